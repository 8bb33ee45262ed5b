"""The wheel, installed into an empty environment: it serves its demo model from any folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import httpx
import pytest

from instar.serve.redis_server import free_port
from tests.conftest import OUTSIDE
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READY_S = 300


def test_a_wheel_in_an_empty_environment_serves_the_demo_model(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, "."],
        cwd=ROOT,
        env=OUTSIDE,
        check=True,
    )
    (wheel,) = tmp_path.glob("instar-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    pinned = ROOT / "constraints.txt"
    subprocess.run(
        [programs / "pip", "install", "-q", "-c", pinned, f"{wheel}[serve]"], env=OUTSIDE, check=True
    )

    port, log = free_port(), tmp_path / "log"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INSTAR"))}
    env = own | {"INSTAR_PORT": str(port), "PATH": f"{programs}:{os.environ['PATH']}"}
    with log.open("wb") as out:
        service = subprocess.Popen(
            [programs / "instar", "serve"], cwd=tmp_path, env=env, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + READY_S
        while "Instar is ready" not in log.read_text():
            assert service.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        body = {"model": "demo", "prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 8, answer
    finally:
        service.send_signal(signal.SIGINT)
        assert service.wait(60) in (0, 130), log.read_text()[-3000:]
