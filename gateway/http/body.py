"""Reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from gateway.errors import ApiError, wrong_media

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]


class ClientLeft(Exception):
    """The client left before its request was complete: no answer is possible."""


async def read_body(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the whole body. It must come within `timeout_s`, since it holds a place in the queue.

    Raises ClientLeft, and ApiError: 413 as soon as the length is known to be too large, 408 on timeout.
    """
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise _too_large(int(value), max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        message = f"the body did not come within {timeout_s:.0f} s (gateway.header_timeout_s)"
        raise ApiError(408, message, kind="timeout", code="body_timeout") from None


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


def check_content_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse other types than JSON, and compressed bodies, which may be huge. Raises ApiError 415."""
    for name, value in headers:
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
