"""The transport of one stage of an exchange between ranks.

Between CPU devices through outboxes, where processes can see each other's memory; else as messages.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from worker.distributed.communicator import Communicator

log = logging.getLogger(__name__)


class Outboxes:
    """Shared buffers of each rank, two of `nbytes` in turn: one is filled while others may read the other."""

    def __init__(self, group: Communicator, nbytes: int) -> None:
        """Make them; every rank calls it alike. Raises PeerLost, and OSError on all if one is not reached."""
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
        """Wait for all ranks; return their filled outboxes, valid until the next `turn`. Raises PeerLost."""
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


Fill = Callable[[int, torch.Tensor], None]  # writes what goes to a peer into uint8 [its bytes]


class Carrier(Protocol):
    nbytes: int  # bytes of memory
    per_peer: int  # the most bytes to or from one peer in one stage

    def trade(self, out: Sequence[int], come: Sequence[int], fill: Fill) -> list[torch.Tensor]:
        """Send out[j] bytes to each peer j, which `fill` writes. Returns the come[j] bytes of each.

        They are valid until the next call. Both are 0 for this rank itself. Raises PeerLost.
        """


class Messages:
    """Sends and receives by collective operations of the group."""

    def __init__(
        self, device: torch.device, group: Communicator, peers: Sequence[int], per_peer: int
    ) -> None:
        self._group, self._peers, self.per_peer = group, peers, per_peer
        self._sent = torch.empty((len(peers) - 1) * per_peer, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)
        self.nbytes = 2 * self._sent.nbytes

    def trade(self, out: Sequence[int], come: Sequence[int], fill: Fill) -> list[torch.Tensor]:
        sent, received = self._sent[: sum(out)], self._received[: sum(come)]
        for peer, part in enumerate(sent.split(list(out))):
            if len(part):
                fill(peer, part)
        self._group.all_to_all(received, sent, self._by_rank(come), self._by_rank(out))
        return list(received.split(list(come)))

    def _by_rank(self, sizes: Sequence[int]) -> list[int]:
        by_peer = dict(zip(self._peers, sizes, strict=True))
        return [by_peer.get(rank, 0) for rank in range(self._group.size)]


class Shared:
    """Sends through outboxes: a slot for each other peer, or one for all where they get the same bytes."""

    def __init__(
        self, boxes: Outboxes, group: Communicator, peers: Sequence[int], per_peer: int, is_alike: bool
    ) -> None:
        self._boxes, self._group, self._peers, self.per_peer = boxes, group, peers, per_peer
        self._own, self._is_alike = peers.index(group.rank), is_alike
        self.nbytes = 2 * boxes.nbytes

    def trade(self, out: Sequence[int], come: Sequence[int], fill: Fill) -> list[torch.Tensor]:
        receivers = [peer for peer, size in enumerate(out) if size]
        for peer in receivers[:1] if self._is_alike else receivers:
            fill(peer, self._slot(self._boxes.own, self._own, peer, out[peer]))
        boxes = self._boxes.turn(self._group)
        return [
            self._slot(boxes[rank], peer, self._own, size)
            for peer, (rank, size) in enumerate(zip(self._peers, come, strict=True))
        ]

    def _slot(self, box: torch.Tensor, sender: int, receiver: int, size: int) -> torch.Tensor:
        at = 0 if self._is_alike else (receiver - (receiver > sender)) * self.per_peer
        return box[at : at + size]


# Made at a group's first exchange and kept as long as it: to make memory takes longer than to fill it.
_boxes: WeakKeyDictionary[Communicator, Outboxes | None] = WeakKeyDictionary()


def carrier_for(
    device: torch.device,
    group: Communicator,
    peers: Sequence[int],
    stage_bytes: int,
    unit_bytes: int,
    *,
    is_alike: bool = False,
) -> Carrier:
    """Return a carrier with buffers of `stage_bytes`, or of a unit for each peer. Every rank calls it alike.

    unit_bytes: a multiple of 8; stages are whole units. is_alike: every peer gets the same bytes.
    """

    def per_peer(slots: int) -> int:
        return max(1, stage_bytes // (2 * slots * unit_bytes)) * unit_bytes

    others = len(peers) - 1
    if device.type == "cpu":
        slots = 1 if is_alike else others
        each = per_peer(slots)
        if boxes := outboxes_of(group, max(stage_bytes // 16 * 8, slots * each)):
            return Shared(boxes, group, peers, each, is_alike)
    return Messages(device, group, peers, per_peer(others))


def outboxes_of(group: Communicator, nbytes: int) -> Outboxes | None:
    """Return outboxes of CPU devices, None where the system forbids them. Every rank calls it alike."""
    boxes = _boxes.get(group)
    if group not in _boxes or (boxes and boxes.nbytes < nbytes):
        try:
            boxes = Outboxes(group, nbytes)
        except OSError as error:
            log.warning("KV and weights are exchanged through sockets: %s", error)
            boxes = None
        _boxes[group] = boxes
    return boxes
