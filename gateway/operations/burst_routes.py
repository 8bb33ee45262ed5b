"""/admin/burst: the burst of the dashboard, begun, followed and stopped; one at a time."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from bus.burst import BURST_FIELDS, BurstOrder
from bus.messages import InstanceCard
from gateway.errors import ApiError, invalid, unavailable
from gateway.operations.answers import allowed
from gateway.operations.bodies import body_type
from gateway.operations.burst import Burst
from gateway.operations.inputs import BodyOf, answering
from gateway.state import Gateway

BurstBody = body_type("BurstBody", BURST_FIELDS)


class Bursts:
    """The bursts of this gateway: the one that is played, or else the last."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[None] | None = None
        self.latest: Burst | None = None

    def start(self, order: BurstOrder) -> Burst:
        """Begin to play. Raises ApiError: 409 while one is played, 400 or 404 for the model, 503."""
        if self.latest is not None and self.latest.is_running:
            message = f"{self.latest.words}; wait until it has ended, or stop it (DELETE /admin/burst)"
            raise ApiError(409, message, code="burst_running")
        self._gateway.refuse_if_closed()
        self.latest = Burst(self._gateway, order, self._card(order.model))
        self._task = asyncio.create_task(self.latest.play(), name="burst")
        return self.latest

    def _card(self, model: str | None) -> InstanceCard:
        served = list(self._gateway.cluster.ready_models())
        if model is None and not served:
            raise unavailable("no worker is serving, so there is nothing to send a burst to", 2.0)
        if model is None and len(served) > 1:
            raise invalid(f"several models are served, and a burst is for one: {', '.join(served)}", "model")
        return self._gateway.models.card(model or served[0])

    async def stop(self) -> Burst:
        """End the burst that is played, and its requests. Raises ApiError 409 if there is none."""
        if self.latest is None or not self.latest.is_running:
            raise ApiError(409, "no burst is played", code="no_burst")
        await self.close()
        return self.latest

    async def close(self) -> None:
        """End what is played: the process exits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.latest is not None and self.latest.is_running:  # its task had not begun
            self.latest.state = "stopped"


async def bursts_of(request: Request) -> Bursts:
    bursts: Bursts = request.app.state.bursts
    return bursts


Played = Annotated[Bursts, Depends(bursts_of)]
router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


@router.post("/burst", status_code=202, responses=answering(None, 404, 409, ok=(202,)))
async def play(bursts: Played, body: Annotated[Any, Depends(BodyOf(BurstBody))]) -> dict[str, Any]:
    """Play the burst of `make demo`. 409 while one is played."""
    return bursts.start(BurstOrder(**body.model_dump(exclude_none=True))).as_json()


@router.get("/burst", responses=answering())
async def get_burst(bursts: Played) -> dict[str, Any]:
    """Return the burst that is played, or the last one; null without any."""
    return {"burst": bursts.latest and bursts.latest.as_json()}


@router.delete("/burst", responses=answering(None, 409))
async def stop(bursts: Played) -> dict[str, Any]:
    """Stop the burst that is played, and cancel its requests. 409 if there is none."""
    return (await bursts.stop()).as_json()
