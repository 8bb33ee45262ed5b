"""`instar`: the command line. Each command imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from instar.argparse_errors import Parser, parse
from instar.commands.bench import TEXT as BENCH
from instar.commands.bench import add_verbs as add_bench_verbs
from instar.commands.intent_flags import DEPLOYING, MODEL, add_model_verbs
from instar.commands.morph_flags import TEXT as MORPH
from instar.commands.morph_flags import add_verbs
from instar.commands.offline import OFFLINE, run_offline
from instar.flags import add_flags, given_flags

if TYPE_CHECKING:
    from bus.settings import Settings

DESCRIPTION = """\
Instar serves large language models and changes shape while it serves.

  instar serve                      the demo model on http://127.0.0.1:8000/v1
  instar serve path/to/model        any Llama, Mistral, Qwen2 or Qwen3 folder of Hugging Face
  instar status                     workers, memory, instances, what runs and what waits
  instar morph resize 400           KV blocks, the layers' bits, the policy: changed while it serves
  instar drain w1                   a worker finishes what it runs and leaves
  instar model add path/to/llama    measure another model; `instar plan` shows what it would take
  instar deploy llama               serve it as you want it: cheap, fast, small
  instar deployments                what is deployed, where, and what waits for room
  instar complete "def fib(n):"     one completion, as it is written
  instar bench replay azure.csv     recorded traffic sent again, and what came of it
  instar settings                   every setting, its value and who set it
  instar quantize models/demo       layers in fewer bits, to swap to under load
  instar profile models/demo        in which order to swap them
"""

SERVE = """\
Runs Redis, gateway, monitor, controller and workers, starts again what dies, and stops all on Ctrl-C.

  instar serve                                     the demo model
  instar serve models/llama --port 9000            another model and port
  instar serve a=dir/one b=dir/two --workers 2     two models in each of two workers
  instar serve --host 0.0.0.0 --api-key s3cret     for other machines: needs a key
  instar serve config-only/ --load-format dummy    random weights of the folder's config.json

Every flag is a setting: `--port 9000`, INSTAR_PORT=9000 and `[gateway] port = 9000` in instar.toml are the
same; the flag wins over the variable, the variable over the file. `instar settings` lists them all.
"""

STATUS = """\
Asks the running gateway for its state and shows it.

  instar status                     of the service on this machine
  instar status --json              the same for programs
  instar status --url http://host:8000
"""

DRAIN = """\
Tells a worker to leave: it takes nothing new and finishes what it runs, as far as it may take
(worker.drain_timeout_s); what is not finished goes on elsewhere.

  instar drain w1                   waits until it has left
  instar drain w1 --detach          only gives the order
  instar drain w0 --force           also where no other worker serves its model

Under `instar serve` the worker stays away until the service starts anew. The service goes on without any
worker: requests wait for one to join (gateway.queue_timeout_s).
"""

COMPLETE = """\
Completes a text with the running service; the text may come from standard input.

  instar complete hello world
  instar complete "def fib(n):" --max-tokens 60      quotes keep what the shell would read itself
  echo "import os" | instar complete --temperature 0
