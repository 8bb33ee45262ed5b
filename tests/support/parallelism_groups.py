"""Groups, workers and metrics for the tests of the scheduler of shapes: eight devices of one host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bus.client import LiveWorker
from bus.messages import InstanceCard, Metrics, WorkerCard
from controller.morphing.groups import Group
from tests.support.metrics_samples import metrics_of

TOKENS_AT = {1: 100, 2: 400, 4: 1200, 8: 3000}
BLOCK_TOKENS = 10


def group(*workers: str, used: int = 0, **changes: Any) -> Group:
    """One instance of these workers; idle."""
    tp = len(workers)
    base: dict[str, Any] = {
        "model": "m",
        "host": "h",
        "workers": workers,
        "instances": tuple(f"m@{worker}" for worker in workers),
        "epochs": (1,) * tp,
        "tp": tp,
        "tokens_at": TOKENS_AT,
        "max_tokens": TOKENS_AT[tp],
        "used_tokens": used,
    }
    return Group(**(base | changes))


def singles(*numbers: int, **changes: Any) -> list[Group]:
    return [group(f"w{number}", **changes) for number in numbers]


def worker_card(name: str, members: tuple[str, ...] = (), **changes: Any) -> WorkerCard:
    """Serves `m`, alone or as one of `members`. `changes` of its instance; `host`, `state`, `link`, `epoch`
    of itself."""
    of_worker = {key: changes.pop(key) for key in ("host", "state", "link", "epoch") if key in changes}
    members = members or (name,)
    instance = InstanceCard(
        id=f"m@{name}",
        model="m",
        model_path="/nowhere",
        max_model_len=5000,
        vocab_size=10,
        num_layers=1,
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
        tp=len(members),
        workers=list(members),
        kv_heads=8,
        degrees=[1, 2, 4, 8],
        tokens_at=TOKENS_AT,
    )
    card = WorkerCard(
        id=name,
        epoch=1,
        host="h",
        pid=1,
        device="cpu",
        page_bytes=1,
        state="serving",
        instances=[replace(instance, **changes)],
        link="127.0.0.1:1",
    )
    return replace(card, **of_worker)


def live(*cards: WorkerCard) -> list[LiveWorker]:
    return [LiveWorker(card, card.epoch, 1000) for card in cards]


def metrics_for(
    *cards: WorkerCard, used: int = 0, longest: int = 0, running: int = 0, age_s: float = 0.0
) -> Metrics:
    """Return the metrics of all; `used` and `longest` in tokens. Members of a group have the same share."""
    told = [_metrics(card, used, longest, running) for card in cards]
    workers = [replace(report, age_seconds=age_s) for one in told for report in one.workers]
    return replace(told[0], workers=workers, instances=[m for one in told for m in one.instances])


def _metrics(card: WorkerCard, used: int, longest: int, running: int) -> Metrics:
    instance = card.instances[0]
    blocks = instance.tokens_at[instance.tp] // BLOCK_TOKENS
    made = metrics_of(
        instance.id, card.epoch, running=running, kv_blocks=blocks, kv_used=used // BLOCK_TOKENS
    )
    (one,) = made.instances
    last = replace(one.last, longest_tokens=longest, kv_own=one.last.kv_used // instance.tp)
    return replace(made, instances=[replace(one, last=last)])
