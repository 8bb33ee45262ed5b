"""The small endpoints: models, probes, metrics, and the dashboard."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from bus.version import program_version
from gateway.delivery.cluster import ReadyInstance
from gateway.errors import no_such_model
from gateway.http.auth import check_api
from gateway.http.paced import PacedResponse
from gateway.openai.answer_types import (
    HealthAnswer,
    NotReadyAnswer,
    ReadyAnswer,
    ServedModel,
    ServedModels,
    VersionAnswer,
)
from gateway.operations.answers import Here
from gateway.operations.inputs import answering
from gateway.operations.metrics import CONTENT_TYPE, exposition

FOLDER: Final = Path(__file__).resolve().parents[1] / "dashboard"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PLAIN: Final = "text/plain; charset=utf-8"
# The page loads and calls nothing but this gateway, and no other page may frame it. `no-cache`: browsers ask
# each time and get 304 while nothing changed, so that no page mixes two versions.
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

READ: Final = ["GET", "HEAD"]
ENDPOINTS: Final = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models"),
    *("/tokenize", "/detokenize", "/version", "/health", "/ready", "/metrics", "/docs", "/openapi.json"),
)


async def with_key(request: Request, gateway: Here) -> None:
    """Raise ApiError 401 or 403 unless the caller may use /v1."""
    check_api(gateway.keys, request.headers.raw, gateway.settings.gateway.cors_origins)


def _read(path: Path) -> tuple[bytes, str, str]:
    """Return a file's body, type and etag."""
    body = path.read_bytes()
    return body, TYPES.get(path.suffix, PLAIN), f'"{hashlib.sha256(body).hexdigest()[:20]}"'


# The dashboard's files, served from memory, so that no path leads out of the folder.
PAGES: Final = {one.relative_to(FOLDER).as_posix(): _read(one) for one in FOLDER.rglob("*") if one.is_file()}

router = APIRouter()
Keyed = Annotated[None, Depends(with_key)]


@router.api_route("/v1/models", methods=READ, responses=answering(ServedModels))
async def models(gateway: Here, _: Keyed) -> dict[str, Any]:
    """List the models that are served."""
    ready = gateway.cluster.ready_models()
    return {"object": "list", "data": [_model(name, one) for name, one in ready.items()]}


@router.api_route("/v1/models/{model:path}", methods=READ, responses=answering(ServedModel))
async def model(model: str, gateway: Here, _: Keyed) -> dict[str, Any]:
    """Describe a served model."""
    ready = gateway.cluster.ready_models()
    if model not in ready:
        raise no_such_model(model, list(ready))
    return _model(model, ready[model])


@router.api_route("/version", methods=READ, responses=answering(VersionAnswer))
async def version() -> dict[str, str]:
    """Return the version of the program."""
    return {"version": program_version()}


@router.api_route("/health", methods=READ, responses=answering(HealthAnswer))
async def health() -> dict[str, str]:
    """Answer if the process is alive."""
    return {"status": "ok"}


@router.api_route("/ready", methods=READ, responses=answering(ReadyAnswer) | {503: {"model": NotReadyAnswer}})
async def ready(gateway: Here) -> JSONResponse:
    """Answer 200 if Redis answers and a worker serves with its tokenizer loaded; else 503 and why."""
    if gateway.is_ready:
        return JSONResponse({"status": "ready", "models": list(gateway.cluster.ready_models())})
    why = "draining" if gateway.is_draining else "no Redis" if not gateway.bus.up else "no worker is serving"
    return JSONResponse({"status": "not ready", "reason": why}, 503, headers={"retry-after": "1"})


@router.api_route("/metrics", methods=READ, responses=answering(media="text/plain"))
async def metrics(gateway: Here) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(exposition(gateway), media_type=CONTENT_TYPE)


@router.api_route("/", methods=READ, responses=answering(None, 304, media="text/html"))
async def root(request: Request) -> Response:
    """Return the dashboard. It needs no key: what it shows comes from /admin, which asks for one."""
    return page(request, "index.html")


@router.api_route("/dashboard/{name:path}", methods=READ, responses=answering(None, 304, media="*/*"))
async def dashboard(request: Request, name: str) -> Response:
    """Return a file of the dashboard."""
    return page(request, name)


def page(request: Request, name: str) -> Response:
    """Return a file, or 304 if the browser has it. Raises HTTPException 404."""
    if name not in PAGES:
        raise HTTPException(404)
    body, media_type, etag = PAGES[name]
    headers = HEADERS | {"etag": etag}
    known = request.headers.get("if-none-match", "").split(",")
    given = [one.strip().removeprefix("W/") for one in known]
    if etag in given or "*" in given:
        return Response(status_code=304, headers=headers)
    return PacedResponse(body, headers=headers, media_type=media_type)


def _model(name: str, ready: ReadyInstance) -> dict[str, Any]:
    about = {"id": name, "object": "model", "created": ready.epoch // 1000, "owned_by": "instar"}
    return about | {"max_model_len": ready.card.max_model_len}
