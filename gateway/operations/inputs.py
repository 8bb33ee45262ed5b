"""Bodies and queries as handlers take them, declared once: FastAPI calls them, the schema describes them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel

from bus.morphs import ManualOrder
from gateway.openai.fields import Body
from gateway.operations import orders
from gateway.operations.answers import Here, body_of

B = TypeVar("B", bound=Body)
OrderT = TypeVar("OrderT", bound=ManualOrder)


class BodyOf(Generic[B]):
    """A dependency: the body of a request, of this type. Raises ApiError: 400, 408, 413, 415."""

    def __init__(self, kind: type[B]) -> None:
        self.kind = kind

    async def __call__(self, request: Request, gateway: Here) -> B:
        return orders.parse(self.kind, await body_of(request, gateway))


class OrderOf(Generic[OrderT]):
    """A dependency: the order that a body has, of this type. Raises as `BodyOf` does."""

    def __init__(self, order: type[OrderT]) -> None:
        self.order, self.kind = order, orders.BODIES[order]

    async def __call__(self, request: Request, gateway: Here) -> OrderT:
        return orders.parse_order(self.order, await body_of(request, gateway))


class QueryOf(Generic[B]):
    """A dependency: a query of this type, whose values may be JSON but for `texts`. Raises ApiError 400."""

    def __init__(self, kind: type[B], texts: Collection[str] = ()) -> None:
        self.kind, self._texts = kind, texts

    async def __call__(self, request: Request) -> B:
        given = request.query_params.items()
        fields = {name: text if name in self._texts else _number_or_text(text) for name, text in given}
        return orders.checked(self.kind, fields)


def _number_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def answering(
    kind: type[BaseModel] | type[list[Any]] | None = None,
    *refusals: int,
    ok: Collection[int] = (200,),
    media: str = "",
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route: its answers of `kind`, and refusals that not every route has.

    media: the type of an answer that is no JSON.
    """
    text = {"content": {media: {"schema": {"type": "string"}}}}
    answers: dict[int | str, dict[str, Any]] = {status: text if media else {"model": kind} for status in ok}
    return answers | {status: {} for status in refusals}
