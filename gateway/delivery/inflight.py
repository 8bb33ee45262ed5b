"""The in-flight table: the owner of the truth about every request that was accepted and has not ended.

A *flight* is one sequence: one prompt, one choice. It holds all that is needed to go on elsewhere: the
prompt, the sampling with its seed, and the tokens received so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from bus.messages import Delta, FinishReason, SamplingParams, StepOutput
from bus.precisions import Precision
from gateway.delivery.journey import Journey
from gateway.delivery.queues import Queue, in_order
from gateway.errors import ApiError


class Target(NamedTuple):
    """Where the current attempt runs; deltas from elsewhere are void."""

    instance: str
    worker: str
    epoch: int


class Sink(Protocol):
    """Who the tokens of a flight are for."""

    def on_admitted(self) -> None:
        """A worker began it; its time in the queue is over."""

    def on_tokens(self, token_ids: list[int], delta: Delta, skip: int, step: StepOutput | None) -> bool:
        """New tokens, in order, each once; `skip` is how many of the delta's were there before; `step` is
        what made them, None where there are none. True: it wants no more (a stop string was met)."""

    def on_end(self) -> None:
        """The flight ended by itself, after its last tokens."""

    def on_error(self, error: ApiError) -> None:
        """The flight ended without a proper end."""

    def flush(self) -> None:
        """The batch is over: write out what it brought."""


@dataclass(slots=True, eq=False)
class Flight:
    """`attempt` grows with every submission; `strikes` only with those that a worker's failure caused.
    Times are seconds of the monotonic clock; `deadline` is when a worker must have begun."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sink: Sink
    arrived: float
    deadline: float
    trace_id: str = ""
    min_precision: Precision | Literal[""] = ""  # no layer may be below it where this runs; "": any will do
    waits_for_precision: bool = True  # for an instance that keeps it, until the deadline; else: a refusal
    refused_by: frozenset[Target] = frozenset()  # below min_precision, by their own word, since the last look
    misfits: int = 0  # times a worker found that its KV cache cannot hold it, whatever we believed
    was_recalled: bool = False  # from a worker where it waited
    received: list[int] = field(default_factory=list)
    attempt: int = 0
    strikes: int = 0
    target: Target | None = None  # None: waits for an instance
    is_sent: bool = False  # Redis has the Submit of this attempt
    is_running: bool = False  # the worker of this attempt began
    was_admitted: bool = False  # a worker of any attempt began
    last_sign: float = 0.0  # of life: sent, admitted, or a token
    last_token: float = 0.0
    began: float = 0.0  # when the first of its workers did; 0: none has
    first_token: float = 0.0  # 0: none came
    ended: str = ""  # how: stop, length, abort, the code of its error
    journey: Journey | None = None  # where it is traced

    @property
    def num_tokens(self) -> int:
        """Tokens that it may come to, prompt and output."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt, and output so far."""
        return len(self.prompt_token_ids) + len(self.received)

    @property
    def log_ids(self) -> dict[str, str]:
        """`extra` of a line in the log: the client's id of its call, and ours of this sequence."""
        return {"request_id": self.trace_id, "sequence": self.request_id}

    def tpot_s(self) -> float | None:
        """Mean seconds from token to token, after the first; None with fewer than two."""
        gaps = len(self.received) - 1
        return (self.last_token - self.first_token) / gaps if gaps > 0 else None

    def missed_finish(self) -> FinishReason | None:
        """How it ended, if all its tokens are here though nobody said that it was over."""
        if self.received and self.received[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.received) >= self.sampling.max_tokens else None


@dataclass(slots=True)
class Place:
    """One incarnation of an instance, with our flights there, of `num_tokens` in all. `num_since` were sent
    since the last metric, of `tokens_since` tokens, less those of what was taken back from its queue."""

    flights: dict[str, Flight] = field(default_factory=dict)
    num_since: int = 0
    tokens_since: int = 0
    num_tokens: int = 0
    _since: set[str] = field(default_factory=set)
    _longest: int | None = 0

    @property
    def longest_tokens(self) -> int:
        if self._longest is None:
            self._longest = max((flight.num_tokens for flight in self.flights.values()), default=0)
        return self._longest

    def add(self, flight: Flight) -> None:
        self.flights[flight.request_id] = flight
        self._since.add(flight.request_id)
        self.num_since += 1
        self.tokens_since += flight.num_tokens
        self.num_tokens += flight.num_tokens
        if self._longest is not None:
            self._longest = max(self._longest, flight.num_tokens)

    def take_back(self, flight: Flight) -> None:
        """From its queue: of what the last metric tells, or of what was sent since."""
        is_new = flight.request_id in self._since
        self.tokens_since -= flight.num_tokens if is_new else flight.num_known_tokens

    def metrics_arrived(self) -> None:
        self.num_since = self.tokens_since = 0
        self._since.clear()

    def remove(self, flight: Flight) -> None:
        del self.flights[flight.request_id]
        self._since.discard(flight.request_id)
        self.num_tokens -= flight.num_tokens
        if flight.num_tokens == self._longest:
            self._longest = None


