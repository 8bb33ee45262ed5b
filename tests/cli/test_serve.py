"""`instar serve`: what is started, what happens when it dies, how it ends. Small programs play services."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from bench.common.redis import running_redis
from bus.settings import Settings, load_settings
from instar.commands.serve import ready_to_start
from instar.errors import InputError
from instar.running import url_of
from instar.serve.child import Child
from instar.serve.preflight import listening_problem
from instar.serve.process import Backoff, Console, Program, Role
from instar.serve.programs import plan_programs, with_values
from instar.serve.readiness import ServiceWatcher
from instar.serve.redis_server import (
    RedisServer,
    find_redis_server,
    free_port,
    plan_redis,
    server_version,
    wait_until_listening,
)
from instar.serve.supervisor import Supervisor
from tests.support.paths import ROOT

QUICK = Backoff(0.05, 0.4)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def program(name: str, role: Role, code: str = SLEEP, stop_timeout_s: float = 5.0) -> Program:
    argv = (sys.executable, "-c", code)
    return Program(name=name, role=role, argv=argv, env=dict(os.environ), stop_timeout_s=stop_timeout_s)


class Running:
    """A supervisor with these programs, and what it wrote."""

    def __init__(self, *programs: Program) -> None:
        self.out = io.StringIO()
        self.supervisor = Supervisor(programs, QUICK, Console(self.out))
        self.supervisor.start("redis", "gateway", "monitor", "controller", "worker")
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> int:
        await self.supervisor.until_end()
        return await self.supervisor.end()

    @property
    def text(self) -> str:
        return self.out.getvalue()

    async def until(self, true: Callable[[], bool], within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.01)

    async def end(self) -> int:
        self.supervisor.request_stop()
        async with asyncio.timeout(10):
            return await self.task

    def pid(self, name: str) -> int:
        child = next(k for k in self.supervisor.processes if k.program.name == name)._child
        assert child is not None
        return child.transport.get_pid()


# --------------------------------------------------------------------------- what is started


def test_one_worker_a_device_each_with_its_share_of_the_cores() -> None:
    settings = with_values(Settings(), "serve", workers=2)
    programs = plan_programs(
        settings, plan_redis(64, "instar:"), {"PATH": "/bin", "INSTAR_PORT": "9"}, 8, num_gpus=0
    )
    assert [p.name for p in programs] == ["redis", "gateway", "monitor", "controller", "w0", "w1"]
    own = load_settings(environ=programs[-1].env)
    assert (own.worker.id, own.worker.threads) == ("w1", 4)
    assert own.redis.url.startswith("redis://worker:")
    assert "CUDA_VISIBLE_DEVICES" not in programs[-1].env


def test_workers_take_the_gpus_in_turn() -> None:
    settings = with_values(Settings(), "serve", workers=3)
    programs = plan_programs(settings, None, {"CUDA_VISIBLE_DEVICES": "4,6"}, 8, num_gpus=8)
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in programs if p.role == "worker"] == ["4", "6", "4"]
    named = with_values(settings, "worker", device="cuda:1")
    programs = plan_programs(named, None, {}, 8, num_gpus=8)
    assert all("CUDA_VISIBLE_DEVICES" not in p.env for p in programs)


def test_workers_that_share_a_redis_with_other_hosts_carry_their_hosts_name() -> None:
    settings = with_values(Settings(), "redis", url="redis://elsewhere:6379/0")
    workers = [p.name for p in plan_programs(settings, None, {}, 1, 0) if p.role == "worker"]
    assert workers == [f"{socket.gethostname()}-w0"]


@pytest.mark.parametrize(
    ("workers", "has_own_redis", "given", "max_tp"),
    [(1, True, 0, 1), (1, True, 4, 4), (2, True, 0, 4), (1, False, 0, 4)],
)
def test_weights_of_a_single_worker_are_not_padded_for_groups(
    workers: int, has_own_redis: bool, given: int, max_tp: int
) -> None:
    settings = with_values(with_values(Settings(), "serve", workers=workers), "worker", max_tp=given)
    programs = plan_programs(settings, plan_redis(64, "instar:") if has_own_redis else None, {}, 8, 0)
    own = load_settings(environ=programs[-1].env)
    assert own.worker.in_force("cpu").max_tp == max_tp


def test_a_redis_with_a_folder_keeps_its_data_and_one_folder_is_for_one_server(tmp_path: Path) -> None:
    folder = tmp_path / 'a "folder"'

    def ask(server: RedisServer, *command: str) -> Any:
        process = subprocess.Popen(server.argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            assert process.stdin is not None
            process.stdin.write(server.config)
            process.stdin.close()
            assert wait_until_listening(server.port, 10)
            with redis.Redis.from_url(server.url("controller")) as client:
                return client.execute_command(*command)
        finally:
            process.kill()
            process.wait(10)

    kept = plan_redis(64, "instar:", str(folder))
    assert ask(kept, "SET", "instar:boot", "a1")
    assert ask(kept, "GET", "instar:boot") == b"a1"
    assert folder.stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match="is in use by another `instar serve`"):
        plan_redis(64, "instar:", str(folder))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"redis\.folder = .* cannot be used: "):
        plan_redis(64, "instar:", str(tmp_path / "file"))
    without = plan_redis(64, "instar:")
    ask(without, "SET", "instar:boot", "a1")
    assert ask(without, "GET", "instar:boot") is None


def test_no_password_is_in_an_argument() -> None:
    server = plan_redis(64, "instar:")
    programs = plan_programs(Settings(), server, {}, 1, 0)
    words = " ".join(word for p in programs for word in p.argv)
    assert not any(password in words for password in server.passwords.values())


def test_each_process_gets_its_own_secrets_only() -> None:
    settings = with_values(Settings(), "gateway", api_keys=["a-key-of-clients"], admin_keys=["an-admins-key"])
    server = plan_redis(64, "instar:")
    programs = plan_programs(settings, server, {}, 1, 0)
    assert len(set(server.passwords.values())) == len(server.passwords)
    for program in programs:
        given = " ".join(program.env.values())
        held = {role for role, password in server.passwords.items() if password in given}
        assert held == {program.role} - {"redis"}
        assert ("a-key-of-clients" in given) == ("an-admins-key" in given) == (program.role == "gateway")
    digests = programs[0].stdin.decode()
    assert not any(password in digests for password in server.passwords.values())


# --------------------------------------------------------------------------- before anything starts


def test_a_port_in_use_is_one_line_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = listening_problem("127.0.0.1", port)
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use"):
            ready_to_start(with_values(Settings(), "gateway", port=port))
    assert f"--port {port + 1}" in told
    assert "\n" not in told
    assert listening_problem("127.0.0.1", port) == ""


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    assert "cannot be opened" in listening_problem("192.0.2.1", 8000)
    assert "not an address of this machine" in listening_problem("no such host", 8000)


def test_a_redis_that_is_not_there_is_told_before_anything_starts() -> None:
    settings = with_values(Settings(), "gateway", port=0)
    settings = with_values(settings, "redis", url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(InputError, match=r"127\.0\.0\.1"):
        ready_to_start(settings)


def test_the_address_told_can_be_opened_from_here() -> None:
    def at(host: str) -> str:
        return url_of(with_values(Settings(), "gateway", host=host).gateway)

    assert at("0.0.0.0") == "http://127.0.0.1:8000"
    assert at("::1") == "http://[::1]:8000"


# --------------------------------------------------------------------------- Redis


def test_a_redis_server_is_found_and_listens_with_a_password() -> None:
    import redis

    with running_redis(maxmemory_mb=32) as (url, _):
        with redis.Redis.from_url(url) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        keyless = redis.Redis.from_url(re.sub(r"//.*@", "//", url))
        with keyless as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_a_redis_that_is_too_old_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    assert server_version(old) == (5, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_redis_server() != old
    monkeypatch.setattr("instar.serve.redis_server._package_folder", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"5\.0"):
        find_redis_server()


# --------------------------------------------------------------------------- what dies, and how it ends


async def test_a_died_process_is_started_again_and_it_is_said_why() -> None:
    running = Running(program("gateway", "gateway"), program("w0", "worker"))
    await running.until(lambda: running.text.count("w0        | up") == 1)
    os.kill(running.pid("w0"), signal.SIGKILL)
    await running.until(lambda: running.text.count("w0        | up") == 2)
    assert "w0 died (killed by SIGKILL); starting it again in 0.05 s" in running.text
    assert await running.end() == 0


async def test_a_process_that_cannot_be_started_for_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, tries = Child.start, 0

    async def scarce(*args: Any) -> Child:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*args)

    monkeypatch.setattr(Child, "start", scarce)
    running = Running(program("gateway", "gateway"))
    await running.until(lambda: "up" in running.text)
    assert "gateway cannot be started: [Errno 11] Resource temporarily unavailable" in running.text
    assert "starting it again in 0.1 s" in running.text
    assert await running.end() == 0


async def test_pauses_between_starts_grow() -> None:
    running = Running(program("gateway", "gateway", "raise SystemExit(3)"), program("w0", "worker"))
    await running.until(lambda: running.text.count("gateway died") >= 4)
    await running.end()
    assert "(exit status 3); starting it again in 0.1 s" in running.text
    assert [QUICK.pause_s(n) for n in (1, 2, 3, 4, 5)] == [0.05, 0.1, 0.2, 0.4, 0.4]


async def test_settings_that_cannot_work_end_the_service_with_status_2_and_the_reason() -> None:
    running = Running(
        program("gateway", "gateway"),
        program("w0", "worker", "import sys; print('models/x: no config.json'); sys.exit(2)"),
    )
    async with asyncio.timeout(10):
        assert await running.task == 2
    assert "Instar cannot serve: w0: models/x: no config.json" in running.text
    assert running.text.count("w0        |") == 1


async def test_one_worker_that_cannot_run_does_not_end_the_others() -> None:
    running = Running(
        program("gateway", "gateway"), program("w0", "worker"), program("w1", "worker", "raise SystemExit(2)")
    )
    await running.until(lambda: "w1 cannot run with these settings" in running.text)
    await asyncio.sleep(0.1)
    assert not running.task.done()
    assert running.supervisor.expected_workers().keys() == {"w0"}
    assert await running.end() == 0


async def test_a_worker_that_lost_its_gpu_is_started_again_on_a_gpu_alone() -> None:
    tell = "import os; print(f'on {os.environ.get(\"INSTAR_WORKER__DEVICE\")}'); raise SystemExit(3)"
    running = Running(program("gateway", "gateway"), program("w0", "worker", tell))
    await running.until(lambda: running.text.count("w0 died (exit status 3)") >= 2)
    assert await running.end() == 0
    told = [line.partition("| ")[2] for line in running.text.splitlines() if "| on " in line]
    assert told[:2] == ["on None", "on cuda"], "it must not serve on the CPU instead"


async def test_a_drained_worker_is_not_started_again() -> None:
    running = Running(
        program("gateway", "gateway"), program("w0", "worker"), program("w1", "worker", "print('bye')")
    )
    await running.until(lambda: "w1 left (exit status 0)" in running.text)
    assert not running.task.done()
    assert await running.end() == 0


async def test_the_service_goes_on_when_its_last_worker_was_drained() -> None:
    running = Running(program("gateway", "gateway"), program("w0", "worker", "print('bye')"))
    await running.until(lambda: "No worker is left: requests wait" in running.text)
    await asyncio.sleep(0.1)
    assert not running.task.done()
    assert await running.end() == 0
    assert running.text.count("No worker is left") == 1


async def test_the_gateway_ends_first_and_redis_last() -> None:
    names: dict[str, Role] = {"redis": "redis", "gateway": "gateway", "monitor": "monitor", "w0": "worker"}
    code = """
