"""NVML's C functions, in Python behind ctypes: the real nvidia-ml-py calls them and converts their values.

The structs and numbers are those of nvml.h, not those of nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from queue import Empty, Queue
from typing import Any

import pynvml
import pytest

UUID = "11111111-2222-3333-4444-555555555555"
NAME = "NVIDIA H100 80GB HBM3"
HANDLE, EVENTS = 0x1234, 0x77
GIB = 1 << 30
NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, TIMEOUT, IS_LOST, UNKNOWN = 3, 6, 9, 10, 15, 999


class EventData(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", c_void_p),
        ("eventType", c_ulonglong),
        ("eventData", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


class NoLibrary:
    """A library that has no function but those in the cache."""


class Failed(Exception):
    """A function returns another status than 0."""

    def __init__(self, status: int) -> None:
        self.status = status


class FakeNvml:
    """One H100 at work. `failing` has the status of functions that fail; `xids` are told one by one."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.xids: Queue[int] = Queue()
        self.calls: Counter[str] = Counter()
        self.utilization, self.reasons = 87, 0x01 | 0x04  # idle counts for nothing
        self.on_memory: Callable[[], object] = lambda: None

    def install(self, monkeypatch: pytest.MonkeyPatch | None = None) -> FakeNvml:
        """Take the library's place in this process; without `monkeypatch` for good."""
        put = monkeypatch.setattr if monkeypatch else setattr
        functions = {
            "nvmlInitWithFlags": self._c(lambda flags: None, c_uint),
            "nvmlShutdown": self._c(lambda: None),
            "nvmlDeviceGetHandleByUUID": self._c(self._find, c_char_p, c_void_p),
            "nvmlDeviceGetName": self._c(self._name, c_void_p, c_void_p, c_uint),
            "nvmlDeviceGetMemoryInfo": self._c(self._memory, c_void_p, c_void_p),
            "nvmlDeviceGetUtilizationRates": self._c(self._rates, c_void_p, c_void_p),
            "nvmlDeviceGetClockInfo": self._c(self._clock, c_void_p, c_uint, c_void_p),
            "nvmlDeviceGetMaxClockInfo": self._c(self._clock, c_void_p, c_uint, c_void_p),
            "nvmlDeviceGetPowerUsage": self._c(self._power, c_void_p, c_void_p),
            "nvmlDeviceGetEnforcedPowerLimit": self._c(self._power_limit, c_void_p, c_void_p),
            "nvmlDeviceGetTemperature": self._c(self._temperature, c_void_p, c_uint, c_void_p),
            "nvmlDeviceGetCurrentClocksThrottleReasons": self._c(self._reasons, c_void_p, c_void_p),
            "nvmlDeviceGetTotalEccErrors": self._c(self._ecc, c_void_p, c_uint, c_uint, c_void_p),
            "nvmlDeviceGetSupportedEventTypes": self._c(self._event_types, c_void_p, c_void_p),
            "nvmlEventSetCreate": self._c(lambda out: _put(out, c_void_p, EVENTS), c_void_p),
            "nvmlDeviceRegisterEvents": self._c(self._register, c_void_p, c_ulonglong, c_void_p),
            "nvmlEventSetWait_v2": self._c(self._wait, c_void_p, c_void_p, c_uint),
            "nvmlEventSetFree": self._c(lambda events: None, c_void_p),
        }
        put(pynvml, "nvmlLib", NoLibrary())
        put(pynvml, "_nvmlGetFunctionPointer_cache", {one: make(one) for one, make in functions.items()})
        return self

    def add(self, name: str, call: Callable[..., object], *types: Any) -> None:
        """Give the library one more function."""
        pynvml._nvmlGetFunctionPointer_cache[name] = self._c(call, *types)(name)

    def _c(self, call: Callable[..., object], *types: Any) -> Callable[[str], Any]:
        """Return what makes a C function of `call` for a name."""

        def make(name: str) -> Any:
            def status(*args: Any) -> int:
                self.calls[name] += 1
                if name in self.failing:
                    return self.failing[name]
                try:
                    call(*args)
                except Failed as failed:
                    return failed.status
                return 0

            return ctypes.CFUNCTYPE(c_int, *types)(status)

        return make

    def _find(self, uuid: bytes, out: int) -> None:
        if uuid != f"GPU-{UUID}".encode():
            raise Failed(NOT_FOUND)
        _put(out, c_void_p, HANDLE)

    def _name(self, gpu: int, out: int, size: int) -> None:
        text = NAME.encode() + b"\0"
        assert gpu == HANDLE and len(text) <= size
        ctypes.memmove(out, text, len(text))

    def _memory(self, gpu: int, out: int) -> None:
        self.on_memory()
        _put(out, c_ulonglong * 3, (80 * GIB, 9 * GIB, 71 * GIB))  # total, free, used

    def _rates(self, gpu: int, out: int) -> None:
        _put(out, c_uint * 2, (self.utilization, 50))

    def _clock(self, gpu: int, kind: int, out: int) -> None:
        assert kind == 1, "NVML_CLOCK_SM"
        _put(out, c_uint, 1980)

    def _power(self, gpu: int, out: int) -> None:
        _put(out, c_uint, 612_345)

    def _power_limit(self, gpu: int, out: int) -> None:
        _put(out, c_uint, 700_000)

    def _temperature(self, gpu: int, sensor: int, out: int) -> None:
        _put(out, c_uint, 64)

    def _reasons(self, gpu: int, out: int) -> None:
        _put(out, c_ulonglong, self.reasons)

    def _ecc(self, gpu: int, kind: int, counter: int, out: int) -> None:
        assert counter == 0, "NVML_VOLATILE_ECC"
        _put(out, c_ulonglong, (3, 1)[kind])  # corrected, uncorrected

    def _event_types(self, gpu: int, out: int) -> None:
        _put(out, c_ulonglong, 0x1F)

    def _register(self, gpu: int, kinds: int, events: int) -> None:
        assert (gpu, kinds, events) == (HANDLE, 0x08, EVENTS), "XIDs alone"

    def _wait(self, events: int, out: int, timeout_ms: int) -> None:
        try:
            xid = self.xids.get(timeout=timeout_ms / 1000)
        except Empty:
            raise Failed(TIMEOUT) from None
        EventData.from_address(out).eventType = 0x08
        EventData.from_address(out).eventData = xid


def _put(address: int, kind: Any, value: Any) -> None:
    """Write a value of a ctypes type to an address."""
    made = kind(*value) if isinstance(value, tuple) else kind(value)
    ctypes.memmove(address, ctypes.addressof(made), ctypes.sizeof(made))
