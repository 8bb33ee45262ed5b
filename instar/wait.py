"""Waiting for what a gateway was asked for: how far it is, what it waits for, and where the wait ends."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import httpx

from instar.client import get_json
from instar.output.progress import LiveLine

POLL_S: Final = 0.3
STUCK: Final = ("waiting", "registered")  # states in which nothing is done for it


@dataclass(frozen=True, slots=True)
class Wait:
    """Until it is in one of `states`, or for `within_s`; of these at most `stuck_s` in a row in which nothing
    is done for it. `hint`: what becomes of it if the wait ends before, on Ctrl-C too, which ends the wait and
    nothing else."""

    states: Collection[str]
    within_s: float
    hint: str
    stuck_s: float = float("inf")


def follow(client: httpx.Client, path: str, found: dict[str, Any], wait: Wait) -> dict[str, Any]:
    """As it is when the wait ends. Raises GatewayProblem."""
    teller, began = _Teller(), time.monotonic()
    moved_at = began
    try:
        while found["state"] not in wait.states:
            now = time.monotonic()
            moved_at = moved_at if found["state"] in STUCK else now
            if now - began >= wait.within_s or now - moved_at >= wait.stuck_s:
                teller.end(wait.hint)
                break
            teller.tell(found)
            time.sleep(min(POLL_S, wait.within_s, wait.stuck_s))
            found = dict(get_json(client, path))
    except KeyboardInterrupt:
        teller.end(wait.hint)
        raise
    finally:
        teller.end()
    return found


class _Teller:
    """On standard error: how far it is in one line of a terminal, and what it waits for in full, wherever
    that goes, each time it is another reason. Numbers in it change by themselves."""

    def __init__(self) -> None:
        self._line = LiveLine()
        self._told = ""

    def tell(self, found: dict[str, Any]) -> None:
        why = found.get("progress") or found["reason"]
        text = f"  {found['state']}: {why}" if why else f"  {found['state']}"
        if found["state"] not in STUCK or not why:
            self._line.show(text)
        elif (gist := re.sub(r"[\d.]+", "", text)) != self._told:
            self._told = gist
            self.end(text)

    def end(self, text: str = "") -> None:
        self._line.end()
        if text:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
