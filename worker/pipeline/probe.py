"""The other end of a worker that measures what ranks and stages say to each other: see `fingerprint.links`.

It answers in threads of the connection and of its own: the engine goes on meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from worker.distributed.communicator import Communicator, PeerLost, connect
from worker.distributed.messages import Echo, MeasureAllReduce, ProbeFailed, ProbeMessage
from worker.model.model import DTYPES
from worker.pipeline.hop import Hop, Payload, to_host

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # for the other worker, at each call


class Probed:
    """`take` what comes, in any thread."""

    def __init__(self, host: str, device: torch.device) -> None:
        """host: of this worker for the others."""
        self._host, self._device = host, device
        self._meets = threading.Lock()  # one at a time: two would measure each other

    def take(self, hop: Hop, message: ProbeMessage, behind: torch.Tensor) -> None:
        if isinstance(message, Echo):
            hop.send(message, self._and_back(behind))
        elif isinstance(message, MeasureAllReduce) and self._meets.acquire(blocking=False):
            threading.Thread(target=self._meet, args=(hop, message), name="probe", daemon=True).start()
        else:
            hop.send(_failed("another worker measures with it already"))

    def _and_back(self, behind: torch.Tensor) -> Payload:
        """By way of the device, as a stage's rows go."""
        use_here(self._device)
        return to_host(behind.to(self._device, non_blocking=True))

    def _meet(self, hop: Hop, message: MeasureAllReduce) -> None:
        try:
            group = meet(message.store, 1, self._host, self._device)
            try:
                tensors = tensors_for(message.sizes, message.dtype, self._device)
                for _ in all_reduces(group, tensors, message.rounds, self._device):
                    pass
            finally:
                group.close()
        except (PeerLost, RuntimeError, ValueError) as error:
            log.info("a worker that measured with this one got no answer: %s", error)
            hop.send(_failed(str(error).splitlines()[0]))
        finally:
            self._meets.release()


def use_here(device: torch.device) -> None:
    """In this thread: otherwise it would wait for what the first GPU has written, whichever is meant."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def meet(store: str, rank: int, host: str, device: torch.device) -> Communicator:
    """With the other one of two ranks, in the store at host:port. Raises PeerLost, RuntimeError."""
    use_here(device)
    at, _, port = store.rpartition(":")
    reached = TCPStore(at, int(port), is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    return connect(reached, rank, 2, timeout_s=PATIENCE_S, host=host, device=str(device))


def tensors_for(sizes: Sequence[int], dtype: str, device: torch.device) -> list[torch.Tensor]:
    """Zeros: however often they are summed. Raises ValueError."""
    known = {str(each): each for each in DTYPES}
    if dtype not in known:
        raise ValueError(f"dtype {dtype}: these are known: {', '.join(known)}")
    return [torch.zeros(size, dtype=known[dtype], device=device) for size in sizes]


def all_reduces(
    group: Communicator, tensors: Sequence[torch.Tensor], rounds: int, device: torch.device
) -> Iterator[int]:
    """Of each tensor in turn, so often; yields its number behind it. Raises PeerLost."""
    for _ in range(rounds):
        for number, tensor in enumerate(tensors):
            group.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield number


def _failed(reason: str) -> ProbeFailed:
    return ProbeFailed(reason=reason)
