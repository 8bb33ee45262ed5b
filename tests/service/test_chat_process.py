"""A model that was pulled by name, served by the real service, and asked in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench.common.service import Service, wait_for
from instar.output.progress import StatusLine
from instar.pull.download import pull
from instar.pull.hub import Hub
from tests.service.test_worker_process import DEMO
from tests.support.hub import COMMIT, loopback_hub
from tests.support.paths import ROOT
from tests.support.terminal import CTRL_C, CTRL_D, terminal

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.timeout(300),  # kernels may be compiled first
]


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model under a name by which only a pull is found."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with loopback_hub() as hub:
        hub.files = {COMMIT: {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}}
        folder = pull(Hub(hub.url), hub.repo, "main", StatusLine())
        assert folder.is_relative_to(tmp_path)
        return Path(hub.repo)


def test_a_pulled_model_is_served_and_a_chat_streams_stops_and_shows_its_shape(pulled: Path) -> None:
    with Service(model=pulled, settings={"WORKER__DTYPE": "float32"}) as service:
        argv = [sys.executable, "-m", "instar", "chat", "--url", service.url(0), "--temperature", "0"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
        first = httpx.post(
            f"{service.url(0)}/v1/chat/completions",
            json={
                "model": "demo",
                "messages": [{"role": "user", "content": "a sorted list"}],
                "temperature": 0,
                "max_tokens": 12,
            },
            timeout=60,
        ).json()["choices"][0]["message"]["content"]
        piped = subprocess.run(
            [*argv, "--max-tokens", "12"],
            input="a sorted list\n",
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (piped.returncode, piped.stdout) == (0, f"{first}\n"), piped.stderr
        with terminal(argv, environ) as screen:
            screen.wait_for("demo answers.")
            screen.wait_for_prompt(1)
            screen.ask("/shape")
            screen.wait_for("demo@w0: tp1, layers 8 full, KV ")
            screen.wait_for_prompt(2)
            screen.ask("/min-precision full")
            screen.wait_for("no layer of an answer is below full")
            screen.wait_for_prompt(3)
            screen.ask("a sorted list")  # its answer ends with the context, after 2,041 tokens
            wait_for("the answer to begin", lambda: service.blocks_used() > 0)
            screen.type(CTRL_C)
            screen.wait_for("stopped;")
            wait_for("the request to be cancelled", lambda: service.blocks_used() == 0)
            screen.wait_for_prompt(4)
            screen.ask("/model nothing")
            screen.wait_for("error: no model 'nothing' is served; there are demo")
            screen.wait_for_prompt(5)
            screen.type(CTRL_D)
            assert screen.end() == 0
