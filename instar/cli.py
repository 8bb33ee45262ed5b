"""`instar`: the command line. A command's module is imported only when it is typed: --help is instant."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Final

from instar.errors import CommandError
from instar.parser import CommandParser, add_config_flag, parse

COMMANDS: Final = {
    "serve": "start the service",
    "chat": "talk with a model in the terminal",
    "pull": "download a model from a hub",
    "status": "show workers, memory, instances and morphs",
    "morph": "change the shape of a running instance",
    "model": "register models and measure them",
    "plan": "show what each way to serve a model would cost",
    "deploy": "serve a registered model by an intent",
    "deployments": "show deployments and why they wait",
    "retire": "end a deployment",
    "keys": "add, list and revoke API keys",
    "drain": "let a worker finish its requests and leave",
    "complete": "complete a text",
    "demo": "show what morphs do under load, in less than three minutes",
    "bench": "replay recorded traffic, or record it",
    "simulate": "compute what a cluster would do with recorded traffic",
    "settings": "show every setting and its source",
}

# These run where torch is, as `python -m worker.offline NAME`, and parse their own flags.
OFFLINE: Final = {
    "quantize": "quantise layers, to swap to under load",
    "profile": "find the order in which layers are swapped",
    "convert": "make safetensors of a GGUF file or of .bin files",
}
CANNOT_RUN: Final = 2
# Those that run the service; the others only ask one.
RUN_THE_SERVICE: Final = ("serve", "demo")
OWN: Final = ("instar", "bus", "")

DESCRIPTION = """\
Instar serves large language models and changes shape while it serves.

  instar serve path/to/model        a model folder of Hugging Face [demo model]
  instar chat                       talk with the model that is served
  instar status                     what runs, on which workers, with how much memory
  instar pull ORG/NAME              download a model, which `instar serve ORG/NAME` finds
  instar morph resize 400           change KV blocks, precision or the policy by hand
  instar deploy llama               serve a registered model by an intent: cheap, fast or small
  instar complete "def fib(n):"     print a completion as it is generated
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in OFFLINE:
        return run_offline(words[0], words[1:])
    name = words[0] if words else ""
    try:
        return _run(name, words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN:
            raise
        sys.stderr.write(f"instar {name}: {missing} is not installed here: {install_line(name)}\n")
        return CANNOT_RUN


def _run(name: str, words: Sequence[str]) -> int:
    args = parse(parser_for(name), words)
    try:
        return int(args.run(args))
    except CommandError as error:
        sys.stderr.write("".join(f"{args.prog}: {line}\n" for line in str(error).splitlines()))
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `instar status | head`
        sys.stderr.close()
        return 1


def parser_for(first: str) -> CommandParser:
    """Return the parser with the flags of the command `first`, or of all commands if it is a flag."""
    parser = CommandParser(prog="instar", description=DESCRIPTION, formatter_class=_Help)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(run=lambda args: _show_help_or_version(parser, args))
    group = parser.add_subparsers(metavar="COMMAND", title="commands (`instar COMMAND --help`)")
    is_misplaced_flag = first.startswith("-") and first not in ("-h", "--help", "--version")
    for name, help_ in (COMMANDS | OFFLINE).items():
        command = group.add_parser(name, help=help_)
        if name in COMMANDS and (name == first or is_misplaced_flag):
            add_config_flag(command)
            module = importlib.import_module(f"instar.commands.{name}")
            command.description = module.DESCRIPTION
            module.add_to(command)
    return parser


def install_line(command: str) -> str:
    """Return what installs the packages that a command needs."""
    return f"pip install 'instar[{'serve' if command in RUN_THE_SERVICE else 'services'}]'"


def run_offline(name: str, argv: Sequence[str]) -> int:
    """Replace this process. Returns an exit status only if the worker is not installed here."""
    missing = [package for package in ("worker", "torch") if importlib.util.find_spec(package) is None]
    if not missing:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "worker.offline", name, *argv])
    sys.stderr.write(f"instar {name}: {missing[0]} is not installed here: pip install 'instar[worker]'\n")
    return CANNOT_RUN


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the longest command and its summary on one line: argparse forgets one indentation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = len("    ") + max(map(len, COMMANDS | OFFLINE))


def _show_help_or_version(parser: CommandParser, args: argparse.Namespace) -> int:
    if args.version:
        from bus.version import program_version

        sys.stdout.write(f"instar {program_version()}\n")
    else:
        parser.print_help()
    return 0
