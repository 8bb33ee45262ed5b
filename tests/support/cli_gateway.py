"""A gateway that answers the command line by a script, and what such a gateway tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from instar.cli import main
from tests.support.threaded_http import serving

RUNNING: dict[str, Any] = {
    "id": "a1",
    "kind": "swap",
    "target": "demo@w0",
    "state": "running",
    "reason": "",
    "decided": "ordered by hand: 2 more to int4",
    "numbers": {},
    "started": 100.0,
    "ended": None,
}
APPLIED = RUNNING | {
    "state": "applied",
    "reason": "2 layers",
    "numbers": {"pages": 12, "s": 0.5},
    "ended": 100.25,
}
DEFERRED = RUNNING | {"state": "deferred", "reason": "no pages", "ended": 101.0}


@dataclass
class Script:
    """`answers`: what the gateway says, in turn, to everything but /admin/state; the last is repeated."""

    url: str
    answers: list[tuple[int, Any]] = field(default_factory=list)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    instances: list[str] = field(default_factory=lambda: ["demo@w0"])
    state: dict[str, Any] | None = None  # all of it, in place of `instances`

    def run(self, *argv: str) -> int:
        return self.main("morph", *argv)

    def main(self, *argv: str) -> int:
        return main([*argv, "--url", self.url])


@contextmanager
def scripted() -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path == "/admin/state":
                named = {"instances": [{"id": name} for name in script.instances]}
                status, answer = 200, script.state or named
            else:
                script.asked.append((self.command, self.path, json.loads(body) if body else None))
                status, answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        script = Script(url)
        yield script


def instance(*workers: str, model: str = "demo", running: int | None = 0, **fields: Any) -> dict[str, Any]:
    counts = {"running": running, "waiting": running}
    named = {"id": f"{model}@{workers[0]}", "model": model, "workers": list(workers), "tp": len(workers)}
    return named | counts | {"state": "serving"} | fields


def cluster(*instances: dict[str, Any], **hosts: str) -> dict[str, Any]:
    """`hosts`: of workers that are not on "here"."""
    names = sorted({worker for one in instances for worker in one["workers"]})
    return {
        "instances": list(instances),
        "workers": [{"id": name, "host": hosts.get(name, "here")} for name in names],
    }


def be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a terminal of 80 columns from here on."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
