"""Every kernel against its oracle, in plain torch.

    python -m bench.gpu kernels [--shard 0/10] [--device cpu]

Compiling takes most of the time, so `make gpu` runs as many shards at once as the machine has cores for. With
`--device cpu` a few checks run on the CPU's kernels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.gpu.common import Found, run_alone
from bench.kernels.checks import checks

ON_A_CPU = 200  # every so many of the checks
SLOW_S = 5.0  # a check that took longer is reported: it compiled for long


def measure(device: torch.device, found: Found) -> None:
    torch.set_num_threads(1)  # oracles of many shards run at once
    every = itertools.islice(
        checks(device.type, device.type), 0, None, 1 if device.type == "cuda" else ON_A_CPU
    )
    found.put(checks=0, slow=[])
    for name, check in found.own(every):
        began = time.perf_counter()
        try:
            check()
        except Exception as problem:  # noqa: BLE001 a kernel that a compiler refuses must not hide the others
            found.problem(f"{name}: {type(problem).__name__}: {str(problem)[:400]}")
            if "illegal memory access" in str(problem) or "CUDA error" in str(problem):
                break  # it poisons every later call of this process
        if (seconds := time.perf_counter() - began) > SLOW_S:
            found.add("slow", [name, round(seconds, 1)])
        found.put(checks=found.values["checks"] + 1)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"kernels: {found['checks']} checks, {len(found['problems'])} failed, in {found.get('seconds')} s"


def main() -> int:
    return run_alone(__doc__, "kernels", measure, lines, is_sharded=True)
