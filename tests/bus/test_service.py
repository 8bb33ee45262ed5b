"""The frame of a process, as it shows from outside: log lines, signals, exit status."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.common.service import free_port
from bus import logs
from bus.service import CONFIGURATION_ERROR, run_until
from bus.settings import LogSettings
from tests.support.paths import ROOT
from tests.support.redis_process import RedisProcess


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Restore logging after `set_up` changed it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def record(level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "gateway", "levelno": level, "msg": "took %d s", "args": (3,), **extra}
    )
    made.levelname = logging.getLevelName(level)
    return made


def test_a_text_line_has_time_service_message_and_extras() -> None:
    line = logs.Text("gateway").format(record(request_id="r1", tokens=12))
    assert line.endswith(" gateway took 3 s request_id=r1 tokens=12")
    assert (
        logs.Text("worker w0")
        .format(record(logging.WARNING))
        .endswith(" worker w0 WARNING gateway: took 3 s")
    )


def test_a_json_line_is_one_object_with_the_extras_as_keys() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = logs.JsonLines("gateway").format(
            record(logging.ERROR, request_id="r1", odd=Path("/x"), exc_info=sys.exc_info())
        )
    entry = json.loads(line)
    assert "\n" not in line
    assert entry["service"] == "gateway"
    assert entry["level"] == "error"
    assert entry["message"] == "took 3 s"
    assert entry["request_id"] == "r1"
    assert entry["odd"] == "/x"
    assert entry["time"].endswith("Z")
    assert "ValueError: two" in entry["exception"]


def test_set_up_keeps_chatty_libraries_quiet(
    restored_logging: None, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(LogSettings(level="info"), "gateway")
    logging.getLogger("httpx").info("not shown")
    logging.getLogger("gateway").debug("not shown either")
    logging.getLogger("gateway").info("shown")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "gateway shown" in err


async def test_run_until_ends_with_the_stop_and_cancels_the_work() -> None:
    stop = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    asyncio.get_running_loop().call_later(0.02, stop.set)
    async with asyncio.timeout(5):
        await run_until(stop, work(), work())
    assert ended == ["work", "work"]


async def test_run_until_raises_what_a_work_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_until(asyncio.Event(), work(), asyncio.sleep(60))


@contextmanager
def launched(service: str, url: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", service],
        cwd=ROOT,
        env=os.environ | {"INSTAR_REDIS_URL": url} | environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"the process ended without {text!r} on stderr")


@pytest.mark.parametrize(
    ("service", "ready"), [("monitor", "following telemetry"), ("controller", "watching leases")]
)
def test_a_service_ends_with_status_0_when_asked_even_while_redis_is_away(
    own_redis: Callable[..., RedisProcess], service: str, ready: str
) -> None:
    server = own_redis()
    with launched(service, server.url) as process:
        first_line_with(process, ready)
        server.kill()
        first_line_with(process, "lost Redis")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.communicate(timeout=10)[1]
        assert process.returncode == 0
        assert time.monotonic() - began < 3


def test_a_service_that_still_waits_for_redis_ends_with_status_0_when_asked() -> None:
    with launched("monitor", f"redis://:hush@127.0.0.1:{free_port()}/0") as process:
        assert "hush" not in first_line_with(process, "waiting up to")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
        assert process.returncode == 0


def test_a_service_with_a_wrong_password_says_what_to_do_and_that_trying_again_is_no_use(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis("--requirepass", "right-one")
    with launched("controller", server.url) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == CONFIGURATION_ERROR
    assert err.count("\n") == 1
    assert "Redis asks for a password" in err
    assert "right-one" not in err


def test_a_service_with_a_wrong_setting_names_it() -> None:
    with launched("monitor", "redis://127.0.0.1:1/0", INSTAR_MONITOR__INTERVAL_S="often") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == CONFIGURATION_ERROR
    assert "INSTAR_MONITOR__INTERVAL_S" in err
    assert "often" in err
    assert "Traceback" not in err
