"""`instar bench record`: the requests of a running service, one line of JSON each, as they end."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import httpx

from instar.client import admin_client, stream_events, unreachable
from instar.errors import InputError, ServerError
from instar.replay.requests import TRIAL

PATH: Final = "/admin/requests"
STOP: Final = ("stop", "")
MIN_FREE_BYTES: Final = 1 << 20  # on the disk: some thousand requests
SILENCE_S: Final = 30.0  # longer than between two comments of a live stream


def record(args: argparse.Namespace) -> int:
    """Return 1 if the service ended the stream."""
    ends = time.monotonic() + args.seconds if args.seconds else None
    counts = Counter[str]()
    with admin_client(args) as client:
        try:
            with _open(args.out, is_private=args.with_prompts) as file:
                has_ended = _write(file, _events(client, args.with_prompts, ends), counts, args.limit)
        except KeyboardInterrupt:
            has_ended = False
        except OSError as error:
            raise InputError(f"{args.out}: {error.strerror}, after {counts['request']} requests") from error
    sys.stderr.write(f"{counts['request']} requests in {args.out}\n")
    if counts["trial"]:
        sys.stderr.write(f"{counts['trial']} trial requests of a replay are left out\n")
    if counts["lost"]:
        sys.stderr.write(f"{counts['lost']} more came faster than they could be written, and are missing\n")
    if has_ended:
        sys.stderr.write(f"{args.prog}: the service ended the stream\n")
    return int(has_ended)


def _open(path: Path, *, is_private: bool) -> TextIO:
    """Create a file. Raises InputError if it exists, cannot be written, or its disk has no room."""
    try:
        if not path.exists() and (free := shutil.disk_usage(path.parent).free) < MIN_FREE_BYTES:
            raise InputError(
                f"--out {path}: {free >> 10} KiB are free on its disk; {MIN_FREE_BYTES >> 10} are needed"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.fdopen(os.open(path, flags, 0o600 if is_private else 0o666), "w", encoding="utf-8")
    except FileExistsError as error:
        raise InputError(f"--out {path}: is there already; name another file") from error
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from error


def _write(file: TextIO, events: Iterator[tuple[str, str]], counts: Counter[str], limit: int | None) -> bool:
    """Write requests until `limit`. Returns True if the server ended the stream."""
    for kind, data in events:
        if (kind, data) == STOP:
            return False
        if kind == "lost":
            counts["lost"] += int(data)
        elif str(json.loads(data).get("id", "")).startswith(TRIAL):
            counts["trial"] += 1
        else:
            file.write(data + "\n")
            file.flush()
            counts["request"] += 1
            if counts["request"] == limit:
                return False
    return True


def _events(client: httpx.Client, has_prompts: bool, ends: float | None) -> Iterator[tuple[str, str]]:
    """Yield (kind, data) of each event, and STOP once `ends` has passed. Raises ServerError."""
    params = {"prompts": "true"} if has_prompts else {}
    try:
        for event in stream_events(client, "GET", PATH, params=params, timeout=SILENCE_S):
            if ends is not None and time.monotonic() >= ends:
                yield STOP
                return
            if event[1]:
                yield event
    except httpx.ReadTimeout as error:
        raise ServerError(f"{client.base_url} sent nothing for {SILENCE_S:g} s") from error
    except httpx.ConnectError as error:
        raise unreachable(client, error) from error
    except httpx.HTTPError:
        return  # the stream was cut: the exit status says so
