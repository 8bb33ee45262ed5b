"""What a worker says of its GPU, with nvidia-ml-py over C functions that the tests make."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import c_void_p

import pynvml
import pytest
import torch

import kernels
from bus.messages import GpuTelemetry
from bus.service import GPU_LOST
from tests.support.fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    IS_LOST,
    NAME,
    NOT_SUPPORTED,
    UNKNOWN,
    UUID,
    FakeNvml,
)
from tests.support.paths import ROOT
from worker.service.gpu_watch import GpuWatch, watch_of
from worker.service.nvml import FATAL_XIDS, Gpu, GpuLost, NoNvml

WAIT_S = 5.0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return FakeNvml().install(monkeypatch)


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def watch(nvml: FakeNvml, lost: list[str]) -> Iterator[GpuWatch]:
    watch = GpuWatch(UUID, lost.append, read_s=0.01, stale_s=0.2)
    yield watch
    nvml.on_memory = lambda: None
    watch.stop(WAIT_S)


def until(is_met: Callable[[], object]) -> None:
    limit = time.monotonic() + WAIT_S
    while not is_met():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.005)


def test_a_gpu_is_found_by_its_uuid_and_tells_all(nvml: FakeNvml) -> None:
    assert Gpu(UUID).read() == GpuTelemetry(
        name=NAME,
        memory_used_bytes=71 * GIB,
        memory_total_bytes=80 * GIB,
        utilization=0.87,
        memory_utilization=0.5,
        power_watts=612.345,
        power_limit_watts=700.0,
        temperature_celsius=64.0,
        sm_clock_hertz=1.98e9,
        sm_clock_max_hertz=1.98e9,
        throttling={
            "power_cap": 1.0,
            "hardware_slowdown": 0.0,
            "sync_boost": 0.0,
            "thermal": 0.0,
            "hardware_thermal": 0.0,
            "power_brake": 0.0,
        },
        ecc_corrected_errors=3,
        ecc_uncorrected_errors=1,
        xid_errors={},
    )


def test_what_a_gpu_does_not_support_is_left_out_named_once_and_not_asked_for_again(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetSupportedEventTypes")
    nvml.failing = dict.fromkeys(names, NOT_SUPPORTED)
    with caplog.at_level(logging.INFO):
        gpu = Gpu(UUID)
        seen = [gpu.read() for _ in range(3)][-1]
    assert (seen.power_watts, seen.ecc_corrected_errors, seen.utilization) == (None, None, 0.87)
    assert caplog.messages == [f"NVML does not tell these of {NAME}: ECC errors, XID events, power"]
    assert nvml.calls["nvmlDeviceGetPowerUsage"] == nvml.calls["nvmlDeviceGetTotalEccErrors"] == 1
    assert not gpu.wait(60), "no XID will come: it must not wait for one"


def test_a_newer_function_that_fails_leaves_the_older_one(nvml: FakeNvml) -> None:
    nvml.add("nvmlDeviceGetTemperatureV", lambda gpu, out: None, c_void_p, c_void_p)
    nvml.failing = {"nvmlDeviceGetTemperatureV": UNKNOWN}
    assert Gpu(UUID).read().temperature_celsius == 64
    assert nvml.calls["nvmlDeviceGetTemperatureV"] == nvml.calls["nvmlDeviceGetTemperature"] == 1
    nvml.failing = {"nvmlDeviceGetTemperatureV": IS_LOST}
    with pytest.raises(GpuLost):
        Gpu(UUID).read()


def test_a_number_that_fails_once_is_asked_for_again(nvml: FakeNvml) -> None:
    gpu = Gpu(UUID)
    nvml.failing = {"nvmlDeviceGetPowerUsage": UNKNOWN}
    assert gpu.read().power_watts is None
    nvml.failing = {}
    assert gpu.read().power_watts == 612.345


@pytest.mark.parametrize(
    ("uuid", "failing", "says"),
    [
        ("99999999-0000", {}, "NVML knows no GPU with the UUID 99999999-0000"),
        (UUID, {"nvmlInitWithFlags": DRIVER_NOT_LOADED}, "nvmlInit: Driver Not Loaded"),
        (UUID, {"nvmlDeviceGetHandleByUUID": UNKNOWN}, "Unknown Error"),
    ],
)
def test_without_nvml_the_reason_is_told_once_and_nothing_is_reported(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture, uuid: str, failing: dict[str, int], says: str
) -> None:
    nvml.failing = failing
    with pytest.raises(NoNvml, match=says):
        Gpu(uuid)
    watch = GpuWatch(uuid, pytest.fail)
    watch.start()
    watch.stop(WAIT_S)
    assert watch.latest() is None
    (message,) = caplog.messages
    assert message.startswith("the GPU's state is not reported: ") and says in message


def test_a_missing_library_and_a_missing_package_are_reasons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    if not torch.cuda.is_available():
        with pytest.raises(NoNvml, match="NVML Shared Library Not Found"):
            Gpu(UUID)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoNvml, match=r"instar\[cuda\]"):
        Gpu(UUID)


def test_a_cpu_has_no_watch() -> None:
    assert watch_of(torch.device("cpu")) is None


def test_a_watch_reads_again_and_again_and_counts_xids_of_programs(
    nvml: FakeNvml, watch: GpuWatch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for xid in (31, 13, 31):
        nvml.xids.put(xid)
    watch.start()
    until(lambda: (seen := watch.latest()) and seen.xid_errors == {"13": 1, "31": 2})
    nvml.utilization = 12
    until(lambda: (seen := watch.latest()) and seen.utilization == 0.12)
    monkeypatch.setattr(kernels, "num_compiled_late", lambda: 3)
    until(lambda: (seen := watch.latest()) and seen.kernels_compiled_late == 3)
    told = [one for one in caplog.messages if "XID" in one]
    assert len(told) == 2, "each XID once: a program can make thousands"


@pytest.mark.parametrize("xid", FATAL_XIDS)
def test_an_xid_of_the_gpu_itself_ends_the_watch_with_its_meaning(
    nvml: FakeNvml, watch: GpuWatch, lost: list[str], xid: int
) -> None:
    nvml.xids.put(xid)
    watch.start()
    until(lambda: lost)
    assert lost == [f"{NAME}: XID {xid}: {FATAL_XIDS[xid]}"]


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates"]
)
def test_a_gpu_that_is_lost_ends_the_watch_whatever_call_says_so(
    nvml: FakeNvml, watch: GpuWatch, lost: list[str], name: str
) -> None:
    watch.start()
    until(watch.latest)
    assert not lost
    nvml.failing = {name: IS_LOST, "nvmlShutdown": IS_LOST}
    until(lambda: lost)
    assert lost == [f"{NAME}: NVML says: GPU is lost ({IS_LOST})"]


def test_a_gpu_that_is_lost_before_the_first_reading_is_told(nvml: FakeNvml) -> None:
    nvml.failing = {"nvmlDeviceGetName": IS_LOST}
    with pytest.raises(GpuLost, match="GPU is lost"):
        Gpu(UUID)
    assert nvml.calls["nvmlShutdown"] == 1


def test_another_gpu_of_the_machine_that_is_lost_ends_no_worker(
    nvml: FakeNvml, watch: GpuWatch, lost: list[str]
) -> None:
    """The driver's functions say so of any GPU where they enumerate them or wait for several."""
    nvml.failing = {"nvmlDeviceGetHandleByUUID": IS_LOST}
    with pytest.raises(NoNvml, match="GPU is lost"):
        Gpu(UUID)
    nvml.failing = {"nvmlEventSetWait_v2": IS_LOST}
    watch.start()
    until(lambda: nvml.calls["nvmlDeviceGetMemoryInfo"] > 2)
    assert not lost and nvml.calls["nvmlEventSetWait_v2"] == 1


