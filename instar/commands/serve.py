"""`instar serve`: the whole service on one machine, from one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path

from bus.settings import Settings
from bus.settings_sources import Given, Layer
from instar.client import settings_of
from instar.errors import InputError
from instar.parser import CommandParser
from instar.running import announced, url_of
from instar.serve.models import served_entries
from instar.serve.preflight import listening_problem, settings_problem
from instar.serve.process import Backoff, Console, Program
from instar.serve.programs import DEMO_MODEL, count_gpus, plan_programs, with_values
from instar.serve.readiness import ServiceWatcher
from instar.serve.redis_server import RedisServer, free_port, plan_redis, wait_until_listening
from instar.serve.supervisor import Supervisor

REDIS_START_S = 10.0

DESCRIPTION = """\
Runs Redis, gateway, monitor, controller and workers, restarts what dies, and stops all on Ctrl-C.

  instar serve                                     the demo model
  instar serve models/llama --port 9000            another model and port
  instar serve model-Q8_0.gguf                     a GGUF file, made into a folder at the first start
  instar serve a=dir/one b=dir/two --workers 2     two models in each of two workers
  instar serve --host 0.0.0.0 --api-key s3cret     for other machines: needs a key
  instar serve config-only/ --load-format dummy    random weights of the folder's config.json

Every flag is a setting: `--port 9000`, INSTAR_PORT=9000 and `[gateway] port = 9000` in instar.toml mean the
same. A flag wins over a variable, a variable over the file. `instar settings` lists all settings.

Other commands find the service of this machine. If several run, --url or INSTAR_PORT says which.
"""


# Settings as flags, under vLLM's names where the meaning is the same. The settings parse the values.
FLAGS = (
    ("--host", "gateway.host", "ADDRESS", "[127.0.0.1]; beyond this machine needs --api-key"),
    ("--port", "gateway.port", "N", "[8000]; 0 takes a free one"),
    ("--api-key", "gateway.api_keys", "KEY", "require this key on /v1; may be repeated"),
    ("--ssl-certfile", "gateway.ssl_certfile", "FILE", "certificate in PEM: serve HTTPS"),
    ("--ssl-keyfile", "gateway.ssl_keyfile", "FILE", "its key [in the file of the certificate]"),
    ("--workers", "serve.workers", "N", "worker processes, one per GPU [1]"),
    ("--model", "worker.models", "DIR", "the same as MODEL; may be repeated"),
    ("--load-format", "worker.load_format", "FORMAT", "safetensors, or dummy for random weights"),
    ("--dtype", "worker.dtype", "TYPE", "auto, float32, bfloat16 or float16"),
    ("--kv-dtype", "worker.kv_dtype", "TYPE", "of the KV cache: full, or int8 for more of it"),
    ("--device", "worker.device", "NAME", "cpu, cuda, cuda:1, ... [a GPU if there is one]"),
    ("--memory-mb", "worker.memory_mb", "MB", "weights and KV cache of a worker"),
    ("--max-model-len", "worker.max_model_len", "TOKENS", "longest prompt and answer together"),
    ("--max-num-seqs", "worker.max_num_seqs", "N", "sequences in one step; also limits the KV cache"),
    ("--max-num-batched-tokens", "worker.max_num_batched_tokens", "N", "tokens in one step"),
    ("--redis-url", "redis.url", "URL", "use a running Redis instead of starting one"),
    ("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
)
REPEATABLE = ("--api-key", "--model")


def add_to(parser: CommandParser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="folder, GGUF file or NAME=DIR [the demo model]"
    )
    for flag, _, metavar, help_ in FLAGS:
        action = "append" if flag in REPEATABLE else "store"
        parser.add_argument(flag, metavar=metavar, help=help_, action=action)
    parser.set_defaults(run=lambda args: serve(settings_of(args, given_flags(args))))


def given_flags(args: argparse.Namespace) -> Layer:
    """Return the settings that flags and MODELs give."""
    values = vars(args)
    layer = {
        setting: Given(value, flag)
        for flag, setting, *_ in FLAGS
        if (value := values[flag.removeprefix("--").replace("-", "_")]) is not None
    }
    if args.models:
        layer["worker.models"] = Given([*args.models, *(args.model or [])], "MODEL")
    return layer


def serve(settings: Settings) -> int:
    """Run until Ctrl-C or SIGTERM. Returns the exit status. Raises InputError before anything starts."""
    console = Console()
    settings = ready_to_start(settings)
    models = served_entries(settings.worker.models, console.say)
    settings = with_values(settings, "worker", models=models)
    section = settings.redis
    redis = None if section.url else plan_redis(section.maxmemory_mb, section.prefix, section.folder)
    num_cpus = len(os.sched_getaffinity(0))
    programs = plan_programs(settings, redis, os.environ, num_cpus, count_gpus())
    console.say(f"Starting {', '.join(program.name for program in programs)} (Ctrl-C stops them all)")
    with announced(url_of(settings.gateway)):
        return asyncio.run(_supervise(settings, programs, redis, console))


def ready_to_start(settings: Settings) -> Settings:
    """Return the settings with the model and port that will be used. Raises InputError."""
    if not settings.worker.models and not settings.worker.may_be_empty:
        if not DEMO_MODEL.is_dir():
            raise InputError("no model: name a model folder, as in `instar serve path/to/model`")
        settings = with_values(settings, "worker", models=[_shortest(DEMO_MODEL)])
    if problem := settings_problem(settings):
        raise InputError(problem)
    if settings.gateway.port == 0:
        settings = with_values(settings, "gateway", port=free_port())
    if problem := listening_problem(settings.gateway.host, settings.gateway.port):
        raise InputError(problem)
    if settings.redis.url and (problem := asyncio.run(_redis_problem(settings))):
        raise InputError(problem)
    return settings


async def _redis_problem(settings: Settings) -> str:
    from bus.client import RedisProblem, connect

    try:
        async with contextlib.aclosing(connect(settings.redis, source="serve", role="cli")) as bus:
            await bus.start(2.0)
    except RedisProblem as problem:
        return str(problem)
    return ""


async def _supervise(
    settings: Settings, programs: list[Program], redis: RedisServer | None, console: Console
) -> int:
    backoff = Backoff(settings.serve.restart_backoff_s, settings.serve.restart_backoff_max_s)
    supervisor = Supervisor(programs, backoff, console, settings.gateway.drain_timeout_s)
    supervisor.handle_signals()
    if redis is not None:
        supervisor.start("redis")
        if not await asyncio.to_thread(wait_until_listening, redis.port, REDIS_START_S):
            console.say(f"{redis.program} does not listen yet after {REDIS_START_S:g} s")
    supervisor.start("gateway", "monitor", "controller", "worker")
    watching = asyncio.create_task(ServiceWatcher(settings, console).watch(supervisor))
    await supervisor.until_end()
    watching.cancel()
    return await supervisor.end()


def _shortest(path: Path) -> str:
    """Return `path` relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
