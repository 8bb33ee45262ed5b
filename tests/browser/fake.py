"""A gateway that plays a part: it serves the real dashboard and a scripted feed, so that rare things are seen
when a test wants them: a transform half-way, a silent worker, a lost connection, a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.common.service import free_port
from gateway.operations.tables import tables
from tests.browser.picture import NUM_LAYERS, Instance, burst, deployment, policy, worker
from tests.support.paths import ROOT

DASHBOARD = ROOT / "gateway" / "dashboard"
CSP = {"content-security-policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'"}
HISTORY_S = 900
Handler = Callable[[Request], Awaitable[Response]]


class Fake:
    """`key`: what /admin asks for; "": nothing. Its script is the methods; a test calls them."""

    def __init__(self, key: str = "", v1_key: str = "") -> None:
        self.key, self.v1_key = key, v1_key
        self.port = free_port()
        self.instances = [Instance([f"w{i}"]) for i in range(4)]
        self.silent: set[str] = set()
        self.morphs: dict[str, dict[str, Any]] = {}
        self.queued = self.unplaced = 0
        self.tables = tables()
        self.policy = policy()
        self.told: dict[str, Any] = {}  # the last change of the policy, as the page sent it
        self.models: list[dict[str, Any]] = []
        self.deployments: list[dict[str, Any]] = []
        self.events = _past()
        self.orders: list[tuple[str, Any]] = []
        self.last_worker = ""  # that is drained only by force
        self.forced: list[str] = []
        self.burst: dict[str, Any] | None = None  # that is played, or was the last
        self.asked: dict[str, Any] = {}  # the last body of /v1
        self._listeners: set[asyncio.Queue[bytes]] = set()
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Fake:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        config = uvicorn.Config(self._app(), port=self.port, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self) -> None:
        if self._server:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10)

    # ------------------------------------------------------------------------------------- the script

    def tell_state(self) -> None:
        self._tell("state", self.state())

    def report(self, morph: dict[str, Any], **fields: Any) -> None:
        """A morph as its worker tells of it now."""
        morph |= fields
        self.morphs[morph["id"]] = morph
        self.tell_event(dict(morph))
        self.tell_state()

    def decide(self, morph_id: str, subject: str, reason: str, numbers: dict[str, Any] | None = None) -> None:
        self.tell_event(_event("morph_decided", "controller", subject, reason, numbers or {}, morph_id))

    def transform_to(self, layers_done: int) -> None:
        """w0 and w1 become one instance: so far with so many layers."""
        for instance in self.instances[:2]:
            instance.layers_done = layers_done
        told = {"layers": NUM_LAYERS, "layers_done": layers_done, "tp_before": 1, "tp_after": 2}
        morph = _morph("m-tp", "transform", "demo@w0", ["w0", "w1"], "tp 2 on w0, w1")
        self.report(self.morphs.get("m-tp", morph), numbers=told)

    def state(self) -> dict[str, Any]:
        workers = [
            worker(name, one, is_silent=name in self.silent) for one in self.instances for name in one.workers
        ]
        return {
            "workers": workers,
            "instances": [one.as_json() for one in self.instances],
            "metrics": {"at_ms": int(time.time() * 1000), "workers": [], "instances": self._measured()},
            "policy": self.policy,
            "models": self.models,
            "deployments": self.deployments,
            "morphs": list(self.morphs.values()),
            "gateway": {"id": "fake", "queued": self.queued, "unplaced": self.unplaced},
        }

    def _measured(self) -> list[dict[str, Any]]:
        return [
            {"id": one.id, "ttft_p95": 0.31, "tpot_p95": 0.024, "generation_tokens_per_second": 210.0}
            for one in self.instances
        ]

    def tell_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._tell("event", event)

    def _tell(self, kind: str, body: Any) -> None:
        data = _sse(kind, body)
        for queue in list(self._listeners):
            queue.put_nowait(data)

    # ------------------------------------------------------------------------------------- the server

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._file("index.html")),
                Route("/dashboard/{file:path}", self._asset),
                Route("/admin/live", self._guarded(self._live)),
                Route("/admin/burst", self._guarded(self._burst), methods=["GET", "POST", "DELETE"]),
                Route("/admin/policy", self._guarded(self._policy), methods=["GET", "PUT"]),
                Route("/admin/{order:path}", self._guarded(self._order), methods=["POST", "DELETE"]),
                Route("/v1/{kind:path}", self._complete, methods=["POST"]),
            ]
        )

    def _file(self, name: str) -> Handler:
        async def answer(_: Request) -> Response:
            return FileResponse(DASHBOARD / name, headers=CSP)

        return answer

    async def _asset(self, request: Request) -> Response:
        return await self._file(request.path_params["file"])(request)

    def _guarded(self, handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return _error(401, "no API key: /admin has keys of its own")
            return await handler(request)

        return guard

    async def _live(self, _: Request) -> Response:
        return StreamingResponse(self._listen(), media_type="text/event-stream")

    async def _listen(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.add(queue)
        now = time.time()
        hello = {"version": "0.1.0", "gateway": "fake", "now": now, "slo": {"ttft_s": 2.0, "tpot_s": 0.1}}
        hello["percentiles"] = {"window_s": 10.0, "relative_error": 0.01}
        yield _sse("hello", hello | {"history_s": HISTORY_S, "tables": self.tables})
        moments = [self._moment(now - back) for back in range(HISTORY_S - 4, 0, -4)]
        yield _sse("history", {"moments": moments, "events": self.events})
        yield _sse("state", self.state())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    yield await asyncio.wait_for(queue.get(), 0.3)
        finally:
            self._listeners.discard(queue)

    def _moment(self, at: float) -> dict[str, Any]:
        return {"at": at, "instances": {one.id: one.moment(at) for one in self.instances}}

    async def _policy(self, request: Request) -> Response:
        if request.method == "PUT":
            body = await request.json()
            if not 0 < body.get("kv_usage_high", 0.5) <= 1:
                told = f"kv_usage_high is {body['kv_usage_high']}; it must be above 0 and at most 1"
                return _error(400, told, "kv_usage_high")
            self.told = body
            unset = {name: None for name, value in body.items() if value == "mode"}
            self.policy |= body | unset | {"revision": self.policy["revision"] + 1}
            self.tell_state()
        return JSONResponse(self.policy)

    async def _burst(self, request: Request) -> Response:
        is_running = self.burst is not None and self.burst["state"] == "sending"
        if request.method == "GET":
            return JSONResponse({"burst": self.burst})
        if request.method == "DELETE":
            self.burst = (self.burst or {}) | {"state": "stopped"}
            return JSONResponse(self.burst)
        self.orders.append(("burst", await request.json()))
        if is_running:
            told = "burst b1 of demo is sending: 8 of its 24 requests are sent; wait until it has ended"
            return _error(409, told, code="burst_running")
        self.burst = burst(sent=8)
        return JSONResponse(self.burst, 202)

    async def _order(self, request: Request) -> Response:
        body = await request.body()
        asked = json.loads(body) if body else None
        self.orders.append((request.path_params["order"], asked))
        if request.path_params["order"].startswith("deployments"):
            return self._deployment(asked)
        if request.path_params["order"].endswith("/drain"):
            if self.last_worker and "force" not in request.query_params:
                told = f"{self.last_worker} is the last worker that serves demo"
                return _error(409, told, "worker", "last_worker")
            self.forced += [self.last_worker] * ("force" in request.query_params)
            return JSONResponse({"id": "d1", "worker": "w0", "state": "draining"}, 202)
        if asked and asked.get("layers") == [99]:
            return _error(400, "layers names 99; demo@w0 has layers 0 to 15", "layers")
        morph = _morph(f"m{len(self.orders)}", "swap", "demo@w0", ["w0"], "ordered by hand: 2 more to int4")
        self.report(morph, numbers={"halves": 4, "halves_applied": 0})
        asyncio.get_running_loop().call_later(0.6, self._apply_swap, morph)
        return JSONResponse(morph, 202)

    def _deployment(self, asked: Any) -> Response:
        """One that is made, or the only one retires."""
        if asked is None:
            self.deployments[0]["state"] = "retiring"
        elif asked["intent"].get("max_latency_s", 1) < 0.01:
            return _error(409, "no configuration meets the intent", "intent")
        else:
            self.deployments.append(deployment("d2", asked["model"], "waiting", asked["intent"]))
        self.tell_state()
        return JSONResponse(self.deployments[-1], 202)

    def _apply_swap(self, morph: dict[str, Any]) -> None:
        self.instances[0].layers[:2] = ["int4", "int4"]
        told = {"halves": 4, "halves_applied": 4, "bytes_copied": 1 << 20, "pages_unmapped": 98}
        self.report(morph, state="applied", ended=time.time(), numbers=told)

    async def _complete(self, request: Request) -> Response:
        if self.v1_key and request.headers.get("authorization") != f"Bearer {self.v1_key}":
            return _error(401, "no API key: /v1 takes a key of gateway.api_keys")
        self.asked = await request.json()
        if self.asked.get("tools"):
            return StreamingResponse(_call_of_a_tool(), media_type="text/event-stream")
        return StreamingResponse(_tokens(), media_type="text/event-stream")


# ------------------------------------------------------------------------------------- what it says


async def _tokens() -> AsyncIterator[bytes]:
    """Twelve words; after the sixth the shape is another."""
    shapes = ["tp1-full"] * 6 + ["tp1-int4x2"] * 6
    for index, shape in enumerate(shapes):
        choice: dict[str, Any] = {"index": 0, "text": f"word{index} ", "finish_reason": None}
        if index == len(shapes) - 1:
            spans = [(0, 6, shapes[0]), (6, 12, shapes[-1])]
            told = [{"start": a, "end": b, "layers_below_full": 0, "fingerprint": c} for a, b, c in spans]
            choice |= {"finish_reason": "length", "precision": told}
        yield _data({"system_fingerprint": shape, "choices": [choice], "usage": None})
        await asyncio.sleep(0.01)
    yield _data({"choices": [], "usage": {"completion_tokens": len(shapes)}})
    yield b"data: [DONE]\n\n"


async def _call_of_a_tool() -> AsyncIterator[bytes]:
    """One call, in pieces."""
    pieces: list[dict[str, Any]] = [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}},
        {"function": {"arguments": '{"city": '}},
        {"function": {"arguments": '"Rome"}'}},
    ]
    for piece in pieces:
        choice = {"index": 0, "delta": {"tool_calls": [{"index": 0} | piece]}, "finish_reason": None}
        yield _data({"system_fingerprint": "tp1-full", "choices": [choice], "usage": None})
    end = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    yield _data({"system_fingerprint": "tp1-full", "choices": [end], "usage": None})
    yield b"data: [DONE]\n\n"


def _past() -> list[dict[str, Any]]:
    """Two decisions and a death."""
    now = time.time()
    seen = {"kv_usage": 0.91, "queue_delay_seconds": 0.42, "windows": 3, "policy_revision": 3}
    reason = "KV use 0.91 above 0.85: 2 layers more to int4 (0 of at most 8 below full)"
    swapped = _morph("m-old", "swap", "demo@w1", ["w1"], reason) | {
        "state": "applied",
        "started": now - 500,
        "ended": now - 499.4,
        "numbers": {"halves": 4, "halves_applied": 4, "bytes_copied": 4 << 20, "boundary_seconds": 0.004},
    }
    refused = _morph("m-no", "resize", "demo@w2", ["w2"], "40 pages are free, for 160 more KV blocks") | {
        "state": "deferred",
        "started": now - 300,
        "ended": now - 299,
        "reason": "12 pages are free, 40 are needed",
        "numbers": {"pages_missing": 28},
    }
    decided = _event("morph_decided", "controller", "demo@w1", reason, seen, "m-old") | {"at": now - 500.2}
    lost = _event("worker_lost", "controller", "w3", "its lease ran out", {"epoch": 1}) | {"at": now - 120}
    return [decided, swapped, refused, lost]


def _event(
    kind: str, source: str, subject: str, reason: str, numbers: Any, morph_id: str = ""
) -> dict[str, Any]:
    return {
        "kind": kind,
        "source": source,
        "subject": subject,
        "reason": reason,
        "at": time.time(),
        "numbers": numbers,
        "morph_id": morph_id,
    }


def _morph(name: str, kind: str, target: str, workers: list[str], decided: str) -> dict[str, Any]:
    return {
        "id": name,
        "kind": kind,
        "target": target,
        "worker": workers[0],
        "workers": workers,
        "state": "running",
        "reason": "",
        "decided": decided,
        "numbers": {},
        "started": time.time(),
        "ended": None,
    }


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "param": param, "code": code}}, status)


def _sse(kind: str, body: Any) -> bytes:
    return b"event: %b\n" % kind.encode() + _data(body)


def _data(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
