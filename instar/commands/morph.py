"""`instar morph`: change the shape of a running instance, and the policy."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import httpx

from bus.messages import PARTS
from bus.morphs import MORPHS, MorphEntry
from bus.policy import FIELDS
from bus.precisions import PRECISIONS
from instar.client import admin_client, ask_json, get_json
from instar.errors import InputError, ServerError
from instar.output.morph_numbers import heading, numbers_text
from instar.output.progress import progress_line
from instar.output.tables import write_json, write_text
from instar.parser import (
    CommandParser,
    at_least_one,
    either,
    number_from_zero,
    one_of,
    subcommands,
)

DONE: Final = ("applied", "running")
POLL_S: Final = 0.1
MANUAL: Final = "manual"

DESCRIPTION = """\
Changes the shape of a running instance by hand, and the policy by which the service changes it itself.

  instar morph swap --count 2 --precision int4          the next two layers in the profile's order
  instar morph swap demo@w0 --layers 0,4-6 --precision full
  instar morph swap --layers 3 --part ffn --precision int8
  instar morph resize 400                               the number of KV blocks
  instar morph kv int8                                  the KV cache in 8 bits, with all that it holds
  instar morph tp 2                                     two workers become one instance
  instar morph tp 1 --workers w0,w1                     and two again
  instar morph policy                                   show the policy
  instar morph policy mode=manual kv_usage_high=0.9     change it
  instar morph show ID                                  the progress of a morph
  instar morph cancel ID                                stop it; the old shape continues to serve

Instances are those of `instar status`. With only one, its name may be left out. Without pressure the policy
returns layers and splits groups that were ordered by hand; with mode=manual it changes nothing itself.
"""


# --------------------------------------------------------------------------- flags


def add_to(parser: CommandParser) -> None:
    parser.description = DESCRIPTION
    command = subcommands(parser)
    for entry in MORPHS:
        if entry.order:
            name = COMMANDS.get(entry.name, entry.name)
            _add_fields(command(name, entry.summary, partial(_run_order, entry)), entry)
    policy = command("policy", "show the policy, or change its fields", _policy)
    policy.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="without any: shows all fields")
    policy.epilog = policy_fields()
    for name, help_, run in (("show", "show a morph", _show), ("cancel", "cancel a running morph", _cancel)):
        command(name, help_, run).add_argument("morph", metavar="ID", help="as `instar status` shows it")


def _add_fields(parser: CommandParser, entry: MorphEntry) -> None:
    """Declare an argument for each field of an order, and what all orders have."""
    if entry.target == "instance":
        parser.add_argument("instance", nargs="?", metavar="INSTANCE", help="[the only one]")
        parser.add_argument("--instance", dest="named", metavar="INSTANCE", help="the same as a flag")
    which: argparse._ActionsContainer = parser
    if ALTERNATIVES & {one.name for one in entry.fields}:
        which = parser.add_mutually_exclusive_group(required=entry.target == "instance")
    for one in entry.fields:
        flag = FLAGS.get(one.name, f"--{one.name.replace('_', '-')}")
        options = {"help": "{}", **ARGUMENTS[one.type]}
        if one.choices:
            options["choices"] = list(one.choices)
        options["help"] = options["help"].format(one.summary)
        if flag.startswith("-"):
            options |= {"dest": one.name, "required": one.is_required and one.name not in ALTERNATIVES}
        (which if one.name in ALTERNATIVES else parser).add_argument(flag, **options)
    parser.add_argument("--detach", action="store_true", help="return at once instead of when it has ended")


def policy_fields() -> str:
    """Return the fields of the policy, each with its meaning, limits, default and effects of modes."""
    lines = ["fields:"]
    width = max(len(one.name) for one in FIELDS) + 2
    for one in FIELDS:
        default = _value(one.name, one.default)
        unit = f" {one.unit}" if one.unit not in one.summary.split() and one.unit else ""
        lines.append(f"  {one.name:{width}}{one.summary}: {one.limits}{unit} [{default}]")
        notes = [f"0: {one.zero}"] if one.zero else []
        notes += [f"{name}: {text}" for name, text in one.choices.items() if text]
        notes += [f"with mode={mode} {effect.summary}" for mode, effect in one.by_mode.items()]
        lines += [f"{'':{width + 2}}{note}" for note in notes]
    return "\n".join(lines)


def _blocks(text: str) -> int:
    try:
        return at_least_one(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; the instance comes before it, as in resize demo@w0 400"
        ) from None


def layer_numbers(text: str) -> list[int]:
    """Parse `0,4-6` as [0, 4, 5, 6]."""
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers; write 0,4-6") from None
        if high < low or high - low > 10_000:
            raise argparse.ArgumentTypeError(f"{piece!r} is not a range of layers; write 4-6")
        found += range(low, high + 1)
    return found


def _names(text: str) -> list[str]:
    """Parse `w0,w1` as ["w0", "w1"]."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of workers; write w0,w1")
    return names


