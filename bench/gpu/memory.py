"""The tests of pages and KV caches that need a GPU, by pytest, and the time of pages of several sizes.

    python -m bench.gpu memory [--device cpu]

`--device cpu` only collects the tests.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.common.results import ROOT, say
from bench.gpu.common import Found, run_alone
from bench.gpu.transform import mapping_seconds
from worker.engine.build import make_pool

LIMIT_S = 90.0
# Without the project's settings and fixtures: those need packages that only services need.
BARE = ("--noconftest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider")


MIB = 1024 * 1024
PAGES_MIB = (2, 4, 8, 16, 32)
FFN_BYTES = 352 * MIB  # of a layer of Llama 3 8B in bfloat16


def measure(device: torch.device, found: Found) -> None:
    _run_tests(device, found)
    is_gpu = device.type == "cuda"
    for page_bytes in [size * MIB for size in PAGES_MIB] if is_gpu else [64 * 1024]:
        found.add("pages", _page_row(device, page_bytes, FFN_BYTES if is_gpu else MIB))


class TimedDriver:
    """CUDA's driver, with the number and the seconds of its calls by name."""

    def __init__(self, driver: Any) -> None:
        self.spent: dict[str, tuple[int, float]] = {}
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._driver, name)
        if not name.startswith("cu"):
            return called

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            answer = called(*args)
            count, seconds = self.spent.get(name, (0, 0.0))
            self.spent[name] = count + 1, seconds + time.perf_counter() - began
            return answer

        return timed


def _page_row(device: torch.device, page_bytes: int, nbytes: int) -> dict[str, Any]:
    """Return milliseconds of mapping and unmapping `nbytes`, and of the driver's calls in one turn."""
    pool = make_pool(device, 2 * nbytes, page_bytes)
    space = pool.reserve(nbytes, kind="weights", owner="bench")
    found = mapping_seconds(device, pool, space, space.num_pages)
    row: dict[str, Any] = {"page_kib": page_bytes // 1024, "pages": space.num_pages}
    row |= {f"{name}_ms": 1e3 * seconds for name, seconds in found.items()}
    if device.type == "cuda":
        cuda: Any = importlib.import_module("worker.memory.cuda")  # exists only where CUDA does
        driver, cuda.driver = cuda.driver, TimedDriver(cuda.driver)
        try:
            space.map(0, space.num_pages, zeroed=False)
            space.unmap(0, space.num_pages)
            pool.reclaim(pool.num_pages)
            row["calls_ms"] = {
                name: [count, 1e3 * seconds] for name, (count, seconds) in cuda.driver.spent.items()
            }
        finally:
            cuda.driver = driver
    pool.close()
    return row


def _run_tests(device: torch.device, found: Found) -> None:
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / "worker").rglob("test_*.py")
        if re.search(r"mark\.gpu|memory_backends", path.read_text())
    )
    what = [] if device.type == "cuda" else ["--collect-only"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *what, *BARE, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    say(ran.stdout[-6000:] + ran.stderr[-1000:])
    told = [line for line in ran.stdout.splitlines() if line.strip()]
    found.put(files=files, summary=told[-1] if told else "no output")
    for line in told:
        if line.startswith(("FAILED", "ERROR")):
            found.problem(line[:400])
    if ran.returncode and not found.values["problems"]:
        found.problem(f"pytest ended with {ran.returncode}: {ran.stderr[-400:]}")


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"memory: {found['summary']}"
    for row in found.get("pages", []):
        spent = (f"{name} {row[name + '_ms']:.2f}" for name in ("made", "map", "map_unzeroed", "unmap"))
        yield f"  {row['pages']} pages of {row['page_kib']} KiB, in ms: {', '.join(spent)}"
        for name, (count, ms) in row.get("calls_ms", {}).items():
            yield f"    {name}: {count} in {ms:.2f}"


def main() -> int:
    return run_alone(__doc__, "memory", measure, lines)
