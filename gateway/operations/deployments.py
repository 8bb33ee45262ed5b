"""/admin/models and /admin/deployments: models are registered, measured, and deployed by intent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from bus.catalogue import Contents
from bus.deployments import (
    Deployment,
    DeployModel,
    ModelCard,
    PlanModel,
    RegisterModel,
    RemoveModel,
    RetireModel,
)
from gateway.errors import ApiError, invalid
from gateway.openai.params import Body
from gateway.operations import answers, orders
from gateway.operations.answers import Here, allowed, body_of, json_answer, new_id
from gateway.operations.intents import intent_in_query, intent_of
from gateway.operations.picture import deployment_json, model_json

MAX_NAME: Final = 200
MEASURED: Final = ("profiled", "failed")
SETTLED: Final = ("serving", "failed", "retired")
GONE: Final = ("retired", "failed")
NO_MODEL: Final = "model_not_found"

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


class ModelBody(Body):
    """The body of POST /admin/models. `name` defaults to the folder's."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None


@router.post("/models")
async def register(request: Request, gateway: Here, wait: bool = False) -> Response:
    """Register a model.

    201 at once, with `?wait=true` when it is measured. 400 for a folder without a model, 409 for a name
    that is taken.
    """
    body = orders.parse(ModelBody, await body_of(request, gateway))
    name = body.name or Path(body.path).name
    if not name.isprintable() or " " in name or not name:
        raise invalid(f"name is {name!r}; it must be printable and without spaces", "name")
    order = RegisterModel(id=new_id(), name=name, path=body.path)
    card = (await answers.ask(gateway, order, param="path")).model
    assert card is not None
    if wait:
        card = await answers.until(gateway, lambda there: there.models.get(name), MEASURED, card)
    return json_answer(model_json(card), 201)


@router.get("/models")
async def models(gateway: Here) -> Response:
    there = await answers.contents(gateway)
    return json_answer({"models": [_shown(card, there) for card in there.models.values()]})


@router.get("/models/{name:path}/plan")
async def plan(name: str, request: Request, gateway: Here) -> Response:
    """Return the estimates of all configurations for the intent in the query.

    Nothing is deployed. 409 while the model is not measured.
    """
    order = PlanModel(id=new_id(), name=name, intent=intent_in_query(request.query_params))
    answer = await answers.ask(gateway, order, param="intent", code=NO_MODEL)
    assert answer.model is not None
    return json_answer(
        {
            "model": name,
            "intent": asdict(order.intent),
            "unmet": answer.error,
            "estimates": [asdict(one) for one in answer.estimates],
        }
    )


@router.get("/models/{name:path}")
async def model(name: str, gateway: Here, wait: bool = False) -> Response:
    """Return a model; with `?wait=true` when it is measured, or that has failed."""
    there = await answers.contents(gateway)
    card = there.models.get(name)
    if card is None:
        known = orders.meant(name, there.models)
        raise ApiError(
            404, f"no model {name[:MAX_NAME]!r} is registered; {known}", param="model", code=NO_MODEL
        )
    if wait:
        card = await answers.until(gateway, lambda seen: seen.models.get(name), MEASURED, card)
    return json_answer(_shown(card, gateway.catalogue))


@router.delete("/models/{name:path}")
async def remove(name: str, gateway: Here) -> Response:
    """Remove a model: 409 while it is deployed. Its measurements stay in a file beside the model."""
    order = RemoveModel(id=new_id(), name=name)
    card = (await answers.ask(gateway, order, param="model", code=NO_MODEL)).model
    assert card is not None
    return json_answer(model_json(card))


def _shown(card: ModelCard, there: Contents) -> dict[str, object]:
    profiles = [one for (model, _), one in there.profiles.items() if model == card.name]
    return model_json(card, profiles)


# ------------------------------------------------------------------------------------- deployments


class DeployBody(Body):
    """The body of POST /admin/deployments. `intent`: an object, or what to minimise."""

    model: Annotated[str, Field(min_length=1)]
    intent: Any = "cost"


@router.post("/deployments")
async def deploy(request: Request, gateway: Here, wait: bool = False) -> Response:
    """Deploy a model.

    202; with `?wait=true` 200 when it serves or has failed. 404 for a model that is not registered, 400 for
    a bad intent, 409 for an intent that no configuration meets.
    """
    body = orders.parse(DeployBody, await body_of(request, gateway))
    order = DeployModel(id=new_id(), name=body.model, intent=intent_of(body.intent))
    answer = await answers.ask(gateway, order, param="intent", code=NO_MODEL)
    assert answer.deployment is not None
    return await _answer(gateway, answer.deployment, wait, SETTLED)


@router.get("/deployments")
async def deployments(gateway: Here) -> Response:
    there = await answers.contents(gateway)
    shown = [deployment_json(one, gateway) for one in there.deployments.values()]
    return json_answer({"deployments": shown})


@router.get("/deployments/{deployment}")
async def deployment(deployment: str, gateway: Here, wait: bool = False) -> Response:
    """Return a deployment; with `?wait=true` when it serves or has ended, or after WAIT_S."""
    there = await answers.contents(gateway)
    found = there.deployments.get(deployment)
    if found is None:
        known = orders.meant(deployment, there.deployments)
        message = f"no deployment {deployment[:200]!r}; {known}"
        raise ApiError(404, message, param="deployment", code="deployment_not_found")
    if wait:
        found = await answers.until(gateway, lambda seen: seen.deployments.get(deployment), SETTLED, found)
    return json_answer(deployment_json(found, gateway))


@router.delete("/deployments/{deployment}")
async def retire(deployment: str, gateway: Here, wait: bool = False) -> Response:
    """Retire a deployment: 202 while it finishes its requests, 200 when its memory is free."""
    order = RetireModel(id=new_id(), deployment=deployment)
    answer = await answers.ask(gateway, order, param="deployment", code="deployment_not_found")
    assert answer.deployment is not None
    return await _answer(gateway, answer.deployment, wait, GONE)


async def _answer(gateway: Here, found: Deployment, wait: bool, states: tuple[str, ...]) -> Response:
    if wait:
        name = found.id
        found = await answers.until(gateway, lambda seen: seen.deployments.get(name), states, found)
        await answers.next_poll(gateway)
    return json_answer(deployment_json(found, gateway), 200 if found.state in states else 202)