def test_nvml_that_hangs_holds_nobody_up_and_its_old_reading_is_not_reported(
    nvml: FakeNvml, watch: GpuWatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = threading.Event()
    watch.start()
    until(watch.latest)
    nvml.on_memory = lambda: hanging.wait(WAIT_S)
    until(lambda: watch.latest() is None)
    watch.latest()
    told = [one for one in caplog.messages if "has not answered" in one]
    assert len(told) == 1
    nvml.on_memory = lambda: None
    hanging.set()
    until(watch.latest)


def test_events_that_fail_are_given_up_and_readings_go_on(
    nvml: FakeNvml, watch: GpuWatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.failing = {"nvmlEventSetWait_v2": UNKNOWN}
    watch.start()
    until(lambda: nvml.calls["nvmlDeviceGetMemoryInfo"] > 2)
    assert nvml.calls["nvmlEventSetWait_v2"] == 1
    assert [one for one in caplog.messages if "XIDs are not reported any more" in one]


def test_a_process_whose_gpu_falls_off_the_bus_ends_with_that_reason() -> None:
    program = f"""
import logging, time
from tests.support.fake_nvml import FakeNvml
from worker.service.gpu_watch import GpuWatch, end_process
logging.basicConfig()
nvml = FakeNvml().install()
nvml.xids.put(79)
GpuWatch({UUID!r}, end_process).start()
time.sleep(30)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == GPU_LOST, ended.stderr
    assert "the GPU is lost" in ended.stderr and "XID 79: it has fallen off the bus" in ended.stderr
