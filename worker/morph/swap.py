"""Halves of layers from one precision to another while requests decode (MorphServe §4.3).

Each is mapped and copied beside the steps, and installed by all members between the same two. Until then the
old variant serves. Several halves are in progress at once, as far as pages allow.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from bus.messages import Number
from bus.morphs import Swap
from bus.precisions import Precision
from worker.distributed.messages import DropHalf, InstallHalf, PrepareHalf
from worker.morph.members import Members
from worker.morph.plan import Half, plan_swap
from worker.morph.run import NotApplied, Run, Steps
from worker.morph.target import Target
from worker.shape.copier import Copy

MAX_IN_PROGRESS = 4  # halves: while one is copied others wait for a boundary or for their turn


@dataclass(slots=True)
class HalvesInProgress:
    """Halves being swapped, in all swaps of one worker, and the pages that their old variants give back.

    A half that waits for a request with a floor is in progress and does not advance.
    """

    halves: int = 0
    advancing: int = 0
    pages_coming: Counter[Hashable] = field(default_factory=Counter)  # by pool

    def add(self, halves: int, pool: Hashable, pages_coming: int) -> None:
        """Count halves that begin, or below 0 that end."""
        self.halves += halves
        self.advancing += halves
        self.pages_coming[pool] += pages_coming


class SwapRun(Run):
    """One Swap, half by half. Halves that are done stay, whatever becomes of the others."""

    def __init__(self, command: Swap, target: Target, in_progress: HalvesInProgress) -> None:
        super().__init__(command.wait_s)
        self._target = target
        self._members, self._in_progress = Members(target), in_progress
        order, variants = target.order_towards(command.precision), target.variants.precisions
        self._towards = halves = plan_swap(command, target.instance.shape, variants, order)
        self.touches, self.already = frozenset(halves), "" if halves else command.precision
        self._pending = deque(halves)
        self._obstacle = NotApplied("deferred", "it did not get its turn")
        self._blocks_before = self._members.blocks
        self._moved_before = target.resizer.num_blocks_moved
        self._num_halves, self._num_applied = len(halves), 0
        self._pages_mapped = self._pages_unmapped = self._bytes = 0
        self._disk_bytes = 0
        self._copy_s = self._disk_s = self._blocks_s = self._swap_s = 0.0
        self._began_s = time.monotonic()
        self._stands = {"stands_seconds": command.stands_s} if command.stands_s else {}

    @property
    def awaits_copies(self) -> bool:  # type: ignore[override]
        return self._members.num_workers == 1 and not self._target.waits_for_disk

    @property
    def progress(self) -> str:
        return halves_text(self._num_applied, self._num_halves)

    def numbers(self) -> dict[str, Number]:
        """Return what the swap took so far; pages and bytes are those of this member."""
        return {
            "halves": self._num_halves,
            "halves_applied": self._num_applied,
            "bytes_copied": self._bytes,
            "copy_seconds": round(self._copy_s, 6),
            "bytes_from_disk": self._disk_bytes,  # the others were in host memory
            "disk_seconds": round(self._disk_s, 6),  # of the disk, beside the copies
            "swap_seconds": round(self._swap_s, 6),  # until all run in it; 0: they do not yet
            "blocks_seconds": round(self._blocks_s, 6),  # until the KV cache had grown first; 0: it has not
            "wait_seconds": round(self._patience.total_s, 6),
            "pages_mapped": self._pages_mapped,
            "pages_unmapped": self._pages_unmapped,
            "blocks_before": self._blocks_before,
            "blocks_after": self._members.blocks,
            "blocks_moved": self._target.resizer.num_blocks_moved - self._moved_before,
            **self._stands,
        }

    def steps(self) -> Steps:
        self._target.unmap_rest()
        try:
            yield from self._swap_all()
            yield from self._members.settle()
            self._swap_s = time.monotonic() - self._began_s
            while self._members.grow_own():
                yield not self._target.resizer.grows_beside  # which wakes it
            yield from self._members.settle()
        finally:
            self._target.resizer.end_growth()

    def _swap_all(self) -> Steps:
        running: list[Steps] = []
        with ExitStack() as undo:
            undo.callback(_close, running)
            while self._pending or running:
                is_advancing = False
                for half in list(running):
                    if (has_advanced := next(half, None)) is None:
                        running.remove(half)
                    if has_advanced is not False:
                        is_advancing = True
                        if running or self._pending:  # else it ends here: what comes next need not wait
                            yield True
                if self._pending and (kv_pages := self._pages_to_take()) is not None:
                    running.append(self._swap(self._pending.popleft(), kv_pages))
                    next(running[-1])
                    is_advancing = True
                    yield True
                self._time_blocks()
                if is_advancing:
                    self._patience.get_on()
                elif self._in_progress.advancing or not self._members.has_settled:
                    self._patience.get_on()  # another swap works, which will make room
                    yield False
                else:
                    yield from self._pause(self._obstacle)

    def _swap(self, half: Half, kv_pages: int) -> Steps:
        """Swap one half; `kv_pages` of each layer's KV make room for its new variant."""
        target, members = self._target, self._members
        (layer, part), precision = half, self._towards[half]
        new_pages = target.pages(half, precision)
        old_pages = target.pages(half, target.precision(half))
        copy: Copy | None = None
        pool = members.pool_of(half)
        self._in_progress.add(1, pool, old_pages)
        try:
            then = self._pending[0] if self._pending else None
            ahead = (*then, self._towards[then]) if then else None
            prepare = PrepareHalf(layer=layer, part=part, precision=precision, ahead=ahead)
            if kv_pages:
                yield from members.shrink(kv_pages, "swap", then=prepare)
            else:
                yield from members.do(prepare)
            copy = target.prepared[half].copy if half in target.prepared else None
            yield True
            while not members.have_copied(half):
                yield False
            yield from self._until_released(precision)
            yield from members.do(InstallHalf(layer=layer, part=part))
        except BaseException:
            members.begin(DropHalf(layer=layer, part=part))
            raise
        finally:
            self._in_progress.add(-1, pool, -old_pages)
            is_applied = target.precision(half) == precision
            self._num_applied += is_applied
            if is_applied and copy:
                self._bytes += copy.nbytes
                self._copy_s += copy.seconds
                self._disk_bytes += copy.reads.disk_bytes
                self._disk_s += copy.reads.disk_s
                self._pages_mapped += new_pages
                self._pages_unmapped += old_pages
            members.grow_own()
            self._time_blocks()
        yield from members.settle()

    def _time_blocks(self) -> None:
        if not self._target.resizer.is_growing:
            self._target.resizer.end_growth()
        if not self._blocks_s and self._members.blocks > self._blocks_before:
            self._blocks_s = time.monotonic() - self._began_s

    def _until_released(self, precision: Precision) -> Iterator[bool]:
        """Wait for requests that came meanwhile and must not run in this precision."""
        self._in_progress.advancing -= 1
        try:
            while self._is_held(precision):
                yield False
        finally:
            self._in_progress.advancing += 1

    def _pages_to_take(self) -> int | None:
        """Return the pages per layer that the KV must give before the next half can start; None: not now."""
        half = self._pending[0]
        if self._in_progress.halves >= MAX_IN_PROGRESS or not self._members.has_settled:
            return None
        return None if self._is_held(self._towards[half]) else self._pages_missing(half)

    def _is_held(self, precision: Precision) -> bool:
        """Return whether requests are here that must not run in this precision."""
        held = self._members.num_held_above(precision)
        if held:
            self._obstacle = NotApplied(
                "deferred",
                f"held by {held} requests that take no layer in {precision}",
                requests_holding=held,
            )
        return held > 0

    def _pages_missing(self, half: Half) -> int | None:
        """Return the pages per layer that the KV must give to map the new variant; None if it cannot.

        On the way the reserve may be used; at the end it must be whole again.
        """
        statuses = self._members.holding(half)
        new = self._target.pages(half, self._towards[half])
        old = self._target.pages(half, self._target.precision(half))
        missing_now = new - min(each.free_pages for each in statuses)
        spare = min(each.spare_pages for each in statuses)
        missing_after = new - old - self._in_progress.pages_coming[self._members.pool_of(half)] - spare
        if missing_now <= 0 and missing_after <= 0:
            return 0
        if missing_after <= 0 and self._in_progress.halves:
            return None  # the halves in progress bring them
        return self._take_from_kv(half, max(missing_now, missing_after))

    def _take_from_kv(self, half: Half, num_pages: int) -> int | None:
        members, resizer = self._members, self._target.resizer
        holding = members.holding(half)
        pages_per_layer = -(-num_pages // holding[0].num_layers)
        needed = members.needed_blocks()
        least = min(each.kv_pages for each in members.statuses())
        if pages_per_layer <= least and members.blocks_after(-pages_per_layer) >= needed:
            return pages_per_layer
        free = min(each.free_pages for each in holding)
        self._obstacle = NotApplied(
            "deferred",
            f"the {half} needs {num_pages} pages more; of {members.blocks} KV blocks {needed} must stay"
            f"{resizer.kv_beside(num_pages)}",
            pages_needed=num_pages + free,
            pages_free=free,
            blocks=members.blocks,
            blocks_used=members.num_used,
            blocks_needed=needed,
            min_blocks=members.min_blocks,
        )
        return None


def _close(running: list[Steps]) -> None:
    """Undo all halves in progress, also where undoing one fails."""
    with ExitStack() as undo:
        for half in running:
            undo.callback(half.close)


def halves_text(num_applied: int, num_halves: int) -> str:
    """Return the progress of a swap before its end, in about ten steps, since every report is broadcast."""
    shown = min(num_applied, num_halves - 1)
    shown -= shown % max(1, num_halves // 10)
    return f"{shown} of {num_halves} halves of layers" if shown > 0 else ""
