"""/admin: morphs and their policy by hand. An order is answered 202 with its morph; `?wait=true` waits."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from bus.messages import CancelMorph
from bus.morphs import MORPHS, MorphEntry, TransformOrder
from bus.policy import describe
from gateway.errors import ApiError
from gateway.morphs import MorphRecord
from gateway.operations import orders, transforms
from gateway.operations import policy as policies
from gateway.operations.admin import Here, allowed
from gateway.operations.answers import body_of, bus_or_503, json_answer, new_id
from gateway.operations.sequences import Sequences, send, shown
from gateway.state import Gateway

WAIT_S: Final = 30.0  # longest answer to ?wait=true; ask again for longer


async def sequences_of(request: Request) -> Sequences:
    sequences: Sequences = request.app.state.sequences
    return sequences


Running = Annotated[Sequences, Depends(sequences_of)]

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


@router.post("/instances/transform")
async def transform(request: Request, gateway: Here, sequences: Running, wait: bool = False) -> Response:
    """Serve a model on these workers in groups of another degree, in as many steps as it takes. 404 for a
    worker that is not there, 409 for one that loads or drains, 400 for workers and degrees that make no
    group."""
    body = orders.parse_order(TransformOrder, await body_of(request, gateway))
    model, steps = transforms.plan(gateway.cluster, body)
    if len(steps) == 1:
        place, command = transforms.command(gateway.cluster, model, steps[0], body, new_id())
        entry = await send(gateway, place, command)
    else:
        entry = await sequences.start(model, steps, body)
    return await _told(gateway, entry, wait)


def _add_instance_order(entry: MorphEntry, order: Any) -> None:
    """POST /admin/instances/{instance}/{kind}. 404 for an instance that is not there, 400 for what it cannot
    be, 409 for an instance whose worker drains."""

    async def handle(instance: str, request: Request, gateway: Here, wait: bool = False) -> Response:
        body = orders.parse_order(order, await body_of(request, gateway))
        place = orders.find(gateway.cluster, instance)
        entry_of = await send(gateway, place, orders.COMMANDS[entry.name](place, body, new_id()))
        return await _told(gateway, entry_of, wait)

    router.add_api_route(f"/instances/{{instance:path}}/{entry.name}", handle, methods=["POST"])


for _entry_of_kind in MORPHS:
    if _entry_of_kind.target == "instance":
        _add_instance_order(_entry_of_kind, _entry_of_kind.order)


@router.get("/morphs/{morph_id}")
async def morph(morph_id: str, gateway: Here, wait: bool = False) -> Response:
    """How far it is: 200, with `?wait=true` when it has ended or after WAIT_S."""
    entry = _entry(gateway, morph_id)
    if wait:
        await entry.wait(WAIT_S)
        await shown(gateway, entry)
    return json_answer(entry.as_json())


@router.delete("/morphs/{morph_id}")
async def cancel(morph_id: str, gateway: Here, sequences: Running, wait: bool = False) -> Response:
    """Give it up: the old shape goes on serving. 409 for one that has ended."""
    entry = _entry(gateway, morph_id)
    if not entry.is_running:
        message = f"morph {morph_id} has ended: {entry.state}; to undo it, order the way back"
        raise ApiError(409, message, param="morph", code="morph_ended")
    sequences.cancel(entry.id)
    steps = (gateway.morphs.get(one) for one in entry.steps)
    for one in [step for step in steps if step and step.is_running] if entry.steps else [entry]:
        command = CancelMorph(id=uuid.uuid4().hex, epoch=one.epoch, morph_id=one.id)
        with bus_or_503():
            await gateway.bus.publish(gateway.bus.names.control(one.worker), command)
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
    gateway.publish("policy_changed", "policy", told, {"revision": float(after.revision)})
    return json_answer(asdict(after))


def _entry(gateway: Gateway, morph_id: str) -> MorphRecord:
    entry = gateway.morphs.get(morph_id)
    if entry is None:
        latest = ", ".join(one.id for one in gateway.morphs.recent(3)) or "none"
        message = f"no morph {morph_id[:200]!r}; the latest are: {latest}"
        raise ApiError(404, message, param="morph", code="morph_not_found")
    return entry


async def _told(gateway: Gateway, entry: MorphRecord, wait: bool) -> Response:
    """202 while it runs. With `wait`, the answer `applied` comes when /admin/state shows the new shape."""
    if wait:
        await entry.wait(WAIT_S)
        await shown(gateway, entry)
    return json_answer(entry.as_json(), 202 if entry.is_running else 200)
