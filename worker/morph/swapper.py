"""Layers, or halves of them, from one precision to another while requests decode (MorphServe §4.3).

A half goes through these stages, each beside running steps or between two of them::

    pages --> mapped --> copied --> checked, installed, old one unmapped --> pages to the KV cache
    engine    engine     copier     engine, all between the same two steps

Until it is installed the old variant serves, and whatever happens the new one is unmapped again. Several
halves fly at once, as far as pages allow: the next one is copied while one waits for a boundary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bus.messages import Number
from bus.precisions import Precision
from worker.morph.outcome import NotApplied
from worker.morph.plan import Half
from worker.morph.run import Clock, Patience, halves_text
from worker.morph.target import Target
from worker.shape.copier import Copier, Copy

Flight = Generator[bool, None, None]  # steps of one half, as `run.Run.steps`
MAX_FLYING = 4  # halves: while one is copied others wait for a boundary or for their turn


@dataclass(slots=True)
class Flights:
    """Halves in the air, of all swaps of one pool, and the pages that their old variants will give back.
    Those that do not move are copied, and held back by a request's floor."""

    halves: int = 0
    moving: int = 0
    pages_coming: int = 0

    def take_off(self, pages_coming: int) -> None:
        self.halves += 1
        self.moving += 1
        self.pages_coming += pages_coming

    def land(self, pages_coming: int) -> None:
        self.halves -= 1
        self.moving -= 1
        self.pages_coming -= pages_coming


class SwapRun:
    """One Swap, half by half. Halves that are done stay, whatever becomes of the others."""

    def __init__(
        self,
        target: Target,
        halves: Sequence[Half],
        precision: Precision,
        *,
        wait_s: float,
        copier: Copier,
        flights: Flights,
        clock: Clock = time.monotonic,
    ) -> None:
        self._target, self._precision = target, precision
        self._copier, self._flights = copier, flights
        self._patience = Patience(wait_s, clock)
        self._pending = deque(halves)
        self._obstacle = NotApplied("deferred", "it did not get its turn")
        self._blocks_before = target.resizer.cache.num_blocks
        self._moved_before = target.resizer.num_blocks_moved
        self._num_halves, self._num_applied = len(halves), 0
        self._pages_mapped = self._pages_unmapped = self._bytes = 0
        self._copy_s = 0.0

    is_beyond_return = False

    @property
    def progress(self) -> str:
        return halves_text(self._num_applied, self._num_halves)

    @property
    def deadline(self) -> float | None:
        return self._patience.deadline

    def numbers(self) -> dict[str, Number]:
        cache = self._target.resizer.cache
        return {
            "halves": self._num_halves,
            "halves_applied": self._num_applied,
            "bytes_copied": self._bytes,
            "copy_seconds": round(self._copy_s, 6),
            "wait_seconds": round(self._patience.total_s, 6),
            "pages_mapped": self._pages_mapped,
            "pages_unmapped": self._pages_unmapped,
            "blocks_before": self._blocks_before,
            "blocks_after": cache.num_blocks,
            "blocks_moved": self._target.resizer.num_blocks_moved - self._moved_before,
        }

    def steps(self) -> Flight:
        self._target.unmap_rest()
        flying: list[Flight] = []
        with ExitStack() as undo:
            undo.callback(_close, flying)
            while self._pending or flying:
                is_moving = False
                for flight in list(flying):
                    if (has_moved := next(flight, None)) is None:
                        flying.remove(flight)
                    if has_moved is not False:
                        is_moving = True
                        yield True
                if self._pending and self._may_start():
                    flying.append(self._fly(self._pending.popleft()))
                    next(flying[-1])
                    is_moving = True
                    yield True
                if is_moving:
                    self._patience.get_on()
                else:
                    self._wait()
                    yield False

    # ----------------------------------------------------------------------------- one half

    def _fly(self, half: Half) -> Flight:
        """From its pages to the KV blocks made of the old ones."""
        target, place = self._target, (half.layer, half.part)
        new, old = self._precision, target.precision(half)
        new_pages, old_pages = target.pages(half, new), target.pages(half, old)
        target.variants.map(*place, new)
        target.resizer.spend(new_pages)
        self._flights.take_off(old_pages)
        copy: Copy | None = None
        try:
            copy = self._copier.start(target.variants.copy_job(*place, new))
            yield True
            while not copy.is_done:
                yield False
            copy.raise_error()
            yield from self._until_released()
            target.variants.check(*place, new)
            target.install(half, new)
        except BaseException:
            if copy:
                copy.stop()
            target.unmap(half, new)
            raise
        finally:
            self._flights.land(old_pages)
        self._count(copy, new_pages, old_pages)
        target.unmap(half, old)

    def _until_released(self) -> Iterator[bool]:
        """A request came meanwhile that must not run in this precision: it was there first."""
        if not self._is_held():
            return
        self._flights.moving -= 1
        try:
            while self._is_held():
                yield False
        finally:
            self._flights.moving += 1

    def _count(self, copy: Copy, pages_mapped: int, pages_unmapped: int) -> None:
        self._num_applied += 1
        self._bytes += copy.nbytes
        self._copy_s += copy.seconds
        self._pages_mapped += pages_mapped
        self._pages_unmapped += pages_unmapped

    # ----------------------------------------------------------------------------- what it may wait for

    def _may_start(self) -> bool:
        return self._flights.halves < MAX_FLYING and not self._is_held() and self._has_pages(self._pending[0])

    def _is_held(self) -> bool:
        """Requests that must not run in this precision are here."""
        held = self._target.instance.num_held_above(self._precision)
        if held:
            self._obstacle = NotApplied(
                "deferred",
                f"held by {held} requests that take no layer in {self._precision}",
                requests_holding=held,
            )
        return held > 0

    def _has_pages(self, half: Half) -> bool:
        """Whether the new variant can be mapped now; the KV cache gives what is missing, if it can.

        At the end the pool's reserve must be whole again. On the way it may be used: that is what it is for.
        """
        resizer = self._target.resizer
        new = self._target.pages(half, self._precision)
        old = self._target.pages(half, self._target.precision(half))
        missing_now = new - resizer.cache.pool.num_free
        missing_after = new - old - self._flights.pages_coming - resizer.num_spare_pages
        if missing_now <= 0 and missing_after <= 0:
            return True
        if missing_after <= 0 and self._flights.halves:
            return False  # those in the air bring it
        return self._shrink(half, max(missing_now, missing_after))

    def _shrink(self, half: Half, num_pages: int) -> bool:
        resizer = self._target.resizer
        pages_per_layer = -(-num_pages // resizer.num_layers)
        needed = resizer.needed_blocks()
        if resizer.can_take(pages_per_layer, needed):
            resizer.shrink_for_swap(pages_per_layer)
            return True
        cache = resizer.cache
        free = cache.pool.num_free
        self._obstacle = NotApplied(
            "deferred",
            f"the {half} needs {num_pages} pages more; of {cache.num_blocks} KV blocks {needed} must stay"
            f"{resizer.kv_beside(num_pages)}",
            pages_needed=num_pages + free,
            pages_free=free,
            blocks=cache.num_blocks,
            blocks_used=cache.allocator.num_used,
            blocks_needed=needed,
            min_blocks=resizer.min_blocks,
        )
        return False

    def _wait(self) -> None:
        if self._flights.moving:
            self._patience.get_on()  # it works, or others work that will make room
        elif not self._patience.wait():
            raise self._obstacle


def _close(flying: list[Flight]) -> None:
    """Undo them all, also where undoing one fails."""
    with ExitStack() as undo:
        for flight in flying:
            undo.callback(flight.close)
