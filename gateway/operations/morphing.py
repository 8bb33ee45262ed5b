"""/admin: morphs and their policy by hand. An order is answered 202 with its morph; `?wait=true` waits."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict
from typing import Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from bus.messages import CancelMorph, Event, Morph
from bus.policy import describe
from gateway.errors import ApiError
from gateway.morphs import CARDS_S, Entry
from gateway.operations import orders, transforms
from gateway.operations import policy as policies
from gateway.operations.admin import Here, allowed
from gateway.operations.answers import body_of, bus_or_503, json_answer, new_id
from gateway.state import Gateway

WAIT_S: Final = 30.0  # longest answer to ?wait=true; ask again for longer
POLL_S: Final = 0.05  # between two looks at the cards of a group that has just changed

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


@router.post("/instances/transform")
async def transform(request: Request, gateway: Here, wait: bool = False) -> Response:
    """Serve a model at another degree of tensor parallelism. 404 for a worker there is not, 409 for one that
    loads or drains, 400 for workers and degrees that make no group."""
    body = orders.parse(transforms.TransformBody, await body_of(request, gateway))
    place, command = transforms.transform(gateway.cluster, body, new_id())
    entry = await _send(gateway, place, command)
    return await _told(gateway, entry, wait)


@router.post("/instances/{instance:path}/swap")
async def swap(instance: str, request: Request, gateway: Here, wait: bool = False) -> Response:
    """Hold layers in another precision. 404 for an instance, 400 for a layer or precision there is not, 409
    for an instance whose worker drains."""
    body = orders.parse(orders.SwapBody, await body_of(request, gateway))
    place = orders.find(gateway.cluster, instance)
    entry = await _send(gateway, place, orders.swap(place, body, new_id()))
    return await _told(gateway, entry, wait)


@router.post("/instances/{instance:path}/resize")
async def resize(instance: str, request: Request, gateway: Here, wait: bool = False) -> Response:
    """Have so many KV blocks. 404 for an instance there is not, 409 for one whose worker drains."""
    body = orders.parse(orders.ResizeBody, await body_of(request, gateway))
    place = orders.find(gateway.cluster, instance)
    entry = await _send(gateway, place, orders.resize(place, body, new_id()))
    return await _told(gateway, entry, wait)


@router.get("/morphs/{morph_id}")
async def morph(morph_id: str, gateway: Here, wait: bool = False) -> Response:
    """How far it is: 200, with `?wait=true` when it has ended or after WAIT_S."""
    entry = _entry(gateway, morph_id)
    if wait:
        await entry.wait(WAIT_S)
        await _shown(gateway, entry)
    return json_answer(entry.as_json())


@router.delete("/morphs/{morph_id}")
async def cancel(morph_id: str, gateway: Here, wait: bool = False) -> Response:
    """Give it up: the old shape goes on serving. 409 for one that has ended."""
    entry = _entry(gateway, morph_id)
    if not entry.is_running:
        message = f"morph {morph_id} has ended: {entry.state}; to undo it, order the way back"
        raise ApiError(409, message, param="morph", code="morph_ended")
    command = CancelMorph(id=uuid.uuid4().hex, epoch=entry.epoch, morph_id=entry.id)
    with bus_or_503():
        await gateway.bus.publish(gateway.bus.names.control(entry.worker), command)
    return await _told(gateway, entry, wait)


@router.get("/policy")
async def get_policy(gateway: Here) -> Response:
    with bus_or_503():
        gateway.policy = await gateway.bus.read_policy()
    return json_answer(asdict(gateway.policy))


@router.get("/policy/fields")
async def get_policy_fields() -> Response:
    """The declaration of each field of the policy: label, type, limits, unit, meaning, effects of modes."""
    return json_answer(describe())


@router.put("/policy")
async def put_policy(request: Request, gateway: Here) -> Response:
    """Changes the fields that are given. 400 for what is out of range or order, 409 for an old revision."""
    body = orders.parse(policies.PolicyBody, await body_of(request, gateway))
    with bus_or_503():
        before, after = await policies.write(gateway.bus, body)
    gateway.policy = after
    told = policies.differences(before, after)
    gateway.tell("policy_changed", "policy", told, {"revision": float(after.revision)})
    return json_answer(asdict(after))


async def _send(gateway: Gateway, place: orders.Place, command: Morph) -> Entry:
    """The order and the event that tells of it, both or neither. Raises ApiError 503."""
    bus, worker = gateway.bus, place.worker.id
    decided = f"ordered by hand: {orders.in_words(command)}"
    entry = gateway.morphs.ordered(command, worker, decided)
    event = Event(
        kind="morph_decided",
        source="gateway",
        subject=command.instance,
        reason=decided,
        at_ms=time.time_ns() // 1_000_000,
        morph_id=command.id,
        cause=entry.cause,
    )
    batch = bus.batch()
    batch.publish(bus.names.control(worker), command)
    batch.publish(bus.names.events, event)
    try:
        with bus_or_503():
            await batch.send()
    except ApiError:
        gateway.morphs.unsent(entry)
        raise
    return entry


async def _shown(gateway: Gateway, entry: Entry) -> None:
    """Wait until the cards of all members show the degree that a transform made, at most CARDS_S."""
    deadline = time.monotonic() + CARDS_S

    def is_shown() -> bool:
        members = [one for one in gateway.cluster.workers.values() if one.id in entry.workers]
        return not any(gateway.morphs.changing(one.id, card.tp) for one in members for card in one.instances)

    while entry.state == "applied" and not is_shown() and time.monotonic() < deadline:
        gateway.poll_now.set()
        await asyncio.sleep(POLL_S)


def _entry(gateway: Gateway, morph_id: str) -> Entry:
    entry = gateway.morphs.get(morph_id)
    if entry is None:
        latest = ", ".join(one.id for one in gateway.morphs.recent(3)) or "none"
        message = f"no morph {morph_id[:200]!r}; the latest are: {latest}"
        raise ApiError(404, message, param="morph", code="morph_not_found")
    return entry


async def _told(gateway: Gateway, entry: Entry, wait: bool) -> Response:
    """202 while it runs. With `wait`, the answer `applied` comes when /admin/state shows the new shape."""
    if wait:
        await entry.wait(WAIT_S)
        await _shown(gateway, entry)
    return json_answer(entry.as_json(), 202 if entry.is_running else 200)
