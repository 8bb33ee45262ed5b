"""`instar drain`: a worker finishes its requests, takes no new ones, and leaves."""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

import httpx

from instar.client import admin_client, admin_path, ask_json, get_json
from instar.output.progress import progress_line
from instar.output.tables import plural, write_found
from instar.parser import CommandParser, add_client_flags, number_from_zero

POLL_S: Final = 0.25

DESCRIPTION = """\
Asks a worker to leave. It takes no new requests and finishes the running ones within
worker.drain_timeout_s; the rest continue on other workers.

  instar drain w1                   wait until it has left
  instar drain w1 --detach          return at once
  instar drain w0 --force           also where no other worker serves its model

Under `instar serve` the worker stays away until the service starts anew. The service goes on without any
worker: requests wait for one to join (gateway.queue_timeout_s).
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser)
    parser.add_argument("worker", metavar="WORKER", help="as `instar status` shows it")
    help_ = "seconds to wait for it to leave [60]"
    parser.add_argument("--wait", type=number_from_zero, default=60.0, metavar="S", help=help_)
    parser.add_argument("--detach", action="store_true", help="return at once")
    parser.add_argument("--force", action="store_true", help="also drain the last worker that serves a model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0 when the worker has left or was asked to (--detach), 1 when it has not in time."""
    with admin_client(args) as client:
        force = "?force=true" if args.force else ""
        answer = ask_json(client, "POST", f"{admin_path('workers', args.worker)}/drain{force}")
        if args.detach:
            return write_found(args, answer, lambda _: f"{args.worker} is draining\n")
        seconds = _until_gone(client, answer, args.wait)
    if seconds is None:
        state, text = "draining", f"is still draining after {args.wait:g} s; `instar status` shows it"
    else:
        state, text = "left", f"has left after {seconds:.1f} s"
    found = {"worker": args.worker, "state": state, "seconds": seconds}
    return write_found(args, found, lambda _: f"{args.worker} {text}\n", is_good=seconds is not None)


def _until_gone(client: httpx.Client, ordered: dict[str, Any], within_s: float) -> float | None:
    """Return the seconds until the worker left, None if it is still there. Raises ServerError."""
    began, worker = time.monotonic(), ordered["worker"]
    with progress_line(f"{worker} continues to drain: `instar status` shows it until it has left") as line:
        while True:
            state = get_json(client, "/admin/state", "workers", "instances")
            seconds = time.monotonic() - began
            if not any((one["id"], one["epoch"]) == (worker, ordered["epoch"]) for one in state["workers"]):
                return seconds
            if seconds > within_s:
                return None
            line.show(f"  {worker} finishes {_requests(state, worker)}, {seconds:.0f} s")
            time.sleep(POLL_S)


def _requests(state: dict[str, Any], worker: str) -> str:
    """Return how many requests the worker's instances have, as far as they report it."""
    mine = [one for one in state["instances"] if worker in one["workers"]]
    counts = [count for one in mine for count in (one.get("running"), one.get("waiting"))]
    return "its requests" if None in counts else plural(sum(counts), "request")
