"""/admin: what is where, what happens, and orders to workers. Its keys are not those of /v1."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse

from bus.client import BusFull, BusUnavailable
from bus.messages import Drain, InstanceCard, WorkerCard
from gateway.delivery.precision import layers_below_full
from gateway.errors import ApiError, unavailable
from gateway.http.auth import check_admin
from gateway.openai.formats import to_json
from gateway.operations.transforms import layer_degrees
from gateway.state import Gateway


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Here = Annotated[Gateway, Depends(gateway_of)]


async def allowed(request: Request, gateway: Here) -> None:
    """Raises ApiError 401 or 403."""
    host = request.client.host if request.client else ""
    loopback_only = gateway.settings.gateway.loopback_only
    check_admin(gateway.admin_keys, request.headers.raw, host, loopback_only=loopback_only)


SHOWN_MORPHS: Final = 32

router = APIRouter(prefix="/admin", dependencies=[Depends(allowed)])


@router.get("/state")
async def state(gateway: Here) -> Response:
    cluster = gateway.cluster
    body = {
        "workers": [_worker(gateway, card) for card in cluster.workers.values()],
        "instances": [_instance(gateway, worker, card) for worker, card in cluster.instances()],
        "metrics": _metrics(gateway),
        "policy": asdict(gateway.policy),
        "deployments": [],
        "morphs": [entry.as_json() for entry in gateway.morphs.recent(SHOWN_MORPHS)],
        "gateway": _gateway(gateway),
    }
    return Response(to_json(body), media_type="application/json")


@router.get("/events")
async def events(gateway: Here) -> StreamingResponse:
    """Server-sent events of the audit stream, the recent ones first."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(gateway.events.listen(), media_type="text/event-stream", headers=headers)


@router.post("/workers/{worker}/drain", status_code=202)
async def drain(worker: str, gateway: Here) -> dict[str, Any]:
    """The worker takes nothing new, finishes what it runs and leaves. 404 for one that is not there."""
    card = gateway.cluster.workers.get(worker)
    if card is None:
        there = ", ".join(gateway.cluster.workers) or "none"
        raise ApiError(
            404, f"no worker {worker!r}; there are: {there}", param="worker", code="worker_not_found"
        )
    command = Drain(id=uuid.uuid4().hex, epoch=card.epoch)
    try:
        await gateway.bus.publish(gateway.bus.names.control(worker), command)
    except (BusUnavailable, BusFull) as error:
        raise unavailable(f"the order cannot be sent: {error}") from error
    return {"id": command.id, "worker": worker, "epoch": card.epoch, "state": "draining"}


def _worker(gateway: Gateway, card: WorkerCard) -> dict[str, Any]:
    """`pages` and `busy` are null without a fresh report: absent is not zero."""
    metrics = gateway.cluster.worker_metrics(card.id, card.epoch, time.monotonic())
    return {
        "id": card.id,
        "host": card.host,
        "pid": card.pid,
        "device": card.device,
        "epoch": card.epoch,
        "state": _state(gateway, card),
        "progress": card.progress,
        "page_bytes": card.page_bytes,
        "pages": asdict(metrics.pages) if metrics else None,
        "busy": metrics.busy if metrics else None,
    }


def _state(gateway: Gateway, card: WorkerCard) -> str:
    """As the card says; "unknown" while the registry cannot be read."""
    return card.state if gateway.bus.up else "unknown"


def _instance(gateway: Gateway, worker: WorkerCard, card: InstanceCard) -> dict[str, Any]:
    metrics = gateway.cluster.instance_metrics(card.id, worker.epoch, time.monotonic())
    last = metrics.last if metrics else None
    layers = [asdict(layer) for layer in last.layers] if last else None
    return {
        "id": card.id,
        "model": card.model,
        "workers": card.workers or [worker.id],
        "tp": card.tp,
        "pp": card.pp,
        "state": _state(gateway, worker),
        "running": last.running if last else None,
        "waiting": last.waiting if last else None,
        "layers": layers,
        "kv": {
            "blocks": last.kv_blocks if last else None,
            "used": last.kv_used if last else None,
            "block_tokens": card.block_tokens,
        },
        "dtype": card.dtype,
        "max_model_len": card.max_model_len,
        "num_layers": card.num_layers,
        "layer_tp": layer_degrees(card, gateway.morphs.transform_of(worker.id)),
        "layers_below_full": layers_below_full(last.layers) if last else None,
        "variants": card.variants,
        "order": card.order,
        "order_name": card.order_name,
        "min_blocks": card.min_blocks,
        "layer_pages": card.layer_pages,
        "kv_heads": card.kv_heads,
        "degrees": card.degrees,
        "tokens_at": card.tokens_at,
    }


def _metrics(gateway: Gateway) -> dict[str, Any]:
    """The monitor's picture, with its age in seconds; {} before the first."""
    cluster = gateway.cluster
    if cluster.metrics is None:
        return {}
    return asdict(cluster.metrics) | {"age_seconds": time.monotonic() - cluster.metrics_at}


def _gateway(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.id,
        "is_draining": gateway.is_draining,
        "inflight": gateway.admission.inflight,
        "queued": gateway.admission.queued,
        "streams": len(gateway.streams),
        "models": gateway.cluster.known_models(),
    }
