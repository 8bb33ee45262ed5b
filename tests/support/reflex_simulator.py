"""Instances of arithmetic under the reflex that serves: hours of load in seconds. Pure.

A request holds its blocks for its seconds; the queue is first come, first served; a swap takes `swap_s` for
each half. There are no tokens and no preemptions: only the load that the reflex sees, and what it does to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bus.messages import PARTS
from bus.policy import Envelope, Policy
from bus.precisions import Precision
from worker.morph import reflex, sizing
from worker.morph.losses import losses_of
from worker.morph.plan import Half
from worker.morph.reflex import Load, ReflexState
from worker.morph.sizing import Decision, Shape

STEP_S = 0.05
NUM_LAYERS = 32
PAGES = {"full": 96, "int8": 48, "int4": 26}  # of a half: about a 7B model on a 24 GB device, pages of 2 MiB
KV_PAGES, PAGES_PER_BLOCK, MIN_BLOCKS = 3072, 4.0, 128
HALVES = [Half(layer, part) for layer in range(NUM_LAYERS) for part in PARTS]
LOSSES = losses_of(NUM_LAYERS, ("int8", "int4"), {})


@dataclass(frozen=True, slots=True)
class Job:
    """One request: so many KV blocks for so long."""

    arrives_s: float
    blocks: int
    seconds: float


@dataclass(slots=True)
class Simulated:
    """`is_refusing`: its morphs are deferred."""

    jobs: deque[Job]
    policy: Policy = field(default_factory=Policy)
    is_refusing: bool = False
    pages_spare: int = 0
    swap_s: float = 0.01
    kv_pages: int = KV_PAGES
    halves: dict[Half, Precision] = field(default_factory=lambda: dict.fromkeys(HALVES, "full"))
    waits: list[float] = field(default_factory=list)  # of each admitted request, in order
    morphs: list[tuple[float, Decision]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # at each step
    blocks: list[int] = field(default_factory=list)  # at each step
    state: ReflexState = field(default_factory=ReflexState)
    _running: list[tuple[float, int]] = field(default_factory=list)  # until, blocks
    _waiting: deque[Job] = field(default_factory=deque)
    _morph: tuple[float, float, Decision] | None = None  # began, ends

    def run(self, seconds: float) -> Simulated:
        policy = self.policy.in_force() or self.policy
        precisions: list[Precision] = ["int8", "int4"]
        envelope = Envelope(id="e", epoch=1, instance="m@w0", policy=policy, precisions=precisions)
        for step in range(round(seconds / STEP_S)):
            self._advance(step * STEP_S, envelope)
        return self

    @property
    def kv_blocks(self) -> int:
        return int(self.kv_pages / PAGES_PER_BLOCK)

    @property
    def kv_used(self) -> int:
        return sum(blocks for _, blocks in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def loss(self) -> float:
        return LOSSES.total(self.halves)

    def _advance(self, at_s: float, envelope: Envelope) -> None:
        self._running = [one for one in self._running if one[0] > at_s]
        while self.jobs and self.jobs[0].arrives_s <= at_s:
            self._waiting.append(self.jobs.popleft())
        self._end_morph(at_s)
        while self._waiting and self._waiting[0].blocks + self.kv_used <= self.kv_blocks:
            job = self._waiting.popleft()
            self.waits.append(at_s - job.arrives_s)
            self._running.append((at_s + job.seconds, job.blocks))
        self.losses.append(self.loss)
        self.blocks.append(self.kv_blocks)
        load = self._load(at_s)
        self.state, needs = reflex.judge(self.state, load, envelope)
        if self._morph or not needs:
            return
        shape = Shape(
            halves=self.halves,
            losses=LOSSES,
            pages=lambda half, precision: PAGES[precision],
            order=range(NUM_LAYERS),
            pages_spare=self.pages_spare,
            pages_per_block=PAGES_PER_BLOCK,
            min_blocks=MIN_BLOCKS,
        )
        for need in needs:
            if need.goal == "relief":
                decision = sizing.relieve(self.state, load, shape, envelope, need, may_lose=True)
            else:
                decision = sizing.restore(self.state, load, shape, envelope, need)
            if decision:
                self.state = reflex.decided(self.state, decision.lever, at_s)
                self.morphs.append((at_s, decision))
                self._morph = at_s, at_s + self.swap_s * max(1, len(decision.halves)), decision
                return

    def _load(self, at_s: float) -> Load:
        waiting = sum(job.blocks for job in self._waiting)
        return Load(
            at_s=at_s,
            kv_blocks=self.kv_blocks,
            kv_used=self.kv_used,
            kv_needed=self.kv_used + waiting,
            running=len(self._running),
            waiting=len(self._waiting),
            wanting_s=at_s - self._waiting[0].arrives_s if self._waiting else 0.0,
            residence_s=4.0,
        )

    def _end_morph(self, at_s: float) -> None:
        if self._morph is None or at_s < self._morph[1]:
            return
        (began_s, _, decision), self._morph = self._morph, None
        is_applied = not self.is_refusing and self._apply(decision)
        self.state = reflex.ended(self.state, decision.lever, is_applied, at_s - began_s, at_s)

    def _apply(self, decision: Decision) -> bool:
        """False: blocks in use would be taken, so nothing is."""
        if decision.lever == "resize":
            self.kv_pages, self.pages_spare = self.kv_pages + self.pages_spare, 0
            return True
        freed = sum(PAGES[self.halves[half]] - PAGES[to] for half, to in decision.halves.items())
        if (self.kv_pages + freed) / PAGES_PER_BLOCK < max(self.kv_used, MIN_BLOCKS):
            return False
        self.kv_pages += freed
        self.halves = self.halves | dict(decision.halves)
        return True


def steady(
    rate: Callable[[float], float], seconds: float, blocks: int = 16, hold_s: float = 4.0
) -> deque[Job]:
    """Requests of one size at `rate(at_s)` a second, evenly spaced. Full precision holds 12 a second."""
    jobs: deque[Job] = deque()
    at_s = 0.0
    while at_s < seconds:
        per_second = rate(at_s)
        if per_second > 0:
            jobs.append(Job(at_s, blocks, hold_s))
        at_s += 1 / per_second if per_second > 0 else STEP_S
    return jobs


def instance(rate: Callable[[float], float], seconds: float, policy: Policy | None = None) -> Simulated:
    """Run an instance under a load for so long."""
    return replace(Simulated(steady(rate, seconds)), policy=policy or Policy()).run(seconds)
