"""The gateway of a simulated cluster with groups: `gateway.delivery.placement` has the same rules.

A request that no instance can take now waits here, and is tried again in every window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.delivery.dispatch import (
    Candidate,
    QueuesAhead,
    Seat,
    TooLong,
    WaitForSplit,
    choose,
    crowded,
    is_long,
    member_for,
    num_to_recall,
)
from instar.replay.outcomes import RequestOutcome
from instar.simulate.engine import SimulatedSequence
from instar.simulate.gateway import ActiveInstance
from instar.simulate.groups import SimulatedGroup, most_tokens


class ServedCluster(Protocol):
    """The cluster, as a dispatcher sees it. queue: what waits at the gateway, in the order of arrival."""

    now_s: float
    groups: dict[int, SimulatedGroup]
    queue: list[RequestOutcome]

    def of(self, worker: str) -> ActiveInstance:
        """Return a worker's instance."""

    def recall(self, seq: SimulatedSequence) -> None:
        """Take a request that waits at an instance back."""

    def order(self, workers: Sequence[str], tp: int) -> None:
        """Have workers become one group, at the next boundary of all of them."""


class Dispatcher(Protocol):
    """Chooses the worker of a request."""

    def place(self, cluster: ServedCluster, outcome: RequestOutcome) -> ActiveInstance | TooLong | None:
        """Return the member that takes the request; None: it waits."""

    def window(self, cluster: ServedCluster) -> None:
        """Look at what is queued, once in a window."""

    def demand(self, cluster: ServedCluster) -> list[int]:
        """Return the tokens of the requests that wait for a group, for the controller."""


def tokens_of(outcome: RequestOutcome) -> int:
    """Return the tokens that a request may have at the end."""
    return outcome.prompt_asked + outcome.output_asked


class ServiceDispatcher:
    """`gateway.delivery.dispatch.choose`, with one gateway's queue.

    can_split: groups form and part by themselves. free_share: of the KV, for a group to part.
    tokens_at: of a sequence, by degree.
    """

    def __init__(self, tokens_at: Mapping[int, int], *, can_split: bool, free_share: float) -> None:
        self._alone, self._longest = tokens_at[1], max(tokens_at.values())
        self._can_split, self._free_share = can_split, free_share
        self._placed_s = float("-inf")  # when a short request got a place last
        self._stuck: tuple[float, int] = -1.0, 0  # a short one of this length found no place at that time

    def place(self, cluster: ServedCluster, outcome: RequestOutcome) -> ActiveInstance | TooLong | None:
        num_tokens, arrived_s = tokens_of(outcome), outcome.due_s
        is_for_group = num_tokens > self._alone
        if not is_for_group and self._stuck[0] == cluster.now_s and num_tokens >= self._stuck[1]:
            return None
        candidates = self._candidates(cluster)
        ahead = [one for one in cluster.queue if (one.due_s, one.number) < (arrived_s, outcome.number)]
        long_ahead = [tokens_of(one) for one in ahead if tokens_of(one) > self._alone]
        found = choose(
            candidates,
            num_tokens,
            "",
            QueuesAhead(
                long_tokens=next(iter(self.demand(cluster)), 0),
                reserved_tokens=max(long_ahead, default=0),
                has_long=bool(long_ahead),
                short_floors=[""] * (len(ahead) - len(long_ahead)),
                now=cluster.now_s,
                waits_since=max(arrived_s, self._placed_s),
                cluster_tokens=self._longest if self._can_split else 0,
            ),
        )
        if isinstance(found, TooLong):
            return found
        if isinstance(found, WaitForSplit) and found.is_overdue:
            found = found.candidate
        elif isinstance(found, Candidate) and found.can_split and not is_long(candidates, num_tokens):
            self._placed_s = cluster.now_s
        if not isinstance(found, Candidate):
            if not is_for_group:
                self._stuck = cluster.now_s, num_tokens
            return None
        return cluster.of(member_for(found, num_tokens).worker)

    def window(self, cluster: ServedCluster) -> None:
        """Recall short requests, so that a group can part or form."""
        if not self._can_split:
            return
        for seat in crowded(self._candidates(cluster), next(iter(self.demand(cluster)), 0)):
            waiting = cluster.of(seat.worker).instance.waiting
            short = [one for one in waiting if most_tokens(one) <= self._alone]
            count = num_to_recall(seat, [most_tokens(one) for one in short])
            for seq in short[len(short) - count :]:
                assert isinstance(seq, SimulatedSequence)
                cluster.recall(seq)

    def demand(self, cluster: ServedCluster) -> list[int]:
        """Return the tokens of the requests that wait for a group, in the order of arrival."""
        return [tokens for tokens in map(tokens_of, cluster.queue) if tokens > self._alone]

    def _candidates(self, cluster: ServedCluster) -> list[Candidate]:
        return [self._candidate(group) for group in cluster.groups.values()]

    def _candidate(self, group: SimulatedGroup) -> Candidate:
        members, leader = group.members, group.leader
        is_group, block_tokens = len(members) > 1, leader.instance.limits.block_tokens
        queued = sum(one.seen.waiting_tokens + one.tokens_since for one in members)
        return Candidate(
            instance=leader.instance.name,
            worker=leader.morphs.worker,
            epoch=1,
            num_measured=sum(one.seen.load for one in members),
            num_own=sum(one.num_own for one in members),
            num_own_since=sum(one.num_since for one in members),
            max_tokens=group.max_tokens,
            kv_usage=sum(one.seen.kv_usage for one in members),
            tp=group.tp,
            low_tokens=self._alone if is_group else group.max_tokens,
            free_tokens=group.kv_tokens - sum(one.seen.last_used for one in members) * block_tokens - queued,
            stays=not is_group or not self._can_split or group.longest_tokens > self._alone,
            can_split=self._can_split,
            seats=tuple(self._seat(group, one) for one in members) if is_group else (),
        )

    def _seat(self, group: SimulatedGroup, one: ActiveInstance) -> Seat:
        there = (*one.instance.scheduler.running, *one.instance.waiting)
        share = (1 - self._free_share) * group.kv_tokens / len(group.members)
        return Seat(
            instance=group.leader.instance.name,
            worker=one.morphs.worker,
            epoch=1,
            num_measured=one.seen.load,
            num_own=one.num_own,
            num_own_since=one.num_since,
            short_tokens=sum(
                len(seq.token_ids) if seq.block_ids else most_tokens(seq)
                for seq in there
                if most_tokens(seq) <= self._alone
            ),
            home_tokens=min(self._alone, share),
        )
