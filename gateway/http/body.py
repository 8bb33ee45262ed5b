"""Reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from bus.settings import GatewaySettings
from gateway.errors import ApiError, wrong_media

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
Headers = Iterable[tuple[bytes, bytes]]


class ClientLeft(Exception):
    """The client left before its request was complete: no answer is possible."""


async def read_body(headers: Headers, receive: Receive, limits: GatewaySettings) -> bytes:
    """Return the whole body, which must come in time, since it holds a place in the queue.

    Raises ClientLeft, and ApiError: 415 for another type, 413 as soon as it is too large, 408 on timeout.
    """
    max_bytes, timeout_s = limits.max_body_bytes, limits.header_timeout_s
    _check(headers, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        message = f"the body did not come within {timeout_s:.0f} s (gateway.header_timeout_s)"
        raise ApiError(408, message, code="body_timeout") from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _check(headers: Headers, max_bytes: int) -> None:
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise _too_large(int(value), max_bytes)
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind not in (b"application/json", b"text/json") and not kind.endswith(b"+json"):
                raise wrong_media(f"content-type is {_shown(value)}; send application/json")
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise wrong_media(f"content-encoding is {_shown(value)}; send the body uncompressed")


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size} bytes or more; the limit is {limit} (gateway.max_body_bytes)"
    return ApiError(413, message, code="body_too_large")
