"""/admin: the state, event streams, and orders to workers by hand. Its keys are not those of /v1.

An order is answered 202 with its morph; with `?wait=true` when it has ended.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse

from bus.errors import meant
from bus.messages import Drain
from bus.morphs import MORPHS, CancelMorph, MorphEntry, TransformOrder
from bus.policy import describe
from gateway.errors import ApiError, invalid, not_found
from gateway.morphs import MorphRecord
from gateway.operations import orders, transforms
from gateway.operations import policy as policies
from gateway.operations.answers import WAIT_S, Here, allowed, bus_or_503, json_answer, new_id
from gateway.operations.group_choice import with_workers
from gateway.operations.inputs import BodyOf, OrderOf, answering
from gateway.operations.live import Feeds
from gateway.operations.orders import loss_without
from gateway.operations.picture import num_requests, picture
from gateway.operations.sequences import Sequences, send, shown
from gateway.operations.tables import tables
from gateway.state import Gateway


async def feeds_of(request: Request) -> Feeds:
    feeds: Feeds = request.app.state.feeds
    return feeds


async def sequences_of(request: Request) -> Sequences:
    sequences: Sequences = request.app.state.sequences
    return sequences


Streams = Annotated[Feeds, Depends(feeds_of)]
Running = Annotated[Sequences, Depends(sequences_of)]

STREAM: Final = answering(media="text/event-stream")
# Orders are under way with 202; 409 for what the state forbids.
ORDER: Final = answering(None, 404, 409, ok=(200, 202))

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


@router.get("/state")
async def state(gateway: Here) -> Response:
    """Return workers, instances, memory, requests and morphs now."""
    return json_answer(picture(gateway))


@router.get("/tables")
async def get_tables() -> Response:
    """Return the precisions, kinds of morphs, fields of the policy and charts."""
    return json_answer(tables())


@router.get("/events", responses=STREAM)
async def events(feeds: Streams) -> StreamingResponse:
    """Stream the events of the bus, the recent ones first."""
    return _stream(feeds.events.listen())


@router.get("/live", responses=STREAM)
async def live(feeds: Streams) -> StreamingResponse:
    """Stream to the dashboard: hello, history, state, and what happens from then on."""
    return _stream(feeds.live.listen())


@router.get("/requests", responses=STREAM)
async def requests(feeds: Streams, prompts: bool = False) -> StreamingResponse:
    """Stream requests as they end, with the token ids of their prompts if `prompts`."""
    return _stream(feeds.requests.listen(prompts))


def _stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


@router.post("/workers/{worker}/drain", status_code=202, responses=answering(None, 409, ok=(202,)))
async def drain(worker: str, gateway: Here, force: bool = False) -> dict[str, Any]:
    """Let a worker finish what it runs, and leave. 404, or 409 for a model's last worker unless `force`."""
    card = gateway.cluster.workers.get(worker)
    if card is None:
        raise not_found("worker", worker, meant(worker, gateway.cluster.workers))
    if not force and (why := loss_without(gateway.cluster, card)):
        message = f"{why}. To drain {worker} all the same, add ?force=true (instar drain {worker} --force)"
        raise ApiError(409, message, param="worker", code="last_worker")
    command = Drain(id=uuid.uuid4().hex, epoch=card.epoch)
    with bus_or_503():
        await gateway.bus.publish(gateway.bus.names.control(worker), command)
    gateway.cluster.mark_draining(worker, card.epoch)
    return {"id": command.id, "worker": worker, "epoch": card.epoch, "state": "draining"}


@router.post("/instances/transform", responses=ORDER)
async def transform(
    body: Annotated[TransformOrder, Depends(OrderOf(TransformOrder))],
    gateway: Here,
    sequences: Running,
    wait: bool = False,
) -> Response:
    """Serve a model on these workers, or on chosen ones, in groups of another degree. 400, 404, 409."""
    if body.workers and body.instance:
        raise invalid("both workers and instance are given; send either", "instance")
    if not body.workers:
        body = with_workers(gateway.cluster, body, partial(num_requests, gateway))
    model, steps = transforms.plan(gateway.cluster, body, gateway.policy, time.monotonic())
    if len(steps) == 1:
        place, command = transforms.command(gateway.cluster, model, steps[0], body, new_id())
        record = await send(gateway, place, command)
    else:
        record = await sequences.start(model, steps, body)
    return await _answer(gateway, record, wait)


