"""`instar drain`: a worker finishes what it runs, takes nothing new, and leaves."""

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
from instar.output.progress import LiveLine

POLL_S: Final = 0.25


def drain(settings: Settings, args: argparse.Namespace) -> int:
    """Exit status 0 when it has left, or will (--detach); 1 when it has not in time, or nobody answers."""
    try:
        with gateway_client(settings, args.url, args.key, settings.gateway.admin_keys) as client:
            force = "?force=true" if args.force else ""
            ordered = ask_json(client, "POST", f"/admin/workers/{quote(args.worker, safe='')}/drain{force}")
            if not args.detach:
                return _tell_end(args.worker, _until_gone(client, ordered, args.wait), args)
    except GatewayProblem as problem:
        sys.stderr.write(f"instar drain: {problem}\n")
        return 1
    sys.stdout.write(json.dumps(ordered) + "\n" if args.json else f"{args.worker} is draining\n")
    return 0


def _until_gone(client: httpx.Client, ordered: dict[str, Any], within_s: float) -> float | None:
    """Seconds until it had left; None: it is still there. Ctrl-C ends the wait, not the drain. Raises
    GatewayProblem."""
    began, line, worker = time.monotonic(), LiveLine(), ordered["worker"]
    try:
        while True:
            state = dict(get_json(client, "/admin/state"))
            seconds = time.monotonic() - began
            if not any((one["id"], one["epoch"]) == (worker, ordered["epoch"]) for one in state["workers"]):
                return seconds
            if seconds > within_s:
                return None
            line.show(f"  {worker} ends {_requests(state, worker)}, {seconds:.0f} s")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        line.end()
        sys.stderr.write("it goes on: `instar status` shows it until it has left\n")
        raise
    finally:
        line.end()


def _requests(state: dict[str, Any], worker: str) -> str:
    """Of the instances that it has a part in; not told is not none."""
    mine = [one for one in state["instances"] if worker in one["workers"]]
    counts = [count for one in mine for count in (one.get("running"), one.get("waiting"))]
    if None in counts:
        return "what it runs"
    total = sum(counts)
    return f"{total} request{'' if total == 1 else 's'}"


def _tell_end(worker: str, seconds: float | None, args: argparse.Namespace) -> int:
    if args.json:
        told = {"worker": worker, "state": "draining" if seconds is None else "left", "seconds": seconds}
        sys.stdout.write(json.dumps(told) + "\n")
    elif seconds is None:
        sys.stdout.write(f"{worker} is still draining after {args.wait:g} s, and goes on: `instar status`\n")
    else:
        sys.stdout.write(f"{worker} has left after {seconds:.1f} s\n")
    return int(seconds is None)
