"""`instar complete`: one completion, printed as it is generated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import httpx

from instar.client import (
    gateway_client,
    model_names,
    require_utf8,
    settings_of,
    standard_input_text,
    stream_choices,
)
from instar.parser import CommandParser, add_client_flags, at_least_one, temperature

DESCRIPTION = """\
Completes a text with the running service. Without TEXT, reads it from standard input.

  instar complete hello world
  instar complete "def fib(n):" --max-tokens 60      quotes keep what the shell would interpret
  echo "import os" | instar complete --temperature 0
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser, json=False)
    parser.add_argument("text", nargs="*", metavar="TEXT", help="words, joined by spaces [standard input]")
    for flag, type_, default, metavar, help_ in (
        ("--model", str, None, "NAME", "[the first one served]"),
        ("--max-tokens", at_least_one, 64, "N", "length of the completion [64]"),
        ("--temperature", temperature, 0.0, "T", "0 to 2 [0: greedy]"),
    ):
        parser.add_argument(flag, type=type_, default=default, metavar=metavar, help=help_)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    text = require_utf8(" ".join(args.text)) if args.text else _standard_input()
    with gateway_client(settings, args.url, args.api_key, "api_keys") as client:
        body = {
            "model": args.model or model_names(client)[0],
            "prompt": text,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
        }
        for piece in stream_text(client, body):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _standard_input() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("instar complete: type the text and end it with Ctrl-D\n")
    return standard_input_text()


def stream_text(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    """Yield the text of a streamed completion in pieces. Raises ServerError."""
    return (choice["text"] for choice in stream_choices(client, "/v1/completions", body))
