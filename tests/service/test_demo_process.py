"""`instar demo` with its real service: the scenes, what they leave, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from bench.common.service import free_port, wait_for
from instar.replay import files
from tests.support.paths import DEMO_MODEL, ROOT

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


class RunningDemo:
    """A demo as a person starts it, with all processes that it ever had."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.folder = folder
        self._output = folder / "output.txt"
        own = {"XDG_RUNTIME_DIR": str(folder), "TERM": "dumb", "INSTAR_PORT": "1"}
        self.env = {**os.environ, **own}
        self.argv = [sys.executable, "-m", "instar", "demo", "--no-open", "--out", str(folder / "out"), *argv]
        with self._output.open("w") as out:
            self.popen = subprocess.Popen(
                self.argv, env=self.env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )
        self.processes = {psutil.Process(self.popen.pid)}

    @property
    def output(self) -> str:
        return self._output.read_text()

    def is_running(self) -> bool:
        """Note the processes of now, and return whether the demo runs."""
        with suppress(psutil.NoSuchProcess):
            self.processes |= set(psutil.Process(self.popen.pid).children(recursive=True))
        return self.popen.poll() is None

    def wait_for_scene(self, number: int) -> None:
        def has_come() -> bool:
            assert self.is_running(), self.output
            return f"[{number}/5]" in self.output

        wait_for(f"scene {number}", has_come, within_s=300)

    def end(self, within_s: float) -> int:
        wait_for("the end of the demo", lambda: not self.is_running(), within_s)
        return self.popen.wait()

    def left(self) -> list[psutil.Process]:
        return [one for one in self.processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def demo(folder: Path, *argv: str) -> Iterator[RunningDemo]:
    made = RunningDemo(folder, *argv)
    try:
        yield made
    finally:
        if made.popen.poll() is None:
            made.popen.kill()  # its service goes with it
            made.popen.wait()


def test_all_scenes_end_in_a_card_and_a_picture_and_no_process_is_left(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    port = free_port()
    with demo(tmp_path, "--port", str(port), "--seconds", "8") as shown:
        status = shown.end(within_s=500)
        output = shown.output
        assert status == 0, output
        assert len(shown.processes) >= 7  # itself, the supervisor, Redis, three services, two workers
        wait_for("all processes to end", lambda: not shown.left())
    assert f"the dashboard: http://127.0.0.1:{port}/" in output
    assert [f"[{number}/5]" in output for number in range(1, 6)] == [True] * 5
    assert "requests lost: 0 of" in output and "TTFT P95" in output
    assert (
        "256 of 256 tokens" in output
        and "become one instance (tp 2)" in output
        and "the group has parted" in output
    )
    assert "\033" not in output  # neither colours nor lines that are replaced
    out = tmp_path / "out"
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    full, morphed = (files.read(out / name) for name in ("full-precision", "with-morphs"))
    assert full.about["arrivals_sha256"] == morphed.about["arrivals_sha256"]
    assert all(one.is_served for run in (full, morphed) for one in run.outcomes)
    assert full.summary["tokens_by_layers_below_full"].keys() == {"0"}
    assert not full.observed["morphs"]
    assert any(one["kind"] == "swap" and one["state"] == "applied" for one in morphed.observed["morphs"])


def test_a_second_demo_is_refused_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    with demo(tmp_path, "--port", str(port)) as shown:
        shown.wait_for_scene(1)
        second = subprocess.run(
            shown.argv, env=shown.env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        assert second.returncode == 2
        assert f"a demo runs already: http://127.0.0.1:{port}/" in second.stderr
        shown.wait_for_scene(3)
        time.sleep(2.0)
        shown.popen.send_signal(signal.SIGINT)
        assert shown.end(within_s=60) == 130, shown.output
        wait_for("all processes to end", lambda: not shown.left())
        assert "nothing of it runs any more" in shown.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_a_demo_that_is_ended_while_it_starts_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as shown:
        shown.wait_for_scene(1)
        wait_for("its service", lambda: shown.is_running() and len(shown.processes) > 3)
        shown.popen.send_signal(number)
        status = shown.end(within_s=60)
        assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130), shown.output
        wait_for("all processes to end", lambda: not shown.left())
