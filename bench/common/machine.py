"""The machine that a benchmark ran on: its processor, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch

CPUINFO: Final = Path("/proc/cpuinfo")
SUMMED_BYTES: Final = 1 << 30  # more than caches hold
NUM_SUMS: Final = 9


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(summed_bytes: int = SUMMED_BYTES) -> dict[str, Any]:
    """Return the processor's name, the cores that this process may use, and the bytes per second of a sum."""
    return {
        "processor": processor_in(CPUINFO.read_text() if CPUINFO.exists() else ""),
        "cores": num_cores(),
        "memory_gb_s": round(sum_speed(summed_bytes) / 1e9, 1),
    }


def processor_in(cpuinfo: str) -> str:
    """Return the first model name in the text of /proc/cpuinfo, else the architecture."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.machine()


def sum_speed(num_bytes: int) -> float:
    """Return the bytes per second at which torch sums float32 numbers with all cores: a median."""
    torch.set_num_threads(num_cores())
    data = torch.ones(num_bytes // 4)
    seconds = []
    for _ in range(NUM_SUMS):
        began = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - began)
    return num_bytes / statistics.median(seconds)
