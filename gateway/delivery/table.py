"""The table of requests: the owner of the truth about each that was accepted and has not ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.delivery.request import InstanceAddress, RequestState


class ModelQueues:
    """Requests that wait for the same thing, by model, in order of arrival."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, RequestState]] = {}  # no model without requests

    def __contains__(self, state: RequestState) -> bool:
        return state.id in self._by_model.get(state.request.model, {})

    def __iter__(self) -> Iterator[RequestState]:
        return (state for queue in self._by_model.values() for state in queue.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_model.values()))

    @property
    def models(self) -> list[str]:
        return sorted(self._by_model)

    def of(self, model: str) -> list[RequestState]:
        """Return the requests for `model`, the earliest first."""
        return list(self._by_model.get(model, {}).values())

    def add(self, state: RequestState) -> None:
        """Insert by arrival: a request that a worker sent back goes before those that came meanwhile."""
        model = state.request.model
        self._by_model[model] = in_order(self._by_model.get(model, {}), state)

    def discard(self, state: RequestState) -> None:
        queue = self._by_model.get(state.request.model, {})
        queue.pop(state.id, None)
        if not queue:
            self._by_model.pop(state.request.model, None)


def in_order(queue: dict[str, RequestState], state: RequestState) -> dict[str, RequestState]:
    """Return `queue` with `state` at its place by arrival: nearly always the last."""
    last = next(reversed(queue.values()), None)
    queue[state.id] = state
    if last is None or last.request.arrived <= state.request.arrived:
        return queue
    return dict(sorted(queue.items(), key=lambda item: item[1].request.arrived))


@dataclass(slots=True)
class AssignedRequests:
    """This gateway's requests at one address."""

    requests: dict[str, RequestState] = field(default_factory=dict)
    num_since: int = 0  # sent since the last metrics
    tokens_since: int = 0  # tokens of these, less those recalled from the worker's queue
    num_tokens: int = 0  # tokens of all requests
    _since: set[str] = field(default_factory=set)
    _longest: int | None = 0

    @property
    def longest_tokens(self) -> int:
        if self._longest is None:
            self._longest = max((state.request.num_tokens for state in self.requests.values()), default=0)
        return self._longest

    def add(self, state: RequestState) -> None:
        num_tokens = state.request.num_tokens
        self.requests[state.id] = state
        self._since.add(state.id)
        self.num_since += 1
        self.tokens_since += num_tokens
        self.num_tokens += num_tokens
        if self._longest is not None:
            self._longest = max(self._longest, num_tokens)

    def note_recall(self, state: RequestState) -> None:
        """Count the worker's queue as shorter: in what the last metrics say, or in what was sent since."""
        is_new = state.id in self._since
        self.tokens_since -= state.request.num_tokens if is_new else state.num_known_tokens

    def on_metrics(self) -> None:
        self.num_since = self.tokens_since = 0
        self._since.clear()

    def remove(self, state: RequestState) -> None:
        del self.requests[state.id]
        self._since.discard(state.id)
        self.num_tokens -= state.request.num_tokens
        if state.request.num_tokens == self._longest:
            self._longest = None


class RequestTable:
    """Requests by id. Each is at exactly one address, its target's, or waits; no address is empty."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self.waiting: dict[str, RequestState] = {}  # without a target, in order of arrival
        self.for_room = ModelQueues()  # long requests that wait for a group with room
        self.for_parts = ModelQueues()  # short requests that wait for a split or for a seat in a group
        self.for_precision = ModelQueues()  # requests for which every instance has too few bits
        self.assigned: dict[InstanceAddress, AssignedRequests] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, state: RequestState) -> None:
        self.requests[state.id] = state
        self.waiting = in_order(self.waiting, state)

    def assign(self, state: RequestState, target: InstanceAddress) -> None:
        """Begin a new attempt at `target`."""
        del self.waiting[state.id]
        state.target = target
        state.attempt += 1
        self.wait(state, None)
        self.assigned.setdefault(target, AssignedRequests()).add(state)

    def unassign(self, state: RequestState) -> None:
        """Void the attempt; the request waits again."""
        self._leave_target(state)
        state.is_sent = state.is_running = False
        self.waiting = in_order(self.waiting, state)

    def recall(self, state: RequestState) -> None:
        """Take a request out of its worker's queue, to wait here for a seat."""
        if state.target is not None:
            self.assigned[state.target].note_recall(state)
        self.unassign(state)
        self.wait(state, self.for_parts)

    def remove(self, state: RequestState) -> None:
        del self.requests[state.id]
        self.wait(state, None)
        if state.target is None:
            del self.waiting[state.id]
        else:
            self._leave_target(state)

    def has(self, state: RequestState) -> bool:
        return self.requests.get(state.id) is state

    def at_worker(self, worker: str, up_to_epoch: int) -> list[RequestState]:
        """Return the requests at this epoch of a worker and at earlier ones."""
        its = [one for one in self.assigned if one.worker == worker and one.epoch <= up_to_epoch]
        return [state for target in its for state in self.at(target)]

    def at(self, target: InstanceAddress) -> list[RequestState]:
        there = self.assigned.get(target)
        return list(there.requests.values()) if there else []

    def wait(self, state: RequestState, queue: ModelQueues | None) -> None:
        """Put a request in `queue`, one of `_queues`, and in no other; None: in none."""
        for each in self._queues:
            if each is not queue:
                each.discard(state)
            elif state not in each:
                each.add(state)

    @property
    def _queues(self) -> tuple[ModelQueues, ...]:
        return self.for_room, self.for_parts, self.for_precision

    def on_metrics(self) -> None:
        for there in self.assigned.values():
            there.on_metrics()

    def check_integrity(self) -> None:
        """Raise AssertionError if a request is at no place or at two."""
        placed = {name for there in self.assigned.values() for name in there.requests}
        if placed & self.waiting.keys() or placed | self.waiting.keys() != self.requests.keys():
            counts = f"{len(placed)} assigned, {len(self.waiting)} waiting of {len(self.requests)}"
            raise AssertionError(counts)
        queued = [state.id for queue in self._queues for state in queue]
        if len(set(queued)) < len(queued) or not self.waiting.keys() >= set(queued):
            raise AssertionError(f"some of {len(queued)} queued requests are assigned, or in two queues")
        for target, there in self.assigned.items():
            if not there.requests or any(state.target != target for state in there.requests.values()):
                raise AssertionError(f"{target} is empty or has requests of another target")

    def _leave_target(self, state: RequestState) -> None:
        if state.target is None:
            raise AssertionError(f"{state.id} has no target")
        there = self.assigned[state.target]
        there.remove(state)
        if not there.requests:
            del self.assigned[state.target]
        state.target = None
