"""`python -m worker`: what it refuses, and the watchdog. `test_morph_process.py` runs one to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.common.oracles import make_oracle
from bus.morphs import Deploy
from bus.settings import RedisSettings, WorkerSettings
from tests.support.paths import ROOT
from worker.engine.build import fair_shares
from worker.service import telemetry
from worker.service.loading import CannotServe
from worker.service.start_up import load

DEMO = ROOT / "models" / "demo"


def start(redis: RedisSettings, log: Path, models: str, **settings: str) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR_")}
    environ |= {
        "INSTAR_REDIS__URL": redis.url,
        "INSTAR_REDIS__PREFIX": redis.prefix,
        "INSTAR_WORKER__ID": "w0",
        "INSTAR_WORKER__THREADS": "1",
        "INSTAR_WORKER__MEMORY_MB": "128",
        "INSTAR_WORKER__MODELS": models,
        "PYTHONPATH": str(ROOT),
    }
    environ |= {f"INSTAR_WORKER__{name.upper()}": value for name, value in settings.items()}
    with log.open("wb") as stderr:
        return subprocess.Popen([sys.executable, "-m", "worker"], env=environ, cwd=log.parent, stderr=stderr)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"models": ["/nowhere"]}, "/nowhere: there is no such model folder"),
        ({}, "no model to serve"),
        ({"models": [f"a={DEMO}", "a=/tmp"]}, "two models are called 'a'"),
        ({"models": ["x"], "device": "gpu"}, "worker.device is 'gpu'"),
        ({"models": ["x"], "device": "cuda:9"}, "worker.device is 'cuda:9', and "),
        ({"models": [str(DEMO)], "memory_mb": 5}, "too big for the device's budget"),
        ({"models": [str(DEMO)], "memory_mb": 5}, "a smaller dtype; it would not fit in int3 either"),
        ({"models": [str(DEMO)], "max_model_len": 99999}, "max_model_len is 99999"),
        ({"models": [str(DEMO)], "memory_mb": 29, "threads": 1}, "no room for a KV cache"),
    ],
)
def test_what_a_restart_cannot_cure_is_told_in_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(CannotServe) as told:
        load(WorkerSettings(**settings), "w0", lambda text: None)
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_a_model_fits_in_the_precision_that_its_refusal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(models=[str(DEMO)], memory_mb=29, threads=1)
    with pytest.raises(CannotServe, match=r"`instar deploy demo --precision (\w+)`") as told:
        load(settings, "w0", lambda text: None)
    precision: Any = str(told.value).rpartition("--precision ")[2].strip("`")
    monkeypatch.setattr("worker.service.start_up.Deploy", partial(Deploy, precision=precision))
    assert [card.id for card in load(settings, "w0", lambda text: None).cards] == ["demo@w0"]


def test_a_bad_model_folder_is_one_line_and_exit_status_2(
    redis_settings: RedisSettings, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start(redis_settings, log, '["/nowhere"]')
    assert process.wait(60) == 2, log.read_text()
    (line,) = log.read_text().splitlines()
    assert line.endswith("worker ERROR /nowhere: there is no such model folder")


def test_two_models_share_the_pool(tmp_path: Path) -> None:
    models = []
    for seed, family in enumerate(("llama", "qwen3")):
        folder = tmp_path / family
        make_oracle(family, seed=seed).save_pretrained(folder)
        models.append(str(folder))
    settings = WorkerSettings(models=models, memory_mb=16, threads=1, max_num_seqs=4)
    loaded = load(settings, "w0", lambda text: None)
    assert [card.id for card in loaded.cards] == ["llama@w0", "qwen3@w0"]
    pages = loaded.pool.counts()
    assert pages.budget == pages.weights + pages.kv + pages.free
    for instance in loaded.engine.instances.values():
        assert instance.scheduler.blocks.capacity >= 4 * 256 // 16, (
            "every sequence may become as long as it may"
        )
    loaded.morphs.close()


def test_fair_shares_are_equal_except_that_nobody_gets_more_than_is_of_use() -> None:
    assert fair_shares(100, [1000, 1000]) == [50, 50]
    assert fair_shares(100, [10, 1000]) == [10, 90]
    assert fair_shares(100, [1000, 20, 30]) == [50, 20, 30]
    assert fair_shares(100, [10, 20]) == [10, 20]
    assert fair_shares(0, [10]) == [0]


async def test_the_watchdog_ends_a_process_whose_step_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck:
        def step_seconds(self) -> float:
            return 61.0

    ended = asyncio.Event()

    def leave(status: int) -> None:
        assert status == 1
        ended.set()

    monkeypatch.setattr("worker.service.telemetry.os._exit", leave)
    monkeypatch.setattr("worker.service.telemetry.faulthandler.dump_traceback", lambda: None)
    task = asyncio.create_task(telemetry.watch_steps(Stuck(), 0.1))  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await ended.wait()
    task.cancel()
    assert "a step has been running for 61 s, the limit is 0 s (worker.watchdog_s)" in caplog.text
