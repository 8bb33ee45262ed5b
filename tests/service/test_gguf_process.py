"""`instar serve FILE.gguf`: the file becomes a folder, and its tokens are those of transformers' reading."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.common.dummy_model import generate
from bench.peers.gguf_file import write_gguf
from bus.tokenizer_folder import load_tokenizer
from instar.serve.redis_server import free_port
from tests.support.gguf_models import make_folder, transformers_reading
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

READY_S = 300  # kernels may be compiled first
PROMPT = [0, 17, 90, 201, 45, 33, 260, 111]
NUM_OUT = 24


def test_a_gguf_file_is_served_with_the_tokens_of_transformers(tmp_path: Path) -> None:
    make_folder(tmp_path / "m")
    path = write_gguf(tmp_path / "m", "Q8_0", has_bos=True)
    (wanted,) = generate(transformers_reading(path, is_quantised=True), [PROMPT], NUM_OUT)
    port, log = free_port(), tmp_path / "log"
    own = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR")}
    environ = own | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "instar", "serve", str(path), "--port", str(port), "--memory-mb", "64"]
    with log.open("wb") as out:
        service = subprocess.Popen(argv, cwd=tmp_path, env=environ, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + READY_S
        while "Instar is ready" not in log.read_text():
            assert service.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        body = {
            "model": "model",
            "prompt": PROMPT,
            "max_tokens": NUM_OUT,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    finally:
        service.send_signal(signal.SIGINT)
        assert service.wait(60) in (0, 130), log.read_text()[-3000:]
    tokenizer = load_tokenizer(tmp_path / "m")
    assert answer["choices"][0]["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
    (made,) = (tmp_path / "cache" / "instar" / "gguf").iterdir()
    told = log.read_text()
    assert f"Converting {path} to {made} (once)" in told and "A worker takes" in told
