"""The small endpoints: models, probes, metrics, and the dashboard."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from gateway.errors import no_such_model
from gateway.http.pages import Pages
from gateway.operations.answers import Here
from gateway.operations.metrics import CONTENT_TYPE, exposition


async def with_key(request: Request, gateway: Here) -> None:
    """Raise ApiError 401 unless the caller has an API key."""
    gateway.keys.check(request.headers.raw)


ENDPOINTS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics")
PAGES: Final = Pages()

router = APIRouter()
Keyed = Annotated[None, Depends(with_key)]


@router.get("/v1/models")
async def models(gateway: Here, _: Keyed) -> dict[str, Any]:
    data = [
        _model(name, ready.card.max_model_len, ready.epoch)
        for name, ready in gateway.cluster.ready_models().items()
    ]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model:path}")
async def model(model: str, gateway: Here, _: Keyed) -> dict[str, Any]:
    ready = gateway.cluster.ready_models()
    if model not in ready:
        raise no_such_model(model, list(ready))
    return _model(model, ready[model].card.max_model_len, ready[model].epoch)


@router.get("/health")
async def health() -> dict[str, str]:
    """Answer if the process is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(gateway: Here) -> JSONResponse:
    """Answer 200 if Redis answers and a worker serves with its tokenizer loaded; else 503 and why."""
    if gateway.is_ready:
        return JSONResponse({"status": "ready", "models": list(gateway.cluster.ready_models())})
    why = "draining" if gateway.is_draining else "no Redis" if not gateway.bus.up else "no worker is serving"
    return JSONResponse({"status": "not ready", "reason": why}, 503, headers={"retry-after": "1"})


@router.get("/metrics")
async def metrics(gateway: Here) -> Response:
    return Response(exposition(gateway), media_type=CONTENT_TYPE)


@router.api_route("/", methods=["GET", "HEAD"])
async def root(request: Request) -> Response:
    """Return the dashboard. It needs no key: what it shows comes from /admin, which asks for one."""
    return _page(request, "index.html")


@router.api_route("/dashboard/{name:path}", methods=["GET", "HEAD"])
async def dashboard(request: Request, name: str) -> Response:
    return _page(request, name)


def _page(request: Request, name: str) -> Response:
    """Return a file of the dashboard. Raises HTTPException 404."""
    answer = PAGES.answer(request, name)
    if answer is None:
        raise HTTPException(404)
    return answer


def _model(name: str, max_model_len: int, epoch_ms: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": epoch_ms // 1000,
        "owned_by": "instar",
        "max_model_len": max_model_len,
    }
