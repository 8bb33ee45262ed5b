"""The needs of a GPU before it serves, and one sentence for people about what is missing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

# Packages, and the oldest versions that are tested on a GPU.
OLDEST: Final[Mapping[str, str]] = {"torch": "2.11", "triton": "3.6", "cuda-bindings": "13.0"}
MODULES: Final[Mapping[str, str]] = {"cuda-bindings": "cuda.bindings"}  # where a package has another name


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The state of this machine for serving on one GPU."""

    versions: Mapping[str, str]  # of the packages in OLDEST; those that are not installed are missing
    torch_cuda: str  # the version of CUDA that torch is built for; "": for a CPU alone
    driver_cuda: int = 0  # the newest version of CUDA that the driver supports, 13020 for 13.2; 0: no driver
    driver_error: str = ""  # why the driver does not start
    num_gpus: int = 0
    index: int = 0  # of the GPU
    name: str = ""
    maps_pages: bool = True  # it has virtual memory management


def missing(facts: GpuFacts) -> str:
    """Return what is missing and what to do, or ""."""
    if not facts.torch_cuda:
        return (
            f"torch {facts.versions.get('torch')} is built for a CPU alone: install a build for CUDA"
            " (https://pytorch.org/get-started)"
        )
    for package, oldest in OLDEST.items():
        if (version := facts.versions.get(package)) is None:
            return f"{package} is not installed: pip install '{package}>={oldest}'"
        if _numbers(version) < _numbers(oldest):
            return f"{package} {version} is too old: pip install '{package}>={oldest}'"
    return _missing_of_driver(facts)


def _missing_of_driver(facts: GpuFacts) -> str:
    if not facts.driver_cuda:
        return (
            f"NVIDIA's driver cannot be used ({facts.driver_error}): install it, or start the container with"
            " `--gpus all`"
        )
    if facts.driver_cuda // 1000 < _numbers(facts.torch_cuda)[0]:
        newest = f"{facts.driver_cuda // 1000}.{facts.driver_cuda % 1000 // 10}"
        return (
            f"NVIDIA's driver supports CUDA up to {newest}, and torch is built for {facts.torch_cuda}: update"
            f" the driver, or install a build of torch for CUDA {newest} or older"
        )
    if facts.driver_error:
        return f"NVIDIA's driver does not start ({facts.driver_error}): restart the machine, or update it"
    if facts.index >= facts.num_gpus:
        return f"this machine has {facts.num_gpus} GPUs for it (CUDA_VISIBLE_DEVICES may hide some)"
    if not facts.maps_pages:
        return (
            f"{facts.name} has no virtual memory management, by which models share its pages: take a whole"
            " GPU of compute capability 8.0 or higher under Linux, or a vGPU with unified memory"
        )
    return ""


def find(index: int) -> GpuFacts:
    """Look at this machine. Starts the driver, and takes no memory of the GPU."""
    versions = {}
    for package, oldest in OLDEST.items():
        with suppress(ImportError):
            module = importlib.import_module(MODULES.get(package, package))
            versions[package] = str(getattr(module, "__version__", oldest))
    facts: dict[str, Any] = {"versions": versions, "torch_cuda": torch.version.cuda or "", "index": index}
    if facts["torch_cuda"] and "cuda-bindings" in versions:
        facts |= _of_driver(index)
    return GpuFacts(**facts)


def _of_driver(index: int) -> dict[str, Any]:
    from cuda.bindings import driver  # exists only where CUDA does

    def call(result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(result[0].name)
        return result[1] if len(result) > 1 else None

    found: dict[str, Any] = {}
    try:
        found["driver_cuda"] = int(call(driver.cuDriverGetVersion()))
        call(driver.cuInit(0))
        found["num_gpus"] = int(call(driver.cuDeviceGetCount()))
        if index < found["num_gpus"]:
            gpu = call(driver.cuDeviceGet(index))
            found["name"] = call(driver.cuDeviceGetName(128, gpu)).split(b"\0")[0].decode()
            maps = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            found["maps_pages"] = bool(call(driver.cuDeviceGetAttribute(maps, gpu)))
    except RuntimeError as error:  # of the loader too, where libcuda.so.1 is not there
        found["driver_error"] = " ".join(str(error).split()) or type(error).__name__
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Return (major, minor), without what a build adds."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
