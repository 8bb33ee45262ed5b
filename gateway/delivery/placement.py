"""The placement of requests: the view for the choice, and what its decision means for this gateway.

A request with its last chance gets it alone: of all that suffer when a worker dies, only the culprit fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from bus.schema import FIRST, version_needed
from gateway.delivery import dispatch
from gateway.delivery.candidates import Candidates
from gateway.delivery.cluster import Cluster
from gateway.delivery.dispatch import Candidate, Destination, QueuesAhead, TooLong, Wait, WaitForSplit
from gateway.delivery.outbox import RequestOutbox
from gateway.delivery.request import InstanceAddress, RequestState
from gateway.delivery.table import RequestTable
from gateway.errors import below_floor, no_grammars, outdated, too_long

Found = Candidate | Wait | WaitForSplit


class Placement:
    """Asks `dispatch.choose` for an instance; assigns the request in the table and submits it."""

    def __init__(
        self, cluster: Cluster, table: RequestTable, outbox: RequestOutbox, *, max_attempts: int
    ) -> None:
        self._cluster, self._table, self._outbox = cluster, table, outbox
        self._last_strike = max_attempts - 1
        self._clock = time.monotonic
        self._placed_s: dict[str, float] = {}  # model -> when a short request last got a place

    def find(self, state: RequestState) -> Found | None:
        """Return the instance, or what the request waits for; None without any. Raises ApiError 400, 503."""
        request = state.request
        candidates = self._candidates(state)
        ahead = self._queues_ahead(state, candidates)
        found = dispatch.choose(candidates, request.num_tokens, request.min_precision, ahead)
        if isinstance(found, TooLong):
            raise too_long(len(request.prompt_token_ids), found.limit, request.sampling.max_tokens)
        if found is Wait.PRECISION and not (request.waits_for_precision or state.was_admitted):
            raise below_floor(request.model, request.min_precision)
        if isinstance(found, WaitForSplit) and found.is_overdue:
            return found.candidate
        is_next = not _is_behind(state, self._table.for_parts.of(request.model))
        is_seated = isinstance(found, Candidate) and found.can_split
        if is_seated and is_next and not dispatch.is_long(candidates, request.num_tokens):
            self._placed_s[request.model] = self._clock()
        return found

    def to_recall(self, model: str) -> list[RequestState]:
        """Return short requests to take back from workers, each once, so that a group can split or form."""
        found = []
        candidates = self.candidates(model)
        for seat in dispatch.crowded(candidates, self._long_tokens(model)):
            queued = [
                one
                for one in self._table.at(_address(seat))
                if one.is_sent and not one.is_running and not one.was_recalled
                if not dispatch.is_long(candidates, one.request.num_tokens)
            ]
            queued.sort(key=lambda one: one.request.arrived)
            count = dispatch.num_to_recall(seat, [one.request.num_tokens for one in queued])
            found += queued[len(queued) - count :]
        return found

    def to_move(self, place: InstanceAddress, num_tokens: int, queued_tokens: int) -> list[RequestState]:
        """Return this gateway's share of the requests to move: the latest short ones queued at an instance.

        num_tokens: of prompts, in all. queued_tokens: of all prompts that queue there, also those of other
        gateways. No request comes back twice.
        """
        queued = [one for one in self._table.at(place) if one.is_sent and not one.is_running]
        candidates = self.candidates(queued[0].request.model) if queued else []
        own_tokens = sum(len(one.request.prompt_token_ids) for one in queued)
        found, left = list[RequestState](), num_tokens * own_tokens / max(own_tokens, queued_tokens, 1)
        for one in sorted(queued, key=lambda state: -state.request.arrived):
            if left <= 0:
                break
            if not one.was_recalled and not dispatch.is_long(candidates, one.request.num_tokens):
                found.append(one)
                left -= len(one.request.prompt_token_ids)
        return found

    def send(self, state: RequestState, to: Candidate) -> None:
        """Begin a new attempt at `to`, or at a member of it."""
        target = _address(dispatch.member_for(to, state.request.num_tokens))
        self._table.assign(state, target)
        if state.journey is not None:
            state.journey.sent(target, state.attempt, state.num_known_tokens, self._clock())
        self._outbox.submit(state)

    def candidates(self, model: str) -> list[Candidate]:
        return Candidates(self._cluster, self._table, self._clock()).of(model)

    def _candidates(self, state: RequestState) -> list[Candidate]:
        view = Candidates(self._cluster, self._table, self._clock())
        model, sampling = state.request.model, state.request.sampling
        has_grammar = sampling.grammar is not None
        version = version_needed(sampling, embeds=state.request.embeds)
        found = view.of(
            model, state.refused_by, state.prompt_digests, with_grammars=has_grammar, version=version
        )
        if (has_grammar or version > FIRST) and not found and self._cluster.ready(model):
            raise no_grammars(model) if has_grammar else outdated(model)
        if self._has_last_chance(state):
            return [one for one in found if not any(map(self._has_last_chance, self._requests_at(one)))]
        return found

    def _queues_ahead(self, state: RequestState, candidates: Sequence[Candidate]) -> QueuesAhead:
        model, arrived, now = state.request.model, state.request.arrived, self._clock()
        long = self._table.for_room.of(model)
        short = _ahead_of(state, self._table.for_parts.of(model))
        earlier = (one.request.num_tokens for one in long if one.request.arrived < arrived)
        fits_now = any(one.max_tokens >= state.request.num_tokens for one in candidates)
        return QueuesAhead(
            long_tokens=self._long_tokens(model),
            reserved_tokens=max(earlier, default=0),
            has_long=_is_behind(state, long),
            short_floors=(one.request.min_precision for one in short),
            now=now,
            waits_since=max(arrived, self._placed_s.get(model, arrived)),
            cluster_tokens=0 if fits_now else self._cluster.longest_tokens(model, now),
        )

    def _long_tokens(self, model: str) -> int:
        return next((one.request.num_tokens for one in self._table.for_room.of(model)), 0)

    def _requests_at(self, candidate: Candidate) -> Iterator[RequestState]:
        places: Sequence[Destination] = candidate.seats or [candidate]
        return (state for place in places for state in self._table.at(_address(place)))

    def _has_last_chance(self, state: RequestState) -> bool:
        return 0 < self._last_strike == state.strikes


def _ahead_of(state: RequestState, queue: Iterable[RequestState]) -> Iterator[RequestState]:
    """Yield the requests before `state` in a queue in order of arrival, which may contain it."""
    for other in queue:
        if other is state or other.request.arrived > state.request.arrived:
            return
        yield other


def _is_behind(state: RequestState, queue: Iterable[RequestState]) -> bool:
    return next(_ahead_of(state, queue), None) is not None


def _address(place: Destination) -> InstanceAddress:
    return InstanceAddress(place.instance, place.worker, place.epoch)
