"""/admin/models and /admin/deployments: models are registered, measured, and deployed by intent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, get_args

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from bus.catalogue import Contents
from bus.deployments import (
    INTENT_FIELDS,
    Deployment,
    DeployModel,
    Intent,
    ModelCard,
    Objective,
    PlanModel,
    RegisterModel,
    RemoveModel,
    RetireModel,
    WeighLevers,
)
from bus.errors import meant
from bus.fields import MAX_COUNT
from gateway.errors import ApiError, invalid, not_found
from gateway.openai.fields import Body, DescribedAs, between
from gateway.openai.problems import shown
from gateway.operations import answers, orders
from gateway.operations.answers import Here, allowed, json_answer, new_id
from gateway.operations.bodies import body_type
from gateway.operations.inputs import BodyOf, QueryOf, answering
from gateway.operations.picture import deployment_json, model_json

MAX_NAME: Final = 200
MAX_WHAT_IF: Final = 10_000  # requests that are imagined
MEASURED: Final = ("profiled", "failed")
SETTLED: Final = ("serving", "failed", "retired")
GONE: Final = ("retired", "failed")
NO_MODEL: Final = "model_not_found"

# The body of an intent. The controller checks whether its fields go together.
IntentBody = body_type("IntentBody", INTENT_FIELDS, takes_null=False)
OBJECTIVES: Final = get_args(Objective)

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


class ModelBody(Body):
    """The body of POST /admin/models. `name` defaults to the folder's."""

    path: Annotated[str, Field(min_length=1, max_length=4096, examples=["/models/llama"])]
    """The model's folder, on the hosts of the workers."""
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    """The name to serve it under, printable and without spaces."""


@router.post("/models", responses=answering(None, 409, ok=(201,)))
async def register(
    gateway: Here, body: Annotated[ModelBody, Depends(BodyOf(ModelBody))], wait: bool = False
) -> Response:
    """Register a model: 201; 400 for a folder without a model, 409 for a name that is taken."""
    name = body.name or Path(body.path).name
    if not name.isprintable() or " " in name or not name:
        raise invalid(f"name is {name!r}; it must be printable and without spaces", "name")
    order = RegisterModel(id=new_id(), name=name, path=body.path)
    card = (await answers.ask(gateway, order, param="path")).model
    assert card is not None
    if wait:
        card = await answers.until(gateway, card, MEASURED)
    return json_answer(model_json(card), 201)


@router.get("/models")
async def models(gateway: Here) -> Response:
    """List the registered models."""
    there = await answers.contents(gateway)
    return json_answer({"models": [_shown(card, there) for card in there.models.values()]})


@router.get("/models/{name:path}/plan", responses=answering(None, 409))
async def plan(name: str, gateway: Here, body: Annotated[Any, Depends(QueryOf(IntentBody))]) -> Response:
    """Return the estimates of all configurations for the intent in the query. 409 until it is measured."""
    order = PlanModel(id=new_id(), name=name, intent=Intent(**body.model_dump()))
    answer = await answers.ask(gateway, order, param="intent", code=NO_MODEL)
    shown = {"model": name, "intent": order.intent, "unmet": answer.error, "estimates": answer.estimates}
    return json_answer(shown)


@router.get("/models/{name:path}")
async def model(name: str, gateway: Here, wait: bool = False) -> Response:
    """Return a model; with `?wait=true` when it is measured, or that has failed."""
    there = await answers.contents(gateway)
    card = there.models.get(name)
    if card is None:
        message = f"no model {name[:MAX_NAME]!r} is registered; {meant(name, there.models)}"
        raise ApiError(404, message, param="model", code=NO_MODEL)
    if wait:
        card = await answers.until(gateway, card, MEASURED)
    return json_answer(_shown(card, gateway.catalogue))


@router.delete("/models/{name:path}", responses=answering(None, 409))
async def remove(name: str, gateway: Here) -> Response:
    """Remove a model: 409 while it is deployed. Its measurements stay in a file beside the model."""
    order = RemoveModel(id=new_id(), name=name)
    card = (await answers.ask(gateway, order, param="model", code=NO_MODEL)).model
    assert card is not None
    return json_answer(model_json(card))


