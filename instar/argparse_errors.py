"""Answers to slips on the command line: what was wrong, what was probably meant, where help is. Two lines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that answers a mistake in two lines instead of with the usage of everything."""

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        told = message + self._value(message)
        self.exit(2, f"{self.prog}: {told}\n`{self.prog} --help` shows what there is.\n")

    def _value(self, message: str) -> str:
        """Of a flag without its value: which that is, and how one is written that looks like a flag."""
        missing = re.fullmatch(r"argument (?:\S+/)?(-\S+): expected one argument", message)
        if missing is None:
            return ""
        flag = missing[1]
        metavar = self._option_string_actions[flag].metavar
        return f", {metavar}; one that begins with a dash is written {flag}=-..."

    @property
    def flags(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]

    @property
    def verbs(self) -> Mapping[str, Parser]:
        """Of a command that has commands of its own."""
        groups = self._subparsers._group_actions if self._subparsers is not None else []
        return groups[0].choices if groups else {}  # type: ignore[return-value]


def parse(parser: Parser, commands: Mapping[str, Parser], argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the command that `argv` begins with. Words may stand on both sides of flags: where a
    command takes any number of them (`args.words`), the later ones are added. Exits with status 2 on a slip.
    """
    command = _command(parser, commands, argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _take_words(command, args, unknown)
    return args


def _command(parser: Parser, commands: Mapping[str, Parser], argv: Sequence[str]) -> Parser:
    """The one that `argv` leads to."""
    first = argv[0] if argv else ""
    if first and first not in commands:
        _refuse_first(parser, commands, first)
    command = commands.get(first)
    if command is None:
        return parser
    return _command(command, command.verbs, argv[1:]) if command.verbs else command


def _refuse_first(parser: Parser, commands: Mapping[str, Parser], first: str) -> None:
    """Returns if it is a flag of the program itself."""
    flag = first.partition("=")[0]
    if not first.startswith("-"):
        known = f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {first!r}{meant(first, commands) or known}")
    if any(own.startswith(flag) for own in parser.flags) or first == "-h":
        return
    for name, command in commands.items():
        if flag in command.flags:
            parser.error(f"{flag} comes after its command, as in `{parser.prog} {name} {flag}`")
    parser.error(f"there is no flag {flag}{meant(flag, parser.flags)}; flags of a command come after it")


def _take_words(command: Parser, args: argparse.Namespace, unknown: list[str]) -> None:
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-") and word not in ("-", "--")]
    if flags:
        command.error(f"there is no flag {flags[0]}{_setting(flags[0]) or meant(flags[0], command.flags)}")
    if not hasattr(args, "words"):
        command.error(f"takes no {unknown[0]!r}: it has flags only")
    args.words += unknown


def meant(typed: str, known: Iterable[str]) -> str:
    """`; did you mean --port?`, or "" when nothing is close."""
    close = get_close_matches(typed, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _setting(flag: str) -> str:
    """How to set what has no flag of its own: --max-queue is INSTAR_GATEWAY__MAX_QUEUE."""
    from bus.settings import Settings
    from bus.settings_sources import fields_of, variable_of

    key = flag.lstrip("-").replace("-", "_")
    names = (name for name in fields_of(Settings) if key in (name.split(".")[1], name.replace(".", "_")))
    name = next(names, None)
    return f"; it is a setting without one: {variable_of(name)}, or {name} in instar.toml" if name else ""