def _add_instance_order(kind: MorphEntry, order: Any) -> None:
    """Add POST /admin/instances/{instance}/{kind}: 404, 400 for what cannot be, 409 while it drains."""

    of_kind: Any = Depends(OrderOf(order))

    async def handle(instance: str, gateway: Here, body: Any = of_kind, wait: bool = False) -> Response:
        place = orders.find(gateway.cluster, instance)
        record = await send(gateway, place, orders.command_of(kind, place, body, new_id()))
        return await _answer(gateway, record, wait)

    handle.__doc__ = f"Order of one instance: {kind.summary}." if kind.summary else None
    path = f"/instances/{{instance:path}}/{kind.name}"
    router.add_api_route(path, handle, methods=["POST"], responses=ORDER)


for _kind in MORPHS:
    if _kind.target == "instance":
        _add_instance_order(_kind, _kind.order)


@router.get("/morphs/{morph}")
async def get_morph(morph: str, gateway: Here, wait: bool = False) -> Response:
    """Return a morph's progress or outcome; with `?wait=true` when it has ended, or after WAIT_S."""
    record = _record(gateway, morph)
    await _answer(gateway, record, wait)
    return json_answer(record.as_json())


@router.delete("/morphs/{morph}", responses=ORDER)
async def cancel_morph(morph: str, gateway: Here, sequences: Running, wait: bool = False) -> Response:
    """Give a morph up: the old shape continues to serve. 409 for a morph that has ended."""
    record = _record(gateway, morph)
    if not record.is_running:
        message = f"morph {morph} has ended: {record.state}; to undo it, order the way back"
        raise ApiError(409, message, param="morph", code="morph_ended")
    sequences.cancel(record.id)
    for one in map(gateway.morphs.get, record.steps or [record.id]):
        if one is not None and one.is_running:
            command = CancelMorph(id=uuid.uuid4().hex, epoch=one.epoch, morph_id=one.id)
            with bus_or_503():
                await gateway.bus.publish(gateway.bus.names.control(one.worker), command)
    return await _answer(gateway, record, wait)


@router.get("/policy")
async def get_policy(gateway: Here) -> Response:
    """Return the policy."""
    with bus_or_503():
        gateway.policy = await gateway.bus.read_policy()
    return json_answer(asdict(gateway.policy))


@router.get("/policy/fields", responses=answering(list[dict[str, Any]]))
async def get_policy_fields() -> Response:
    """Return the declaration of each field: label, type, limits, unit, meaning, effects of modes."""
    return json_answer(describe())


@router.put("/policy", responses=answering(None, 409))
async def put_policy(gateway: Here, body: Annotated[Any, Depends(BodyOf(policies.PolicyBody))]) -> Response:
    """Change the fields that are given. 400 for values out of range or order, 409 for an old revision."""
    with bus_or_503():
        before, after = await policies.write(gateway.bus, body)
    gateway.policy = after
    changes = policies.differences(before, after)
    gateway.publish("policy_changed", "policy", changes, {"revision": float(after.revision)})
    return json_answer(asdict(after))


def _record(gateway: Gateway, morph: str) -> MorphRecord:
    record = gateway.morphs.get(morph)
    if record is None:
        latest = ", ".join(one.id for one in gateway.morphs.recent(3)) or "none"
        raise not_found("morph", morph, f"the latest are: {latest}")
    return record


async def _answer(gateway: Gateway, record: MorphRecord, wait: bool) -> Response:
    """Answer 202 while a morph runs. With `wait`, `applied` comes when /admin/state shows the new shape."""
    if wait:
        await record.wait(WAIT_S)
        await shown(gateway, record)
    return json_answer(record.as_json(), 202 if record.is_running else 200)
