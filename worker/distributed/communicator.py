"""Collective communication of one group of ranks, without a process-wide default group.

Gloo between CPU devices, NCCL between GPUs, and gloo by way of host memory for workers that share one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.distributed import ProcessGroupGloo, Store, Work

Sizes = Sequence[int]  # rows to or from each rank, in their order

log = logging.getLogger(__name__)

POLL_S: Final = 50e-6  # between two looks whether the device has ended a call
LEAVE_S: Final = 2.0  # wait for NCCL to let go of the device; what it has to free may take longer

# Read by the constructor of a group over NCCL. Beside each group torch runs a watchdog, and a monitor of it,
# which are made for training: a call that fails ends the process, with all its models.
_WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog raises no error, which would end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does its monitor end it
    # Else a failed call of any group whose members met in the same store sends the monitor to sleep for eight
    # minutes, and the destructor of a group waits for its monitor.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Behind a failed call the watchdog sleeps for four times as long, a minute by default. It holds the lock
    # that every call of the group takes, and the destructor waits for it, too.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",  # calls' stacks are not recorded: to name one takes seconds, under that lock
}
_NEVER: Final = timedelta(days=365)  # until the watchdog counts a call as failed


class PeerLost(RuntimeError):
    """A member of the group is gone, or did not answer in time. What the call would have written is void."""


class Communicator(Protocol):
    """`rank` of `size`.

    Every member makes the same calls in the same order; each call waits for all of them and raises
    PeerLost, at the latest after the group's timeout, where one does not come. Between GPUs `all_reduce` is
    only launched, and `settle` waits.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """X becomes the sum over all ranks, the same bits on each."""

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, come: Sizes, out: Sizes) -> None:
        """Send rows of `sent` to the ranks in their order, and receive theirs.

        sent: [sum(out), ...]; received: [sum(come), ...]. Contiguous tensors of one dtype.
        """

    def settle(self) -> None:
        """Wait for the end of all calls so far, on a GPU too. Raises PeerLost.

        Before the host waits for what a sum became, in any way: it would wait for a lost peer for ever.
        """

    def close(self) -> None:
        """Leave. Calls of other members fail from here on. Repeating it is harmless."""


class TorchCommunicator:
    """A communicator over a process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.numel():
            self._wait(lambda group: group.allreduce([x]))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, come: Sizes, out: Sizes) -> None:
        sizes = list(come), list(out)
        self._wait(lambda group: group.alltoall_base(received, sent, *sizes))

    def settle(self) -> None:
        """Do nothing: a call has ended when it returns."""

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            _abort(group)

    def _wait(self, call: Any) -> None:
        if self._group is None:
            raise PeerLost("the group was left")
        try:
            work: Work = call(self._group)
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} of {self.size}: {error}") from error


class DeviceEvent(Protocol):
    """A point in a device's stream, as torch.cuda.Event has it."""

    def query(self) -> bool:
        """Return True if the device has passed it. Raises RuntimeError for an error of the device."""


