"""Every part on a GPU, each in a process of its own with its own limit.

    python -m bench.gpu [all] [--parts card,decode] [--limit 540] [--device cpu]        (make gpu)

A part that crashes or reaches its limit costs its own rest and nothing else: what it has found is on disk row
by row. Parts that only check run beside each other, those that measure time alone. A table comes first and
short, what failed and did not run with it; the JSON of all parts comes last.

Needs Python with torch and triton on a CUDA machine, and of the rest what `make gpu-kit` packs. Everything is
written to bench/results/gpu/{device}.json, and to $OUT/gpu.json and $OUT/gpu.log if OUT is set, after every
change. Exit status 1 if a check failed. Without CUDA it says so and exits 0.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from bench.common.results import RESULTS, ROOT, parser, say
from bench.gpu.parts import FOLDER, NAMES, PARTS, Part

LOG_BYTES = 12_000  # of the end of each part's output
TICK_S = 0.2
END_S = 5.0  # for a part to end after SIGTERM


@dataclass(slots=True)
class Running:
    """A process of a part: one shard of it, or all."""

    part: Part
    name: str  # of its files
    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)
    ended: str = ""  # "", "ended with 0", "killed at its limit of 60 s"

    def look(self, limit_s: float) -> bool:
        """Return whether it has ended; end it if its limit has passed."""
        if (status := self.process.poll()) is not None:
            self.ended = f"ended with {status}"
        elif time.monotonic() - self.began > limit_s:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.ended = f"ended at its limit of {limit_s:.0f} s"
        return bool(self.ended)


class Run:
    """The parts of one run, and what is known of them."""

    def __init__(self, folder: Path, parts: Sequence[Part], limit_s: float, device: str) -> None:
        """Prepare to run the parts; device: the GPU's name, or "cpu" for their dry runs."""
        self._folder, self._parts, self._device = folder, parts, device
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        self._kept = RESULTS / "gpu" / f"{slug}.json"
        self._earlier: dict[str, Any] = _read(self._kept).get("parts", {})
        self._began, self._limit_s = time.monotonic(), limit_s
        self._day = date.today().isoformat()
        self._done: list[Running] = []
        self._running: list[Running] = []

    def run(self) -> dict[str, Any]:
        """Run every part; those that do not measure run together. Returns the whole result."""
        together = [part for part in self._parts if not part.is_alone]
        for part in self._parts:
            if part.is_alone:
                self._run_together([part])
            elif together and part is together[0]:
                self._run_together(together)
        return self.write()

    def _run_together(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if self._left_s() <= 0:
                continue  # a row "not run"
            for shard in range(part.shards if self._device != "cpu" else 1):
                self._running.append(self._start(part, shard))
        while self._running:
            for one in list(self._running):
                if one.look(min(one.part.limit_s, max(0.0, self._left_s() + time.monotonic() - one.began))):
                    self._running.remove(one)
                    self._done.append(one)
                    say(f"{one.name}: {one.ended} after {time.monotonic() - one.began:.0f} s")
            self.write()
            time.sleep(TICK_S)

    def _left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._began)

    def _start(self, part: Part, shard: int) -> Running:
        is_sharded = part.shards > 1 and self._device != "cpu"
        name = f"{part.name}-{shard}" if is_sharded else part.name
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "bench.gpu", part.name]
        command += ["--device", "cpu"] if self._device == "cpu" else []
        if is_sharded:
            command += ["--shard", f"{shard}/{part.shards}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, FOLDER: str(self._folder), "PYTHONUNBUFFERED": "1"},
            )
        return Running(part, name, process, log)

    # ------------------------------------------------------------------------- what is known

    def whole(self) -> dict[str, Any]:
        """Return the JSON of every part and what became of it; of parts left out, that of an earlier run."""
        own = [part.name for part in self._parts]
        parts: dict[str, Any] = {name: one for name, one in self._earlier.items() if name not in own}
        for part in self._parts:
            ran = [one for one in [*self._done, *self._running] if one.part is part]
            found = [_read(self._folder / f"{one.name}.json") for one in ran]
            ends = [one.ended or "runs" for one in ran] or ["not run"]
            problems = [problem for one in found for problem in one.get("problems", [])]
            for one, values in zip(ran, found, strict=True):
                if one.ended and not values.get("is_whole"):
                    problems.append(f"{one.name} is not whole: it {one.ended}; {_last_line(one.log)}")
            parts[part.name] = {"day": self._day, "ends": ends, "problems": problems, "found": found}
        return {"bench": "gpu", "device": self._device, "parts": parts}

    def write(self) -> dict[str, Any]:
        """Write everything and return it."""
        result = self.whole()
        text = json.dumps(result, indent=1) + "\n"
        targets = [self._kept] if self._device != "cpu" else []
        if out := os.environ.get("OUT"):
            Path(out).mkdir(parents=True, exist_ok=True)
            targets.append(Path(out) / "gpu.json")
            (Path(out) / "gpu.log").write_text("".join(self._logs()))
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return result

    def _logs(self) -> Iterator[str]:
        for one in [*self._done, *self._running]:
            yield f"\n======== {one.name}: {one.ended or 'runs'}\n{_tail(one.log)}"


def table(parts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of every part's own table, then what failed and what did not run."""
    for name, part in parts.items():
        lines = importlib.import_module(f"bench.gpu.{name}").lines
        for found in part["found"]:
            try:
                yield from lines(found)
            except (KeyError, IndexError, TypeError) as missing:
                yield f"{name}: its table stops at {missing!r}"
    for name, part in parts.items():
        if part["ends"] == ["not run"]:
            yield f"{name}: not run"
        for problem in part["problems"]:
            yield f"FAILED {name}: {problem}"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--parts", default=",".join(NAMES), help="which ones, with commas between them")
    options.add_argument("--limit", type=float, default=540, help="seconds for all of them")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, in small")
    args = options.parse_args()
    wanted = args.parts.split(",")
    if unknown := sorted(set(wanted) - set(NAMES)):
        say(f"no part {unknown[0]!r}; there are {', '.join(NAMES)}")
        return 2
    device = "cpu" if args.device == "cpu" else device_name()
    if not device:
        say("no CUDA device here, or no torch in this Python (set PYTHON): nothing was run")
        return 0
    with tempfile.TemporaryDirectory(prefix="instar-gpu-") as folder:
        parts = [part for part in PARTS if part.name in wanted]
        result = Run(Path(folder), parts, args.limit, device).run()
    say()
    own = {name: part for name, part in result["parts"].items() if name in wanted}
    for line in table(own):
        say(line)
    num_problems = sum(len(part["problems"]) for part in own.values())
    say(f"{num_problems} checks failed")
    say(json.dumps(result))
    return 1 if num_problems else 0


def device_name() -> str:
    """Return the GPU's name, asked for in a process of its own, or ""."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace")


def _last_line(log: Path) -> str:
    lines = [line for line in _tail(log).splitlines() if line.strip()]
    return f"its last line: {lines[-1][:300]}" if lines else "it wrote nothing"