import signal, sys, time
def bye(*_): print('bye', flush=True); time.sleep(0.1); sys.exit(0)
signal.signal(signal.SIGTERM, bye); print('up', flush=True); time.sleep(60)"""
    running = Running(*(program(name, role, code) for name, role in names.items()))
    await running.until(lambda: running.text.count("| up") == 4)
    assert await running.end() == 0
    ended = [line.split()[0] for line in running.text.splitlines() if line.endswith("| bye")]
    assert ended == ["gateway", "w0", "monitor", "redis"]


async def test_the_end_says_how_long_running_requests_may_take() -> None:
    out = io.StringIO()
    supervisor = Supervisor([program("gateway", "gateway")], QUICK, Console(out), drain_s=30.0)
    supervisor.request_stop()
    assert "running requests have 30 s to finish; Ctrl-C again stops at once" in out.getvalue()


@pytest.mark.parametrize(
    ("level", "said"),
    [("info", ["w0: loading", "w0: compiling"]), ("warning", ["w0: loading", "w0: 50%", "w0: compiling"])],
)
async def test_progress_is_told_once_and_only_where_there_is_some(
    level: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ["", "50%", "50%", "compiling"]
    states = [{"workers": [{"id": "w0", "state": "loading", "progress": step}]} for step in steps]
    asked: list[Any] = [(None, None), *((None, state) for state in states), (None, {}), ({}, {})]
    answers = iter([answer for pair in asked for answer in pair])

    async def get(*_: object) -> Any:
        return next(answers)

    monkeypatch.setattr("instar.serve.readiness._get", get)
    for name in ("POLL_S", "PROGRESS_AFTER_S", "PROGRESS_EVERY_S"):
        monkeypatch.setattr(f"instar.serve.readiness.{name}", 0.0)
    out = io.StringIO()
    settings = with_values(with_values(Settings(), "log", level=level), "worker", models=["models/demo"])
    await ServiceWatcher(settings, Console(out)).until_ready()
    ready = "Instar is ready: http://127.0.0.1:8000/v1 (model demo)"
    assert out.getvalue().splitlines() == [*said, ready]


async def test_a_process_that_will_not_end_is_killed_when_patience_is_over_or_hurry_asked() -> None:
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    running = Running(
        program("gateway", "gateway", deaf, stop_timeout_s=0.2), program("w0", "worker", deaf, 60)
    )
    await running.until(lambda: running.text.count("| up") == 2)
    running.supervisor.request_stop()
    await running.until(lambda: "killed gateway (still running after 0.2 s)" in running.text)
    running.supervisor.request_stop()
    async with asyncio.timeout(5):
        assert await running.task == 0
    assert "killed w0 (second Ctrl-C)" in running.text


async def test_a_line_without_end_and_bytes_that_are_no_text_do_no_harm() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff' * 200_000 + b'\\nlast\\n'); raise SystemExit(2)"
    running = Running(program("gateway", "gateway", code), program("w0", "worker"))
    async with asyncio.timeout(10):
        assert await running.task == 2
    assert "Instar cannot serve: gateway: last" in running.text


async def test_a_terminal_that_went_away_does_not_keep_the_service_from_ending() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    supervisor = Supervisor([program("gateway", "gateway")], QUICK, Console(Gone()))
    supervisor.start("gateway")
    await asyncio.sleep(0.2)
    supervisor.request_stop()
    async with asyncio.timeout(10):
        await supervisor.until_end()
        assert await supervisor.end() == 0


def test_no_child_outlives_a_supervisor_that_is_killed() -> None:
    code = f"""
import asyncio, os, sys
sys.path.insert(0, {str(ROOT)!r})
from instar.serve.child import Child
async def main():
    child = await Child.start((sys.executable, "-c", "import time; time.sleep(60)"), os.environ, b"", print)
    print(child.transport.get_pid(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    child = int(supervisor.stdout.readline())
    time.sleep(0.3)  # past the start of pdeathsig.py
    os.kill(child, 0)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert _is_gone(child)


def _is_gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # dead; whoever inherited it has not read its status yet
            return True
        time.sleep(0.02)
    return False
