"""Collective communication of one group of ranks, without a process-wide default group.

Gloo between CPU devices, and for several workers that share one GPU; NCCL between distinct GPUs. A process
may hold many communicators: they are values, made ahead for the groups that may form, and thrown away with
the death of a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, Store, Work


class PeerLost(RuntimeError):
    """A member of the group is gone, or did not answer in time. What the call would have written is void."""


class Communicator(Protocol):
    """`rank` of `size`. Every member makes the same calls in the same order; each call waits for all of them
    and raises PeerLost, at the latest after the group's timeout, where one does not come."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """x becomes the sum over all ranks, the same bits on each."""

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        """Rows of `sent` [sum(sent_sizes), ...] go to the ranks in their order, so many to each; `received`
        [sum(received_sizes), ...] has what they sent here. Contiguous tensors of one dtype."""

    def close(self) -> None:
        """Leave. Calls of other members fail from here on. Repeating it is harmless."""


class TorchCommunicator:
    """Over a process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.numel():
            self._wait(lambda group: group.allreduce([x]))

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        sizes = list(received_sizes), list(sent_sizes)
        self._wait(lambda group: group.alltoall_base(received, sent, *sizes))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # its connections may be broken already
                group.abort()

    def _wait(self, call: Any) -> None:
        if self._group is None:
            raise PeerLost("the group was left")
        try:
            work: Work = call(self._group)
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} of {self.size}: {error}") from error


def connect(
    store: Store, rank: int, size: int, *, timeout_s: float, host: str = "127.0.0.1", device: str = "cpu"
) -> Communicator:
    """Meet the other ranks in `store`, which all of them share (with a prefix of this group's own).

    host: the address of this rank for the others. device: "cpu" takes gloo, "cuda" NCCL, which needs a GPU
    for each rank. Raises PeerLost where they do not come within `timeout_s`, later calls' limit too.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if device == "cuda":
            return TorchCommunicator(_nccl(store, rank, size, timeout))
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return TorchCommunicator(ProcessGroupGloo(store, rank, size, options))
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} of {size} did not meet the others: {error}") from error


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only builds with CUDA have it

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
