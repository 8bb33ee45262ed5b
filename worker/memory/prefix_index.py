"""An index of KV blocks by the tokens that they hold, for later requests with the same beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from bus.precisions import Precision, is_below
from bus.prefix_keys import is_published
from worker.memory.block_set import BlockSet


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """The contents of a full block.

    precision: the lowest of any layer while this block, or one before it, was computed. depth: blocks before
    it.
    """

    key: bytes
    precision: Precision
    depth: int


class PrefixIndex:
    """Full blocks by key (`bus.prefix_keys`); a key has one block.

    A closed index takes nothing in: while layers of a group run at two degrees only blocks in use travel, so
    free ones hold nothing of use.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self._is_open = is_open
        self._blocks: dict[bytes, int] = {}  # least recently used first
        self._contents: dict[int, IndexedBlock] = {}
        self._marks = BlockSet()  # the blocks of `_contents`

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        """Take blocks in from now on."""
        self._is_open = True

    def close(self) -> None:
        """Forget all blocks and take none in."""
        self._is_open = False
        self._blocks.clear()
        self._contents.clear()
        self._marks = BlockSet()

    def find(self, keys: Sequence[bytes], floor: Precision) -> list[int]:
        """Return the blocks of the first keys, up to one that is missing or was made below `floor`."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or is_below(self._contents[block].precision, floor):
                break
            found.append(block)
        return found

    def precision_of(self, block: int) -> Precision:
        """Return the precision that made an indexed block. Raises KeyError for another."""
        return self._contents[block].precision

    def touch(self, blocks: Iterable[int]) -> None:
        """Count these indexed blocks as used now."""
        for block in blocks:
            key = self._contents[block].key
            self._blocks[key] = self._blocks.pop(key)

    def add(self, block: int, key: bytes, precision: Precision, depth: int = 0) -> None:
        """Index a full block, unless the key has a block that is as precise."""
        if not self._is_open:
            return
        known = self._blocks.get(key)
        if known is not None:
            if not is_below(self._contents[known].precision, precision):
                return
            self.forget(known)
        self.forget(block)
        self._blocks[key] = block
        self._contents[block] = IndexedBlock(key, precision, depth)
        self._marks.add(block)

    def lower(self, precision: Precision) -> None:
        """Count what all blocks hold as made in `precision` at best."""
        for block, contents in self._contents.items():
            if is_below(precision, contents.precision):
                self._contents[block] = replace(contents, precision=precision)

    def forget(self, block: int) -> None:
        """Remove a block whose memory will hold something else."""
        if contents := self._contents.pop(block, None):
            del self._blocks[contents.key]
            self._marks.discard(block)

    def forget_from(self, first: int) -> None:
        """Remove every block from `first` on."""
        for block in self._marks.numbers(first).tolist():
            self.forget(block)

    def rename(self, moves: Mapping[int, int]) -> None:
        """Follow blocks whose contents were moved at once (from -> to); what the targets held is gone."""
        moved = {to: self._contents.get(block) for block, to in moves.items()}
        for block in (*moves.keys(), *moves.values()):
            self.forget(block)
        for block, contents in moved.items():
            if contents:
                self._contents[block] = contents
                self._blocks[contents.key] = block
                self._marks.add(block)

    def recent_keys(self, most: int) -> list[bytes]:
        """Return up to `most` keys that are to be published (`bus.prefix_keys`), the last used first.

        Looks at four times as many blocks at most, so that a report of a large cache costs no more.
        """
        looked_at = islice(reversed(self._blocks.items()), 4 * most)
        published = (key for key, block in looked_at if is_published(self._contents[block].depth))
        return list(islice(published, most))

    @property
    def oldest_first(self) -> Iterator[int]:
        """The blocks indexed, the least recently used first."""
        return iter(self._blocks.values())

    @property
    def blocks(self) -> set[int]:
        """The indexed blocks."""
        return set(self._contents)

    def mask(self, num_blocks: int) -> npt.NDArray[np.bool_]:
        """Return bool [num_blocks]: which of the blocks below are indexed."""
        return self._marks.mask(num_blocks)

    def among(self, blocks: Iterable[int]) -> set[int]:
        """Return those of these blocks that are indexed."""
        return self._contents.keys() & set(blocks) if self._contents else set()

    @property
    def highest(self) -> int:
        """The highest block indexed; -1 for none."""
        return self._marks.highest

    def check_integrity(self, capacity: int) -> None:
        """Raise AssertionError unless keys and blocks are in step and all blocks exist."""
        # In C, since a GPU has tens of thousands of blocks and this is done between two steps.
        keys = map(attrgetter("key"), self._contents.values())
        assert self._blocks == dict(zip(keys, self._contents, strict=True))
        assert set(self._marks) == self._contents.keys() and self.highest < capacity
