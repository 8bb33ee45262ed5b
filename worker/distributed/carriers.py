"""How the rows of one stage of an exchange get from rank to rank.

Between CPU devices through outboxes, where the system lets processes see each other's memory; else, and
between GPUs, as messages of the group.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from worker.distributed.communicator import Communicator


class Outboxes:
    """A rank has two of `nbytes`, in turn: one is filled while others may still read the one before it.

    Holds no reference to its group, as whose part it is kept.
    """

    def __init__(self, group: Communicator, nbytes: int) -> None:
        """Every rank calls it, with the same number.

        Raises OSError, on all ranks, where one cannot reach the memory of another (a container of its own,
        another user), and PeerLost.
        """
        self._rank, self.nbytes = group.rank, nbytes
        self._turn = 0
        fd = os.memfd_create("instar-outbox")
        try:
            # In a container of its own the same numbers are another file, maybe this rank's own: each has a
            # name in it that the others must find there.
            name = secrets.randbits(62)
            os.pwrite(fd, name.to_bytes(8, "little"), 0)
            os.ftruncate(fd, max(2 * nbytes, 8))
            whose = torch.tensor([[os.getpid(), fd, name]] * group.size)
            of_all = torch.empty_like(whose)
            group.all_to_all(of_all, whose, [1] * group.size, [1] * group.size)
            reached = [_reach(pid, other, known, 2 * nbytes) for pid, other, known in of_all.tolist()]
            _agree(group, all(part is not None for part in reached))
        finally:
            os.close(fd)
        self._parts = [part.view(2, nbytes) for part in reached if part is not None]

    @property
    def own(self) -> torch.Tensor:
        """uint8 [nbytes]: to be filled before the next `turn`."""
        return self._parts[self._rank][self._turn % 2]

    def turn(self, group: Communicator) -> list[torch.Tensor]:
        """When every rank has filled its own: those of all, by rank, to be read before the next `turn`.

        Raises PeerLost.
        """
        here = torch.zeros(group.size, 1, dtype=torch.uint8)
        each = [1] * group.size
        group.all_to_all(torch.empty_like(here), here, each, each)  # at once; a sum goes round a ring
        filled = [part[self._turn % 2] for part in self._parts]
        self._turn += 1
        return filled


def _agree(group: Communicator, is_reached: bool) -> None:
    missing = torch.tensor([0.0 if is_reached else 1.0])
    group.all_reduce(missing)
    if missing.item():
        raise OSError(f"{int(missing)} of {group.size} ranks cannot reach the others' memory")


def _reach(pid: int, fd: int, name: int, nbytes: int) -> torch.Tensor | None:
    """uint8 [nbytes], its pages present; None where the system does not allow it, or it is another's."""
    try:
        with Path(f"/proc/{pid}/fd/{fd}").open("r+b", buffering=0) as file:
            if file.read(8) != name.to_bytes(8, "little"):
                return None
            shared = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, ValueError):
        return None
    return torch.from_numpy(np.frombuffer(shared, np.uint8))


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of this rank that go to, or come from, each subgroup in one stage (none of its own)."""

    by_subgroup: list[npt.NDArray[np.int64]]

    @property
    def num(self) -> int:
        return sum(map(len, self.by_subgroup))

    def all(self) -> npt.NDArray[np.int64]:
        return np.concatenate(self.by_subgroup)

    def sizes(self, peers: Sequence[int], size: int) -> list[int]:
        """Return the number of rows for each rank of the group."""
        sizes = [0] * size
        for peer, places in zip(peers, self.by_subgroup, strict=True):
            sizes[peer] = len(places)
        return sizes


class Carrier(Protocol):
    nbytes: int  # of memory that it takes

    def carry(self, rows: torch.Tensor, out: Places, come: Places) -> None:
        """Send `out` of rows [N, row], and put what comes to `come`.

        Raises PeerLost; then nothing has been put.
        """


class Messages:
    def __init__(self, rows: torch.Tensor, group: Communicator, peers: Sequence[int], per_peer: int) -> None:
        """per_peer: the most rows to or from one of them in one stage."""
        self._group, self._peers = group, peers
        self._sent = rows.new_empty((len(peers) - 1) * per_peer, rows.shape[1])
        self._received = torch.empty_like(self._sent)
        self.nbytes = self._sent.nbytes + self._received.nbytes

    def carry(self, rows: torch.Tensor, out: Places, come: Places) -> None:
        sent, received = self._sent[: out.num], self._received[: come.num]
        _take(rows, out.all(), sent)
        sizes = (places.sizes(self._peers, self._group.size) for places in (come, out))
        self._group.all_to_all(received, sent, *sizes)
        _put(rows, come.all(), received)


class Shared:
    """Carries rows over outboxes, each with a slot for every other peer."""

    def __init__(self, boxes: Outboxes, group: Communicator, peers: Sequence[int], per_peer: int) -> None:
        self._boxes, self._group, self._peers, self._per_peer = boxes, group, peers, per_peer
        self._own = peers.index(group.rank)
        self.nbytes = 2 * boxes.nbytes

    def carry(self, rows: torch.Tensor, out: Places, come: Places) -> None:
        box = self._boxes.own
        for peer, places in enumerate(out.by_subgroup):
            if len(places):
                _take(rows, places, self._slot(box, rows, self._own, peer)[: len(places)])
        boxes = self._boxes.turn(self._group)
        for peer, places in enumerate(come.by_subgroup):
            if len(places):
                source = self._slot(boxes[self._peers[peer]], rows, peer, self._own)
                _put(rows, places, source[: len(places)])

    def _slot(self, box: torch.Tensor, rows: torch.Tensor, sender: int, receiver: int) -> torch.Tensor:
        """Return the slot of one sender and receiver: [per_peer, row]."""
        row_bytes = rows.shape[1] * rows.itemsize
        first = (receiver - (receiver > sender)) * self._per_peer
        part = box[first * row_bytes : (first + self._per_peer) * row_bytes]
        return part.view(rows.dtype).view(self._per_peer, -1)


def _take(rows: torch.Tensor, places: npt.NDArray[np.int64], out: torch.Tensor) -> None:
    torch.index_select(rows, 0, torch.from_numpy(places).to(rows.device), out=out)


def _put(rows: torch.Tensor, places: npt.NDArray[np.int64], source: torch.Tensor) -> None:
    if rows.device.type == "cpu":
        rows.numpy()[places] = source.numpy()  # a row at once; torch goes word by word, 1.6 times as long
    else:
        rows.index_copy_(0, torch.from_numpy(places).to(rows.device), source)


# Made at a group's first exchange and kept as long as it: to make memory takes longer than to fill it.
_boxes: WeakKeyDictionary[Communicator, Outboxes | None] = WeakKeyDictionary()


def carrier_for(
    rows: torch.Tensor, group: Communicator, peers: Sequence[int], per_peer: int, nbytes: int
) -> Carrier:
    """Every rank calls it, with the same numbers. nbytes: of an outbox, unless a stage takes more."""
    if rows.device.type != "cpu":
        return Messages(rows, group, peers, per_peer)
    needed = max(nbytes // rows.itemsize, (len(peers) - 1) * per_peer * rows.shape[1]) * rows.itemsize
    boxes = outboxes_of(group, needed)
    return Shared(boxes, group, peers, per_peer) if boxes else Messages(rows, group, peers, per_peer)


def outboxes_of(group: Communicator, nbytes: int) -> Outboxes | None:
    """Return outboxes of at least `nbytes` each for a group of CPU devices.

    None where the system does not allow them. Every rank calls it, with the same number.
    """
    boxes = _boxes.get(group)
    if group not in _boxes or (boxes and boxes.nbytes < nbytes):
        try:
            boxes = Outboxes(group, nbytes)
        except OSError as error:
            log.warning("KV and weights are exchanged through sockets: %s", error)
            boxes = None
        _boxes[group] = boxes
    return boxes
