"""Command-line parsing: short errors, types of arguments, common flags. Imports nothing that is slow."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

Run = Callable[[argparse.Namespace], int]  # a command: arguments to exit status


class CommandParser(argparse.ArgumentParser):
    """A parser with errors of two lines and without abbreviations. `args.prog` is the command as typed."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.set_defaults(prog=self.prog)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        if missing := re.fullmatch(r"argument (?:\S+/)?(-\S+): expected one argument", message):
            metavar = self._option_string_actions[missing[1]].metavar
            message += f", {metavar}; write {missing[1]}=-... for a value that begins with a dash"
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help` for usage.\n")

    @property
    def flags(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]

    @property
    def commands(self) -> Mapping[str, CommandParser]:
        """The parsers of this parser's own commands."""
        groups = self._subparsers._group_actions if self._subparsers is not None else []
        return groups[0].choices if groups else {}  # type: ignore[return-value]

    @property
    def list_name(self) -> str:
        """The name of the argument that takes any number of words, "" if there is none."""
        return next((one.dest for one in self._get_positional_actions() if one.nargs == "*"), "")


def parse(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`. A list argument may continue after flags. Exits with status 2 after a mistake."""
    command = _command(parser, argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _take_words(command, args, unknown)
    return args


def _command(parser: CommandParser, argv: Sequence[str]) -> CommandParser:
    """Return the parser of the command that `argv` begins with. Exits for an unknown command or flag."""
    commands = parser.commands
    if not (argv and commands):
        return parser
    if argv[0] in commands:
        return _command(commands[argv[0]], argv[1:])
    flag = argv[0].partition("=")[0]
    if not flag.startswith("-"):
        hint = suggestion(argv[0], commands) or f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {argv[0]!r}{hint}")
    if flag not in (*parser.flags, "-h"):
        for name, command in commands.items():
            if flag in command.flags:
                parser.error(f"{flag} comes after its command, as in `{parser.prog} {name} {flag}`")
        hint = suggestion(flag, parser.flags)
        parser.error(f"there is no flag {flag}{hint}; flags of a command come after it")
    return parser


def _take_words(command: CommandParser, args: argparse.Namespace, unknown: list[str]) -> None:
    """Add words that follow a flag to the list argument."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-") and word not in ("-", "--")]
    if flags:
        hint = _setting(flags[0]) or suggestion(flags[0], command.flags)
        command.error(f"there is no flag {flags[0]}{hint}")
    if not command.list_name:
        command.error(f"unexpected argument {unknown[0]!r}")
    getattr(args, command.list_name).extend(unknown)


def suggestion(typed: str, known: Iterable[str]) -> str:
    """Return `; did you mean --port?`, or "" when nothing is close."""
    close = get_close_matches(typed, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _setting(flag: str) -> str:
    """Return how to set a setting without a flag: --max-queue is INSTAR_GATEWAY__MAX_QUEUE."""
    from bus.settings import Settings
    from bus.settings_sources import fields_of, variable_of

    key = flag.lstrip("-").replace("-", "_")
    names = (name for name in fields_of(Settings) if key in (name.split(".")[1], name.replace(".", "_")))
    name = next(names, None)
    return f"; it is a setting without a flag: {variable_of(name)}, or {name} in instar.toml" if name else ""


def subcommands(parser: CommandParser, *, json: bool = True) -> Callable[[str, str, Run], CommandParser]:
    """Return a function that declares a command of `parser` for a running service: name, help, run."""

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show_help)
    group = parser.add_subparsers(metavar="COMMAND", title=f"commands (`{parser.prog} COMMAND --help`)")

    def declare(name: str, help_: str, run: Run) -> CommandParser:
        about = f"{help_[0].upper()}{help_[1:]}."
        command: CommandParser = group.add_parser(name, help=help_, description=about)
        add_config_flag(command, default=argparse.SUPPRESS)
        add_client_flags(command, json=json)
        command.set_defaults(run=run)
        return command

    return declare


def add_config_flag(parser: CommandParser, default: str | None = None) -> None:
    help_ = "settings file [instar.toml if present]"
    parser.add_argument("--config", type=Path, default=default, metavar="FILE", help=help_)


def add_client_flags(parser: CommandParser, *, json: bool = True) -> None:
    """Add the flags of a command that asks a running service."""
    parser.add_argument("--url", metavar="URL", help="URL of the gateway [the service on this machine]")
    parser.add_argument("--api-key", metavar="KEY", help="key for the gateway [from the settings]")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _number(is_allowed: Callable[[float], bool], expected: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be {expected}")
    return value


number_above_zero = partial(_number, lambda value: 0 < value < math.inf, "a number above 0")
number_from_zero = partial(_number, lambda value: 0 <= value < math.inf, "a number, 0 or more")
temperature = partial(_number, lambda value: 0 <= value <= 2, "a number from 0 to 2")


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return a type that accepts `names`. Unlike argparse's `choices` its error suggests the closest."""

    def convert(text: str) -> str:
        if text not in names:
            hint = suggestion(text, names)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}{hint}")
        return text

    return convert


def either(names: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"
