"""`instar bench record`: the requests of a running service as they end, a line of JSON each.

Lines are in the order of their ends; `at` is when a request arrived, which is what a replay goes by. The
trial requests of a replay are left out: they are not its traffic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import httpx

from bus.settings import Settings
from instar.client import GatewayProblem, gateway_client, refuse_errors, unreachable
from instar.errors import BenchProblem
from instar.replay.requests import TRIAL

PATH: Final = "/admin/requests"
LEAST_BYTES: Final = 1 << 20  # free on the disk: some thousand requests
SILENCE_S: Final = 30.0  # longer than between two comments of a living stream


def record(settings: Settings, args: argparse.Namespace) -> int:
    """Exit status 0; 1 when the service ended before it was told to stop. Raises GatewayProblem and
    BenchProblem."""
    ends = time.monotonic() + args.seconds if args.seconds else None
    counts = _Counts()
    with gateway_client(settings, args.url, args.key, settings.gateway.admin_keys) as client:
        try:
            with _open(args.out, is_private=args.with_prompts) as file:
                has_ended = _write(file, _events(client, args.with_prompts, ends), counts, args.limit)
        except KeyboardInterrupt:
            has_ended = False
        except OSError as error:
            raise BenchProblem(f"{args.out}: {error.strerror}, after {counts.requests} requests") from error
    sys.stderr.write(f"{counts.requests} requests in {args.out}\n")
    if counts.trials:
        sys.stderr.write(f"{counts.trials} trial requests of a replay are left out\n")
    if counts.lost:
        sys.stderr.write(f"{counts.lost} more came faster than they could be written, and are not in it\n")
    if has_ended:
        sys.stderr.write("instar bench record: the service ended the stream\n")
    return int(has_ended)


class _Counts:
    def __init__(self) -> None:
        self.requests = self.trials = self.lost = 0


def _open(path: Path, *, is_private: bool) -> TextIO:
    """A new file: what was recorded before is not written over. is_private: for its owner's eyes only. Raises
    BenchProblem, also where the disk has no room."""
    try:
        if not path.exists() and (free := shutil.disk_usage(path.parent).free) < LEAST_BYTES:
            raise BenchProblem(
                f"--out {path}: {free >> 10} KiB are free on its disk; it needs {LEAST_BYTES >> 10} at least"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.fdopen(os.open(path, flags, 0o600 if is_private else 0o666), "w", encoding="utf-8")
    except FileExistsError as error:
        raise BenchProblem(f"--out {path}: is there already; name another file") from error
    except OSError as error:
        raise BenchProblem(f"--out {path}: cannot be written: {error.strerror}") from error


def _write(file: TextIO, events: Iterator[tuple[str, str]], counts: _Counts, limit: int | None) -> bool:
    """Whether the stream ended by itself."""
    for kind, data in events:
        if kind == "":
            return False
        if kind == "lost":
            counts.lost += int(data)
            continue
        if str(json.loads(data).get("id", "")).startswith(TRIAL):
            counts.trials += 1
            continue
        file.write(data + "\n")
        file.flush()
        counts.requests += 1
        if counts.requests == limit:
            return False
    return True


def _events(client: httpx.Client, has_prompts: bool, ends: float | None) -> Iterator[tuple[str, str]]:
    """(kind, data) of each event; ("", "") when it is time to stop, which is looked at with each line: at the
    latest with the next comment. Raises GatewayProblem."""
    timeout = httpx.Timeout(SILENCE_S, read=SILENCE_S)
    params = {"prompts": "true"} if has_prompts else {}
    try:
        with client.stream("GET", PATH, params=params, timeout=timeout) as answer:
            if not answer.is_success:
                answer.read()
            refuse_errors(answer)
            kind = ""
            for line in answer.iter_lines():
                if ends is not None and time.monotonic() >= ends:
                    yield "", ""
                    return
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield kind, line.removeprefix("data: ")
    except httpx.ReadTimeout as error:
        raise GatewayProblem(f"nothing came from {client.base_url} for {SILENCE_S:g} s") from error
    except httpx.ConnectError as error:
        raise unreachable(client, error) from error
    except httpx.HTTPError:
        return  # it was cut: what came is kept, and the exit status says so
