"""/admin: what is where, what happens, and orders to workers. Its keys are not those of /v1."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse

from bus.client import BusFull, BusUnavailable
from bus.messages import Drain
from gateway.errors import ApiError, unavailable
from gateway.http.auth import check_admin
from gateway.openai.formats import to_json
from gateway.operations.feeds import Feeds
from gateway.operations.orders import loss_without, meant
from gateway.operations.picture import picture
from gateway.operations.tables import tables
from gateway.state import Gateway


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def feeds_of(request: Request) -> Feeds:
    feeds: Feeds = request.app.state.feeds
    return feeds


Here = Annotated[Gateway, Depends(gateway_of)]
Streams = Annotated[Feeds, Depends(feeds_of)]


async def allowed(request: Request, gateway: Here) -> None:
    """Raises ApiError 401 or 403."""
    host = request.client.host if request.client else ""
    loopback_only = gateway.settings.gateway.loopback_only
    check_admin(gateway.admin_keys, request.headers.raw, host, loopback_only=loopback_only)


router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


@router.get("/state")
async def state(gateway: Here) -> Response:
    return Response(to_json(picture(gateway)), media_type="application/json")


@router.get("/tables")
async def get_tables() -> Response:
    """The precisions, kinds of morphs, fields of the policy and charts."""
    return Response(to_json(tables()), media_type="application/json")


@router.get("/events")
async def events(feeds: Streams) -> StreamingResponse:
    """Server-sent events of the audit stream, the recent ones first."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(feeds.events.listen(), media_type="text/event-stream", headers=headers)


@router.get("/live")
async def live(feeds: Streams) -> StreamingResponse:
    """Server-sent events for the dashboard: hello, history, state, and what happens from then on."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(feeds.live.listen(), media_type="text/event-stream", headers=headers)


@router.get("/requests")
async def requests(feeds: Streams, prompts: bool = False) -> StreamingResponse:
    """Server-sent events: each request as it ends, with its prompt's token ids if `prompts`."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(feeds.requests.listen(prompts), media_type="text/event-stream", headers=headers)


@router.post("/workers/{worker}/drain", status_code=202)
async def drain(worker: str, gateway: Here, force: bool = False) -> dict[str, Any]:
    """Let a worker finish what it runs, take nothing new, and leave.

    404 for a worker that is not there. 409 for the last worker that serves a model, unless `force`.
    """
    card = gateway.cluster.workers.get(worker)
    if card is None:
        message = f"no worker {worker[:200]!r}; {meant(worker, gateway.cluster.workers)}"
        raise ApiError(404, message, param="worker", code="worker_not_found")
    if not force and (why := loss_without(gateway.cluster, card)):
        message = f"{why}. To drain {worker} all the same, add ?force=true (instar drain {worker} --force)"
        raise ApiError(409, message, param="worker", code="last_worker")
    command = Drain(id=uuid.uuid4().hex, epoch=card.epoch)
    try:
        await gateway.bus.publish(gateway.bus.names.control(worker), command)
    except (BusUnavailable, BusFull) as error:
        raise unavailable(f"the order cannot be sent: {error}") from error
    gateway.cluster.mark_draining(worker, card.epoch)
    return {"id": command.id, "worker": worker, "epoch": card.epoch, "state": "draining"}
