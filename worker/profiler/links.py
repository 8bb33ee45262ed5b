"""Measurements of the communication of ranks and stages with another worker (`worker.distributed.probe`).

A decode sends a row for each sequence, a prefill one for each token: a few numbers of rows are measured.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
from torch.distributed import TCPStore

from bus.deployments import LinkKind, LinkSample, ProbePeer
from worker.distributed.communicator import PeerLost
from worker.distributed.messages import Echo, MeasureAllReduce, Message, ProbeFailed
from worker.distributed.probe import PATIENCE_S, all_reduces, meet_probe, tensors_for, use_device
from worker.distributed.transport import Link, connect, to_host

log = logging.getLogger(__name__)

ROWS = (1, 8, 64, 512)
ROUNDS, WARM_UP = 100, 2
LIMIT_S = 10.0  # for either kind, however slow the link is


class NoAnswer(Exception):
    """The other worker does not answer, or does so no longer."""


def measure_links(
    peer: ProbePeer,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    host: str,
    *,
    rows: Sequence[int] = ROWS,
) -> list[LinkSample]:
    """Measure what can be measured with a peer; return nothing if it does not answer.

    Takes a second, and for either kind at most LIMIT_S and the time of one answer: not for the engine's
    thread. host: the address of this worker for the other.
    """
    use_device(device)
    line = _Line(peer, device)
    found: list[LinkSample] = []
    try:
        tensors = tensors_for([count * hidden_size for count in rows], str(dtype), device)
        found += _timed("hop", _hops(line, tensors), per_turn=2)
        if "all_reduce" in kinds_with(peer):
            found += _timed("all_reduce", _sums(line, tensors, host))
    except (NoAnswer, PeerLost, RuntimeError) as error:
        log.warning("%s: the link is measured in part or not at all: %s", peer.worker, error)
    finally:
        line.link.close()
    return found


def kinds_with(peer: ProbePeer) -> set[LinkKind]:
    """Return the kinds that can be measured with this peer: ranks share a host."""
    return {"hop", "all_reduce"} if peer.shares_host else {"hop"}


def _timed(kind: LinkKind, turns: Iterator[int], per_turn: int = 1) -> list[LinkSample]:
    """Time the turns: each yields the bytes of what it has just done, `per_turn` times."""
    measured = defaultdict[int, list[float]](list)
    before = started = time.perf_counter()
    for nbytes in turns:
        measured[nbytes].append((time.perf_counter() - before) / per_turn)
        before = time.perf_counter()
        if before - started > LIMIT_S:
            break
    return [
        LinkSample(kind=kind, nbytes=nbytes, seconds=seconds[WARM_UP:])
        for nbytes, seconds in measured.items()
        if len(seconds) > WARM_UP
    ]


def _hops(line: _Line, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
    """Send tensors there and back. Raises NoAnswer."""
    line.call(tensors[0])  # until the connection stands
    for _ in range(WARM_UP + ROUNDS):
        for tensor in tensors:
            line.call(tensor)
            yield tensor.nbytes


def _sums(line: _Line, tensors: Sequence[torch.Tensor], host: str) -> Iterator[int]:
    """Sum tensors with the peer. Raises NoAnswer, PeerLost, RuntimeError."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))
    at, rounds = f"{host}:{store.port}", WARM_UP + ROUNDS
    dtype, device, sizes = tensors[0].dtype, tensors[0].device, [tensor.numel() for tensor in tensors]
    line.link.send(MeasureAllReduce(store=at, dtype=str(dtype), sizes=sizes, rounds=rounds))
    try:
        group = meet_probe(at, 0, host, device)
    except PeerLost as error:
        raise NoAnswer(line.complaint() or str(error)) from error
    try:
        for number in all_reduces(group, tensors, rounds, device):
            yield tensors[number].nbytes
    finally:
        group.close()


class _Line:
    """A connection to the other worker, for one thread."""

    def __init__(self, peer: ProbePeer, device: torch.device) -> None:
        self._device = device
        self._mail: SimpleQueue[torch.Tensor | str] = SimpleQueue()
        is_gpu = device.type == "cuda"
        self.link = connect(
            peer.link, peer.link_key, self._take, self._lose, timeout_s=PATIENCE_S, is_pinned=is_gpu
        )

    def call(self, tensor: torch.Tensor) -> None:
        """Send a tensor and wait until it is back on the device. Raises NoAnswer."""
        self.link.send(Echo(), to_host(tensor))
        try:
            back = self._mail.get(timeout=PATIENCE_S)
        except Empty:
            raise NoAnswer(f"no answer within {PATIENCE_S:g} s") from None
        if isinstance(back, str):
            raise NoAnswer(back)
        back.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def complaint(self) -> str:
        """Return the reason that the other worker gave for not taking part, or ""."""
        while not self._mail.empty():
            if isinstance(said := self._mail.get(), str):
                return said
        return ""

    def _take(self, link: Link, message: Message, tensor: torch.Tensor) -> None:
        self._mail.put(message.reason if isinstance(message, ProbeFailed) else tensor)

    def _lose(self, link: Link, reason: str) -> None:
        self._mail.put(reason)
