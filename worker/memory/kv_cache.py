"""The KV cache of one model on one device, and the allocator of its blocks."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from worker.memory.backend import BlocksInUse, BrokenInvariant, OutOfBlocks, OutOfPages
from worker.memory.pool import PagePool, VirtualRange

# Bytes of an empty cache on a CPU device that stay with the process, so that small loads find them in place:
# the first access to a page takes 20 to 40 us.
RETAINED_BYTES: Final = 64 << 20
# Bytes that one call returns to the system, in about 20 ms on an idle machine: a request that comes meanwhile
# waits for it.
DISCARDED_BYTES: Final = 256 << 20


class KVCache:
    """The KV blocks of one model on one device: [max_blocks, Hkv, 2, block_tokens, D] per layer.

    Each layer has one virtual range. Heads are outermost in a block (header-centric, Gyges §4.1), so a block
    of H heads is also two blocks of H/2 heads at the same addresses. The view spans the reserved space from
    the first growth on and never changes; only blocks below `num_blocks` have memory. All layers always have
    the same number of pages.

    A block need not divide a page: it may straddle two, and the last page may end in part of a block.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        dtype: torch.dtype,
        max_blocks: int,
        owner: str,
    ) -> None:
        """Reserve addresses for max_blocks per layer; map nothing. Raises MappingFailed."""
        self.pool, self.owner, self.dtype = pool, owner, dtype
        self.block_tokens, self.max_blocks = block_tokens, max_blocks
        self._most_blocks = max_blocks
        self.block_shape = (num_kv_heads, 2, block_tokens, head_dim)
        self.block_bytes: int = 2 * num_kv_heads * block_tokens * head_dim * dtype.itemsize  # in one layer
        self.layers: list[torch.Tensor] = []  # empty until the first growth
        self._ranges: list[VirtualRange] = []
        self._allocator = BlockAllocator()
        self.allocator = self._allocator
        try:
            for i in range(num_layers):
                name = f"{owner} KV of layer {i}"
                self._ranges.append(pool.reserve(max_blocks * self.block_bytes, kind="kv", owner=name))
        except RuntimeError:
            self.release()
            raise

    @property
    def allocator(self) -> BlockAllocator:
        return self._allocator

    @allocator.setter
    def allocator(self, allocator: BlockAllocator) -> None:
        """Replace the allocator. Only the one in force may discard: an old one is out of date."""
        # By a weak reference: in a cycle, the addresses of a dropped cache would wait for the collector.
        discard = weakref.WeakMethod(self._discard_unused)
        self._allocator.on_empty = None
        allocator.on_empty = lambda: (call := discard()) and call()
        self._allocator = allocator

    @property
    def num_layers(self) -> int:
        return len(self._ranges)

    @property
    def pages_per_layer(self) -> int:
        return self._ranges[0].num_mapped

    @property
    def num_blocks(self) -> int:
        return self.allocator.capacity

    @property
    def growable_pages(self) -> int:
        """The pages per layer by which the cache can grow now."""
        room = min(self._ranges[0].num_pages, self.pages_for(self._most_blocks)) - self.pages_per_layer
        return max(0, min(room, self.pool.num_free // len(self._ranges)))

    def layers_at(self, degree: int) -> list[torch.Tensor]:
        """Return the layers as a tensor-parallel group of `degree` sees them, at the same addresses.

        The shape is [max_blocks * degree, Hkv // degree, 2, block_tokens, D]; block c becomes blocks c *
        degree to c * degree + degree - 1. Raises ValueError if the heads cannot be split.
        """
        num_kv_heads, *rest = self.block_shape
        if degree < 1 or num_kv_heads % degree:
            raise ValueError(
                f"{self.owner}: {num_kv_heads} KV heads cannot be split over {degree} ranks; take a divisor"
            )
        shape = (self.max_blocks * degree, num_kv_heads // degree, *rest)
        return [layer.view(shape) for layer in self.layers]

    def pages_for(self, num_blocks: int, degree: int = 1) -> int:
        """Return the pages per layer that hold `num_blocks` blocks of a group of `degree` workers."""
        return self.pool.pages_for(-(-num_blocks * self.block_bytes // degree))

    def blocks_in(self, pages_per_layer: int, degree: int = 1) -> int:
        """Return the whole blocks, of a group of `degree` workers, that so many pages per layer hold."""
        nbytes = pages_per_layer * self.pool.page_bytes * degree
        return min(nbytes // self.block_bytes, self._most_blocks * degree)

    def limit(self, num_blocks: int) -> None:
        """Set the most blocks that the cache may ever have. Raises as `shrink` does.

        A group has no more blocks than its smallest member.
        """
        self.shrink(max(0, self.pages_per_layer - self.pages_for(num_blocks)))
        self.allocator.truncate(min(num_blocks, self.num_blocks))
        self._most_blocks = num_blocks

    def grow(self, pages_per_layer: int) -> None:
        """Map so many more pages in every layer, or none.

        New blocks hold what their pages held before: attention reads no token that was not written. Raises
        OutOfPages (with the pages of all layers together), MappingFailed, and ValueError above max_blocks.
        """
        if pages_per_layer == 0:
            return
        needed, free = pages_per_layer * len(self._ranges), self.pool.num_free
        if needed > free:
            raise OutOfPages(needed, free, self.pool.num_pages, f"{self.owner} KV cache")
        before = self.pages_per_layer
        self._resize(before, before + pages_per_layer)
        if not self.layers:
            shape = (self.max_blocks, *self.block_shape)
            self.layers = [layer.tensor(self.dtype, shape) for layer in self._ranges]
        self.allocator.extend(self.blocks_in(before + pages_per_layer))

    def shrink(self, pages_per_layer: int) -> None:
        """Unmap the last so many pages of every layer, or none.

        Raises BlocksInUse while a block in them is live, and ValueError below zero pages.
        """
        if pages_per_layer == 0:
            return
        before = self.pages_per_layer
        after = before - pages_per_layer
        if after < 0:
            raise ValueError(f"{self.owner} KV cache has {before} pages per layer, not {pages_per_layer}")
        self.allocator.truncate(self.blocks_in(after))
        try:
            self._resize(before, after)
        except RuntimeError:
            if all(layer.num_mapped == before for layer in self._ranges):
                self.allocator.extend(self.blocks_in(before))
            raise

    def release(self) -> None:
        """Free all pages and addresses, live blocks or not. The views must not be used any more."""
        self.layers = []
        for layer in self._ranges:
            layer.release()
        self.allocator = BlockAllocator()

    def check_integrity(self) -> None:
        """Check the blocks and that all layers have the same pages. Raises BrokenInvariant."""
        self.allocator.check_integrity()
        pages = {layer.num_mapped for layer in self._ranges}
        if len(pages) > 1:
            raise BrokenInvariant(f"{self.owner} KV cache: layers have {sorted(pages)} pages")

    def _discard_unused(self) -> None:
        """Return memory above RETAINED_BYTES to the system, from the top. No block is in use.

        Without this a worker on a CPU device keeps every page that its largest burst has touched.
        """
        block_bytes, touched = self.block_bytes * len(self._ranges), self.allocator.num_touched
        kept = max(RETAINED_BYTES // block_bytes, touched - DISCARDED_BYTES // block_bytes)
        if touched <= kept:
            return
        for layer in self._ranges:
            layer.discard(self.pages_for(kept), self.pages_for(touched))
        self.allocator.num_touched = kept

    def _resize(self, before: int, after: int) -> None:
        """Map `after` pages in every layer, or `before` again if that fails.

        If going back fails too, the error has a note of it, and `check_integrity` finds layers that differ.
        """
        try:
            for layer in self._ranges:
                if after > before:
                    layer.map(before, after - before, zeroed=False)
                else:
                    layer.unmap(after, before - after)
        except (RuntimeError, ValueError) as error:
            for layer in self._ranges:
                try:
                    layer.resize(before)
                except RuntimeError as another:
                    error.add_note(f"{layer.owner} keeps {layer.num_mapped} pages, not {before}: {another}")
            raise


class BlockAllocator:
    """The block numbers 0..capacity-1, given out lowest first.

    Lowest first, not first in first out: live blocks gather at the low end, so few must move when the cache
    shrinks. Costs a heap operation per block.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._free: list[int] = []  # a heap
        self._in_use = bytearray()  # _in_use[id]; its length is the capacity
        self.num_touched = 0  # blocks below this number may have been written
        self.on_empty: Callable[[], None] | None = None  # called when the last block in use is freed
        self.extend(capacity)

    @property
    def capacity(self) -> int:
        return len(self._in_use)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    @property
    def used(self) -> list[int]:
        return [block for block in range(self.capacity) if self._in_use[block]]

    def claim(self, blocks: Sequence[int]) -> None:
        """Take these blocks. Raises ValueError, and takes none, if one is not free."""
        wanted = set(blocks)
        free = set(self._free)
        if not wanted <= free or len(wanted) != len(blocks):
            raise ValueError(f"KV blocks claimed that are not free: {sorted(wanted - free)[:8]}")
        self._free = sorted(free - wanted)
        for block in blocks:
            self._in_use[block] = True
        self.num_touched = max([self.num_touched, *(block + 1 for block in blocks)])

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, in ascending order. Raises OutOfBlocks, and takes none, if fewer are free."""
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free), self.capacity)
        taken = [heapq.heappop(self._free) for _ in range(n)]
        for block in taken:
            self._in_use[block] = True
        if taken:
            self.num_touched = max(self.num_touched, taken[-1] + 1)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Free these blocks. Raises ValueError, and frees none, if one is not in use or given twice."""
        wrong = [b for b in blocks if not (0 <= b < self.capacity and self._in_use[b])]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {wrong or list(blocks)}")
        for block in blocks:
            self._in_use[block] = False
            heapq.heappush(self._free, block)
        if blocks and self.on_empty is not None and self.num_free == self.capacity:
            self.on_empty()

    def live_from(self, capacity: int) -> list[int]:
        """Return the blocks in use at or above `capacity`, which must move before shrinking to it."""
        return [block for block in range(capacity, self.capacity) if self._in_use[block]]

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Rename blocks in use whose contents were moved (from -> to); the sources are free."""
        taken = set(moves.values())
        self._free = [block for block in self._free if block not in taken] + list(moves)
        heapq.heapify(self._free)
        for source, target in moves.items():
            self._in_use[source], self._in_use[target] = False, True

    def extend(self, capacity: int) -> None:
        """Grow to `capacity` with free blocks. Raises ValueError if that is less than now."""
        if capacity < self.capacity:
            raise ValueError(f"cannot extend {self.capacity} KV blocks to {capacity}; truncate")
        self._free.extend(range(self.capacity, capacity))  # the largest ids at the end keep the heap a heap
        self._in_use.extend(bytes(capacity - self.capacity))

    def truncate(self, capacity: int) -> None:
        """Shrink to `capacity`. Raises BlocksInUse, changing nothing, if a block above is in use."""
        live = self.live_from(capacity)
        if live:
            raise BlocksInUse(live, capacity)
        self._free = [block for block in self._free if block < capacity]
        heapq.heapify(self._free)
        del self._in_use[capacity:]

    def check_integrity(self) -> None:
        """Check that every block is free once, or in use. Raises BrokenInvariant."""
        free = set(self._free)
        expected = {block for block in range(self.capacity) if not self._in_use[block]}
        if len(free) != len(self._free) or free != expected:
            raise BrokenInvariant(
                f"KV blocks both free and in use, or neither: {sorted(free ^ expected)[:8]}"
            )


def plan_moves_below(used: Iterable[int], capacity: int) -> dict[int, int]:
    """Plan the moves (from -> to) of blocks in use at or above `capacity` to the lowest free ones below it.

    Raises OutOfBlocks if there are not enough.
    """
    taken = set(used)
    live = sorted(block for block in taken if block >= capacity)
    targets = [block for block in range(capacity) if block not in taken][: len(live)] if live else []
    if len(targets) < len(live):
        raise OutOfBlocks(len(live), len(targets), capacity)
    return dict(zip(live, targets, strict=True))
