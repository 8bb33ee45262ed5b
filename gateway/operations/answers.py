"""The parts that the handlers of /admin share: dependencies, bodies, answers, and orders to the controller.

The controller alone changes what is registered and deployed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, Request
from starlette.responses import Response

from bus.api_keys import Scope
from bus.catalogue import Contents
from bus.client import BusFull, BusUnavailable
from bus.deployments import Answer, Deployment, ModelCard, Order
from gateway.errors import ApiError, bad_json, unavailable
from gateway.http.auth import check_admin
from gateway.http.body import ClientLeft, read_body
from gateway.openai.formats import to_json
from gateway.state import Gateway

ANSWER_S: Final = 5.0  # a live controller answers within a fraction of it
WAIT_S: Final = 30.0  # longest answer to ?wait=true; ask again for longer
LOOK_S: Final = 0.2
POLL_WAIT_S: Final = 2.0  # longest wait for the registry; the answer is true without it
POLL_LOOK_S: Final = 0.02

R = TypeVar("R", ModelCard, Deployment)


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Here = Annotated[Gateway, Depends(gateway_of)]


async def allowed(request: Request, gateway: Here) -> None:
    """Raise ApiError 401 or 403 unless the caller may use /admin."""
    host = request.client.host if request.client else ""
    loopback_only = gateway.settings.gateway.loopback_only
    scope: Scope = "admin-read" if request.method in ("GET", "HEAD") else "admin-write"
    check_admin(gateway.admin_keys, request.headers.raw, host, loopback_only=loopback_only, scope=scope)


async def body_of(request: Request, gateway: Gateway) -> bytes:
    """Return a request's body. Raises ApiError for one that is too large, too slow or of another type."""
    try:
        return await read_body(request.headers.raw, request.receive, gateway.settings.gateway)
    except ClientLeft as error:  # the client is gone, and nothing was ordered
        raise bad_json("the body is incomplete") from error


def new_id() -> str:
    """Return an id that people can type."""
    return uuid.uuid4().hex[:12]


def json_answer(body: Any, status: int = 200) -> Response:
    return Response(to_json(body), status, media_type="application/json")


@contextmanager
def bus_or_503() -> Iterator[None]:
    """Raise ApiError 503 where Redis is away or full."""
    try:
        yield
    except (BusUnavailable, BusFull) as error:
        raise unavailable(f"the bus cannot be reached: {error}") from error


async def ask(gateway: Gateway, order: Order, *, param: str, code: str = "not_found") -> Answer:
    """Send an order; return the controller's answer. Raises ApiError: its refusal, or 503."""
    catalogue = gateway.bus.catalogue
    with bus_or_503():
        entry = await catalogue.order(order)
        answer = await catalogue.await_answer(order.id, entry, ANSWER_S)
    if answer is None:
        raise unavailable(
            f"the controller did not take the order within {ANSWER_S:g} s, and nothing was changed; "
            "see that one runs (`instar serve` starts it; by hand: `python -m controller`) and order again",
            5.0,
        )
    if answer.status >= 400:
        codes = {400: "invalid_value", 404: code, 409: "conflict", 500: "controller_failed"}
        raise ApiError(answer.status, answer.error, param=param, code=codes.get(answer.status))
    gateway.poll_now.set()
    return answer


async def contents(gateway: Gateway) -> Contents:
    """Read the catalogue. Raises ApiError 503."""
    with bus_or_503():
        gateway.catalogue = await gateway.bus.catalogue.read()
    return gateway.catalogue


async def next_poll(gateway: Gateway) -> None:
    """Wait until the gateway has read the workers' cards anew: its state shows what they serve now."""
    began = time.monotonic()
    gateway.poll_now.set()
    while gateway.cluster.polled_at < began and time.monotonic() < began + POLL_WAIT_S:  # noqa: ASYNC110
        await asyncio.sleep(POLL_LOOK_S)


async def until(gateway: Gateway, record: R, states: tuple[str, ...]) -> R:
    """Wait until a record is in one of these states or gone, at most WAIT_S, and return it."""
    deadline = time.monotonic() + WAIT_S
    while record.state not in states and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
        there = await contents(gateway)
        if isinstance(record, ModelCard):
            found = there.models.get(record.name)
        else:
            found = there.deployments.get(record.id)
        if found is None:
            break
        record = found
    return record