# How a field of each type is read; {} is its summary.
ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "blocks": {"type": _blocks, "metavar": "BLOCKS"},
    "choice": {"metavar": "CHOICE"},
    "degree": {"type": at_least_one, "metavar": "DEGREE"},
    "integer": {"type": at_least_one, "metavar": "N"},
    "layers": {"type": layer_numbers, "metavar": "LIST", "help": "{}, as 0,4-6"},
    "number": {"type": number_from_zero, "metavar": "S", "default": 0.0, "help": "{} [0]"},
    "parts": {
        "action": "append",
        "type": one_of(PARTS),
        "metavar": "PART",
        "help": f"{either(PARTS)} [both]",
    },
    "precision": {"type": one_of(PRECISIONS), "metavar": "P", "help": either(PRECISIONS)},
    "text": {"metavar": "NAME"},
    "workers": {"type": _names, "metavar": "LIST", "help": "{}, as w0,w1 [the least loaded]"},
}
FLAGS: Final = {
    "blocks": "blocks",
    "kv_dtype": "kv_dtype",
    "tp": "tp",
    "parts": "--part",
    "wait_s": "--wait",
}  # else as the field
ALTERNATIVES: Final = {"layers", "count", "workers", "instance"}  # fields of which an order takes one
COMMANDS: Final = {"transform": "tp"}  # else as the kind of morph


# --------------------------------------------------------------------------- orders


def _run_order(entry: MorphEntry, args: argparse.Namespace) -> int:
    """Post the order of a morph and wait for its end."""
    with admin_client(args) as client:
        path, body = _order(client, entry, args)
        given = {name: value for name, value in body.items() if value is not None}
        morph = ask_json(client, "POST", path, given)
        morph = morph if args.detach else _until_end(client, morph)
        is_done = morph["state"] in DONE
        if args.json:
            return write_json(morph, is_good=is_done)
        state = _state(client)
    mode = (state.get("policy") or {}).get("mode", MANUAL)
    write_text(in_words(morph, _page_bytes(state, morph)))
    if is_done and mode != MANUAL and entry.causes != ("order",):
        write_text(f"  the policy (mode {mode}) may undo this; `instar morph policy mode=manual` keeps it\n")
    return int(not is_done)


