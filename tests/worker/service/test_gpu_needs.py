"""What a GPU misses is told in one sentence, with what to do, before anything is loaded."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from bus.settings import WorkerSettings
from worker.service import gpu_needs
from worker.service.gpu_needs import GpuFacts, missing
from worker.service.loading import CannotServe
from worker.service.start_up import load

VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "cuda-bindings": "13.0.3"}
GOOD = GpuFacts(versions=VERSIONS, torch_cuda="13.0", driver_cuda=13020, num_gpus=1, name="NVIDIA H100")


def without(package: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name != package}


def test_a_gpu_that_has_all_misses_nothing() -> None:
    assert missing(GOOD) == ""
    assert missing(replace(GOOD, driver_cuda=13000, torch_cuda="13.2")) == "", (
        "a driver serves its generation"
    )
    assert missing(replace(GOOD, versions=VERSIONS | {"torch": "2.13.0", "triton": "3.10.1+git"})) == ""


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            replace(GOOD, torch_cuda=""),
            "torch 2.11.0+cu130 is built for a CPU alone: install a build for CUDA",
        ),
        (replace(GOOD, versions=without("triton")), "triton is not installed: pip install 'triton>=3.6'"),
        (
            replace(GOOD, versions=without("cuda-bindings")),
            "cuda-bindings is not installed: pip install 'cuda-bindings>=13.0'",
        ),
        (
            replace(GOOD, versions=VERSIONS | {"torch": "2.9.1"}),
            "torch 2.9.1 is too old: pip install 'torch>=2.11'",
        ),
        (
            replace(GOOD, versions=VERSIONS | {"triton": "3.5.1"}),
            "triton 3.5.1 is too old: pip install 'triton>=3.6'",
        ),
        (
            replace(GOOD, driver_cuda=0, num_gpus=0, driver_error="no libcuda.so.1"),
            "NVIDIA's driver cannot be used (no libcuda.so.1): install it, or start the container with",
        ),
        (
            replace(GOOD, driver_cuda=12080, num_gpus=0),
            "NVIDIA's driver supports CUDA up to 12.8, and torch is built for 13.0: update the driver",
        ),
        (
            replace(GOOD, num_gpus=0, driver_error="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
            "NVIDIA's driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH): restart the machine",
        ),
        (replace(GOOD, index=1), "this machine has 1 GPUs for it (CUDA_VISIBLE_DEVICES may hide some)"),
        (replace(GOOD, maps_pages=False), "NVIDIA H100 has no virtual memory management, by which"),
    ],
)
def test_what_is_missing_is_one_sentence(facts: GpuFacts, says: str) -> None:
    told = missing(facts)
    assert told.startswith(says) and "\n" not in told
    assert missing(replace(facts, num_gpus=0, maps_pages=False)) != ""


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


def driver(**answers: Any) -> SimpleNamespace:
    """A driver of one GPU with all that is needed, but for `answers`: a value, a Result, or an exception."""

    def call(name: str, value: Any) -> Any:
        def answer(*_: object) -> tuple[Any, ...]:
            wanted = answers.get(name, value)
            if isinstance(wanted, Exception):
                raise wanted
            return (wanted, None) if isinstance(wanted, Result) else (Result.CUDA_SUCCESS, wanted)

        return answer

    attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    return SimpleNamespace(
        CUresult=Result,
        CUdevice_attribute=attribute,
        cuDriverGetVersion=call("version", 13000),
        cuInit=call("init", None),
        cuDeviceGetCount=call("count", 1),
        cuDeviceGet=call("get", 0),
        cuDeviceGetName=call("name", b"NVIDIA H100" + bytes(20)),
        cuDeviceGetAttribute=call("attribute", 1),
    )


@pytest.mark.parametrize(
    ("answers", "finds"),
    [
        ({}, {"driver_cuda": 13000, "num_gpus": 1, "name": "NVIDIA H100", "maps_pages": True}),
        ({"attribute": 0}, {"maps_pages": False}),
        ({"init": Result.CUDA_ERROR_NO_DEVICE}, {"driver_error": "CUDA_ERROR_NO_DEVICE", "num_gpus": 0}),
        ({"version": RuntimeError("no libcuda\n here")}, {"driver_error": "no libcuda here"}),
        ({"count": 0}, {"num_gpus": 0, "driver_error": ""}),
    ],
)
def test_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], finds: dict[str, Any]
) -> None:
    bindings = SimpleNamespace(driver=driver(**answers), __version__="13.0.3")
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    found = gpu_needs.find(0)
    assert found.versions["cuda-bindings"] == "13.0.3" and found.torch_cuda == "13.0"
    assert {name: getattr(found, name) for name in finds} == finds


def test_a_worker_says_it_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_needs, "find", lambda index: replace(GOOD, index=index, driver_cuda=12080))
    shown = list[str]()
    with pytest.raises(CannotServe) as told:
        load(WorkerSettings(device="cuda:0", may_be_empty=True), "w0", shown.append)
    assert str(told.value) == (
        "worker.device is 'cuda:0', and NVIDIA's driver supports CUDA up to 12.8, and torch is built for"
        " 13.0: update the driver, or install a build of torch for CUDA 12.8 or older, or set worker.device"
        " to cpu"
    )
    assert not shown
