"""The tests of pages and KV caches that need a GPU, by pytest.

    python -m bench.gpu memory [--device cpu]

`--device cpu` only collects them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.common.results import ROOT, say
from bench.gpu.common import Found, run_alone

LIMIT_S = 90.0
# Without the project's settings and fixtures: those need packages that only services need.
BARE = ("--noconftest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider")


def measure(device: torch.device, found: Found) -> None:
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


def main() -> int:
    return run_alone(__doc__, "memory", measure, lines)