class LaunchedCommunicator(TorchCommunicator):
    """A communicator between GPUs, over NCCL.

    There `Work.wait` orders streams, and does not wait for the peers. A kernel of NCCL spins until they come,
    and whoever waits for the device waits for it. So `settle` looks at an event behind the last call until
    the timeout, and then aborts the group, which ends its kernels. `Work.is_completed` would not do: it is
    also true of a call that failed.

    An abort first tells the kernels to end, then frees memory, which waits for everything that the device has
    to do, and joins threads that may wait for the lost peer. So it runs in a thread of its own, and so does
    the group's destructor, which joins others.
    """

    def __init__(self, group: Any, timeout_s: float, mark: Callable[[], DeviceEvent]) -> None:
        """mark: records an event in the stream of the calls."""
        super().__init__(group)
        self._timeout_s, self._mark = timeout_s, mark
        self._end: DeviceEvent | None = None  # behind the last call

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, come: Sizes, out: Sizes) -> None:
        super().all_to_all(received, sent, come, out)
        self.settle()

    def settle(self) -> None:
        end, self._end = self._end, None
        deadline = time.monotonic() + self._timeout_s
        while end and not end.query():
            if time.monotonic() > deadline:
                self.close()
                raise PeerLost(
                    f"rank {self.rank} of {self.size}: a call did not end within {self._timeout_s:g} s"
                    " (worker.group_timeout_s); another rank is gone, or hangs"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Abort the group, and wait for `LEAVE_S` at most."""
        if self._group is not None:
            leaving = threading.Thread(target=_abort, args=(self._group,), name="nccl-abort", daemon=True)
            self._group = None  # the thread has the last reference
            leaving.start()
            leaving.join(LEAVE_S)
            if leaving.is_alive():
                log.warning(
                    "rank %d of %d: NCCL has not left the group after %g s", self.rank, self.size, LEAVE_S
                )

    def _wait(self, call: Any) -> None:
        super()._wait(call)
        self._end = self._mark()


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # the connections may be broken already
        group.abort()


class Staged:
    """A communicator for tensors of a device, over one for tensors of the host: for workers that share a GPU.

    NCCL takes one rank a GPU, and gloo no all-to-all of tensors on one. Each call costs two copies over the
    device's bus, and waits for what the device still has to do.
    """

    def __init__(self, group: Communicator, *, pins: bool) -> None:
        """pins: its buffers lie in memory that a GPU reads and writes itself."""
        self.rank, self.size = group.rank, group.size
        self._group, self._pins = group, pins
        self._sent, self._received = _empty(0, pins), _empty(0, pins)

    def all_reduce(self, x: torch.Tensor) -> None:
        self._sent, host = self._like(self._sent, x)
        host.copy_(x)
        self._group.all_reduce(host)
        x.copy_(host)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, come: Sizes, out: Sizes) -> None:
        self._sent, here = self._like(self._sent, sent)
        self._received, came = self._like(self._received, received)
        here.copy_(sent)
        self._group.all_to_all(came, here, come, out)
        received.copy_(came)

    def settle(self) -> None:
        self._group.settle()

    def close(self) -> None:
        self._group.close()

    def _like(self, buffer: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffer, larger where it was too small, and its beginning in the shape of x."""
        if buffer.nbytes < x.nbytes:
            buffer = _empty(x.nbytes, self._pins)
        return buffer, buffer[: x.nbytes].view(x.dtype).view(x.shape)


def connect(
    store: Store, rank: int, size: int, *, timeout_s: float, host: str = "127.0.0.1", device: str = "cpu"
) -> Communicator:
    """Meet the other ranks in `store`, which all of them share (with a prefix of this group's own).

    host: the address of this rank for the others. device: "cpu" takes gloo; GPUs ("cuda:0") take NCCL, which
    needs one for each rank, or gloo by way of host memory where two ranks share one. Raises PeerLost where
    they do not come within `timeout_s`, later calls' limit too.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if device == "cpu":
            return TorchCommunicator(_gloo(store, rank, size, timeout, host))
        gpu = torch.device(device)
        if share_a_gpu(store, rank, size, str(torch.cuda.get_device_properties(gpu).uuid)):
            return Staged(TorchCommunicator(_gloo(store, rank, size, timeout, host)), pins=True)
        return _connected(_nccl(store, rank, size), timeout_s, gpu)
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} of {size} did not meet the others: {error}") from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only builds with CUDA have it

    os.environ.update(_WATCHDOG)
    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # `LaunchedCommunicator` has its own, and leaves the group
    return ProcessGroupNCCL(store, rank, size, options)


def _connected(group: Any, timeout_s: float, gpu: torch.device) -> LaunchedCommunicator:
    """Make the communicator of a group, and the connections now: NCCL makes them with the first call."""
    made = LaunchedCommunicator(group, timeout_s, lambda: torch.cuda.current_stream(gpu).record_event())
    made.all_reduce(torch.zeros(1, device=gpu))
    made.settle()
    return made


def share_a_gpu(store: Store, rank: int, size: int, gpu: str) -> bool:
    """Return whether two ranks have the same GPU. gpu: a name unique across hosts. Raises RuntimeError."""
    store.set(f"gpu of {rank}", gpu)
    return len({store.get(f"gpu of {other}") for other in range(size)}) < size


def _empty(nbytes: int, is_pinned: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
