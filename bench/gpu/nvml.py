"""This machine's GPU as a worker would report it (`worker/service/nvml.py`), at rest and at work.

    python -m bench.gpu nvml [--device cpu]

Prints each number beside itself under load, what NVML does not tell here, and how long its calls take, which
is why they have a thread of their own. Where NVML says nothing of the GPU, the table says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any, Final

import torch

from bench.common.results import digits
from bench.gpu.common import Found, run_alone
from worker.service.nvml import Gpu, GpuLost, NoNvml

LOAD_S: Final = 2.0  # the driver samples utilisation up to once a second
WAIT_S: Final = 0.2
READINGS: Final = 20
SIZE: Final = 8192


def measure(device: torch.device, found: Found) -> None:
    """Put into `found` what NVML says of a device."""
    if device.type != "cuda":
        found.put(why_not="the device is a CPU")
        return
    found.put(uuid=(uuid := str(torch.cuda.get_device_properties(device).uuid)))
    try:
        read(uuid, _matmul(device), found)
    except NoNvml as why:
        found.put(why_not=str(why))
    except GpuLost as lost:
        found.problem(str(lost))


def read(uuid: str, load: Callable[[], object], found: Found) -> None:
    """Put into `found` what NVML says of a GPU before and after `load` has been called for LOAD_S.

    Raises NoNvml and GpuLost.
    """
    began = time.perf_counter()
    gpu = Gpu(uuid)
    found.put(open_ms=(time.perf_counter() - began) * 1e3)
    try:
        times = []
        for _ in range(READINGS):
            began = time.perf_counter()
            at_rest = gpu.read()
            times.append((time.perf_counter() - began) * 1e3)
        found.put(read_ms=median(times), read_max_ms=max(times), at_rest=asdict(at_rest))
        found.put(tells_xids=gpu.wait(WAIT_S))
        until = time.perf_counter() + LOAD_S
        while time.perf_counter() < until:
            load()
        found.put(at_work=asdict(gpu.read()), not_told=sorted(gpu.unknown))
    finally:
        gpu.close()


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of what was found."""
    if "why_not" in found:
        yield f"NVML: nothing is reported here: {found['why_not']}"
        return
    yield f"{found['at_rest']['name']}, {found['uuid']}"
    yield f"{'':24}{'at rest':>16}{'at work':>16}"
    for name, value in found["at_rest"].items():
        if name != "name":
            yield f"{name:24}{_text(value):>16}{_text(found['at_work'][name]):>16}"
    yield (
        f"{'a reading, ms':24}{found['read_ms']:16.2f}{found['read_max_ms']:16.2f} at most;"
        f" opened in {found['open_ms']:.0f} ms"
    )
    yield f"{'not told here':24}{', '.join(found['not_told']) or 'nothing'}"
    yield f"{'XIDs':24}{'told' if found['tells_xids'] else 'not told'}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(str(key) for key, one in value.items() if one) or "none"
    return "-" if value is None else f"{digits(value):g}"


def _matmul(device: torch.device) -> Callable[[], None]:
    left, right = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))

    def load() -> None:
        for _ in range(8):
            torch.matmul(left, right)
        torch.cuda.synchronize(device)

    return load


def main() -> int:
    return run_alone(__doc__, "nvml", measure, lines)
