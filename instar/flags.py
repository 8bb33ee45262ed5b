"""Flags of `instar serve`: each is a setting under the name vLLM gives it, where the meaning is the same."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """The value stays text: the settings know its type and say what they accept."""

    option: str
    setting: str
    metavar: str
    help: str
    repeatable: bool = False

    @property
    def name(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


FLAGS = (
    Flag(
        "--host",
        "gateway.host",
        "ADDRESS",
        "where to listen [127.0.0.1]; beyond this machine needs --api-key",
    ),
    Flag("--port", "gateway.port", "N", "[8000]; 0 takes a free one"),
    Flag("--api-key", "gateway.api_keys", "KEY", "ask for this key on /v1; may be repeated", repeatable=True),
    Flag("--workers", "serve.workers", "N", "worker processes, one per GPU [1]"),
    Flag("--model", "worker.models", "DIR", "as MODEL; NAME=DIR names it; may be repeated", repeatable=True),
    Flag("--load-format", "worker.load_format", "FORMAT", "safetensors, or dummy for random weights"),
    Flag("--dtype", "worker.dtype", "TYPE", "auto, float32, bfloat16 or float16"),
    Flag("--device", "worker.device", "NAME", "cpu, cuda, cuda:1, ... [a GPU if there is one]"),
    Flag("--memory-mb", "worker.memory_mb", "MB", "weights and KV cache of a worker"),
    Flag("--max-model-len", "worker.max_model_len", "TOKENS", "longest prompt and answer together"),
    Flag("--max-num-seqs", "worker.max_num_seqs", "N", "sequences in one step"),
    Flag("--max-num-batched-tokens", "worker.max_num_batched_tokens", "N", "tokens in one step"),
    Flag("--redis-url", "redis.url", "URL", "use a running Redis instead of starting one"),
    Flag("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    for flag in FLAGS:
        action = "append" if flag.repeatable else "store"
        parser.add_argument(flag.option, dest=flag.name, metavar=flag.metavar, help=flag.help, action=action)


def given_flags(args: argparse.Namespace) -> dict[str, tuple[object, str]]:
    """section.key -> (value, the flag as it was typed), of the flags that were given."""
    values = {flag: getattr(args, flag.name, None) for flag in FLAGS}
    return {flag.setting: (value, flag.option) for flag, value in values.items() if value is not None}
