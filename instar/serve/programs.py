"""The programs that `instar serve` runs, as a plain function of the settings."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.settings import Settings, settings_environment
from instar.serve.process import Program, Role
from instar.serve.redis_server import RedisServer

DEMO_MODEL = Path(__file__).resolve().parent.parent.parent / "models" / "demo"
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


def plan_programs(
    settings: Settings, redis: RedisServer | None, environ: Mapping[str, str], num_cpus: int, num_gpus: int
) -> list[Program]:
    """Return the programs in the order of their start. `redis` is None if the settings name a running one."""
    if redis is not None:
        settings = with_values(settings, "redis", url=redis.url)
    stop_s = settings.serve.stop_timeout_s
    environ = {**environ, "PYTHONUNBUFFERED": "1"}  # lines come when written, not by 8 KiB
    programs = [] if redis is None else [_redis_program(redis, environ, stop_s)]
    env = settings_environment(settings, environ)
    programs += [
        _module("gateway", "gateway", env, stop_s + settings.gateway.drain_timeout_s),
        _module("monitor", "monitor", env, stop_s),
        _module("controller", "controller", env, stop_s),
    ]
    for index in range(settings.serve.workers):
        name = worker_id(settings, index, shares_redis=redis is None)
        threads = settings.worker.threads or max(1, num_cpus // settings.serve.workers)
        own = with_values(settings, "worker", id=name, threads=threads)
        if settings.serve.workers == 1 and redis is not None and not settings.worker.max_tp:
            own = with_values(own, "worker", max_tp=1)  # alone: no padding for groups that cannot be
        env = settings_environment(own, environ) | _visible_gpu(settings, environ, index, num_gpus)
        programs.append(_module(name, "worker", env, stop_s + settings.worker.drain_timeout_s))
    return programs


def _module(name: str, role: Role, env: Mapping[str, str], stop_timeout_s: float) -> Program:
    """Return the service of a role. -P ignores a folder `gateway` in the working directory."""
    argv = (sys.executable, "-P", "-m", role)
    return Program(name=name, role=role, argv=argv, env=env, stop_timeout_s=stop_timeout_s)


def with_values(settings: Settings, section: str, **values: Any) -> Settings:
    """Return a copy with keys of one section replaced."""
    changed = getattr(settings, section).model_copy(update=values)
    return settings.model_copy(update={section: changed})


def worker_id(settings: Settings, index: int, *, shares_redis: bool) -> str:
    """Return w0, w1, ..., after the host's name where other hosts use the same Redis."""
    if settings.worker.id:
        return settings.worker.id if settings.serve.workers == 1 else f"{settings.worker.id}{index}"
    return f"{socket.gethostname()}-w{index}" if shares_redis else f"w{index}"


def count_gpus() -> int:
    """Count the GPUs that the driver shows, without loading it."""
    return len(list(NVIDIA_DEVICES.glob("*")))


def _redis_program(redis: RedisServer, environ: Mapping[str, str], stop_timeout_s: float) -> Program:
    env = {name: value for name, value in environ.items() if not name.startswith("INSTAR_")}
    return Program(
        name="redis",
        role="redis",
        argv=redis.argv,
        env=env,
        stdin=redis.config,
        stop_timeout_s=stop_timeout_s,
        is_quiet=True,
    )


def _visible_gpu(settings: Settings, environ: Mapping[str, str], index: int, num_gpus: int) -> dict[str, str]:
    """Give each of several workers a GPU in turn, unless the settings name the device."""
    if settings.serve.workers == 1 or num_gpus == 0 or settings.worker.device not in ("", "cuda"):
        return {}
    visible = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    devices = visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]}
