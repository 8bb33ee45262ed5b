"""A GPU as NVML sees it, the library behind nvidia-smi, through nvidia-ml-py.

Any call may block for as long as the driver does, so a `Gpu` belongs to one thread, which is not the
engine's (`worker.service.gpu_watch`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from bus.messages import GpuTelemetry

log = logging.getLogger(__name__)

T = TypeVar("T")

# XIDs after which nothing more runs on the GPU in this process, by NVIDIA's catalogue of Xid errors. Others,
# such as 13, 31 and 43, are faults of one program, which CUDA tells that program.
FATAL_XIDS: Final[Mapping[int, str]] = {
    48: "an uncorrectable memory error",
    62: "its microcontroller halted",
    79: "it has fallen off the bus",
    94: "an uncorrectable memory error in what a program used",
    95: "an uncorrectable memory error that may be anywhere",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "an uncorrectable error that was not recovered",
    143: "it did not start",
}
# Bits of nvmlClocksEventReasons that lower the clocks of a GPU with work: not an idle one's, nor a setting's.
THROTTLE_REASONS: Final[Mapping[str, int]] = {
    "power_cap": 0x04,
    "hardware_slowdown": 0x08,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
XID_EVENT: Final = 0x08  # nvmlEventTypeXidCriticalError
MHZ: Final = 1e6


class NoNvml(Exception):
    """NVML says nothing of this GPU; the message says why."""


class GpuLost(Exception):
    """The GPU computes nothing more in this process; the message says why."""


class Gpu:
    """One GPU, found by the UUID that torch has for it.

    CUDA counts only the GPUs in CUDA_VISIBLE_DEVICES, in an order of its own, and NVML all of the machine. So
    a number means different GPUs to the two.
    """

    def __init__(self, uuid: str) -> None:
        """uuid: with or without the prefix "GPU-" or "MIG-". Raises NoNvml and GpuLost."""
        self._nvml = nvml = _module()
        self.unknown: set[str] = set()  # what this GPU, driver or machine never tells
        self._named: set[str] = set()  # of those, in the log
        self._events: Any = None
        self.xids: Counter[int] = Counter()  # since the start
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NoNvml(f"nvmlInit: {_said(error)}") from error
        try:
            self._handle = self._find(uuid)
            self.name = str(self._told("name", lambda: nvml.nvmlDeviceGetName(self._handle)) or "")
            self._register()
        except BaseException:
            self._shutdown()
            raise

    def close(self) -> None:
        """Give up NVML."""
        if self._events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        self._shutdown()

    def _shutdown(self) -> None:
        with suppress(self._nvml.NVMLError):  # also after the GPU was lost
            self._nvml.nvmlShutdown()

    def _find(self, uuid: str) -> Any:
        nvml = self._nvml
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in names:
            try:
                return nvml.nvmlDeviceGetHandleByUUID(name)
            except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                continue
            except nvml.NVMLError as error:  # GPU_IS_LOST too: it may be another one of the machine
                raise NoNvml(f"nvmlDeviceGetHandleByUUID({name}): {_said(error)}") from error
        raise NoNvml(f"NVML knows no GPU with the UUID {uuid}")

    def _register(self) -> None:
        """Ask to be told of XIDs, where the GPU can: not in a virtual GPU or a MIG slice."""
        nvml, handle = self._nvml, self._handle
        if (self._told("XID events", lambda: nvml.nvmlDeviceGetSupportedEventTypes(handle)) or 0) & XID_EVENT:
            events = self._told("XID events", nvml.nvmlEventSetCreate)
            with self._telling("XID events"):
                nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, events)
                self._events = events
        else:
            self.unknown.add("XID events")

    # ----------------------------------------------------------------------------- what it says

    def read(self) -> GpuTelemetry:
        """Return the state of now. What is not told is None. Raises GpuLost."""
        nvml, gpu = self._nvml, self._handle
        memory = self._told("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
        rates = self._told("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(gpu))
        clock = self._told("clock", lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
        most = self._told("highest clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM))
        power = self._told("power", lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        limit = self._told("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        reasons = self._told("throttling", self._throttle_reasons)
        seen = GpuTelemetry(
            name=self.name,
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            utilization=rates and rates.gpu / 100,
            memory_utilization=rates and rates.memory / 100,
            power_watts=None if power is None else power / 1e3,
            power_limit_watts=None if limit is None else limit / 1e3,
            temperature_celsius=self._told("temperature", self._temperature),
            sm_clock_hertz=None if clock is None else clock * MHZ,
            sm_clock_max_hertz=None if most is None else most * MHZ,
            throttling={}
            if reasons is None
            else {name: float(bool(reasons & bit)) for name, bit in THROTTLE_REASONS.items()},
            ecc_corrected_errors=self._told("ECC errors", lambda: self._ecc(is_corrected=True)),
            ecc_uncorrected_errors=self._told("ECC errors", lambda: self._ecc(is_corrected=False)),
            xid_errors={str(xid): count for xid, count in sorted(self.xids.items())},
        )
        self._log_unknown()
        return seen

    def wait(self, seconds: float) -> bool:
        """Take the XIDs of the next `seconds`. Return False at once if none is ever told here.

        Raises GpuLost for an XID of FATAL_XIDS.
        """
        nvml, until = self._nvml, time.monotonic() + seconds
        while self._events is not None and (left_s := until - time.monotonic()) > 0:
            try:
                event = nvml.nvmlEventSetWait(self._events, math.ceil(left_s * 1000))
            except nvml.NVMLError_Timeout:
                break
            except nvml.NVMLError as error:  # also if a GPU is lost; the next reading says if it is this one
                log.warning("XIDs are not reported any more: nvmlEventSetWait: %s", _said(error))
                self._events = None
            else:
                if event.eventType & XID_EVENT:
                    self._take(int(event.eventData))
        return self._events is not None

    def _take(self, xid: int) -> None:
        self.xids[xid] += 1
        if meaning := FATAL_XIDS.get(xid):
            raise GpuLost(f"XID {xid}: {meaning}")
        if self.xids[xid] == 1:  # one program can make thousands
            log.warning("the driver reports XID %d of %s, a fault of a program that uses it", xid, self.name)

    def _temperature(self) -> float:
        nvml = self._nvml
        sensor = nvml.NVML_TEMPERATURE_GPU
        calls = (
            ("nvmlDeviceGetTemperatureV", lambda: nvml.nvmlDeviceGetTemperatureV(self._handle, sensor)),
            ("nvmlDeviceGetTemperature", lambda: nvml.nvmlDeviceGetTemperature(self._handle, sensor)),
        )
        return float(self._first(calls))

    def _throttle_reasons(self) -> int:
        nvml = self._nvml
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        calls = tuple((name, lambda name=name: getattr(nvml, name)(self._handle)) for name in names)
        return int(self._first(calls))

    def _first(self, calls: tuple[tuple[str, Callable[[], Any]], ...]) -> Any:
        """Return what the first call gives that this library and this driver know: newer names come first."""
        nvml = self._nvml
        *newer, (_, oldest) = calls
        for name, call in newer:
            if hasattr(nvml, name):
                try:
                    return call()
                except nvml.NVMLError as error:
                    self._raise_if_lost(error)
        return oldest()

    def _ecc(self, *, is_corrected: bool) -> int:
        nvml = self._nvml
        kind = (
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED if is_corrected else nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        )
        return int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, nvml.NVML_VOLATILE_ECC))

    # ----------------------------------------------------------------------------- errors

    def _told(self, what: str, call: Callable[[], T]) -> T | None:
        """Return what a call gives; None where this GPU, driver or machine does not. Raises GpuLost."""
        if what not in self.unknown:
            with self._telling(what):
                return call()
        return None

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        nvml = self._nvml
        try:
            yield
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            self.unknown.add(what)
        except nvml.NVMLError as error:  # it may tell it again at the next reading
            self._raise_if_lost(error)
            log.debug("NVML does not tell the %s of %s: %s", what, self._handle, _said(error))

    def _raise_if_lost(self, error: Exception) -> None:
        nvml = self._nvml
        if isinstance(error, (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired)):
            raise GpuLost(f"NVML says: {_said(error)}") from error

    def _log_unknown(self) -> None:
        if new := sorted(self.unknown - self._named):
            self._named |= self.unknown
            log.info("NVML does not tell these of %s: %s", self.name or "the GPU", ", ".join(new))


def _module() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("nvidia-ml-py is not installed: pip install 'instar[cuda]'") from error
    return pynvml


def _said(error: Exception) -> str:
    return f"{str(error).rstrip('.')} ({getattr(error, 'value', '?')})"
