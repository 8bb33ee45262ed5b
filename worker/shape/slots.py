"""The slots of a bounded ring of host memory: what each holds, who needs it, and what to read next. Pure.

A slot holds one chunk of a file. A copy holds the slots of the chunks that it takes next, and nothing else is
read into these. A slot that no copy holds keeps its chunk until its room is needed, the one that was used
longest ago first: a chunk that comes again soon is not read twice. What is expected is read ahead, into slots
that no copy holds, while no copy misses anything.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_SLOTS = 4


class Chunk(NamedTuple):
    """A piece of a file that fits into a slot."""

    file: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class RingSlot:
    """One slot. `chunk` is in it, or is being read into it."""

    chunk: Chunk | None = None
    is_reading: bool = False
    is_fresh: bool = False  # no copy has taken it since it was read
    read_s: float = 0.0  # time of the disk that the read took
    holders: int = 0  # copies that take it next


@dataclass(eq=False, slots=True)
class ChunkDemand:
    """The chunks that one copy takes, in order, and what they have cost the disk so far."""

    chunks: Sequence[Chunk]
    taken: int = 0
    is_copying: bool = False  # from the first slot of `ahead`
    ahead: deque[int] = field(default_factory=deque)  # slots of the chunks from `taken` on, as far as claimed
    disk_bytes: int = 0
    disk_s: float = 0.0
    error: Exception | None = None

    @property
    def claimed(self) -> int:
        """The number of chunks that have, or had, a slot."""
        return self.taken + len(self.ahead)


class RingSlots:
    """Decides which chunk is read into which slot."""

    def __init__(self, num_slots: int) -> None:
        """Make empty slots. Raises ValueError for fewer than LEAST_SLOTS."""
        if num_slots < LEAST_SLOTS:
            raise ValueError(
                f"a ring of {num_slots} slots cannot read while it copies; it needs {LEAST_SLOTS}"
            )
        self.slots = [RingSlot() for _ in range(num_slots)]
        self.most_ahead = num_slots // 2  # slots of one copy, and of all that is expected
        self._idle = OrderedDict.fromkeys(range(num_slots))  # neither held nor being read, the oldest first
        self._where: dict[Chunk, int] = {}
        self._demands: list[ChunkDemand] = []
        self._expected: dict[Hashable, dict[Chunk, None]] = {}

    # ----------------------------------------------------------------------------- copies

    def open(self, chunks: Sequence[Chunk]) -> ChunkDemand:
        """Begin a copy, which takes these chunks one after the other."""
        demand = ChunkDemand(chunks)
        self._demands.append(demand)
        return demand

    def take(self, demand: ChunkDemand) -> int | None:
        """Return the slot of the next chunk, which stays the copy's until `give`; None: it is not there yet.

        Raises the error of its read.
        """
        if demand.error:
            raise demand.error
        self._claim_known(demand)
        if not demand.ahead or self.slots[demand.ahead[0]].is_reading:
            return None
        slot = self.slots[demand.ahead[0]]
        if slot.is_fresh:
            assert slot.chunk
            slot.is_fresh = False
            demand.disk_bytes += slot.chunk.nbytes
            demand.disk_s += slot.read_s
        demand.is_copying = True
        return demand.ahead[0]

    def give(self, demand: ChunkDemand) -> None:
        """Give back the slot of the chunk that was taken."""
        self._release(demand.ahead.popleft())
        demand.taken += 1
        demand.is_copying = False

    def close(self, demand: ChunkDemand) -> None:
        """End a copy, at any point, and give back all its slots. Repeating it is harmless."""
        while demand.ahead:
            self._release(demand.ahead.popleft())
        self._demands = [each for each in self._demands if each is not demand]

    # ----------------------------------------------------------------------------- what comes later

    def expect(self, key: Hashable, chunks: Sequence[Chunk]) -> None:
        """Read these ahead as far as there is room; they replace what was expected under this key.

        A chunk is expected until a copy claims it.
        """
        self._expected.pop(key, None)
        if chunks:
            self._expected[key] = dict.fromkeys(chunks)

    def forget(self, file: int) -> None:
        """Drop the chunks of a file, but for those that copies hold and those that are being read."""
        for key, chunks in list(self._expected.items()):
            self.expect(key, [chunk for chunk in chunks if chunk.file != file])
        for number in list(self._idle):
            if (chunk := self.slots[number].chunk) and chunk.file == file:
                self._empty(number)

    @property
    def num_held(self) -> int:
        """The slots that copies hold."""
        return sum(slot.holders > 0 for slot in self.slots)

    def is_reading(self, file: int) -> bool:
        """Return True while a chunk of this file is being read."""
        return any(slot.is_reading and slot.chunk and slot.chunk.file == file for slot in self.slots)

    # ----------------------------------------------------------------------------- reads

    def next_read(self) -> int | None:
        """Return a slot whose `chunk` is to be read into it now; None: there is nothing to read, or no room.

        The copy that has the least ahead comes first.
        """
        while waiting := [each for each in self._demands if self._may_claim(each)]:
            demand = min(waiting, key=lambda each: len(each.ahead))
            self._claim_known(demand)
            if not self._may_claim(demand):
                continue
            if not self._idle:
                return None
            expected = self._expected_here()
            number = next((each for each in self._idle if each not in expected), next(iter(self._idle)))
            self._begin(number, demand.chunks[demand.claimed])
            self._hold(demand, number)
            return number
        return self._next_expected()

    def read_done(self, number: int, seconds: float, error: Exception | None = None) -> None:
        """End a read. seconds: what it took of the disk's time."""
        slot = self.slots[number]
        slot.is_reading, slot.read_s = False, seconds
        if error:
            for demand in self._demands:
                if number in demand.ahead:
                    demand.error = demand.error or error
                    while len(demand.ahead) > demand.is_copying:
                        self._release(demand.ahead.pop())
            self._expected.clear()  # the next copy finds out whether the disk can be read again
        if not slot.holders:
            self._idle[number] = None
        if error:
            self._empty(number)

    def _claim_known(self, demand: ChunkDemand) -> None:
        """Let a copy hold the chunks that it takes next, as far as they are here or on their way."""
        while self._may_claim(demand):
            known = self._where.get(demand.chunks[demand.claimed])
            if known is None:
                return
            self._hold(demand, known)

    def _may_claim(self, demand: ChunkDemand) -> bool:
        has_more = not demand.error and demand.claimed < len(demand.chunks)
        return has_more and len(demand.ahead) < self.most_ahead

    def _next_expected(self) -> int | None:
        here = self._expected_here()
        if len(here) >= self.most_ahead:
            return None
        missing = (chunk for chunk in self._all_expected() if chunk not in self._where)
        number = next((each for each in self._idle if each not in here), None)
        if number is None or (chunk := next(missing, None)) is None:
            return None
        self._begin(number, chunk)
        return number

    def _all_expected(self) -> Iterator[Chunk]:
        for chunks in self._expected.values():
            yield from chunks

    def _expected_here(self) -> set[int]:
        """Return the slots that hold what is expected."""
        return {self._where[chunk] for chunk in self._all_expected() if chunk in self._where}

    def _hold(self, demand: ChunkDemand, number: int) -> None:
        slot = self.slots[number]
        assert slot.chunk
        slot.holders += 1
        self._idle.pop(number, None)
        demand.ahead.append(number)
        for chunks in self._expected.values():
            chunks.pop(slot.chunk, None)

    def _release(self, number: int) -> None:
        slot = self.slots[number]
        slot.holders -= 1
        if not (slot.holders or slot.is_reading):
            self._idle[number] = None

    def _begin(self, number: int, chunk: Chunk) -> None:
        """Take an idle slot for a chunk that is to be read."""
        del self._idle[number]
        self._empty(number)
        slot = self.slots[number]
        slot.chunk, slot.is_reading, slot.is_fresh = chunk, True, True
        self._where[chunk] = number

    def _empty(self, number: int) -> None:
        """Forget what a slot holds; an idle one is the next to be used."""
        slot = self.slots[number]
        if slot.chunk:
            del self._where[slot.chunk]
        slot.chunk, slot.is_fresh = None, False
        if number in self._idle:
            self._idle.move_to_end(number, last=False)

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot has two chunks, a copy misses its own, or one is lost."""
        there = {slot.chunk: number for number, slot in enumerate(self.slots) if slot.chunk}
        assert there == self._where, "the slots and the index differ"
        assert all(slot.chunk or not (slot.is_reading or slot.is_fresh) for slot in self.slots)
        held = Counter(number for demand in self._demands for number in demand.ahead)
        assert [slot.holders for slot in self.slots] == [held[n] for n in range(len(self.slots))]
        idle = {n for n, slot in enumerate(self.slots) if not (slot.holders or slot.is_reading)}
        assert idle == set(self._idle), f"slots {idle ^ set(self._idle)} are lost or have two owners"
        for demand in self._demands:
            assert len(demand.ahead) <= self.most_ahead
            claimed = demand.chunks[demand.taken : demand.claimed]
            ahead = [self.slots[number].chunk for number in demand.ahead]
            assert list(claimed) == ahead, f"a copy holds {ahead} where it takes {claimed}"
