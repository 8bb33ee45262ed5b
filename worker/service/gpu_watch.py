"""A thread that reads the state of the worker's GPU, and ends the process when the GPU is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Final

import torch

import kernels
from bus.messages import GpuTelemetry
from bus.service import GPU_LOST
from worker.service.nvml import Gpu, GpuLost, NoNvml

log = logging.getLogger(__name__)

READ_S: Final = 1.0  # the driver's own sampling of utilisation takes a sixth of a second to a second
STALE_S: Final = 10.0  # an older reading is not reported: NVML hangs, as a failing GPU's does


class GpuWatch:
    """The latest state of one GPU. Whoever asks for it never waits for NVML."""

    def __init__(
        self, uuid: str, on_lost: Callable[[str], None], *, read_s: float = READ_S, stale_s: float = STALE_S
    ) -> None:
        """on_lost: called in the thread, with the reason, when the GPU computes nothing more."""
        self._uuid, self._on_lost = uuid, on_lost
        self._read_s, self._stale_s = read_s, stale_s
        self._latest: tuple[float, GpuTelemetry] | None = None
        self._is_silent = False  # told in the log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float = 2 * READ_S) -> None:
        """End the thread; one that NVML holds is left behind."""
        self._stopping.set()
        if self.is_running:
            self._thread.join(within_s)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def latest(self) -> GpuTelemetry | None:
        """Return the last reading; None if there is none, or NVML has been silent for too long."""
        if self._latest is None:
            return None
        read_at, seen = self._latest
        is_silent = time.monotonic() - read_at > self._stale_s
        if is_silent and not self._is_silent and not self._stopping.is_set():
            log.warning("NVML has not answered for %.0f s: the GPU's state is not reported", self._stale_s)
        self._is_silent = is_silent
        return None if is_silent else seen

    def _run(self) -> None:
        try:
            gpu = Gpu(self._uuid)
        except NoNvml as why:
            log.warning("the GPU's state is not reported: %s", why)
            return
        except GpuLost as lost:
            self._on_lost(str(lost))
            return
        with closing(gpu):
            try:
                while not self._stopping.is_set():
                    seen = replace(gpu.read(), kernels_compiled_late=kernels.num_compiled_late())
                    self._latest = time.monotonic(), seen
                    if not gpu.wait(self._read_s):
                        self._stopping.wait(self._read_s)
            except GpuLost as lost:
                self._on_lost(f"{gpu.name}: {lost}")


def watch_of(device: torch.device) -> GpuWatch | None:
    """Return a watch of the worker's device, not started; None on a CPU."""
    if device.type != "cuda":
        log.info("the device is a %s: no GPU's state is reported", device.type)
        return None
    return GpuWatch(str(torch.cuda.get_device_properties(device).uuid), end_process)


def end_process(reason: str) -> None:
    """End the process at once: its lease expires, and its requests go on elsewhere.

    The engine's thread may hang in a call of CUDA that never returns, so nothing waits for it.
    """
    log.critical("the GPU is lost: %s; the process ends here with status %d", reason, GPU_LOST)
    os._exit(GPU_LOST)
