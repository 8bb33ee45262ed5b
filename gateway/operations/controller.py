"""Orders to the controller, which alone changes what is registered and deployed, and its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

from bus.catalogue import Contents
from bus.deployments import Answer, Deployment, ModelCard, Order
from gateway.errors import ApiError, invalid, unavailable
from gateway.operations.answers import bus_or_503
from gateway.state import Gateway

ANSWER_S: Final = 5.0  # a controller that lives answers within a look or two
WAIT_S: Final = 30.0  # longest answer to ?wait=true; ask again for longer
LOOK_S: Final = 0.2
POLL_WAIT_S: Final = 2.0  # longest wait for the registry; the answer is true without it
POLL_LOOK_S: Final = 0.02

R = TypeVar("R", ModelCard, Deployment)


async def ask(gateway: Gateway, order: Order, *, param: str, code: str = "not_found") -> Answer:
    """`param`: that an order is refused for; `code`: of a 404. Raises ApiError: what the controller refuses,
    503 where it does not answer."""
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
        raise _refusal(answer, param, code)
    gateway.poll_now.set()
    return answer


def _refusal(answer: Answer, param: str, code: str) -> ApiError:
    if answer.status == 400:
        return invalid(answer.error, param)
    codes = {404: code, 409: "conflict"}
    return ApiError(answer.status, answer.error, param=param, code=codes.get(answer.status))


async def contents(gateway: Gateway) -> Contents:
    """As it is now. Raises ApiError 503."""
    with bus_or_503():
        gateway.catalogue = await gateway.bus.catalogue.read()
    return gateway.catalogue


async def next_poll(gateway: Gateway) -> None:
    """Wait until the gateway has read the workers' cards anew: its state shows what they serve now."""
    began = time.monotonic()
    gateway.poll_now.set()
    while gateway.cluster.polled_at < began and time.monotonic() < began + POLL_WAIT_S:  # noqa: ASYNC110
        await asyncio.sleep(POLL_LOOK_S)


async def until(
    gateway: Gateway, find: Callable[[Contents], R | None], states: tuple[str, ...], record: R
) -> R:
    """The record when it is in one of these states, gone, or as it is after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while record.state not in states and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
        found = find(await contents(gateway))
        if found is None:
            break
        record = found
    return record
