"""The KV cache of an instance to another number of blocks, on all its members alike (MorphServe §4.4)."""

from __future__ import annotations

from bus.messages import LayerShape, Number
from bus.morphs import Resize
from worker.distributed.messages import GrowKV
from worker.morph.members import Members
from worker.morph.run import NotApplied, Run, Steps
from worker.morph.target import Target

# Pages per layer that a worker maps or unmaps between two steps: so the calls' own cost is shared (8 layers,
# pages of 64 KiB: one takes 0.3 ms, eight 0.6), and no step waits for all of a large change. A group takes
# more at once, since all its members must come to the same boundary for each action.
PAGES_AT_ONCE, GROUP_PAGES_AT_ONCE = 8, 64


class ResizeRun(Run):
    """One Resize, some pages of every layer at a time.

    A resize that ends before its goal goes back to where it began, as far as the pages are still free.
    """

    touches = frozenset({"size of its KV cache"})

    def __init__(self, command: Resize, target: Target) -> None:
        """Raise NotApplied for sizes that can never be, or not as long as the layers are what they are."""
        super().__init__(command.wait_s)
        num_blocks = command.blocks
        self._target, self._num_blocks = target, num_blocks
        self._members = members = Members(target)
        self._blocks_before = members.blocks
        self._moved_before = target.resizer.num_blocks_moved
        self._at_once = PAGES_AT_ONCE if members.num_workers == 1 else GROUP_PAGES_AT_ONCE
        self._pages_done = 0  # pages of each layer; below 0: given back
        least, most = members.min_blocks, members.most_blocks
        if not least <= num_blocks <= most:
            raise NotApplied(
                "failed" if num_blocks < least else "deferred",  # fewer bits in a layer make room for more
                f"this instance needs at least {least} KV blocks, since the longest sequence must fit"
                if num_blocks < least
                else f"this instance can have at most {most} KV blocks: the device's budget less the weights"
                f"{self._fewer_bits()}",
                blocks_asked=num_blocks,
                min_blocks=least,
                max_blocks=most,
            )

    def numbers(self) -> dict[str, Number]:
        return {
            "blocks_before": self._blocks_before,
            "blocks_after": self._members.blocks,
            "blocks_used": self._target.instance.scheduler.blocks.num_used,
            "blocks_moved": self._target.resizer.num_blocks_moved - self._moved_before,
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Steps:
        members, is_done = self._members, False
        try:
            while missing := members.pages_missing(self._num_blocks):
                if obstacle := self._obstacle(missing):
                    yield from self._pause(obstacle)
                    continue
                self._patience.get_on()
                pages = max(-self._at_once, min(missing, self._at_once))
                if pages > 0:
                    yield from members.grow(pages, "order")
                else:
                    yield from members.shrink(-pages, "order")
                self._pages_done += pages
                yield True
            is_done = True
            self._target.resizer.own_all()
        finally:
            if not is_done:
                self._go_back()

    def _fewer_bits(self) -> str:
        """Return the advice to swap layers, "" where none can lose bits."""
        lowest = self._target.variants.precisions[-1]
        if all(layer == LayerShape(attention=lowest, ffn=lowest) for layer in self._target.instance.shape):
            return ""
        return f"; layers in fewer bits leave room for more: swap some to {lowest}"

    def _obstacle(self, missing: int) -> NotApplied | None:
        """Return why it cannot go on now, if anything."""
        members, resizer = self._members, self._target.resizer
        statuses = members.statuses()
        tightest = min(statuses, key=lambda each: each.growable_pages)
        if missing > tightest.growable_pages:
            free, spare = tightest.free_pages, tightest.spare_pages
            needed = missing * tightest.num_layers
            where = f" in each of {members.size} workers" if members.size > 1 else ""
            if members.size < len(statuses):
                where = f" for layers {tightest.first} to {tightest.end - 1}"
            return NotApplied(
                "deferred",
                f"{self._num_blocks} KV blocks need {needed} pages more{where}; {free} are free, and "
                f"{resizer.reserve_pages} of them are kept for swaps{resizer.kv_beside(needed - spare)}"
                f"{self._fewer_bits()}",
                pages_needed=needed,
                pages_free=free,
                pages_reserved=resizer.reserve_pages,
            )
        used = members.num_used
        if missing < 0 and members.blocks_after(missing) < used:
            return members.in_use(used, self._num_blocks)
        return None

    def _go_back(self) -> None:
        """Undo what was done; pages that a group has added stay, since taking them needs its consent."""
        members, done = self._members, self._pages_done
        if members.is_lost or not done:
            return
        if done < 0:
            pages = min(-done, *(each.growable_pages for each in members.statuses()))
            members.begin(GrowKV(pages=pages, blocks=members.blocks_after(pages), purpose="order"))
        elif members.size == 1 and members.blocks_after(-done) >= members.num_used:
            members.begin(members.plan_shrink(done, self._target.resizer.cache.allocator.used, "order"))
