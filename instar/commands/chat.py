"""`instar chat`: a conversation with a model of the running service."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Final

from bus.precisions import PRECISIONS
from instar.chat.conversation import Conversation
from instar.chat.service import GatewayChat
from instar.chat.session import Session
from instar.chat.terminal import ask_once, open_screen, talk
from instar.client import settings_of
from instar.errors import InputError
from instar.parser import CommandParser, add_client_flags, at_least_one, one_of, suggestion, temperature

DESCRIPTION: Final = """\
Talks with a model of the running service, in this terminal. /help lists the commands of the chat.

  instar chat
  instar chat --model llama --system "Answer briefly."
  instar chat --min-precision full               no layer in fewer bits while it answers
  echo "What is an instar?" | instar chat        one question, the answer on standard output
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser, json=False)
    for flag, type_, metavar, help_ in (
        ("--model", str, "NAME", "[the first one served]"),
        ("--system", str, "TEXT", "what the model is told before the conversation"),
        ("--min-precision", one_of(PRECISIONS), "NAME", f"{', '.join(PRECISIONS)} [any]"),
        ("--max-tokens", at_least_one, "N", "longest answer [what the model's context holds]"),
        ("--temperature", temperature, "T", "0 to 2 [the model's own]"),
    ):
        parser.add_argument(flag, type=type_, metavar=metavar, help=help_)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with closing(GatewayChat(settings_of(args), args.url, args.api_key)) as service:
        names = service.models()
        if args.model and args.model not in names:
            hint = suggestion(args.model, names) or f"; there are {', '.join(names)}"
            raise InputError(f"--model {args.model}: no such model is served{hint}")
        conversation = Conversation(
            model=args.model or names[0],
            system=args.system or "",
            min_precision=args.min_precision or "",
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        )
        session = Session(service, conversation)
        return talk(session, open_screen()) if sys.stdin.isatty() else ask_once(session)
