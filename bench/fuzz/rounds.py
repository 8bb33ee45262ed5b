"""Rounds of schemathesis, several programs at once, until there were enough cases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from bench.common.results import ROOT, say

KEY: Final = "sk-of-the-fuzzer-0000000"
SETTINGS: Final = {
    "GATEWAY__API_KEYS": KEY,
    "GATEWAY__QUEUE_TIMEOUT_S": "5",
    "GATEWAY__MAX_N_TOKENS": "16",  # short answers, so that the cases are many
    "LOG__LEVEL": "warning",
}
NOT_ASKED: Final = r"^/admin/(live|events|requests|burst)$"  # streams without an end, and a load of its own
PER_ROUND: Final = 200  # cases of an operation in a round; all that there are, if it has fewer
SAY_EVERY_S: Final = 10.0
CONFIG: Final = Path(__file__).with_name("fuzz.toml")
# CPython 3.11 counts the recursion of ast.parse for all threads together, so that two of them fail: a program
# has one.
OPTIONS: Final = ["--checks", "all", "--continue-on-failure", "--request-timeout", "60", "--workers", "1"]


class Fuzzer:
    """Sends cases to one gateway, and counts the answers. `failures`: what schemathesis found."""

    def __init__(self, url: str, folder: Path, most_s: float = float("inf")) -> None:
        """folder: for the files of schemathesis; most_s: after so long no round begins."""
        self.failures = 0
        self.counts = Counter[str]()  # by operation, mode and status, as `after_call` of the hooks has them
        self._url, self._folder = url, folder
        self._until_s = time.monotonic() + most_s
        self._seed = 0

    def play(self, cases: int, processes: int, more: Callable[[], str] = str) -> None:
        """Send at least so many cases; the first program also sends those of the limits, once.

        more: what is said of the service beside the number of cases.
        """
        self.counts.clear()
        first, began = True, time.monotonic()
        while first or (self.counts.total() < cases and time.monotonic() < self._until_s):
            programs = [_Program(self, cases, index == 0 and first) for index in range(processes)]
            said_s = time.monotonic()
            while any(one.is_running for one in programs):
                time.sleep(0.2)
                if time.monotonic() > said_s + SAY_EVERY_S:
                    said_s = time.monotonic()
                    so_far = self.counts.total() + sum(one.counts().total() for one in programs)
                    rate = so_far / (said_s - began)
                    say(f"{so_far} cases, {rate:.0f}/s, {self.failures} failures; {more()}")
            for one in programs:
                self._add(one)
            first = False

    def statuses(self) -> dict[str, int]:
        """Return the number of answers by status."""
        found = Counter[str]()
        for key, count in self.counts.items():
            found[key.split("|")[2]] += count
        return dict(sorted(found.items()))

    def _add(self, program: _Program) -> None:
        output = program.output()
        counts = program.counts()
        if not counts:
            raise RuntimeError(f"schemathesis sent nothing:\n{output}")
        self.counts.update(counts)
        if program.status:
            found = re.search(r"=+ (\d+) failures?", output) or re.search(r"=+ (\d+) errors?", output)
            self.failures += int(found[1]) if found else 1
            say(output)

    def command(self, cases: int, has_limits: bool) -> list[str]:
        """Return the command line of a program with the next seed."""
        self._seed += 1
        phases = "examples,coverage,fuzzing" if has_limits else "fuzzing"
        per_operation = max(1, min(PER_ROUND, cases // 50))
        return [
            str(Path(sys.executable).with_name("schemathesis")),
            "--no-color",
            *("--config-file", str(CONFIG), "run", f"{self._url}/openapi.json", *OPTIONS),
            *("--phases", phases, "--max-examples", str(per_operation), "--seed", str(self._seed)),
            *("--exclude-path-regex", NOT_ASKED, "--header", f"Authorization: Bearer {KEY}"),
        ]

    def place(self) -> Path:
        """Make the folder of the next program."""
        place = self._folder / str(self._seed)
        place.mkdir()
        return place


class _Program:
    """One run of schemathesis."""

    def __init__(self, fuzzer: Fuzzer, cases: int, has_limits: bool) -> None:
        command = fuzzer.command(cases, has_limits)
        place = fuzzer.place()
        self._counts, self._output = place / "counts.json", place / "output"
        env = os.environ | {
            "SCHEMATHESIS_HOOKS": "bench.fuzz.hooks",
            "FUZZ_COUNTS": str(self._counts),
            "PYTHONPATH": str(ROOT),
        }
        with self._output.open("wb") as file:
            self._popen = subprocess.Popen(command, cwd=place, env=env, stdout=file, stderr=file)

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def status(self) -> int | None:
        return self._popen.poll()

    def counts(self) -> Counter[str]:
        return Counter(json.loads(self._counts.read_text())) if self._counts.exists() else Counter()

    def output(self) -> str:
        return self._output.read_text(errors="replace")


def of_operations(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the cases by operation."""
    found = Counter[str]()
    for key, count in counts.items():
        found[key.split("|")[0]] += count
    return dict(sorted(found.items()))


def bad_answers(counts: Mapping[str, int]) -> int:
    """Return the number of 5xx but 503 and 504, which are documented."""
    statuses = ((int(key.split("|")[2]), count) for key, count in counts.items())
    return sum(count for status, count in statuses if status >= 500 and status not in (503, 504))
