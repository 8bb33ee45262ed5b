"""A set of block numbers in which questions about thousands of blocks take microseconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt

FEW = 64  # blocks: of a request, not of a cache

BlockNumbers = npt.NDArray[np.int64]  # ascending


class BlockSet:
    """Block numbers from 0 on, one byte for each number up to the highest.

    A GPU's cache has tens of thousands of blocks, and swaps shrink and grow it between two steps. So what
    concerns many blocks is done at once in C, and what concerns one takes no longer than in a `set`.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._marks = bytearray()
        self._num = 0
        self._lowest = 0  # no block below this number is here
        self.update(blocks if isinstance(blocks, Collection) else list(blocks))

    def __len__(self) -> int:
        return self._num

    def __contains__(self, block: int) -> bool:
        return 0 <= block < len(self._marks) and self._marks[block] == 1

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks, ascending."""
        return iter(self.numbers().tolist())

    @property
    def highest(self) -> int:
        """The highest block; -1 for none."""
        return self._marks.rfind(1)

    def numbers(self, first: int = 0) -> BlockNumbers:
        """Return the blocks from `first` on, int64 [n], ascending."""
        return np.flatnonzero(self._array()[first:]) + first

    def mask(self, num_blocks: int) -> npt.NDArray[np.bool_]:
        """Return bool [num_blocks]: which of the blocks below are here."""
        mask = np.zeros(num_blocks, dtype=np.bool_)
        known = self._array()[:num_blocks]
        mask[: len(known)] = known
        return mask

    def update(self, blocks: Collection[int] | BlockNumbers) -> None:
        """Add blocks; those that are here already stay."""
        if not len(blocks):
            return
        if len(blocks) <= FEW:
            for block in blocks:
                self.add(block)
        elif isinstance(blocks, range) and blocks.step == 1:
            self._reach(blocks.stop)
            self._num += len(blocks) - self._marks.count(1, blocks.start, blocks.stop)
            self._marks[blocks.start : blocks.stop] = b"\x01" * len(blocks)
            self._lowest = min(self._lowest, blocks.start)
        else:
            places = np.fromiter(blocks, np.int64, len(blocks))
            self._reach(int(places.max()) + 1)
            marks = self._array()
            marks[places] = True
            self._num = int(np.count_nonzero(marks))
            self._lowest = min(self._lowest, int(places.min()))

    def add(self, block: int) -> None:
        """Add one block."""
        if block >= len(self._marks):
            self._reach(block + 1)
        self._num += 1 - self._marks[block]
        self._marks[block] = 1
        self._lowest = min(self._lowest, block)

    def discard(self, block: int) -> None:
        """Remove a block if it is here."""
        if block in self:
            self._marks[block] = 0
            self._num -= 1

    def difference_update(self, blocks: Iterable[int]) -> None:
        """Remove those of these blocks that are here."""
        for block in blocks:
            self.discard(block)

    def pop_lowest(self, most: int) -> list[int]:
        """Remove up to `most` blocks, the lowest, and return them, ascending."""
        taken: list[int] = []
        while len(taken) < most and self._num:
            self._lowest = self._marks.find(1, self._lowest)
            taken.append(self._lowest)
            self.discard(self._lowest)
        return taken

    def pop_highest(self, most: int) -> list[int]:
        """Remove up to `most` blocks, the highest, and return them, ascending."""
        taken = self.numbers()[max(0, self._num - most) :].tolist() if most > 0 else []
        self.difference_update(taken)
        return taken

    def drop_from(self, first: int) -> None:
        """Remove the blocks from `first` on."""
        self._num -= self._marks.count(1, first)
        del self._marks[first:]

    def _array(self) -> npt.NDArray[np.bool_]:
        """Return bool [n] over the marks, which must not change their number while it lives."""
        return np.frombuffer(self._marks, dtype=np.bool_)

    def _reach(self, end: int) -> None:
        if end > len(self._marks):
            self._marks.extend(bytes(end - len(self._marks)))
