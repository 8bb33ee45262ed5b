"""docs/tutorial.md, block by block as a reader types it, against the real service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from instar.serve.redis_server import free_port
from tests.support.paths import ROOT
from tests.test_documentation import blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STARTS = ("make serve", "instar serve")
READY_S, COMMAND_S = 240, 120


class Reader:
    """A reader with two terminals: one for the service, one for everything else."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.service: subprocess.Popen[bytes] | None = None
        self.env = os.environ | {
            "INSTAR_PORT": str(self.port),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start(self, command: str) -> None:
        """Stop the service as Ctrl-C does, and start it anew."""
        self.stop()
        log = self.folder / "service.log"
        words = command.replace("make serve", "instar serve").split()
        with log.open("wb") as out:
            self.service = subprocess.Popen(words, cwd=ROOT, env=self.env, stdout=out, stderr=out)
        deadline = time.monotonic() + READY_S
        while "Instar is ready" not in log.read_text():
            assert self.service.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        num_workers = int(command.partition("--workers ")[2] or 1)
        while len(self._instances()) < num_workers:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)

    def _instances(self) -> list[Any]:
        state = httpx.get(f"http://127.0.0.1:{self.port}/admin/state").json()
        return list(state["instances"])

    def stop(self) -> None:
        if self.service and self.service.poll() is None:
            self.service.send_signal(signal.SIGINT)
            self.service.wait(60)

    def type(self, language: str, block: str) -> str:
        """Run a block and return what it prints."""
        block = block.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        words = [sys.executable, "-c", block] if language == "python" else ["bash", "-ec", block]
        done = subprocess.run(
            words, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    found = Reader(tmp_path)
    try:
        yield found
    finally:
        found.stop()


def test_every_block_of_the_tutorial_does_what_it_says(reader: Reader) -> None:
    said: dict[str, str] = {}
    for language, block in blocks_of((ROOT / "docs" / "tutorial.md").read_text()):
        if block.startswith(STARTS):
            reader.start(block.strip())
            continue
        # The environment is this one: there is none to activate.
        block = block.replace("source .venv/bin/activate\n", "")
        said[block] = reader.type(language, block)
    printed = "".join(said.values())
    assert '"object":"text_completion"' in printed.replace(" ", "") and "data: [DONE]" in printed
    replay = next(text for block, text in said.items() if "bench replay" in block)
    assert re.search(r"\bswap", replay), replay  # the card names the morphs of the policy
    by_hand = next(text for block, text in said.items() if "mode=manual" in block)
    assert by_hand.count("applied") >= 2 and "int4" in by_hand, by_hand
    merged = next(text for block, text in said.items() if "morph tp 2" in block)
    assert merged.count("applied") >= 2, merged
