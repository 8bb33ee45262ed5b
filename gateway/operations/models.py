"""/admin/models: registering a model measures it on an idle worker; then it can be planned and deployed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from bus.catalogue import Contents
from bus.deployments import ModelCard, PlanModel, RegisterModel, RemoveModel
from gateway.errors import ApiError, invalid
from gateway.openai.params import Body
from gateway.operations import controller, orders
from gateway.operations.admin import Here, allowed
from gateway.operations.answers import body_of, json_answer, new_id
from gateway.operations.deployed import model_json
from gateway.operations.intents import intent_in_query

MAX_NAME: Final = 200
OVER: Final = ("profiled", "failed")
NOT_FOUND: Final = "model_not_found"

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


class ModelBody(Body):
    """`name`: left out, the folder's."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None


@router.post("/models")
async def register(request: Request, gateway: Here, wait: bool = False) -> Response:
    """201 with the model, which is measured now; `?wait=true`: when that is over. 400 for a folder that is no
    model, 409 for a name that is taken."""
    body = orders.parse(ModelBody, await body_of(request, gateway))
    name = body.name or Path(body.path).name
    if not name.isprintable() or " " in name or not name:
        raise invalid(f"name is {name!r}; it must be printable and without spaces", "name")
    order = RegisterModel(id=new_id(), name=name, path=body.path)
    card = (await controller.ask(gateway, order, param="path")).model
    assert card is not None
    if wait:
        card = await controller.until(gateway, lambda there: there.models.get(name), OVER, card)
    return json_answer(model_json(card), 201)


@router.get("/models")
async def models(gateway: Here) -> Response:
    there = await controller.contents(gateway)
    return json_answer({"models": [_shown(card, there) for card in there.models.values()]})


@router.get("/models/{name:path}/plan")
async def plan(name: str, request: Request, gateway: Here) -> Response:
    """What would be chosen for the intent in the query, and everything else: nothing is done. 409 while the
    model is not measured."""
    order = PlanModel(id=new_id(), name=name, intent=intent_in_query(request.query_params))
    answer = await controller.ask(gateway, order, param="intent", code=NOT_FOUND)
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
    """`?wait=true`: when it is measured, or that has failed."""
    there = await controller.contents(gateway)
    card = there.models.get(name)
    if card is None:
        known = orders.meant(name, there.models)
        raise ApiError(
            404, f"no model {name[:MAX_NAME]!r} is registered; {known}", param="model", code=NOT_FOUND
        )
    if wait:
        card = await controller.until(gateway, lambda seen: seen.models.get(name), OVER, card)
    return json_answer(_shown(card, gateway.catalogue))


@router.delete("/models/{name:path}")
async def remove(name: str, gateway: Here) -> Response:
    """409 while it is deployed. What was measured stays in a file beside the model."""
    order = RemoveModel(id=new_id(), name=name)
    card = (await controller.ask(gateway, order, param="model", code=NOT_FOUND)).model
    assert card is not None
    return json_answer(model_json(card))


def _shown(card: ModelCard, there: Contents) -> dict[str, object]:
    profiles = [one for (model, _), one in there.profiles.items() if model == card.name]
    return model_json(card, profiles)
