"""/admin/deployments: a registered model is to be served, as an intent says."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from bus.deployments import DeployModel, RetireModel
from gateway.errors import ApiError
from gateway.openai.params import Body
from gateway.operations import controller, orders
from gateway.operations.admin import Here, allowed
from gateway.operations.answers import body_of, json_answer, new_id
from gateway.operations.deployed import deployment_json
from gateway.operations.intents import intent_of

SETTLED: Final = ("serving", "failed", "retired")
GONE: Final = ("retired", "failed")

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


class DeployBody(Body):
    """`intent`: an object, or what to minimise alone; left out, the cost."""

    model: Annotated[str, Field(min_length=1)]
    intent: Any = "cost"


@router.post("/deployments")
async def deploy(request: Request, gateway: Here, wait: bool = False) -> Response:
    """202 with the deployment; `?wait=true`: 200 when it serves or has failed. 404 for a model that is not
    registered, 400 for a bad intent, 409 for one that nothing meets."""
    body = orders.parse(DeployBody, await body_of(request, gateway))
    order = DeployModel(id=new_id(), name=body.model, intent=intent_of(body.intent))
    answer = await controller.ask(gateway, order, param="intent", code="model_not_found")
    assert answer.deployment is not None
    return await _told(gateway, answer.deployment, wait, SETTLED)


@router.get("/deployments")
async def deployments(gateway: Here) -> Response:
    there = await controller.contents(gateway)
    shown = [deployment_json(one, gateway) for one in there.deployments.values()]
    return json_answer({"deployments": shown})


@router.get("/deployments/{deployment}")
async def deployment(deployment: str, gateway: Here, wait: bool = False) -> Response:
    """200; with `?wait=true` when it serves or has ended, or after WAIT_S."""
    there = await controller.contents(gateway)
    found = there.deployments.get(deployment)
    if found is None:
        known = orders.meant(deployment, there.deployments)
        message = f"no deployment {deployment[:200]!r}; {known}"
        raise ApiError(404, message, param="deployment", code="deployment_not_found")
    if wait:
        found = await controller.until(gateway, lambda seen: seen.deployments.get(deployment), SETTLED, found)
    return json_answer(deployment_json(found, gateway))


@router.delete("/deployments/{deployment}")
async def retire(deployment: str, gateway: Here, wait: bool = False) -> Response:
    """202: it takes nothing new, finishes what runs, and gives its memory back; 200 when that is done."""
    order = RetireModel(id=new_id(), deployment=deployment)
    answer = await controller.ask(gateway, order, param="deployment", code="deployment_not_found")
    assert answer.deployment is not None
    return await _told(gateway, answer.deployment, wait, GONE)


async def _told(gateway: Here, found: Any, wait: bool, states: tuple[str, ...]) -> Response:
    if wait:
        name = found.id
        found = await controller.until(gateway, lambda seen: seen.deployments.get(name), states, found)
        await controller.next_poll(gateway)
    return json_answer(deployment_json(found, gateway), 200 if found.state in states else 202)
