"""A model of eight GPUs on one host that serve one model, event by event, seeded and without a clock.

Instances step: decodes first, then chunks of prompts, first come, first served. A sequence is admitted when
the KV cache has room for its whole length, so nothing is preempted. `bench.scheduler.costs` states what a
step costs; the `Scheduler` decides which request runs where, and which instances form a group.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from bench.scheduler import costs
from worker.parallel.coordinator import TokenNeed, allowances, even_share

WINDOW_S = 0.5


@dataclass(slots=True, eq=False)
class Request:
    """A request; the scheduler sets `home`, the worker that took it and gets it when its group splits."""

    number: int
    arrives_s: float
    prompt: int
    output: int
    home: str = ""
    computed: int = 0
    generated: int = 0
    first_s: float | None = None
    end_s: float | None = None
    is_refused: bool = False
    waits: bool = False  # at the gateway

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.output

    @property
    def is_long(self) -> bool:
        return self.num_tokens > costs.TOKENS_AT[1]


@dataclass(slots=True)
class Transform:
    morph_id: str
    tp: int  # afterwards
    steps_left: int = costs.NUM_LAYERS


@dataclass(slots=True, eq=False)
class Unit:
    """An instance, `workers` in the order of their shards; while it transforms it has all its members."""

    workers: tuple[str, ...]
    tp: int
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    transform: Transform | None = None
    is_stepping: bool = False
    is_held: bool = False  # takes no step, since others of its transform are still in one
    needs: list[TokenNeed] = field(default_factory=list)  # of the members, after the last step

    @property
    def leader(self) -> str:
        return self.workers[0]

    @property
    def is_changing(self) -> bool:
        return self.is_held or self.transform is not None

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    @property
    def max_tokens(self) -> int:
        return costs.TOKENS_AT[self.tp]

    @property
    def used_tokens(self) -> int:
        return sum(one.prompt + one.generated for one in self.running)

    def used_by(self, *workers: str) -> int:
        """Return the tokens that requests of these workers use."""
        return sum(one.prompt + one.generated for one in self.running if one.home in workers)

    @property
    def emptiest(self) -> str:
        """The member with the fewest requests, and the first of equals."""
        homes = Counter(one.home for one in self.requests)
        return min(self.workers, key=lambda name: homes[name])

    @property
    def outstanding_tokens(self) -> int:
        return sum(one.num_tokens - one.computed - one.generated for one in self.requests)

    def part_of(self, one: Request) -> int:
        """Return the number of the part that gets the request when the group splits; 0 if it does not."""
        is_parting = self.transform is not None and self.transform.tp < self.tp
        return self.workers.index(one.home) % self.num_parts if is_parting else 0

    @property
    def num_parts(self) -> int:
        return max(1, self.tp // self.transform.tp) if self.transform else 1

    def room(self, part: int) -> int:
        """Return the tokens that a part can admit, in whole sequences.

        A group that forms has the caches of all its members; in one that splits each member admits what its
        part will hold.
        """
        tp, count = self.tp, 1
        if self.transform:
            tp = min(self.tp, self.transform.tp)
            count = len(self.workers) // tp if self.transform.tp > self.tp else 1
        taken = sum(one.num_tokens for one in self.running if self.part_of(one) == part)
        return count * costs.TOKENS_AT[tp] - taken

    def admit(self) -> None:
        """Admit waiting requests, first come, first served in each part."""
        left: deque[Request] = deque()
        full: set[int] = set()
        for one in self.waiting:
            part = self.part_of(one)
            if part not in full and one.num_tokens <= self.room(part):
                self.running.append(one)
            else:
                full.add(part)
                left.append(one)
        self.waiting = left

    def plan(self) -> list[tuple[Request, int]]:
        """Return the tokens of each request in the next step.

        Every member plans as many as the engine allows.
        """
        allowed = self._allowed()
        chunks = [(one, 1) for one in self.running if one.computed == one.prompt]
        planned = Counter(one.home for one, _ in chunks)
        for one in self.running:
            if (left := one.prompt - one.computed) and (budget := allowed[one.home] - planned[one.home]) > 0:
                chunks.append((one, min(left, budget)))
                planned[one.home] += min(left, budget)
        self.needs = [self._need(name, planned[name], allowed[name]) for name in self.workers]
        return chunks

    def _allowed(self) -> dict[str, int]:
        size = len(self.workers)
        if size == 1:
            tokens = [costs.CHUNK_TOKENS]
        elif len(self.needs) == size:
            tokens = allowances(self.needs, costs.CHUNK_TOKENS)
        else:
            tokens = [even_share(costs.CHUNK_TOKENS, size)] * size
        return dict(zip(self.workers, tokens, strict=True))

    def _need(self, name: str, ran: int, allowed: int) -> TokenNeed:
        own = [one for one in self.running if one.home == name]
        long = [max(1, one.prompt - one.computed) for one in own if one.is_long]
        return TokenNeed(ran, allowed, len(own), max(long, default=0))


class Scheduler(Protocol):
    """A scheduler under comparison."""

    def place(self, cluster: Cluster, request: Request) -> Unit | None:
        """Return the unit that runs the request, and set its `home`.

        None if it was refused, or waits; then `place` is called again in every window.
        """

    def window(self, cluster: Cluster) -> None:
        """Decide everything else, twice a second."""

    def reshaped(self, cluster: Cluster, morph_id: str, units: Iterable[Unit]) -> None:
        """Take note of a transform that ended with these units."""


class Cluster:
    """The GPUs, in the given shapes at first. Times are seconds since the start."""

    def __init__(
        self, scheduler: Scheduler, shapes: Iterable[int] = (1,) * 8, peak_share: float = costs.PEAK_SHARE
    ) -> None:
        self.now = 0.0
        self.units: dict[str, Unit] = {}
        self.waiting: list[Request] = []  # at the gateway, first come first
        self.waiting_long: list[Request] = []  # the long ones among them
        self.requests: list[Request] = []
        self.num_tokens = 0  # processed
        self.num_transforms = {"up": 0, "down": 0}
        self.rates: list[tuple[float, int, int]] = []  # a sample a window: when, tokens so far, groups
        self._scheduler = scheduler
        self._peak_share = peak_share
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._between_steps: list[tuple[list[Unit], Unit]] = []
        first = 0
        for tp in shapes:
            self._add(Unit(tuple(f"w{i}" for i in range(first, first + tp)), tp))
            first += tp

    def run(self, requests: Iterable[Request], seconds: float) -> None:
        """Run until `seconds`; requests that still run then do not end."""
        for request in requests:
            self.requests.append(request)
            self._at(request.arrives_s, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._at(0.0, self._window)
        while self._events and self._events[0][0] <= seconds:
            self.now, _, work = heapq.heappop(self._events)
            work()
        self.now = seconds

    def transform(self, workers: tuple[str, ...], tp: int, morph_id: str) -> None:
        """Make the workers groups of degree `tp`: one that grows, or several that a group splits into."""
        units = [unit for unit in self.units.values() if set(unit.workers) & set(workers)]
        assert sorted(name for unit in units for name in unit.workers) == sorted(workers)
        assert not any(unit.is_changing for unit in units), "two transforms at once"
        self.num_transforms["up" if tp > units[0].tp else "down"] += 1
        for unit in units:
            unit.is_held = True
        self._come_together(units, Unit(workers, units[0].tp, transform=Transform(morph_id, tp)))

    def _come_together(self, units: list[Unit], together: Unit) -> None:
        """Merge the units, between two steps of all of them."""
        if any(unit.is_stepping for unit in units):
            self._between_steps.append((units, together))
            return
        for unit in units:
            del self.units[unit.leader]
            together.running += unit.running
            together.waiting += unit.waiting
        self._add(together)
        self._step(together)

    def _add(self, unit: Unit) -> None:
        self.units[unit.leader] = unit

    def _at(self, moment: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), work))

    def _arrive(self, request: Request) -> None:
        if unit := self._scheduler.place(self, request):
            self._submit(unit, request)
        elif not request.is_refused:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        request.waits = True
        self.waiting.append(request)
        if request.is_long:
            self.waiting_long.append(request)

    def recall(self, unit: Unit, requests: Iterable[Request]) -> None:
        """Move requests from the unit's queue to the gateway's."""
        for request in requests:
            unit.waiting.remove(request)
            self._wait(request)
        self.waiting.sort(key=lambda one: one.arrives_s)

    def _submit(self, unit: Unit, request: Request) -> None:
        assert request.home in unit.workers
        request.waits = False
        unit.waiting.append(request)
        self._step(unit)

    def _window(self) -> None:
        left = []
        for request in self.waiting:
            if unit := self._scheduler.place(self, request):
                self.waiting_long = [one for one in self.waiting_long if one is not request]
                self._submit(unit, request)
            else:
                left.append(request)
        self.waiting = left
        self._scheduler.window(self)
        self.rates.append((self.now, self.num_tokens, sum(unit.tp > 1 for unit in self.units.values())))
        self._at(self.now + WINDOW_S, self._window)

    # ------------------------------------------------------------------------------------- steps

    def _step(self, unit: Unit) -> None:
        """Begin the next step, if none runs and there is something to do."""
        if unit.is_stepping or unit.is_held:
            return
        unit.admit()
        chunks = unit.plan()
        if not chunks and not unit.transform:
            return
        unit.is_stepping = True
        self._at(self.now + self._seconds(unit, chunks), lambda: self._stepped(unit, chunks))

    def _seconds(self, unit: Unit, chunks: list[tuple[Request, int]]) -> float:
        num_prompt = sum(count for one, count in chunks if one.computed < one.prompt)
        num_output = sum(count for _, count in chunks) - num_prompt
        if unit.transform is None:
            return costs.step_s(num_prompt, num_output, unit.tp, self._peak_share)
        tp = max(unit.tp, unit.transform.tp)
        seconds = costs.step_s(num_prompt, num_output, tp, self._peak_share) * costs.TRANSFORM_SLOWDOWN
        return max(seconds, costs.SHORTEST_TRANSFORM_STEP_S)

    def _stepped(self, unit: Unit, chunks: list[tuple[Request, int]]) -> None:
        unit.is_stepping = False
        for request, count in chunks:
            self._advance(request, count)
        self.num_tokens += sum(count for _, count in chunks)
        unit.running = [one for one in unit.running if one.end_s is None]
        if unit.is_held:
            waiting, self._between_steps = self._between_steps, []
            for units, together in waiting:
                self._come_together(units, together)
        elif unit.transform is not None and unit.transform.steps_left <= 1:
            self._reshape(unit, unit.transform)
        else:
            if unit.transform is not None:
                unit.transform.steps_left -= 1
            self._step(unit)

    def _advance(self, request: Request, count: int) -> None:
        if request.computed < request.prompt:
            request.computed += count
            if request.computed < request.prompt:
                return
            count = 1  # the last chunk of the prompt gives the first token
        request.generated += count
        if request.first_s is None:
            request.first_s = self.now
        if request.generated >= request.output:
            request.end_s = self.now

    def _reshape(self, unit: Unit, transform: Transform) -> None:
        del self.units[unit.leader]
        made = [Unit(unit.workers[part :: unit.num_parts], transform.tp) for part in range(unit.num_parts)]
        for part in made:
            self._add(part)
        homes = {name: part for part in made for name in part.workers}
        for one in unit.running:
            homes[one.home].running.append(one)
        for one in unit.waiting:
            if one.num_tokens <= costs.TOKENS_AT[transform.tp]:
                homes[one.home].waiting.append(one)
            else:  # it came too late: the worker sends it back
                self._wait(one)
        self.waiting.sort(key=lambda one: one.arrives_s)  # it keeps its place
        self.waiting_long.sort(key=lambda one: one.arrives_s)
        self._scheduler.reshaped(self, transform.morph_id, made)
        for part in made:
            self._step(part)
