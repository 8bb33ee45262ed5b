"""Instances of arithmetic under the policy that serves: ten minutes of a cluster in a second. Pure.

A request holds its blocks for its seconds; the queue is first come, first served; a morph takes `morph_s`
and moves whole layers between weights and KV cache. No tokens, no preemption: what is simulated is the load
that the policy sees and what its morphs do to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bus.messages import MorphOutcome, MorphReport
from bus.policy import Policy
from bus.precisions import Precision
from controller.morphing.levers import MorphDecision
from controller.morphing.policy import Freshness, decide
from controller.morphing.track import State, observe, sent
from controller.morphing.view import View

TICK_S = 0.05
FRESHNESS = Freshness(stale_s=5.0, gap_s=7.0)


@dataclass(frozen=True, slots=True)
class Load:
    """One request: so many KV blocks for so long."""

    arrives_s: float
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Of an instance at full precision; the defaults are about a 7B model on a 24 GB device."""

    num_layers: int = 32
    layer_pages: tuple[tuple[Precision, int], ...] = (("full", 193), ("int4", 52))  # of 2 MiB
    kv_pages: int = 3072
    free_pages: int = 52
    pages_per_block: float = 4.0
    min_blocks: int = 128
    morph_s: float = 0.4


@dataclass(slots=True)
class Simulated:
    """`answer` is the outcome of its morphs; `is_silent(at_s)`: no report at that time."""

    name: str
    loads: deque[Load]
    shape: Shape = Shape()
    answer: MorphOutcome = "applied"
    is_silent: Callable[[float], bool] = lambda _: False
    below_full: int = 0
    kv_pages: int = 0
    free_pages: int = 0
    kv_used: float = 0.0  # smoothed
    waits: list[float] = field(default_factory=list)  # queueing delay of each admitted request, in order
    morphs: list[tuple[float, MorphDecision]] = field(default_factory=list)
    _running: list[tuple[float, int]] = field(default_factory=list)  # until, blocks
    _waiting: deque[Load] = field(default_factory=deque)
    _morph: tuple[float, str, MorphDecision] | None = None  # done at

    def __post_init__(self) -> None:
        self.kv_pages, self.free_pages = self.shape.kv_pages, self.shape.free_pages

    @property
    def kv_blocks(self) -> int:
        return int(self.kv_pages / self.shape.pages_per_block)

    @property
    def blocks_used(self) -> int:
        return sum(blocks for _, blocks in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def advance(self, at_s: float) -> MorphReport | None:
        """Requests end, arrive and are admitted; returns the end of a morph."""
        self._running = [one for one in self._running if one[0] > at_s]
        while self.loads and self.loads[0].arrives_s <= at_s:
            self._waiting.append(self.loads.popleft())
        report = self._finish(at_s)
        while self._waiting and self._waiting[0].blocks + self.blocks_used <= self.kv_blocks:
            load = self._waiting.popleft()
            self.waits.append(at_s - load.arrives_s)
            self._running.append((at_s + load.seconds, load.blocks))
        return report

    def begin(self, at_s: float, morph_id: str, decision: MorphDecision) -> None:
        assert self._morph is None, "two morphs at once"
        self.morphs.append((at_s, decision))
        self._morph = (at_s + self.shape.morph_s, morph_id, decision)

    def view(self, at_s: float) -> View:
        self.kv_used += (self.blocks_used - self.kv_used) / 2
        return View(
            instance=self.name,
            worker=self.name,
            epoch=1,
            kv_blocks=self.kv_blocks,
            kv_used=self.kv_used,
            kv_usage=min(1.0, self.kv_used / self.kv_blocks),
            waiting=len(self._waiting),
            waiting_blocks=sum(load.blocks for load in self._waiting) + bool(self._waiting),
            blocks_free=self.kv_blocks - self.blocks_used,
            queue_delay_s=at_s - self._waiting[0].arrives_s if self._waiting else 0.0,
            num_layers=self.shape.num_layers,
            layers_below=self.below_full,
            variants=tuple(precision for precision, _ in self.shape.layer_pages),
            min_blocks=self.shape.min_blocks,
            pages_free=self.free_pages,
            pages_per_block=self.shape.pages_per_block,
            layer_pages=dict(self.shape.layer_pages),
        )

    def _finish(self, at_s: float) -> MorphReport | None:
        if self._morph is None or at_s < self._morph[0]:
            return None
        (_, morph_id, decision), self._morph = self._morph, None
        state: MorphOutcome = self.answer if self._apply(decision) else "deferred"
        return MorphReport(
            id=morph_id,
            kind="resize" if decision.lever == "resize" else "swap",
            target=self.name,
            worker=self.name,
            epoch=1,
            state=state,
            reason="simulated",
            started_ms=0,
            ended_ms=int(at_s * 1000),
        )

    def _apply(self, decision: MorphDecision) -> bool:
        """False: blocks in use would be taken, so nothing is."""
        if self.answer != "applied":
            return True
        if decision.lever == "resize":
            grown = int(decision.blocks * self.shape.pages_per_block) - self.kv_pages
            self.kv_pages, self.free_pages = self.kv_pages + grown, self.free_pages - grown
            return True
        pages = dict(self.shape.layer_pages)
        sign = 1 if decision.lever == "swap_down" else -1
        precision = decision.precision if decision.lever == "swap_down" else "int4"
        kv_pages = self.kv_pages + sign * decision.count * (pages["full"] - pages[precision])
        if kv_pages / self.shape.pages_per_block < max(self.blocks_used, self.shape.min_blocks):
            return False
        self.kv_pages, self.below_full = kv_pages, self.below_full + sign * decision.count
        return True


@dataclass(frozen=True, slots=True)
class Window:
    """What one window of one instance showed."""

    at_s: float
    instance: str
    kv_usage: float
    kv_blocks: int
    waiting: int
    layers_below_full: int


def simulate(
    instances: Iterable[Simulated], policy: Policy, seconds: float, window_s: float = 0.5
) -> list[Window]:
    """Runs the cluster and the policy; morphs and waits are with the instances afterwards."""
    cluster = {instance.name: instance for instance in instances}
    state, windows, number = State(), [], 0
    ticks_per_window = round(window_s / TICK_S)
    for tick in range(round(seconds / TICK_S)):
        at_s = tick * TICK_S
        for instance in cluster.values():
            if report := instance.advance(at_s):
                state = observe(state, report, at_s)
        if tick % ticks_per_window:
            continue
        views = [one.view(at_s) for one in cluster.values() if not one.is_silent(at_s)]
        state, decisions = decide(state, views, policy, at_s, FRESHNESS)
        for decision in decisions:
            number += 1
            state = sent(state, decision.instance, decision.lever, f"morph-{number}", at_s)
            cluster[decision.instance].begin(at_s, f"morph-{number}", decision)
        windows += [_window(at_s, view) for view in views]
    return windows


def _window(at_s: float, view: View) -> Window:
    return Window(
        at_s=at_s,
        instance=view.instance,
        kv_usage=view.kv_usage,
        kv_blocks=view.kv_blocks,
        waiting=round(view.waiting),
        layers_below_full=view.layers_below,
    )


def steady(rate: Callable[[float], float], seconds: float, blocks: int, hold_s: float) -> deque[Load]:
    """Requests of one size at `rate(at_s)` a second, evenly spaced."""
    loads: deque[Load] = deque()
    at_s = 0.0
    while at_s < seconds:
        per_second = rate(at_s)
        if per_second > 0:
            loads.append(Load(at_s, blocks, hold_s))
        at_s += 1 / per_second if per_second > 0 else TICK_S
    return loads
