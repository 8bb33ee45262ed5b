"""What the admin's orders have in common: a body read, an answer written, the bus that may be away."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from starlette.responses import Response

from bus.client import BusFull, BusUnavailable
from gateway.errors import bad_json, unavailable
from gateway.http.body import ClientLeft, check_content_type, read_body
from gateway.openai.formats import to_json
from gateway.state import Gateway


async def body_of(request: Request, gateway: Gateway) -> bytes:
    """Raises ApiError."""
    settings, headers = gateway.settings.gateway, request.headers.raw
    check_content_type(headers)
    try:
        return await read_body(
            headers, request.receive, max_bytes=settings.max_body_bytes, timeout_s=settings.header_timeout_s
        )
    except ClientLeft as error:  # nothing was ordered; nobody reads this answer
        raise bad_json("the body is incomplete") from error


def new_id() -> str:
    """Short, since people type it."""
    return uuid.uuid4().hex[:12]


def json_answer(body: Any, status: int = 200) -> Response:
    return Response(to_json(body), status, media_type="application/json")


@contextmanager
def bus_or_503() -> Iterator[None]:
    try:
        yield
    except (BusUnavailable, BusFull) as error:
        raise unavailable(f"the bus cannot be reached: {error}") from error
