"""Runs that never were, and a server of a few lines that answers as a test wants."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from instar.commands.bench import add_to
from instar.parser import CommandParser
from instar.replay.files import RunFile
from instar.replay.outcomes import NOT_SENT, RequestOutcome
from instar.replay.statistics import Slo


def outcome(number: int, due_s: float, **fields: Any) -> RequestOutcome:
    """Served: sent 1 ms late, begun after 0.1 s, its first token after 0.5 s, then one every 50 ms."""
    one = RequestOutcome(number, due_s, prompt_asked=20, output_asked=11)
    served = {
        "sent_s": due_s + 0.001,
        "opened_s": due_s + 0.1,
        "first_s": due_s + 0.5,
        "last_s": due_s + 1.0,
        "ended_s": due_s + 1.0,
        "status": 200,
        "finish": "length",
        "events": 11,
        "prompt_tokens": 20,
        "output_tokens": 11,
        "spans": [(11, 0)],
    }
    for name, value in (served | fields).items():
        setattr(one, name, value)
    return one


def failed(number: int, due_s: float, error: str) -> RequestOutcome:
    """`error`: as the replay tells it."""
    one = RequestOutcome(number, due_s, prompt_asked=20, output_asked=11, error=error)
    if error != NOT_SENT:
        one.sent_s = one.ended_s = due_s
    return one


def sample(at_s: float, **numbers: Any) -> dict[str, Any]:
    shape = {"kv_blocks": 100, "kv_used": 10, "running": 1, "waiting": 0, "layers_below_full": 0, "tp": 1}
    return {"at_s": at_s, "instances": {"demo@w0": shape | {"queue_delay_s": 0.0} | numbers}}


def run_file(
    outcomes: list[RequestOutcome], name: str = "one", *, observed: bool = True, **about: Any
) -> RunFile:
    told: dict[str, Any] = {
        "name": name,
        "source": "trace.csv",
        "url": "http://127.0.0.1:8000",
        "model": "demo",
        "arrivals_sha256": "ab",
        "began_at": 1000.0,
        "was_interrupted": False,
        "notes": [],
    }
    seen: dict[str, Any] = {
        "samples": [
            sample(0.0),
            sample(1.0, kv_blocks=140, kv_used=90, layers_below_full=2, queue_delay_s=0.4),
        ],
        "missed": 0,
        "morphs": [{"id": "m", "kind": "swap", "state": "applied", "started": 1000.5}],
        "counted": {},
    }
    return RunFile(told | about, Slo(2.0, 0.1), outcomes, seen if observed else {}, [3, 8])


def flags(*argv: str) -> argparse.Namespace:
    """Return the arguments of `instar bench ...`."""
    parser = CommandParser(prog="instar bench")
    add_to(parser)
    return parser.parse_args(argv)


# --------------------------------------------------------------------------- a server

Answer = tuple[int, list[bytes]]  # status, and the pieces of its body; b"" ends the connection at once


def events(num: int, *, usage: bool = True, ends: bool = True) -> list[bytes]:
    """A stream of so many tokens."""
    found = []
    for index in range(num):
        finish = "length" if ends and index == num - 1 else None
        found.append({"choices": [{"index": 0, "text": "a", "finish_reason": finish}]})
    if usage:
        found.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num}})  # type: ignore
    return [b"data: %b\n\n" % json.dumps(one).encode() for one in found] + [b"data: [DONE]\n\n"] * ends


def refused(status: int, code: str) -> Answer:
    return status, [json.dumps({"error": {"message": "no", "type": "server_error", "code": code}}).encode()]


@dataclass
class Stub:
    """`answer(body)` to a completion; everything else but /v1/models is a 404."""

    answer: Callable[[dict[str, Any]], Answer]
    port: int = 0
    pause_s: float = 0.0  # between two pieces
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await self._write(writer, *await self._answer(head, reader))
        writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader) -> Answer:
        if head.startswith("get /v1/models"):
            return 200, [b'{"data": [{"id": "m", "max_model_len": 50}]}']
        if not head.startswith("post /v1/completions"):
            return 404, [b"{}"]
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        if body["max_tokens"] > 1:  # the rest are trials
            self.bodies.append(body)
        return self.answer(body)

    async def _write(self, writer: asyncio.StreamWriter, status: int, pieces: list[bytes]) -> None:
        if not status:
            return
        writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status)
        for piece in pieces:
            if not piece:
                return
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(self.pause_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextlib.asynccontextmanager
async def stub(
    answer: Callable[[dict[str, Any]], Answer], port: int = 0, pause_s: float = 0.0
) -> AsyncIterator[Stub]:
    made = Stub(answer, pause_s=pause_s)
    server = await asyncio.start_server(made.serve, "127.0.0.1", port)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


async def serve_tokens(port: int) -> None:
    """Each 20 ms after the other, for ever."""
    async with stub(lambda body: (200, events(body["max_tokens"])), port, pause_s=0.02):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_tokens(int(sys.argv[1])))
