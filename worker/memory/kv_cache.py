"""The KV cache of one model on one device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Final, NamedTuple

import numpy as np
import torch

from bus.pages import kv_pages_per_layer
from bus.precisions import KVPrecision
from kernels import copy_blocks, store_kv
from kernels.kv_codes import cache_format, dequantize, is_codes, parts_of
from worker.memory.backend import BrokenInvariant, OutOfPages
from worker.memory.block_allocator import BlockAllocator, in_parts
from worker.memory.pool import PagePool, PageSpan, VirtualRange

# Bytes of an empty cache on a CPU device that stay with the process, so that small loads find them in place:
# the first access to a page takes 20 to 40 us.
RETAINED_BYTES: Final = 64 << 20
# Bytes that one call returns to the system, in about 20 ms on an idle machine: a request that comes meanwhile
# waits for it.
DISCARDED_BYTES: Final = 256 << 20
# Bytes of full precision that are converted at once, beside the cache: what a processor's caches hold.
CONVERTED_BYTES: Final = 1 << 20


class KVCache:
    """The KV blocks of one model on one device: [max_blocks, Hkv, 2, block_tokens, D] per layer.

    In 8 bits D + 2 bytes stand for D numbers (`kernels.kv_codes`). Each layer can be converted in place, from
    one precision to the other; while layers differ, blocks are counted in full precision.

    Each layer has one virtual range. Heads are outermost in a block (header-centric, Gyges §4.1), so a block
    of H heads is also two blocks of H/2 heads at the same addresses. The view spans the reserved space from
    the first growth on and never changes; only blocks below `num_blocks` have memory. All layers always have
    the same number of pages.

    A block need not divide a page: it may straddle two, and the last page may end in part of a block.

    On a GPU, blocks hold zeros until tokens are written, and finite numbers from then on: attention of other
    libraries multiplies what it masks, and 0 x NaN is NaN (flash-attention#2374). The kernels of this project
    do not read what was not written, and a CPU's pages would lose their memory by being zeroed.
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
        precision: KVPrecision = "full",
    ) -> None:
        """Reserve addresses for max_blocks per layer; map nothing. Raises MappingFailed.

        dtype: the model's, in which the cache is unless it has another precision.
        """
        self.pool, self.owner = pool, owner
        self.block_tokens, self.max_blocks = block_tokens, max_blocks
        self._num_kv_heads, self._head_dim, self._dtype = num_kv_heads, head_dim, dtype
        self._is_zeroed = pool.backend.device.type != "cpu"
        self.block_bytes = self._block_bytes(precision)  # one layer's
        self._addressed_bytes = self._most_bytes = max_blocks * self.block_bytes
        self._precisions: list[KVPrecision] = [precision] * num_layers
        self.layers: list[torch.Tensor] = []  # empty until the first growth
        self.pages_per_layer = 0
        self._growth: _Growth | None = None
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
    def precision(self) -> KVPrecision:
        """The lowest of any layer."""
        return "int8" if "int8" in self._precisions else "full"

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of a block in the first layer."""
        return self._format(self._precisions[0])[1]

    @property
    def num_layers(self) -> int:
        return len(self._ranges)

    @property
    def _most_blocks(self) -> int:
        """The limit, in whole blocks as they are counted now."""
        return self._most_bytes // self.block_bytes

    @property
    def num_blocks(self) -> int:
        return self.allocator.capacity

    @property
    def growable_pages(self) -> int:
        """The pages per layer by which the cache can grow now."""
        present = self._growth.end if self._growth else self.pages_per_layer
        room = min(self._ranges[0].num_pages, self.pages_for(self._most_blocks)) - present
        return max(0, min(room, self.pool.num_free // len(self._ranges)))

    @property
    def form(self) -> KVPrecision | None:
        """The precision of all layers, in which blocks are counted too; None on the way to another one."""
        return self.precision if self.counts_as(self.precision) and len(set(self._precisions)) == 1 else None

    def layers_at(self, degree: int) -> list[torch.Tensor]:
        """Return the layers as a tensor-parallel group of `degree` sees them, at the same addresses.

        The shape is [max_blocks * n, Hkv // n, 2, block_tokens, D] with n = `parts_at(degree)`; block c
        becomes blocks c * n to c * n + n - 1. Raises ValueError if the heads cannot be split.
        """
        return [self._at(layer, degree) for layer in self.layers]

    def parts_at(self, degree: int) -> int:
        """Return how many blocks of a group of `degree` workers take the bytes of one.

        As many as there are ranks; where there are fewer KV heads, several ranks have the same one. Raises
        ValueError if the heads cannot be split.
        """
        heads = self._num_kv_heads
        if degree < 1 or (heads % degree and degree % heads):
            raise ValueError(
                f"{self.owner}: {heads} KV heads cannot be split over {degree} ranks; take a divisor or a"
                " multiple"
            )
        return min(heads, degree)

    def pages_for(self, num_blocks: int, degree: int = 1) -> int:
        """Return the pages per layer that hold `num_blocks` blocks of a group of `degree` workers."""
        parts = self.parts_at(degree)
        return kv_pages_per_layer(num_blocks, self.block_bytes, self.pool.page_bytes, parts)

    def most_blocks(self, degree: int = 1) -> int:
        """Return the blocks, of a group of `degree` workers, that there are addresses for."""
        return self.max_blocks * self.parts_at(degree)

    def blocks_in(self, pages_per_layer: int, degree: int = 1, precision: KVPrecision | None = None) -> int:
        """Return the whole blocks, of a group of `degree` workers, that so many pages per layer hold.

        precision: of the blocks; None: as they are counted now.
        """
        block_bytes = self._block_bytes(precision) if precision else self.block_bytes
        parts = self.parts_at(degree)
        nbytes = pages_per_layer * self.pool.page_bytes * parts
        return min(nbytes // block_bytes, self._most_bytes // block_bytes * parts)

    def limit(self, num_blocks: int) -> None:
        """Set the most blocks that the cache may ever have. Raises as `shrink` does.

        A group has no more blocks than its smallest member.
        """
        self.shrink(max(0, self.pages_per_layer - self.pages_for(num_blocks)))
        self.allocator.truncate(min(num_blocks, self.num_blocks))
        self._most_bytes = num_blocks * self.block_bytes

    def grow(self, pages_per_layer: int) -> None:
        """Map so many more pages in every layer, or none.

        On a CPU, new blocks hold what their pages held before. Raises OutOfPages (with the pages of all
        layers together), MappingFailed, and ValueError above max_blocks.
        """
        if pages_per_layer == 0:
            return
        self._check_settled()
        self._check_free(pages_per_layer)
        before = self.pages_per_layer
        self._resize(before, before + pages_per_layer)
        self._count_grown()

    def begin_growth(self, pages_per_layer: int) -> None:
        """Take so many more pages for every layer; another thread maps them (`PagePool.beside`).

        `end_growth` must follow before the cache changes otherwise, which it refuses until then. Raises
        OutOfPages and MappingFailed.
        """
        self._check_settled()
        self._check_free(pages_per_layer)
        end = self.pages_per_layer + pages_per_layer
        is_wanted = np.arange(self._ranges[0].num_pages) < end
        try:
            for layer in self._ranges:
                layer.claim(is_wanted, zeroed=self._is_zeroed)
        except RuntimeError:
            for layer in self._ranges:
                layer.settle()
            raise
        self._growth = _Growth(end, self.pool.run_beside(self._map_claimed, end * self.pool.page_bytes))

    @property
    def is_growing(self) -> bool:
        return self._growth is not None and not self._growth.mapping.done()

    def await_growth(self, within_s: float) -> bool:
        """Wait for the pages of a growth that has not ended. Return True if they are mapped."""
        return self._growth is not None and bool(wait([self._growth.mapping], within_s).done)

    def end_growth(self) -> None:
        """Count the blocks of a growth that was begun; wait until its pages are mapped.

        Raises MappingFailed, having given back what was mapped.
        """
        if (growth := self._growth) is None:
            return
        self._growth = None
        try:
            growth.mapping.result()
            for layer in self._ranges:
                layer.settle()
        except RuntimeError as error:
            self._go_back(error)
            raise
        self.pages_per_layer = growth.end
        self._count_grown()

    def _map_claimed(self, end_bytes: int) -> None:
        for layer in self._ranges:
            layer.map_claimed(end_bytes)

    def _check_settled(self) -> None:
        """Raise BrokenInvariant while the pages of a growth are not counted: their number is not known."""
        if self._growth:
            raise BrokenInvariant(
                f"{self.owner} KV cache: it grows to {self._growth.end} pages per layer, and cannot change"
                " otherwise before end_growth"
            )

    def _check_free(self, pages_per_layer: int) -> None:
        needed, free = pages_per_layer * len(self._ranges), self.pool.num_free
        if needed > free:
            raise OutOfPages(needed, free, self.pool.num_pages, f"{self.owner} KV cache")

    def _count_grown(self) -> None:
        if not self.layers:
            self.layers = [self._view(i, precision) for i, precision in enumerate(self._precisions)]
        self.allocator.extend(self.blocks_in(self.pages_per_layer))

    def shrink(self, pages_per_layer: int) -> None:
        """Unmap the last so many pages of every layer, or none.

        Raises BlocksInUse while a block in them is live, and ValueError below zero pages.
        """
        if pages_per_layer == 0:
            return
        self._check_settled()
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

    def copy_blocks(self, moves: Mapping[int, int], degree: int = 1, at_once_bytes: int = 0) -> None:
        """Copy blocks (from -> to) in every layer, all at once: a target may be a source, too.

        degree: as in `layers_at`. at_once_bytes: of memory beside the cache, where a target is a source.
        """
        if not moves:
            return
        layers = self.layers_at(degree)
        is_apart = moves.keys().isdisjoint(moves.values())
        most = max(1, at_once_bytes * self.parts_at(degree) // self.block_bytes)
        for part in [moves] if is_apart else in_parts(moves, most):
            # Two rows of one tensor: its columns would not be contiguous, as the kernel takes them to be.
            sources, targets = torch.tensor([list(part), list(part.values())], device=layers[0].device)
            for layer in layers:
                if part.keys().isdisjoint(part.values()):
                    copy_blocks(layer, sources, targets)
                else:
                    layer[targets] = layer[sources]

    @property
    def can_convert(self) -> bool:
        """True if blocks can be in 8 bits: the scales of a block take whole words."""
        return self.block_tokens % 2 == 0

    @property
    def gain_in_8_bits(self) -> float:
        """The blocks in 8 bits in the bytes of one in the model's dtype; 1.0 where they cannot be."""
        return self._block_bytes("full") / self._block_bytes("int8") if self.can_convert else 1.0

    def blocks_as(self, precision: KVPrecision) -> int:
        """Return the blocks that the present pages hold in a precision, up to the limit."""
        return self.blocks_in(self.pages_per_layer, precision=precision)

    def count_as(self, precision: KVPrecision) -> None:
        """Count blocks as a precision has them, from now on.

        Raises BlocksInUse, changing nothing, where fewer do not hold a block in use.
        """
        self._check_settled()
        before, after = self.block_bytes, self._block_bytes(precision)
        if after > before:
            self.allocator.truncate(self.blocks_as(precision))
        self.block_bytes, self.max_blocks = after, self._addressed_bytes // after
        self.allocator.num_touched = -(-self.allocator.num_touched * before // after)
        if after < before:
            self.allocator.extend(self.blocks_in(self.pages_per_layer))

    def counts_as(self, precision: KVPrecision) -> bool:
        """Return True if blocks are counted as this precision has them."""
        return self.block_bytes == self._block_bytes(precision)

    def layers_beside(self, precision: KVPrecision) -> list[int]:
        """Return the layers that have another precision."""
        return [i for i, each in enumerate(self._precisions) if each != precision]

    def convert(
        self, index: int, precision: KVPrecision, blocks: Iterable[int] | None = None, degree: int = 1
    ) -> None:
        """Hold a layer in another precision from now on, with what `blocks` hold.

        blocks: of a group of `degree` workers; None: those in use here, and those that can be found. A layer
        that is in this precision stays as it is.

        In place: the first block goes first to fewer bits, the last one first to more, so that none is
        overwritten before it was read. Raises BrokenInvariant where it fails once blocks are rewritten: the
        layer can be read in neither precision. What fails before has changed nothing.
        """
        if self._precisions[index] == precision:
            return
        self._check_settled()
        held = sorted(self.allocator.held if blocks is None else blocks, reverse=precision == "full")
        target = self._view(index, precision)
        before, after = self._at(self.layers[index], degree), self._at(target, degree)
        at_once = max(1, CONVERTED_BYTES * self.parts_at(degree) // self._block_bytes("full"))
        for first in range(0, len(held), at_once):
            try:
                rewrite_blocks(
                    before, after, torch.tensor(held[first : first + at_once], device=target.device)
                )
            except Exception as error:
                if not first:
                    raise
                raise BrokenInvariant(
                    f"{self._ranges[index].owner}: {first} of {len(held)} blocks are in {precision}, the"
                    " others are not; the worker must start anew"
                ) from error
        if self._is_zeroed:
            self._zero_beside(index, precision, held, degree)
        # A new list: a recorded step keeps the old one to compare with.
        self.layers = [*self.layers[:index], target, *self.layers[index + 1 :]]
        self._precisions[index] = precision

    def release(self) -> None:
        """Free all pages and addresses, live blocks or not. The views must not be used any more."""
        if self._growth:
            wait([self._growth.mapping])
            self._growth = None
        self.layers = []
        for layer in self._ranges:
            layer.release()
        self.pages_per_layer = 0
        self.allocator = BlockAllocator()

    def check_integrity(self, with_index: bool = True) -> None:
        """Check blocks, pages, and that layers are what they count as. Raises BrokenInvariant.

        with_index: as in `BlockAllocator.check_integrity`.
        """
        self.allocator.check_integrity(with_index)
        pages = {layer.num_mapped for layer in self._ranges}
        if pages != {self.pages_per_layer} and not self._growth:
            raise BrokenInvariant(
                f"{self.owner} KV cache: layers have {sorted(pages)} pages, not {self.pages_per_layer}"
            )
        nbytes, present = self.num_blocks * self.block_bytes, self.pages_per_layer * self.pool.page_bytes
        if nbytes > present:
            raise BrokenInvariant(
                f"{self.owner} KV cache: its blocks take {nbytes} bytes per layer of {present}"
            )
        if not self.counts_as("full") and (layers := self.layers_beside("int8")):
            raise BrokenInvariant(f"{self.owner} KV cache: blocks count as int8, but not in layers {layers}")
        for i, (layer, precision) in enumerate(zip(self.layers, self._precisions, strict=False)):
            if (layer.dtype, layer.shape[1:]) != self._format(precision):
                raise BrokenInvariant(f"{self.owner} KV cache: layer {i} is {layer.dtype}, not {precision}")

    def _discard_unused(self) -> None:
        """Return memory above RETAINED_BYTES to the system, from the top. No block is in use.

        Without this a worker on a CPU device keeps every page that its largest burst has touched. Blocks of
        the prefix cache keep theirs.
        """
        block_bytes, touched = self.block_bytes * len(self._ranges), self.allocator.num_touched
        kept = max(RETAINED_BYTES // block_bytes, touched - DISCARDED_BYTES // block_bytes)
        kept = max(kept, self.allocator.index.highest + 1)
        if touched <= kept:
            return
        for layer in self._ranges:
            layer.discard(self.pages_for(kept), self.pages_for(touched))
        self.allocator.num_touched = kept

    def _at(self, layer: torch.Tensor, degree: int) -> torch.Tensor:
        """Return a view of a layer as `layers_at` says. Raises ValueError if the heads cannot be split."""
        parts = self.parts_at(degree)
        return layer.view(layer.shape[0] * parts, self._num_kv_heads // parts, *layer.shape[2:])

    def _format(self, precision: KVPrecision) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of a block."""
        dtype, token_size = cache_format(precision, self._head_dim, self._dtype)
        return dtype, (self._num_kv_heads, 2, self.block_tokens, token_size)

    def _block_bytes(self, precision: KVPrecision) -> int:
        dtype, shape = self._format(precision)
        return int(math.prod(shape) * dtype.itemsize)

    def _view(self, index: int, precision: KVPrecision) -> torch.Tensor:
        dtype, shape = self._format(precision)
        num_blocks = self._addressed_bytes // self._block_bytes(precision)
        return self._ranges[index].tensor(dtype, (num_blocks, *shape))

    def _zero_beside(self, index: int, precision: KVPrecision, held: Sequence[int], degree: int) -> None:
        """Zero all of a layer but the blocks `held`: numbers of another precision could read as NaN.

        degree: as in `layers_at`; the blocks are those of `precision`.
        """
        present, block_bytes = self.pages_per_layer * self.pool.page_bytes, self._block_bytes(precision)
        parts = self.parts_at(degree)
        is_beside = np.ones(present * parts // block_bytes, dtype=np.bool_)
        is_beside[np.asarray(held, dtype=np.int64)] = False
        blocks = self._at(self._view(index, precision), degree)
        blocks.index_fill_(0, torch.from_numpy(np.flatnonzero(is_beside)).to(blocks.device), 0)
        whole = len(is_beside) * block_bytes // parts
        if whole < present:
            self._ranges[index].tensor(torch.uint8, [present - whole], offset_bytes=whole).zero_()

    def _resize(self, before: int, after: int) -> None:
        """Map `after` pages in every layer, or `before` again if that fails.

        If going back fails too, the error has a note of it, and `check_integrity` finds layers that differ.
        """
        try:
            if after < before:
                self.pool.unmap(PageSpan(layer, after, before - after) for layer in self._ranges)
            else:
                for layer in self._ranges:
                    layer.map(before, after - before, zeroed=self._is_zeroed)
        except (RuntimeError, ValueError) as error:
            self._go_back(error)
            raise
        self.pages_per_layer = after

    def _go_back(self, error: Exception) -> None:
        """Have the pages of before in every layer again; note where that is refused."""
        before = self.pages_per_layer
        for layer in self._ranges:
            try:
                layer.resize(before)
            except RuntimeError as another:
                error.add_note(f"{layer.owner} keeps {layer.num_mapped} pages, not {before}: {another}")


class _Growth(NamedTuple):
    """Pages that another thread maps."""

    end: int  # pages per layer with them
    mapping: Future[None]


def rewrite_blocks(source: torch.Tensor, target: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write what blocks of one view of a layer hold to those of another, in the other precision."""
    taken = source[blocks]
    if is_codes(taken):
        target[blocks] = dequantize(*parts_of(taken)).to(target.dtype)
        return
    block_tokens = source.shape[3]
    slots = blocks[:, None] * block_tokens + torch.arange(block_tokens, device=blocks.device)
    keys, values = taken.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [tokens, Hkv, D] each
    store_kv(keys, values, target, slots.flatten())
