"""The answering end of a link measurement, in threads of its own; `worker.profiler.links` is the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from worker.distributed.communicator import Communicator, PeerLost
from worker.distributed.messages import Echo, MeasureAllReduce, ProbeFailed, ProbeMessage
from worker.distributed.rendezvous import meet
from worker.distributed.transport import Link, Payload, Transport, to_host

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # for the other worker, at each call
DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}


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
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield number
