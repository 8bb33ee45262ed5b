"""A morph of a simulated instance: halves of layers one after the other, or a resize of the KV cache.

A half is mapped and later installed between two steps, each for half of the calibration's `half_s`, as
`worker.shape.copier.Pace` allows it. The next step waits for that, as it does in the worker. Between the two
the half is copied beside the steps, with the share of the time that the worker has for copies: all of it
while it is idle, else that of the calibration, or more if the reflex says that it is urgent. At a boundary an
urgent morph waits for its copy as long as the pace allows. That several halves are in progress at once in the
worker changes little, since one thread copies them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from bus.morphs import KIND_OF, ConvertCache, MorphOutcome, MorphReport, Resize, Swap
from bus.precisions import Precision
from instar.simulate.calibration import MorphCosts
from instar.simulate.engine import SimulatedInstance
from instar.simulate.group_shape import GroupInstance
from worker.memory import OutOfBlocks, plan_moves_below
from worker.morph.plan import Half, plan_swap
from worker.morph.resizer import headroom
from worker.morph.run import NotApplied
from worker.shape.copier import Pace

Command = Swap | Resize | ConvertCache
MorphingInstance = SimulatedInstance | GroupInstance

COPIED: Final = 1e-9  # seconds left of a copy that is done, but for rounding


class Turn:
    """The time between two steps that morphs take, as `worker.morph.manager.MorphManager` spends it.

    urgency: the share of a busy worker's time that morphs may take at least. spent_s: at this boundary.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._clock, self.spent_s = clock, 0.0
        self.pace = Pace(share, lambda: self.now_s)
        self.is_busy, self.urgency = False, 0.0

    @property
    def now_s(self) -> float:
        return self._clock() + self.spent_s

    def begin(self, is_busy: bool, urgency: float) -> None:
        """Begin a boundary. is_busy: steps follow."""
        self.spent_s, self.is_busy, self.urgency = 0.0, is_busy, urgency
        self.pace.begin(is_busy, urgency)

    def spend(self, seconds: float) -> None:
        """Do something that takes so long."""
        self.spent_s += seconds
        self.pace.spent()


