"""The programs that `instar serve` runs, as a plain function of the settings."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from bus.settings import Settings, settings_environment
from instar.serve.process import Program
from instar.serve.redis_server import RedisServer

Service = Literal["gateway", "monitor", "controller", "worker"]

# The keys are asked for by the gateway alone; an origin "*" takes one.
NO_KEYS: Final[dict[str, Any]] = {"api_keys": [], "admin_keys": [], "cors_origins": []}

# Folders that may have models/demo: a checkout, and where a wheel puts its data.
_DEMO_PARENTS = (Path(__file__).resolve().parent.parent.parent, Path(sys.prefix, "share", "instar"))
DEMO_MODEL = next(
    (path for parent in _DEMO_PARENTS if (path := parent / "models" / "demo").is_dir()),
    _DEMO_PARENTS[0] / "models" / "demo",
)
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


def plan_programs(
    settings: Settings, redis: RedisServer | None, environ: Mapping[str, str], num_cpus: int, num_gpus: int
) -> list[Program]:
    """Return the programs in the order of their start. `redis` is None if the settings name a running one."""
    stop_s = settings.serve.stop_timeout_s
    environ = {**environ, "PYTHONUNBUFFERED": "1"}  # lines come when written, not by 8 KiB
    programs = [] if redis is None else [_redis_program(redis, environ, stop_s)]
    drain_s = settings.gateway.drain_timeout_s
    services: tuple[tuple[Service, float], ...] = (("gateway", drain_s), ("monitor", 0), ("controller", 0))
    for role, more_s in services:
        env = settings_environment(_own(settings, role, redis), environ)
        programs.append(_module(role, role, env, stop_s + more_s))
    for index in range(settings.serve.workers):
        name = worker_id(settings, index, shares_redis=redis is None)
        threads = settings.worker.threads or max(1, num_cpus // settings.serve.workers)
        own = with_values(_own(settings, "worker", redis), "worker", id=name, threads=threads)
        if settings.serve.workers == 1 and redis is not None and not settings.worker.max_tp:
            own = with_values(own, "worker", max_tp=1)  # alone: no padding for groups that cannot be
        env = settings_environment(own, environ) | _visible_gpu(settings, environ, index, num_gpus)
        programs.append(_module(name, "worker", env, stop_s + settings.worker.drain_timeout_s))
    return programs


def _own(settings: Settings, role: Service, redis: RedisServer | None) -> Settings:
    """Return the settings of one process: its own password of Redis, and keys only where they are asked."""
    if redis is not None:
        settings = with_values(settings, "redis", url=redis.url(role))
    return settings if role == "gateway" else with_values(settings, "gateway", **NO_KEYS)


def _module(name: str, role: Service, env: Mapping[str, str], stop_timeout_s: float) -> Program:
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
