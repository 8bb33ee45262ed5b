"""The ASGI app: routes, and the one place where errors become answers.

The calls that carry the load bypass FastAPI, whose routing takes longer than a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route

from gateway.endpoint import CompletionsEndpoint
from gateway.errors import ApiError, internal, invalid, no_such_path, wrong_method
from gateway.http.body import Message, Receive, Scope, Send
from gateway.http.limits import RATE_HEADERS
from gateway.loops import Loops
from gateway.openai.answer_types import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    EmbeddingsAnswer,
    ResponseAnswer,
    ResponseEvent,
)
from gateway.openai.embeddings import EmbeddingsBody
from gateway.openai.formats import CHAT, COMPLETION, EMBEDDING, RESPONSE
from gateway.openai.params import ChatBody, CompletionBody
from gateway.openai.problems import sentence
from gateway.openai.request_log import RequestLog
from gateway.openai.responses import ResponsesBody
from gateway.operations import admin, burst_routes, deployments, public, schema, tokens
from gateway.operations.live import Feeds
from gateway.operations.sequences import Sequences
from gateway.state import Gateway

log = logging.getLogger("gateway")

App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTERS: Final = (
    *(public.router, schema.router, tokens.router, admin.router),
    *(deployments.router, burst_routes.router),
)
# The calls that carry the load.
CALLS: Final[schema.Calls] = {
    "/v1/completions": (CompletionBody, CompletionAnswer, CompletionChunk),
    "/v1/chat/completions": (ChatBody, ChatAnswer, ChatChunk),
    "/v1/responses": (ResponsesBody, ResponseAnswer, ResponseEvent),
    "/v1/embeddings": (EmbeddingsBody, EmbeddingsAnswer, None),
}
# What a 404 under /admin names, in the order of the routes.
_ADMIN_ROUTES: Final = [*admin.router.routes, *deployments.router.routes, *burst_routes.router.routes]
_ADMIN_PATHS: Final = [one.path.replace(":path", "") for one in _ADMIN_ROUTES if isinstance(one, Route)]
ADMIN_ENDPOINTS: Final = tuple(dict.fromkeys(_ADMIN_PATHS))
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
# W3C Trace Context, section 3.2: version, trace id, parent id, flags; neither id is all zeros, version ff is
# none, and later versions may add fields.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)


def create_app(gateway: Gateway, feeds: Feeds, on_death: Callable[[], None]) -> App:
    """Return the app. It calls `on_death` when a background task failed: the process should end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loops = Loops(gateway, feeds)
        await loops.start()
        running = asyncio.create_task(loops.run(), name="gateway-loops")
        running.add_done_callback(lambda task: _report_death(task, on_death))
        try:
            yield
        finally:
            await bursts.close()
            await sequences.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await loops.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    app.state.feeds = feeds
    app.state.sequences = sequences = Sequences(gateway)
    app.state.bursts = bursts = burst_routes.Bursts(gateway)
    app.state.document = None
    app.state.describe = partial(describe, gateway)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unforeseen)
    calls = {
        "/v1/completions": guarded(CompletionsEndpoint(gateway, COMPLETION, CompletionBody)),
        "/v1/chat/completions": guarded(CompletionsEndpoint(gateway, CHAT, ChatBody)),
        "/v1/responses": guarded(CompletionsEndpoint(gateway, RESPONSE, ResponsesBody)),
        "/v1/embeddings": guarded(CompletionsEndpoint(gateway, EMBEDDING, EmbeddingsBody)),
    }
    front = Front(app, calls)
    if origins := gateway.settings.gateway.cors_origins:
        return CORSMiddleware(
            front,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
        )
    return front


def describe(gateway: Gateway) -> dict[str, Any]:
    """Return the OpenAPI document of all routes."""
    has_key = {"apiKey": bool(gateway.keys), "adminKey": bool(gateway.admin_keys)}
    return schema.Describer(CALLS, has_key).document(chain.from_iterable(one.routes for one in ROUTERS))


def _report_death(task: asyncio.Task[None], on_death: Callable[[], None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a background task failed; this gateway ends", exc_info=error)
        on_death()


class Front:
    """The outermost app: gives every request an id, and completions straight to their endpoints."""

    def __init__(self, app: FastAPI, calls: Mapping[str, App]) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        ended = RequestLog(request_id.decode(), scope["method"], scope["path"], time.monotonic())
        scope.setdefault("state", {}).update(request_id=ended.request_id, log=ended)
        endpoint = self._calls.get(scope["path"], self._app)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if endpoint is self._app:  # the others note their own status
                    ended.status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        try:
            await endpoint(scope, receive, send_with_id)
        finally:
            ended.write()


def guarded(app: App) -> App:
    """Wrap `app` so that its errors become answers, as FastAPI does for its routes."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except ApiError as error:
            scope["state"]["log"].refused(error)
            await _answer(error)(scope, receive, send)

    return ServerErrorMiddleware(guard, handler=_unforeseen)


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the client's id; else the trace and span of its traceparent; else a new one."""
    given = dict(headers)
    if _REQUEST_ID.fullmatch(own := given.get(b"x-request-id", b"")):
        return own
    if traced := _TRACEPARENT.fullmatch(given.get(b"traceparent", b"")):
        return traced[1]
    return b"req-" + uuid.uuid4().hex.encode()


def _answer(error: ApiError) -> Response:
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


async def _api_error(request: Request, error: Any) -> Response:
    request.state.log.refused(error)
    return _answer(error)


async def _http_error(request: Request, error: Any) -> Response:
    """Answer what routing refuses: 404, 405."""
    method, path, headers = request.method, request.scope["path"], error.headers or {}
    if error.status_code == 404:
        refusal = no_such_path(method, path, public.ENDPOINTS, ADMIN_ENDPOINTS)
    elif error.status_code == 405 and "Allow" in headers:
        refusal = wrong_method(method, path, _methods(request) or headers["Allow"])
    else:
        refusal = ApiError(error.status_code, str(error.detail), headers=headers)
    return await _api_error(request, refusal)


def _methods(request: Request) -> str:
    """Return all methods of the first path in ROUTERS that matches; FastAPI has a route for each method."""
    routes = chain.from_iterable(router.routes for router in ROUTERS)
    found = [
        one for one in routes if isinstance(one, Route) and one.matches(request.scope)[0] is not Match.NONE
    ]
    return ", ".join(sorted({m for one in found if one.path == found[0].path for m in one.methods or ()}))


async def _validation_error(request: Request, error: Any) -> Response:
    first = error.errors()[0]
    param = ".".join(str(step) for step in first["loc"][1:])
    return await _api_error(request, invalid(f"{param} {sentence(first)}", param))


async def _unforeseen(request: Request, __: Exception) -> Response:
    """Answer 500. The traceback follows in the log: the server raises the error again after this answer."""
    log.error("request %s failed: %s %r", request.state.request_id, request.method, request.scope["path"])
    return _answer(internal())