def _order(client: httpx.Client, entry: MorphEntry, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of an order."""
    body = {one.name: getattr(args, one.name) for one in entry.fields}
    if entry.target == "instance":
        return _instance_path(client, args, entry.name), body
    return f"/admin/instances/{entry.name}", body


def _instance_path(client: httpx.Client, args: argparse.Namespace, morph: str) -> str:
    """Return the path of the instance named by its place or by --instance, else of the only one."""
    names: set[str] = {name for name in (args.instance, args.named) if name}
    if len(names) > 1:
        raise InputError(f"{args.instance} and --instance {args.named} differ; name one instance")
    instance = names.pop() if names else _only_instance(client, args.prog)
    return f"/admin/instances/{quote(instance, safe='@')}/{morph}"


def _only_instance(client: httpx.Client, prog: str) -> str:
    known = [str(one["id"]) for one in get_json(client, "/admin/state", "instances")["instances"]]
    if not known:
        raise ServerError("there is no instance yet: `instar status` shows what is loading")
    if len(known) > 1:
        raise InputError(f"say which instance, as in `{prog} {known[0]} ...`; there are: {', '.join(known)}")
    return known[0]


def _until_end(client: httpx.Client, morph: dict[str, Any]) -> dict[str, Any]:
    """Poll the morph until it has ended, with progress on a terminal. Raises ServerError."""
    began = time.monotonic()
    hint = f"the morph continues: see `instar morph show {morph['id']}`, or cancel it"
    with progress_line(hint) as line:
        while morph["state"] == "running":
            if line.is_watched:
                line.show(f"  {progress_text(morph, time.monotonic() - began)}")
                time.sleep(POLL_S)
            wait = "" if line.is_watched else "?wait=true"
            morph = get_json(client, _path(morph["id"]) + wait)
        if progress := _degree_text(morph["numbers"]):
            line.show(f"  {progress}")
    return morph


def _show(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        morph = get_json(client, _path(args.morph))
        return write_json(morph) if args.json else _write(client, morph)


def _cancel(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        morph = _until_end(client, ask_json(client, "DELETE", _path(args.morph)))
        return write_json(morph) if args.json else _write(client, morph)


def _write(client: httpx.Client, morph: dict[str, Any]) -> int:
    return write_text(in_words(morph, _page_bytes(_state(client), morph)))


def _state(client: httpx.Client) -> dict[str, Any]:
    """Return the service's state, {} where it cannot be read: it only adds to what is shown."""
    try:
        return get_json(client, "/admin/state")
    except ServerError:
        return {}


def _page_bytes(state: dict[str, Any], morph: dict[str, Any]) -> int | None:
    pages = {one["id"]: one.get("page_bytes") for one in state.get("workers") or []}
    return pages.get(morph.get("worker"))


def _path(morph_id: str) -> str:
    return f"/admin/morphs/{quote(morph_id, safe='')}"


# --------------------------------------------------------------------------- in words


def progress_text(morph: dict[str, Any], seconds: float) -> str:
    """Return `5 of 8 layers at tp 2, 3 s`."""
    text = _degree_text(morph["numbers"]) or morph["reason"] or morph["state"]
    return text + (f", {seconds:.0f} s" if seconds >= 1 else "")


def _degree_text(numbers: dict[str, Any]) -> str:
    """Return how far a transform is, "" before its first layer."""
    if not {"layers_done", "layers", "tp_after"} <= numbers.keys() or not numbers["layers_done"]:
        return ""
    return f"{numbers['layers_done']} of {numbers['layers']} layers at tp {numbers['tp_after']}"


def in_words(morph: dict[str, Any], page_bytes: int | None = None) -> str:
    """Return up to three lines: what it was and how it ended, the reason, numbers beyond the reason's."""
    numbers = numbers_text(morph["numbers"], page_bytes, morph["reason"])
    return "\n  ".join(filter(None, (heading(morph), morph["reason"], numbers))) + "\n"


# --------------------------------------------------------------------------- the policy


def _policy(args: argparse.Namespace) -> int:
    changes = dict(map(_field, args.fields))
    with admin_client(args) as client:
        policy = ask_json(client, "PUT" if changes else "GET", "/admin/policy", changes or None)
    if args.json:
        return write_json(policy)
    return write_text("".join(f"{name} = {_value(name, value)}\n" for name, value in policy.items()))


def _field(word: str) -> tuple[str, Any]:
    """Parse `windows=3` as ("windows", 3). What is not JSON is text. Raises InputError."""
    name, equals, text = word.partition("=")
    if not equals:
        raise InputError(f"{word!r} is not a field with its value; write it as windows=3")
    try:
        return name, json.loads(text, parse_constant=str)  # JSON has no NaN and Infinity
    except ValueError:
        return name, text


def _value(name: str, value: Any) -> str:
    if value is None:
        return next((one.unset for one in FIELDS if one.name == name), "")
    return f"{value:g}" if isinstance(value, float) else str(value)
