"""The state as the dashboard draws it: what /admin/state shows, what lies in each worker's pages, and how far
its morphs are; without what nobody sees (histograms) and what changes without meaning anything (digits)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from bus.messages import PARTS, InstanceCard, InstanceMetrics, LayerShape, Metrics, Part, WorkerCard
from bus.morphs import progress_of
from bus.precisions import Precision
from gateway.morphs import MorphRecord
from gateway.operations.picture import SHOWN_MORPHS, picture
from gateway.operations.transforms import layer_degrees
from gateway.state import Gateway

MEASURED: Final = [field.name for field in fields(InstanceMetrics) if field.name != "last"]
DIGITS: Final = 4


def live_state(gateway: Gateway) -> dict[str, Any]:
    """As JSON. `metrics` has `at_ms` and `instances` only."""
    state = picture(gateway, metrics=_metrics(gateway.cluster.metrics))
    for worker in state["workers"]:
        card = gateway.cluster.workers[worker["id"]]
        worker["busy"] = _short(worker["busy"])
        worker["ranges"] = ranges(gateway, card, worker["pages"])
    state["morphs"] = [_morph(entry) for entry in gateway.morphs.recent(SHOWN_MORPHS)]
    return state


def _metrics(metrics: Metrics | None) -> dict[str, Any]:
    if metrics is None:
        return {"instances": []}
    instances = [{name: _short(getattr(one, name)) for name in MEASURED} for one in metrics.instances]
    return {"at_ms": metrics.at_ms, "instances": instances}


def _short(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


def _morph(entry: MorphRecord) -> dict[str, Any]:
    """`progress` of a running one: 0 to 1, null where its worker does not tell."""
    shown = entry.as_json()
    return shown | {"progress": _short(progress_of(entry.kind, entry.numbers))} if entry.is_running else shown


# ------------------------------------------------------------------------------------- pages


@dataclass(frozen=True, slots=True)
class _Held:
    """Layers [first, end) of an instance lie on the worker. `epoch`: of who leads, and tells of it."""

    card: InstanceCard
    epoch: int
    first: int
    end: int


def ranges(gateway: Gateway, worker: WorkerCard, pages: dict[str, int] | None) -> list[dict[str, Any]]:
    """What lies in a worker's pages; [] without a fresh report. Of weights the size of the largest layer is
    taken for each: they differ by a page or two. Several models share the pages of the KV as they share the
    blocks of layers, which is exact where their layers are alike."""
    now = time.monotonic()
    held = _held(gateway, worker)
    metrics = [(one, gateway.cluster.instance_metrics(one.card.id, one.epoch, now)) for one in held]
    known = [(one, found.last) for one, found in metrics if found is not None]
    if pages is None or len(known) < len(held):
        return []
    travelling = gateway.morphs.transform_of(worker.id)
    num_blocks = sum(last.kv_blocks * (one.end - one.first) for one, last in known)
    found: list[dict[str, Any]] = []
    for one, last in known:
        found += _weights(one, last.layers, layer_degrees(one.card, travelling))
        blocks = last.kv_blocks * (one.end - one.first)
        kv_pages = pages["kv"] * blocks // num_blocks if num_blocks else 0
        found.append(_range(one.card.id, "kv", None, "", "full", kv_pages))
    return found


def _held(gateway: Gateway, worker: WorkerCard) -> list[_Held]:
    """Its instances, and stages of pipelines that others lead."""
    whole = [_Held(card, worker.epoch, 0, card.num_layers) for card in worker.instances if not card.stages]
    parts = [
        _Held(card, leader.epoch, stage.first, stage.end)
        for leader in gateway.cluster.workers.values()
        for card in leader.instances
        for stage in card.stages
        if worker.id in stage.workers
    ]
    return whole + parts


def _weights(one: _Held, layers: list[LayerShape], degrees: list[int]) -> Iterator[dict[str, Any]]:
    """Attention is whole at every member of a group; of the FFN each keeps its rows. The card of a pipeline
    tells the pages of a rank."""
    card = one.card
    for number, (layer, tp) in enumerate(zip(layers, degrees, strict=False)):
        for part in PARTS if one.first <= number < one.end else ():
            precision = layer.attention if part == "attention" else layer.ffn
            pages = _pages(card, part, precision)
            kept = pages if part == "attention" or card.stages else -(-pages // tp)
            yield _range(card.id, "weights", number, part, precision, kept)


def _pages(card: InstanceCard, part: Part, precision: Precision) -> int:
    attention = card.attention_pages.get(precision, 0)
    return attention if part == "attention" else card.layer_pages.get(precision, 0) - attention


def _range(
    owner: str, kind: str, layer: int | None, part: str, precision: Precision, pages: int
) -> dict[str, Any]:
    return {
        "owner": owner,
        "kind": kind,
        "layer": layer,
        "part": part,
        "precision": precision,
        "pages": pages,
    }
