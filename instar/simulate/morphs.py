"""A morph of a simulated instance: halves of layers one after the other, or a resize of the KV cache.

A half takes the calibration's time for its new variant, divided by the share of the time that the worker has
for morphs: all of it while it is idle, else `worker.morph_share`, or more if the reflex says that it is
urgent. It is installed between two steps. An urgent morph may spend its share of URGENT_TURN_S ahead, as
`worker.shape.copier.Pace` allows it, so that several halves may be installed between the same two steps. That
several are in progress at once in the worker changes little, since one thread copies them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from bus.morphs import MorphOutcome, MorphReport, Resize, Swap
from bus.precisions import Precision
from instar.simulate.calibration import MorphCosts
from instar.simulate.engine import SimulatedInstance
from worker.memory import OutOfBlocks, plan_moves_below
from worker.morph.plan import Half, plan_swap
from worker.morph.resizer import headroom
from worker.morph.run import NotApplied
from worker.shape.copier import URGENT_TURN_S

Command = Swap | Resize


@dataclass(slots=True)
class SimulatedMorph:
    """A morph in progress, and why it was ordered.

    due_s: when its next half is ready, None while it waits for blocks. spent_s: until when its share of the
    time is used up. obstacle: why it cannot go on.
    """

    command: Command
    reason: str
    began_s: float
    page_bytes: int
    costs: MorphCosts
    pending: deque[Half] = field(default_factory=deque)
    towards: dict[Half, Precision] = field(default_factory=dict)
    num_halves: int = 0
    due_s: float | None = None
    spent_s: float = 0.0
    waiting_since_s: float | None = None
    copy_s: float = 0.0  # pauses not counted
    obstacle: str = ""

    def begin(self, instance: SimulatedInstance, now_s: float, urgency: float) -> MorphReport | None:
        """Begin; returns the report if it ends at once."""
        if isinstance(self.command, Resize):
            return self._resize(instance, now_s)
        shape = instance.shape
        order = shape.order_towards(self.command.precision)
        try:
            self.towards = plan_swap(self.command, shape.layers, shape.variants, order)
        except NotApplied as end:
            self.obstacle = end.reason
            return self._report(instance, now_s, end.state)
        self.pending.extend(self.towards)
        self.num_halves = len(self.pending)
        return self.advance(instance, now_s, urgency)

    def advance(self, instance: SimulatedInstance, now_s: float, urgency: float) -> MorphReport | None:
        """Carry on between two steps; returns the report at the end.

        urgency: the share of a busy worker's time that morphs may take at least.
        """
        if not isinstance(self.command, Swap):
            return self._resize(instance, now_s)
        urgency = max(urgency, self.command.urgency)
        while True:
            if self.due_s is not None:
                if now_s < self.due_s:
                    return None
                self._install(instance, self.pending.popleft(), now_s)
                self.spent_s, self.due_s = self.due_s, None
            if not self.pending:
                return self._report(instance, now_s, "applied")
            since_s = max(self.spent_s, now_s - URGENT_TURN_S) if urgency else now_s
            if not self._prepare(instance, since_s, urgency):
                return self._wait(instance, now_s)

    def _prepare(self, instance: SimulatedInstance, since_s: float, urgency: float) -> bool:
        """Make room for the next half and start its copy. Returns False if KV blocks are in the way.

        since_s: the time from which on its share of the time counts.
        """
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
        nbytes = shape.half_pages(half, self.towards[half]) * self.page_bytes
        seconds = self.costs.half_s + nbytes * self.costs.byte_s
        share = max(self.costs.share, urgency) if instance.has_work else 1.0
        self.copy_s += seconds
        self.due_s = since_s + seconds / share
        self.waiting_since_s = None
        return True

    def _install(self, instance: SimulatedInstance, half: Half, now_s: float) -> None:
        shape = instance.shape
        shape.install(half, self.towards[half])
        if pages := shape.growth():
            shape.resize(pages)
            instance.blocks.extend(shape.kv_blocks)
        instance.reshaped(now_s)

    def _resize(self, instance: SimulatedInstance, now_s: float) -> MorphReport | None:
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

    def cancel(self, instance: SimulatedInstance, now_s: float) -> MorphReport:
        """End the morph as it is; the half in progress keeps its old variant, and the cache its blocks."""
        if pages := instance.shape.growth():
            instance.shape.resize(pages)
            instance.blocks.extend(instance.shape.kv_blocks)
        self.obstacle = "cancelled"
        return self._report(instance, now_s, "failed")

    def _wait(self, instance: SimulatedInstance, now_s: float) -> MorphReport | None:
        """Wait for blocks as long as the command says."""
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        if now_s < self.waiting_since_s + self.command.wait_s:
            return None
        return self._report(instance, now_s, "deferred")

    def _report(self, instance: SimulatedInstance, now_s: float, state: MorphOutcome) -> MorphReport:
        done = self.num_halves - len(self.pending)
        return MorphReport(
            id=self.command.id,
            kind="swap" if isinstance(self.command, Swap) else "resize",
            target=instance.name,
            worker=instance.name.rpartition("@")[2],
            epoch=1,
            state=state,
            reason=self.reason if state == "applied" else self.obstacle,
            numbers={
                "halves": self.num_halves,
                "halves_applied": done,
                "copy_seconds": self.copy_s,
                "blocks_after": instance.blocks.capacity,
                "stands_seconds": self.command.stands_s if isinstance(self.command, Swap) else 0.0,
            },
            started_ms=round(self.began_s * 1000),
            ended_ms=round(now_s * 1000),
        )


def _shrink(instance: SimulatedInstance, blocks: int) -> bool:
    """Take the last blocks, moving those in use below them. Returns False if they find no room."""
    try:
        moves = plan_moves_below(instance.blocks.used, blocks, instance.blocks.index.oldest_first)
    except OutOfBlocks:
        return False
    if moves:
        instance.blocks.relocate(moves)
        instance.scheduler.renumber(moves)
    instance.blocks.truncate(blocks)
    return True