def _shown(card: ModelCard, there: Contents) -> dict[str, object]:
    profiles = [one for (model, _), one in there.profiles.items() if model == card.name]
    return model_json(card, profiles)


class WhatIfBody(Body):
    """The query of GET /admin/plan."""

    model: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """The model of the requests; empty: the only one."""
    requests: Annotated[int, between(0, MAX_WHAT_IF)] = 0
    """Requests that are imagined to come."""
    prompt_tokens: Annotated[int, between(1, MAX_COUNT)] = 256
    """Tokens of the prompt of each."""
    output_tokens: Annotated[int, between(1, MAX_COUNT)] = 64
    """Tokens of the output of each."""


@router.get("/plan", responses=answering(None, 404, 409))
async def what_if(
    gateway: Here, body: Annotated[WhatIfBody, Depends(QueryOf(WhatIfBody, texts=("model",)))]
) -> Response:
    """Return what the morph policy would weigh and do now, also if more requests came. Changes nothing."""
    order = WeighLevers(id=new_id(), **body.model_dump())
    answer = await answers.ask(gateway, order, param="model", code=NO_MODEL)
    return json_answer({"note": answer.error, "plans": answer.plans})


class DeployBody(Body):
    """The body of POST /admin/deployments. `intent`: an object, or what to minimise."""

    model: Annotated[str, Field(min_length=1, examples=["llama"])]
    """The name of a registered model."""
    intent: Annotated[Any, DescribedAs(IntentBody | Objective)] = "cost"
    """What to minimise, or an object with limits, too."""


@router.post("/deployments", responses=answering(None, 404, 409, ok=(200, 202)))
async def deploy(
    gateway: Here, body: Annotated[DeployBody, Depends(BodyOf(DeployBody))], wait: bool = False
) -> Response:
    """Deploy a model: 202, with `?wait=true` 200 when it settled. 400, 404, 409 for what cannot be."""
    order = DeployModel(id=new_id(), name=body.model, intent=intent_of(body.intent))
    answer = await answers.ask(gateway, order, param="intent", code=NO_MODEL)
    assert answer.deployment is not None
    return await _answer(gateway, answer.deployment, wait, SETTLED)


@router.get("/deployments")
async def deployments(gateway: Here) -> Response:
    """List the deployments."""
    there = (await answers.contents(gateway)).deployments.values()
    return json_answer({"deployments": [deployment_json(one, gateway) for one in there]})


@router.get("/deployments/{deployment}")
async def deployment(deployment: str, gateway: Here, wait: bool = False) -> Response:
    """Return a deployment; with `?wait=true` when it serves or has ended, or after WAIT_S."""
    there = await answers.contents(gateway)
    found = there.deployments.get(deployment)
    if found is None:
        raise not_found("deployment", deployment, meant(deployment, there.deployments))
    if wait:
        found = await answers.until(gateway, found, SETTLED)
    return json_answer(deployment_json(found, gateway))


@router.delete("/deployments/{deployment}", responses=answering(None, 409, ok=(200, 202)))
async def retire(deployment: str, gateway: Here, wait: bool = False) -> Response:
    """Retire a deployment: 202 while it finishes its requests, 200 when its memory is free."""
    order = RetireModel(id=new_id(), deployment=deployment)
    answer = await answers.ask(gateway, order, param="deployment", code="deployment_not_found")
    assert answer.deployment is not None
    return await _answer(gateway, answer.deployment, wait, GONE)


async def _answer(gateway: Here, found: Deployment, wait: bool, states: tuple[str, ...]) -> Response:
    if wait:
        found = await answers.until(gateway, found, states)
        await answers.next_poll(gateway)
    return json_answer(deployment_json(found, gateway), 200 if found.state in states else 202)


def intent_of(value: Any) -> Intent:
    """Return the intent of an object, or of the name of what to minimise. Raises ApiError 400."""
    if value in OBJECTIVES:
        return Intent(minimise=value)
    if isinstance(value, str):
        raise invalid(f"intent is {value[:100]!r}; {meant(value, OBJECTIVES)}", "intent")
    if not isinstance(value, dict):
        either = f"it must be an object, or one of {', '.join(OBJECTIVES)}"
        raise invalid(f"intent is {shown(value)}; {either}", "intent")
    return Intent(**orders.checked(IntentBody, value, "intent.").model_dump())