"""

SETTINGS = """\
Shows every setting: its value, and in brackets the file or variable that set it.

  instar settings                              what a service started here would use
  instar settings --example > instar.toml      a file with every default and its meaning, to edit
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in OFFLINE:
        return run_offline(words[0], words[1:])
    args = parse(*_parsers(), words)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `instar status | head`
        sys.stderr.close()
        return 1


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """The program's own and that of each command."""
    parser = Parser(prog="instar", description=DESCRIPTION, formatter_class=_Help)
    parser.add_argument("--version", action="store_true", help="tell the version")
    parser.set_defaults(run=_help_or_version, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (instar COMMAND --help teaches each)")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str) -> Parser:
        sub = commands.add_parser(
            name, help=summary, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.add_argument("--config", type=Path, metavar="FILE", help="settings file [instar.toml if present]")
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", _serve, "start the service", SERVE)
    serve.add_argument("words", nargs="*", metavar="MODEL", help="model folder, or NAME=DIR [the demo model]")
    add_flags(serve)

    status = command("status", _status, "what runs, and in which shape", STATUS)
    _add_client_flags(status)
    status.add_argument("--json", action="store_true", help="as JSON")

    add_verbs(command("morph", _morph, "change the shape of what runs", MORPH), _add_client_flags)

    add_model_verbs(command("model", _model, "register models, and measure them", MODEL), _add_client_flags)
    for name, summary, text, add in DEPLOYING:
        add(command(name, partial(_deployments, command=name), summary, text), _add_client_flags)

    drain = command("drain", _drain, "let a worker finish what it runs, and leave", DRAIN)
    _add_client_flags(drain)
    drain.add_argument("worker", metavar="WORKER", help="as `instar status` shows it")
    drain.add_argument("--wait", type=float, default=60.0, metavar="S", help="for it to leave [60]")
    drain.add_argument("--detach", action="store_true", help="return at once")
    drain.add_argument("--force", action="store_true", help="also drain the last worker that serves a model")
    drain.add_argument("--json", action="store_true", help="as JSON")

    complete = command("complete", _complete, "complete a text", COMPLETE)
    _add_client_flags(complete)
    complete.add_argument(
        "words", nargs="*", metavar="TEXT", help="[standard input]; several words are joined by spaces"
    )
    complete.add_argument("--model", metavar="NAME", help="[the first one served]")
    complete.add_argument("--max-tokens", type=int, default=64, metavar="N", help="[64]")
    complete.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[0: greedy]")

    add_bench_verbs(
        command("bench", _bench, "replay recorded traffic, or record it", BENCH), _add_client_flags
    )

    settings = command("settings", _settings, "every setting and who set it", SETTINGS)
    settings.add_argument("--example", action="store_true", help="write a settings file with every default")

    for name, summary in OFFLINE.items():  # for the list only: their own processes read their flags
        commands.add_parser(name, help=summary)
    return parser, dict(commands.choices)


class _Help(argparse.RawDescriptionHelpFormatter):
    """argparse does not count that names of commands are indented twice: what a long one does would stand in
    a line of its own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = len("    deployments")


def _add_client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", metavar="URL", help="of the gateway, as its ready line prints it [from the settings]"
    )
    parser.add_argument(
        "--api-key", dest="key", metavar="KEY", help="[the first of the settings, for their own service]"
    )


# --------------------------------------------------------------------------- commands


def _help_or_version(args: argparse.Namespace) -> int:
    if args.version:
        from importlib.metadata import version

        sys.stdout.write(f"instar {version('instar')}\n")
    else:
        args.parser.print_help()
    return 0


def _serve(args: argparse.Namespace) -> int:
    settings = _load(args)
    if settings is None:
        return 2
    from instar.commands.serve import serve

    return serve(settings)


def _status(args: argparse.Namespace) -> int:
    settings = _load(args)
    if settings is None:
        return 2
    from instar.commands.status import status

    return status(settings, url=args.url, key=args.key, as_json=args.json)


def _morph(args: argparse.Namespace) -> int:
    if not args.verb:
        args.help()
        return 0
    settings = _load(args)
    if settings is None:
        return 2
    from instar.commands.morph import morph

    return morph(settings, args)


def _drain(args: argparse.Namespace) -> int:
    settings = _load(args)
    if settings is None:
        return 2
    from instar.commands.drain import drain

    return drain(settings, args)


def _model(args: argparse.Namespace) -> int:
    if not args.verb:
        args.help()
        return 0
    return _deployments(args, f"model {args.verb}")


def _deployments(args: argparse.Namespace, command: str) -> int:
    settings = _load(args)
    if settings is None:
        return 2
    from instar.commands.deploy import run

    return run(settings, args, command)


def _bench(args: argparse.Namespace) -> int:
    if not args.verb:
        args.help()
        return 0
    settings = _load(args)
    if settings is None:
        return 2
    from instar.replay.run import bench

    return bench(settings, args)


def _complete(args: argparse.Namespace) -> int:
    settings = _load(args)
    if settings is None:
        return 2
    from instar.commands.complete import complete

    return complete(
        settings,
        " ".join(args.words) if args.words else _standard_input(),
        url=args.url,
        key=args.key,
        model=args.model,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
    )


def _standard_input() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("instar complete: type the text and end it with Ctrl-D\n")
    return sys.stdin.read()


def _settings(args: argparse.Namespace) -> int:
    from instar.commands.settings import example, listing

    if args.example:
        sys.stdout.write(example())
        return 0
    settings = _load(args)
    if settings is None:
        return 2
    sys.stdout.write(listing(args.config))
    return 0


def _load(args: argparse.Namespace) -> Settings | None:
    """Settings with the flags on top; None after the complaint was written."""
    from bus.settings import SettingsError, load_settings
    from bus.settings_sources import Given

    flags = {name: Given(value, option) for name, (value, option) in given_flags(args).items()}
    if models := getattr(args, "words", None):
        named = flags["worker.models"].value if "worker.models" in flags else []
        flags["worker.models"] = Given([*models, *named], "MODEL")
    try:
        return load_settings(args.config, flags=flags)
    except SettingsError as error:
        sys.stderr.write("".join(f"instar: {line}\n" for line in str(error).splitlines()))
        return None