@dataclass(slots=True)
class SimulatedMorph:
    """A morph in progress, and why it was ordered.

    due_s: when it is to be carried on at the latest, None while it waits for blocks. left_s: of the copy in
    progress, if it had all the time; None: no half is in progress. since_s, rate: since when it has which
    share of the time. obstacle: why it cannot go on.
    """

    command: Command
    reason: str
    began_s: float
    page_bytes: int
    costs: MorphCosts
    pending: deque[Half] = field(default_factory=deque)
    towards: dict[Half, Precision] = field(default_factory=dict)
    num_halves: int = 0
    layers_done: int = 0  # whose KV is converted
    due_s: float | None = None
    left_s: float | None = None
    since_s: float = 0.0
    rate: float = 1.0
    waiting_since_s: float | None = None
    copy_s: float = 0.0  # pauses not counted
    boundary_s: float = 0.0
    awaited_s: float = 0.0  # of it, for copies
    blocks_s: float = 0.0  # until the KV cache had grown first; 0: it has not
    obstacle: str = ""

    @property
    def urgency(self) -> float:
        """The least share of a busy worker's time that its order gives it."""
        return self.command.urgency if isinstance(self.command, Swap) else 0.0

    def begin(self, instance: MorphingInstance, turn: Turn) -> MorphReport | None:
        """Begin; returns the report if it ends at once."""
        if isinstance(self.command, Resize):
            return self._resize(instance, turn.now_s)
        if isinstance(self.command, ConvertCache):
            return self._convert(instance, turn)
        shape = instance.shape
        order = shape.order_towards(self.command.precision)
        try:
            self.towards = plan_swap(self.command, shape.layers, shape.variants, order)
        except NotApplied as end:
            self.obstacle = end.reason
            return self._report(instance, turn.now_s, end.state)
        self.pending.extend(self.towards)
        self.num_halves = len(self.pending)
        return self.advance(instance, turn)

    def advance(self, instance: MorphingInstance, turn: Turn) -> MorphReport | None:
        """Carry on between two steps; returns the report at the end."""
        if isinstance(self.command, ConvertCache):
            return self._convert(instance, turn)
        if not isinstance(self.command, Swap):
            return self._resize(instance, turn.now_s)
        if self.left_s:
            self._copy_on(max(0.0, turn.now_s - self.since_s) * self.rate)
        while turn.pace.has_time:
            if self.left_s is None:
                if not self.pending:
                    return self._report(instance, turn.now_s, "applied")
                if not self._prepare(instance, turn):
                    self.due_s = None
                    return self._wait(instance, turn.now_s)
            elif self.left_s:
                if not self._await_copy(turn):
                    break
            else:
                self._spend(turn, self.costs.half_s / 2)
                self._install(instance, self.pending.popleft(), turn.now_s)
                self.left_s = None
                if not self.pending:
                    return self._report(instance, turn.now_s, "applied")
        self.since_s, self.rate = turn.now_s, max(self.costs.share, turn.urgency) if turn.is_busy else 1.0
        self.due_s = self.since_s + (self.left_s or 0.0) / self.rate
        return None

    def _copy_on(self, seconds: float) -> None:
        """Let the copy in progress get on by so many seconds of work."""
        assert self.left_s is not None
        self.left_s -= seconds
        if self.left_s <= COPIED:
            self.left_s = 0.0

    def _await_copy(self, turn: Turn) -> bool:
        """Let the next step wait for the copy as long as there is time. Returns False if it is not done."""
        if self.left_s and turn.is_busy and turn.urgency:
            seconds = min(self.left_s, turn.pace.left_s)
            self.awaited_s += seconds
            self._spend(turn, seconds)
            self._copy_on(seconds)
        return not self.left_s

    def _spend(self, turn: Turn, seconds: float) -> None:
        turn.spend(seconds)
        self.boundary_s += seconds

    def _prepare(self, instance: MorphingInstance, turn: Turn) -> bool:
        """Make room for the next half and start its copy. Returns False if KV blocks are in the way."""
        half, shape = self.pending[0], instance.shape
        pages = shape.pages_to_take(half, self.towards[half])
        if pages:
            blocks = shape.blocks_in(shape.kv_pages - pages)
            kept = instance.blocks.num_used + headroom(instance.scheduler.running, instance.limits)
            needed = max(shape.min_blocks, kept)
            if blocks < needed or not _shrink(instance, blocks):
                self.obstacle = f"{needed} of {instance.blocks.capacity} KV blocks must stay"
                return False
            shape.resize(-pages)
        self._spend(turn, self.costs.half_s / 2)
        nbytes = shape.half_pages(half, self.towards[half]) * self.page_bytes
        rate = max(self.costs.share, turn.urgency) if turn.is_busy else 1.0
        self.left_s = nbytes * max(self.costs.byte_s, self.costs.disk_byte_s * rate)  # a disk has no share
        self.copy_s += nbytes * self.costs.byte_s
        self.waiting_since_s = None
        return True

    def _install(self, instance: MorphingInstance, half: Half, now_s: float) -> None:
        shape = instance.shape
        shape.install(half, self.towards[half])
        if pages := shape.growth():
            shape.resize(pages)
            instance.blocks.extend(shape.kv_blocks)
            self.blocks_s = self.blocks_s or now_s - self.began_s
        instance.reshaped(now_s)

    def _resize(self, instance: MorphingInstance, now_s: float) -> MorphReport | None:
        assert isinstance(self.command, Resize)
        shape = instance.shape
        pages = shape.pages_missing(self.command.blocks)
        if pages * shape.num_layers > shape.spare_pages:
            self.obstacle = f"{pages * shape.num_layers} pages are missing, {shape.spare_pages} are free"
            return self._wait(instance, now_s)
        blocks = shape.blocks_in(shape.kv_pages + pages)
        if pages < 0 and not _shrink(instance, blocks):
            self.obstacle = f"{instance.blocks.num_used} KV blocks are in use"
            return self._wait(instance, now_s)
        shape.resize(pages, is_own=False)
        if pages > 0:
            instance.blocks.extend(blocks)
        return self._report(instance, now_s, "applied")

    def _convert(self, instance: MorphingInstance, turn: Turn) -> MorphReport | None:
        """Convert the KV of layers while there is time; to full precision it has fewer blocks first."""
        assert isinstance(self.command, ConvertCache)
        shape, goal = instance.shape, self.command.kv_dtype
        if goal == "full" and shape.kv_form != goal:
            blocks = shape.blocks_in(shape.kv_pages, goal)
            kept = instance.blocks.num_used + headroom(instance.scheduler.running, instance.limits)
            if blocks < max(shape.min_blocks, kept) or not _shrink(instance, blocks):
                self.obstacle, self.due_s = f"{kept} KV blocks must stay, of {blocks} in full", None
                return self._wait(instance, turn.now_s)
            shape.convert(goal)
        while self.layers_done < shape.num_layers:
            if not turn.pace.has_time:
                self.due_s = turn.now_s
                return None
            self._spend(turn, self.costs.kv_layer_s)
            self.layers_done += 1
        if goal != "full":
            shape.convert(goal)
            instance.blocks.extend(shape.kv_blocks)
        instance.reshaped(turn.now_s)
        return self._report(instance, turn.now_s, "applied")

    def cancel(self, instance: MorphingInstance, now_s: float) -> MorphReport:
        """End the morph as it is; the half in progress keeps its old variant, and the cache its blocks."""
        if pages := instance.shape.growth():
            instance.shape.resize(pages)
            instance.blocks.extend(instance.shape.kv_blocks)
        self.obstacle = "cancelled"
        return self._report(instance, now_s, "failed")

    def progress(self, instance: MorphingInstance, now_s: float) -> MorphReport:
        """Return a report that it runs."""
        return replace(self._report(instance, now_s, "applied"), state="running", ended_ms=None)

    def _wait(self, instance: MorphingInstance, now_s: float) -> MorphReport | None:
        """Wait for blocks as long as the command says."""
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        if now_s < self.waiting_since_s + self.command.wait_s:
            return None
        return self._report(instance, now_s, "deferred")

    def _report(self, instance: MorphingInstance, now_s: float, state: MorphOutcome) -> MorphReport:
        done = self.num_halves - len(self.pending)
        return MorphReport(
            id=self.command.id,
            kind=KIND_OF[type(self.command)],
            target=instance.name,
            worker=instance.name.rpartition("@")[2],
            epoch=1,
            state=state,
            reason=self.reason if state == "applied" else self.obstacle,
            numbers={
                "halves": self.num_halves,
                "halves_applied": done,
                "layers": instance.shape.num_layers if isinstance(self.command, ConvertCache) else 0,
                "layers_done": self.layers_done,
                "copy_seconds": self.copy_s,
                "boundary_seconds": self.boundary_s,
                "awaited_seconds": self.awaited_s,
                "blocks_seconds": self.blocks_s,
                "blocks_after": instance.blocks.capacity,
                "stands_seconds": self.command.stands_s if isinstance(self.command, Swap) else 0.0,
            },
            started_ms=round(self.began_s * 1000),
            ended_ms=round(now_s * 1000),
        )


def _shrink(instance: MorphingInstance, blocks: int) -> bool:
    """Take the last blocks, moving those in use below them. Returns False if they find no room."""
    try:
        moves = plan_moves_below(instance.blocks.used, blocks, instance.blocks.index)
    except OutOfBlocks:
        return False
    if moves:
        instance.blocks.relocate(moves)
        instance.scheduler.renumber(moves)
    instance.blocks.truncate(blocks)
    return True