class InFlight:
    """request_id -> flight, with an index of who runs where. Integrity: every flight is in exactly one
    place, its target's, or waits; no place is empty."""

    def __init__(self) -> None:
        self.flights: dict[str, Flight] = {}
        self.waiting: dict[str, Flight] = {}  # without a target, in order of arrival
        self.for_room: Queue[Flight] = Queue()  # those of `waiting` that wait for a group
        self.for_parts: Queue[Flight] = Queue()  # and those that wait for one to part, or for a seat in it
        self.places: dict[Target, Place] = {}

    def __len__(self) -> int:
        return len(self.flights)

    def add(self, flight: Flight) -> None:
        self.flights[flight.request_id] = flight
        self.waiting = in_order(self.waiting, flight)

    def assign(self, flight: Flight, target: Target) -> None:
        """A new attempt at `target`."""
        del self.waiting[flight.request_id]
        flight.target = target
        flight.attempt += 1
        self._end_wait(flight)
        self.places.setdefault(target, Place()).add(flight)

    def unassign(self, flight: Flight) -> None:
        """Its attempt is void; it waits again."""
        self._leave_place(flight)
        flight.is_sent = flight.is_running = False
        self.waiting = in_order(self.waiting, flight)

    def recall(self, flight: Flight) -> None:
        """From a worker's queue, which is shorter from here on, whatever its last metric says."""
        if flight.target is not None:
            self.places[flight.target].take_back(flight)
        self.unassign(flight)
        self.wait(flight, self.for_parts)

    def remove(self, flight: Flight) -> None:
        del self.flights[flight.request_id]
        self._end_wait(flight)
        if flight.target is None:
            del self.waiting[flight.request_id]
        else:
            self._leave_place(flight)

    def has(self, flight: Flight) -> bool:
        return self.flights.get(flight.request_id) is flight

    def at(self, worker: str, up_to_epoch: int) -> list[Flight]:
        """Flights at a worker's incarnations up to and with this one."""
        return [
            flight
            for target, place in self.places.items()
            if target.worker == worker and target.epoch <= up_to_epoch
            for flight in place.flights.values()
        ]

    def at_target(self, target: Target) -> list[Flight]:
        place = self.places.get(target)
        return list(place.flights.values()) if place else []

    def wait(self, flight: Flight, queue: Queue[Flight] | None) -> None:
        """In this one of the two, or in neither."""
        for each in (self.for_room, self.for_parts):
            if each is not queue:
                each.discard(flight)
            elif flight not in each:
                each.add(flight)

    def _end_wait(self, flight: Flight) -> None:
        self.wait(flight, None)

    def metrics_arrived(self) -> None:
        for place in self.places.values():
            place.metrics_arrived()

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        placed = dict(self._placed())
        if placed.keys() & self.waiting.keys() or placed.keys() | self.waiting.keys() != self.flights.keys():
            raise AssertionError(f"{len(placed)} placed + {len(self.waiting)} waiting != {len(self.flights)}")
        queued = [flight.request_id for queue in (self.for_room, self.for_parts) for flight in queue]
        if len(set(queued)) < len(queued) or not self.waiting.keys() >= set(queued):
            raise AssertionError(
                f"of {len(queued)} that wait for groups some are elsewhere, or in two queues"
            )
        for target, place in self.places.items():
            if not place.flights or any(flight.target != target for flight in place.flights.values()):
                raise AssertionError(f"the place {target} is empty or holds flights of another")

    def _placed(self) -> Iterator[tuple[str, Flight]]:
        for place in self.places.values():
            yield from place.flights.items()

    def _leave_place(self, flight: Flight) -> None:
        if flight.target is None:
            raise AssertionError(f"{flight.request_id} is at no place")
        place = self.places[flight.target]
        place.remove(flight)
        if not place.flights:
            del self.places[flight.target]
        flight.target = None
