"""`instar serve`: the whole service on one machine, from one command."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from bus.settings import Settings
from instar.address import why_not_listen
from instar.serve.console import Console
from instar.serve.keeper import CONFIGURATION_ERROR, Backoff, Program
from instar.serve.preflight import why_not_serve
from instar.serve.programs import DEMO_MODEL, available_cpus, count_gpus, plan_programs, with_values
from instar.serve.redis_server import (
    RedisServer,
    RedisServerNotFound,
    free_port,
    plan_redis,
    wait_until_listening,
)
from instar.serve.supervisor import Supervisor

REDIS_START_S = 10.0


class CannotServe(Exception):
    """Found before anything was started; says what to change."""


def serve(settings: Settings) -> int:
    """Runs until Ctrl-C or SIGTERM. Returns the exit status: 0, or 2 when these settings cannot serve."""
    console = Console()
    try:
        settings = ready_to_start(settings)
        redis = None if settings.redis.url else plan_redis(settings.redis.maxmemory_mb)
    except (CannotServe, RedisServerNotFound) as problem:
        sys.stderr.write(f"instar serve: {problem}\n")
        return CONFIGURATION_ERROR
    programs = plan_programs(settings, redis, os.environ, available_cpus(), count_gpus())
    console.say(f"Starting {', '.join(program.name for program in programs)} (Ctrl-C stops them all)")
    return asyncio.run(_supervise(settings, programs, redis, console))


def ready_to_start(settings: Settings) -> Settings:
    """Settings with the model and port that will be used. Raises CannotServe."""
    if not settings.worker.models and not settings.worker.may_be_empty:
        if not DEMO_MODEL.is_dir():
            raise CannotServe("no model: name a model folder, as in `instar serve path/to/model`")
        settings = with_values(settings, "worker", models=[_shortest(DEMO_MODEL)])
    if problem := why_not_serve(settings):
        raise CannotServe(problem)
    if settings.gateway.port == 0:
        settings = with_values(settings, "gateway", port=free_port())
    if problem := why_not_listen(settings.gateway.host, settings.gateway.port):
        raise CannotServe(problem)
    if settings.redis.url and (problem := asyncio.run(_why_not_redis(settings))):
        raise CannotServe(problem)
    return settings


async def _why_not_redis(settings: Settings) -> str:
    from bus.client import RedisProblem, connect

    bus = None
    try:
        bus = connect(settings.redis, source="serve")
        await bus.start(2.0)
    except RedisProblem as problem:
        return str(problem)
    finally:
        if bus is not None:
            await bus.aclose()
    return ""


async def _supervise(
    settings: Settings, programs: list[Program], redis: RedisServer | None, console: Console
) -> int:
    backoff = Backoff(settings.serve.restart_backoff_s, settings.serve.restart_backoff_max_s)
    supervisor = Supervisor(programs, backoff, console, settings.gateway.drain_timeout_s)
    supervisor.listen_to_signals()
    if redis is not None:
        supervisor.start("redis")
        if not await asyncio.to_thread(wait_until_listening, redis.port, REDIS_START_S):
            console.say(f"{redis.program} does not listen yet after {REDIS_START_S:g} s")
    supervisor.start("gateway", "monitor", "controller", "worker")
    watching = asyncio.create_task(_watch(settings, supervisor, console))
    await supervisor.until_end()
    watching.cancel()
    return await supervisor.end()


async def _watch(settings: Settings, supervisor: Supervisor, console: Console) -> None:
    from instar.serve.readiness import Watch

    watch = Watch(settings, console)
    await watch.until_ready()
    while True:
        await supervisor.died.wait()
        supervisor.died.clear()
        await watch.until_whole(supervisor.expected_workers)


def _shortest(path: Path) -> str:
    """Relative to the working directory where that is inside it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
