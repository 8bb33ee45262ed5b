"""The ASGI app: routes, and the one place where errors become answers.

The two calls that carry the load go past FastAPI: its middleware and routing take longer than all that the
gateway itself does to refuse a call, and in a burst most calls are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import chain
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route

from gateway.endpoint import Api, Chat, Completions, Endpoint
from gateway.errors import ApiError, from_status, internal, invalid, no_such_path, wrong_method
from gateway.http.body import Message, Receive, Scope, Send
from gateway.loops import Loops
from gateway.openai.problems import sentence
from gateway.operations import admin, deployments, models, morphing, public
from gateway.operations.feeds import Feeds
from gateway.operations.sequences import Sequences
from gateway.state import Gateway

log = logging.getLogger("gateway")

App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTERS: Final = (public.router, admin.router, morphing.router, models.router, deployments.router)
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
# W3C Trace Context, section 3.2: version, trace id, parent id, flags; neither id is all zeros, version ff is
# none, and later versions may add fields.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)


def create_app(gateway: Gateway, feeds: Feeds, on_death: Callable[[], None]) -> Front:
    """`on_death` is called when a background task failed: the process should end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loops = Loops(gateway, feeds)
        await loops.start()
        running = asyncio.create_task(loops.run(), name="gateway-loops")
        running.add_done_callback(lambda task: _report_death(task, on_death))
        try:
            yield
        finally:
            await sequences.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await loops.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    app.state.feeds = feeds
    app.state.sequences = sequences = Sequences(gateway)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unforeseen)
    calls: dict[str, Api] = {"/v1/completions": Completions(), "/v1/chat/completions": Chat()}
    return Front(app, {path: guarded(Endpoint(gateway, api)) for path, api in calls.items()})


def _report_death(task: asyncio.Task[None], on_death: Callable[[], None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a background task failed; this gateway ends", exc_info=error)
        on_death()


class Front:
    """Gives every request an id, the client's own where it sent one, and says it in the answer; workers and
    the log get the same. Takes the calls straight to their endpoints and all else to FastAPI."""

    def __init__(self, app: FastAPI, calls: Mapping[str, App]) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        await self._calls.get(scope["path"], self._app)(scope, receive, send_with_id)


def guarded(app: App) -> App:
    """An app whose errors become answers, as those of FastAPI's routes do."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except ApiError as error:
            await _answer(error)(scope, receive, send)

    return ServerErrorMiddleware(guard, handler=_unforeseen)


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's own; else the trace and span of its traceparent, by which a tracing client finds the call
    in our log; else a new one."""
    given = dict(headers)
    if _REQUEST_ID.fullmatch(own := given.get(b"x-request-id", b"")):
        return own
    if traced := _TRACEPARENT.fullmatch(given.get(b"traceparent", b"")):
        return traced[1]
    return b"req-" + uuid.uuid4().hex.encode()


def _answer(error: ApiError) -> Response:
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


async def _api_error(_: Request, error: Any) -> Response:
    return _answer(error)


async def _http_error(request: Request, error: Any) -> Response:
    """What routing refuses: 404, 405."""
    method, path, headers = request.method, request.scope["path"], error.headers or {}
    if error.status_code == 404:
        return _answer(no_such_path(method, path, public.ENDPOINTS + public.ADMIN_ENDPOINTS))
    if error.status_code == 405 and "Allow" in headers:
        return _answer(wrong_method(method, path, _methods(request) or headers["Allow"]))
    return _answer(from_status(error.status_code, headers, str(error.detail)))


def _methods(request: Request) -> str:
    """All that the path takes: what refuses a method tells of the first route alone."""
    found = set[str]()
    for route in chain.from_iterable(router.routes for router in ROUTERS):
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


async def _validation_error(_: Request, error: Any) -> Response:
    """A parameter of an admin call."""
    first = error.errors()[0]
    param = ".".join(str(step) for step in first["loc"][1:])
    return _answer(invalid(f"{param} {sentence(first)}", param))


async def _unforeseen(request: Request, __: Exception) -> Response:
    """The traceback follows in the log (the server raises it again after this answer)."""
    log.error("request %s failed: %s %r", request.state.request_id, request.method, request.scope["path"])
    return _answer(internal())
