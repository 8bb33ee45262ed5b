"""Measurements of the communication of ranks and stages with another worker, and its answers.

A decode sends a row for each sequence, a prefill one for each token: a few numbers of rows are measured.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

import torch

from bus.deployments import LinkKind, LinkSample, ProbePeer
from worker.distributed.communicator import Communicator, PeerLost
from worker.distributed.messages import Echo, MeasureAllReduce, Message, ProbeFailed, ProbeMessage
from worker.distributed.rendezvous import meet, open_store
from worker.distributed.secure import ClusterTLS
from worker.distributed.transport import Link, Payload, Transport, connect, to_host

log = logging.getLogger(__name__)

ROWS = (1, 8, 64, 512)
ROUNDS, WARM_UP = 100, 2
LIMIT_S = 10.0  # time for either kind, however slow the link
PATIENCE_S = 5.0  # wait for the other worker at each call
DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}


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
    tls: ClusterTLS | None = None,
) -> list[LinkSample]:
    """Measure what can be measured with a peer; return nothing if it does not answer.

    Takes a second, and for either kind at most LIMIT_S and the time of one answer: not for the engine's
    thread. host: the address of this worker for the other.
    """
    use_device(device)
    line = _Line(peer, device, tls)
    found: list[LinkSample] = []
    try:
        tensors = tensors_for([count * hidden_size for count in rows], str(dtype), device)
        found += _timed("hop", _hops(line, tensors), per_turn=2)
        if "all_reduce" in kinds_with(peer):
            found += _timed("all_reduce", _sums(line, tensors, host))
    except (NoAnswer, PeerLost, RuntimeError, OSError) as error:
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
    """Sum tensors with the peer. Raises NoAnswer, PeerLost, RuntimeError, OSError."""
    store = open_store(host, PATIENCE_S)
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

    def __init__(self, peer: ProbePeer, device: torch.device, tls: ClusterTLS | None) -> None:
        self._device = device
        self._mail: SimpleQueue[torch.Tensor | str] = SimpleQueue()
        is_gpu = device.type == "cuda"
        self.link = connect(
            peer.link, peer.link_key, self._take, self._lose, timeout_s=PATIENCE_S, is_pinned=is_gpu, tls=tls
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
        await_stream(self._device)

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


class ProbeResponder:
    """Answers probes that come over the links of `transport`."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        """device: of the tensors that are measured."""
        self._host, self._device = transport.host, device
        self._measures = threading.Lock()  # one at a time: two would measure each other
        transport.endpoint(ProbeMessage, lambda *received: self._take(*received), lambda link, reason: None)

    def _take(self, link: Link, message: ProbeMessage, payload: torch.Tensor) -> None:
        if isinstance(message, Echo):
            link.send(message, self._through_device(payload))
        elif isinstance(message, MeasureAllReduce):
            if self._measures.acquire(blocking=False):
                threading.Thread(
                    target=self._all_reduce, args=(link, message), name="probe", daemon=True
                ).start()
            else:
                link.send(ProbeFailed(reason="another worker measures with it already"))

    def _through_device(self, payload: torch.Tensor) -> Payload:
        """Return the payload by way of the device, as the rows of a stage go."""
        use_device(self._device)
        return to_host(payload.to(self._device, non_blocking=True))

    def _all_reduce(self, link: Link, message: MeasureAllReduce) -> None:
        try:
            group = meet_probe(message.store, 1, self._host, self._device)
            try:
                tensors = tensors_for(message.sizes, message.dtype, self._device)
                for _ in all_reduces(group, tensors, message.rounds, self._device):
                    pass
            finally:
                group.close()
        except (PeerLost, RuntimeError, ValueError) as error:
            log.info("a link measurement failed: %s", error)
            link.send(ProbeFailed(reason=str(error).splitlines()[0]))
        finally:
            self._measures.release()


def use_device(device: torch.device) -> None:
    """Make `device` current in this thread: otherwise copies would wait for the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def meet_probe(store: str, rank: int, host: str, device: torch.device) -> Communicator:
    """Return a communicator of two ranks; `store` is host:port. Raises PeerLost and RuntimeError."""
    use_device(device)
    return meet(store, "probe", rank, 2, timeout_s=PATIENCE_S, host=host, device=str(device))


def await_stream(device: torch.device) -> None:
    """Wait for what this thread gave a GPU. A wait for the whole device would end a capture of a graph."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def tensors_for(sizes: Sequence[int], dtype: str, device: torch.device) -> list[torch.Tensor]:
    """Return a tensor of zeros for each size; their sums stay 0. Raises ValueError for an unknown dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: these are known: {', '.join(DTYPES)}")
    return [torch.zeros(size, dtype=DTYPES[dtype], device=device) for size in sizes]


def all_reduces(
    group: Communicator, tensors: Sequence[torch.Tensor], rounds: int, device: torch.device
) -> Iterator[int]:
    """All-reduce each tensor in turn, `rounds` times, and yield its number after each. Raises PeerLost."""
    for _ in range(rounds):
        for number, tensor in enumerate(tensors):
            group.all_reduce(tensor)
            group.settle()
            await_stream(device)
            yield number
