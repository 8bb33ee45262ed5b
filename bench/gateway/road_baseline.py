"""The baseline of the road: a bare Starlette SSE app on uvicorn that sends the same chunks.

One ticker puts a ready-made chunk into every stream's queue, and a generator per stream yields it, as such an
app is usually written. There is no bus, no tokenizer and no JSON.

    BENCH_PORT=PORT BENCH_LOG=FILE python -m bench.gateway.road_baseline
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

CHUNK = (
    b'data: {"id":"%b","object":"text_completion","created":1700000000,"model":"road",'
    b'"system_fingerprint":"road","choices":[{"index":0,"text":" return","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


class Server(uvicorn.Server):
    """A server that returns from SIGTERM, so that the log can be written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        self.should_exit = True


class Ticker:
    def __init__(self) -> None:
        self.queues: dict[str, tuple[asyncio.Queue[None], int]] = {}
        self.steps_per_s = 50.0
        self.births: list[int] = []
        self.first_steps: dict[str, int] = {}

    async def run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + 1 / self.steps_per_s, time.perf_counter() - 1.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self.queues:
                self.births.append(time.time_ns())
                for queue, _ in self.queues.values():
                    queue.put_nowait(None)

    async def stream(self, name: str, max_tokens: int) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[None] = asyncio.Queue()
        self.queues[name] = (queue, max_tokens)
        self.first_steps[name] = len(self.births)
        chunk = CHUNK % name.removesuffix("-0").encode()
        try:
            for _ in range(max_tokens):
                await queue.get()
                yield chunk
            yield b"data: [DONE]\n\n"
        finally:
            del self.queues[name]


def main(port: int, log: Path) -> None:
    ticker = Ticker()

    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        ticker.steps_per_s = float(body["seed"])
        name = f"cmpl-{len(ticker.first_steps):024x}-0"
        return StreamingResponse(ticker.stream(name, body["max_tokens"]), media_type="text/event-stream")

    async def ready(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ready"})

    async def serve() -> None:
        routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/ready", ready)]
        config = uvicorn.Config(Starlette(routes=routes), port=port, log_level="warning", access_log=False)
        server = Server(config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.leave)
        ticking = asyncio.create_task(ticker.run())
        await server.serve()
        ticking.cancel()

    uvloop.run(serve())
    log.write_text(json.dumps({"births_ns": ticker.births, "first_steps": ticker.first_steps}))


if __name__ == "__main__":
    main(int(os.environ["BENCH_PORT"]), Path(os.environ["BENCH_LOG"]))
