"""`instar morph`: orders to a running gateway, and how they ended."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final
from urllib.parse import quote

import httpx

from bus.settings import Settings
from instar.client import GatewayProblem, ask_json, gateway_client, get_json
from instar.commands.morph_workers import workers_for
from instar.output.morph_numbers import numbers_text
from instar.output.progress import LiveLine

DONE: Final = ("applied", "running")
POLL_S: Final = 0.1
MANUAL: Final = "manual"
UNDONE: Final = "  the policy (mode {mode}) may undo this; `instar morph policy mode=manual` keeps it\n"


def morph(settings: Settings, args: argparse.Namespace) -> int:
    """Exit status 0; 1 when no gateway answered, or the morph ended otherwise than applied."""
    try:
        with gateway_client(settings, args.url, args.key, settings.gateway.admin_keys) as client:
            if args.verb == "policy":
                return _policy(client, args)
            found = _morph(client, args)
            return _tell_json(found, args) if args.json else _tell(found, args, _state(client))
    except GatewayProblem as problem:
        sys.stderr.write(f"instar morph {args.verb}: {problem}\n")
        return 1


def _morph(client: httpx.Client, args: argparse.Namespace) -> dict[str, Any]:
    """The morph as it is when this command has nothing more to wait for."""
    if args.verb == "show":
        return _object(get_json(client, _path(args.morph)))
    if args.verb == "cancel":
        return _until_end(client, _object(ask_json(client, "DELETE", _path(args.morph))))
    path, body = _transform(client, args) if args.verb == "tp" else _of_instance(client, args)
    given = {name: value for name, value in (body | {"wait_s": args.wait}).items() if value is not None}
    ordered = _object(ask_json(client, "POST", path, given))
    return ordered if args.detach else _until_end(client, ordered)


def _of_instance(client: httpx.Client, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    instance = quote(_named(args) or _only_instance(client, args.verb), safe="@")
    path = f"/admin/instances/{instance}/{args.verb}"
    if args.verb == "resize":
        return path, {"blocks": args.blocks}
    return path, {
        "precision": args.precision,
        "layers": args.layers,
        "count": args.count,
        "parts": args.part,
    }


def _transform(client: httpx.Client, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    workers, model = args.members, args.served
    if not workers:
        workers, model = workers_for(get_json(client, "/admin/state"), args.tp, args.instance, model)
    body = {"workers": workers, "tp": args.tp, "model": model, "layers_per_step": args.layers_per_step}
    return "/admin/instances/transform", body


def _until_end(client: httpx.Client, found: dict[str, Any]) -> dict[str, Any]:
    """Shows how far it is to whoever watches. Ctrl-C ends the wait, not the morph. Raises GatewayProblem."""
    line, began = LiveLine(), time.monotonic()
    try:
        while found["state"] == "running":
            if line.is_watched:
                line.show(f"  {progress_text(found, time.monotonic() - began)}")
                time.sleep(POLL_S)
            wait = "" if line.is_watched else "?wait=true"
            found = _object(get_json(client, _path(found["id"]) + wait))
        if progress := degree_text(found["numbers"]):
            line.show(f"  {progress}")
    except KeyboardInterrupt:
        line.end()
        sys.stderr.write(f"it goes on: `instar morph show {found['id']}`, or cancel\n")
        raise
    finally:
        line.end()
    return found


def progress_text(found: dict[str, Any], seconds: float) -> str:
    """`5 of 8 layers at tp 2, 3 s`; the time from the first second on."""
    told = degree_text(found["numbers"]) or found["reason"] or found["state"]
    return told + (f", {seconds:.0f} s" if seconds >= 1 else "")


def degree_text(numbers: dict[str, Any]) -> str:
    """Of a transform; empty before the first layer."""
    if not {"layers_done", "layers", "tp_after"} <= numbers.keys() or not numbers["layers_done"]:
        return ""
    return f"{numbers['layers_done']} of {numbers['layers']} layers at tp {numbers['tp_after']}"


def _named(args: argparse.Namespace) -> str | None:
    """By its place or by --instance. Raises GatewayProblem for two names."""
    names: set[str] = {name for name in (args.instance, args.named) if name}
    if len(names) > 1:
        raise GatewayProblem(f"{args.instance} and --instance {args.named} are two: name one")
    return names.pop() if names else None


def _only_instance(client: httpx.Client, verb: str) -> str:
    there = [str(instance["id"]) for instance in get_json(client, "/admin/state")["instances"]]
    if not there:
        raise GatewayProblem("there is no instance yet: `instar status` shows what is loading")
    if len(there) > 1:
        raise GatewayProblem(
            f"say which instance, as in `instar morph {verb} {there[0]} ...`; there are: {', '.join(there)}"
        )
    return there[0]


def _state(client: httpx.Client) -> dict[str, Any]:
    """Of the service; {} where it is not told: the order went out, this is for its reader only."""
    try:
        return _object(get_json(client, "/admin/state"))
    except GatewayProblem:
        return {}


def _doubt(state: dict[str, Any], found: dict[str, Any], verb: str) -> str:
    """What may soon be otherwise: the policy goes back to where pressure or the lack of it leads it. "" where
    it does nothing by itself, or is not told."""
    if verb in ("show", "cancel") or found["state"] not in DONE:
        return ""
    mode = (state.get("policy") or {}).get("mode", MANUAL)
    return "" if mode == MANUAL else UNDONE.format(mode=mode)


def _tell_json(found: dict[str, Any], args: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return _exit_status(found, args)


def _tell(found: dict[str, Any], args: argparse.Namespace, state: dict[str, Any]) -> int:
    pages = {one["id"]: one.get("page_bytes") for one in state.get("workers") or []}
    sys.stdout.write(in_words(found, pages.get(found.get("worker"))) + _doubt(state, found, args.verb))
    return _exit_status(found, args)


def _exit_status(found: dict[str, Any], args: argparse.Namespace) -> int:
    return 0 if found["state"] in DONE or args.verb in ("show", "cancel") else 1


def in_words(found: dict[str, Any], page_bytes: int | None = None) -> str:
    """Two or three lines: what, how it ended and why, with those numbers that the reason does not tell.
    `page_bytes`: of its worker's pages, where that is known."""
    took = f" in {found['ended'] - found['started']:.2f} s" if found["ended"] else ""
    lines = [f"{found['kind']} {found['id']} of {found['target']}: {found['state']}{took}"]
    if found["reason"]:
        lines.append(f"  {found['reason']}")
    if told := numbers_text(found["numbers"], page_bytes, found["reason"]):
        lines.append(f"  {told}")
    return "".join(f"{line}\n" for line in lines)


def _policy(client: httpx.Client, args: argparse.Namespace) -> int:
    if args.words:
        policy = _object(ask_json(client, "PUT", "/admin/policy", dict(map(_field, args.words))))
    else:
        policy = _object(get_json(client, "/admin/policy"))
    if args.json:
        sys.stdout.write(json.dumps(policy, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{name} = {_number(value)}\n" for name, value in policy.items()))
    return 0


def _field(word: str) -> tuple[str, Any]:
    """`windows=3` -> ("windows", 3); what is no JSON is text. Raises GatewayProblem."""
    name, equals, text = word.partition("=")
    if not equals:
        raise GatewayProblem(f"{word!r} is no field with its value; write it as windows=3")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise GatewayProblem("the answer is no JSON object: is that an Instar gateway?")
    return found


def _path(morph_id: str) -> str:
    return f"/admin/morphs/{quote(morph_id, safe='')}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
