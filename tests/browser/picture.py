"""The state of a made-up cluster: four workers of one host, a model of 16 layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

NUM_LAYERS = 16
PAGES = {"full": 60, "int8": 32, "int4": 18, "int3": 14}
BUDGET, REST = 1600, 48  # pages of a worker; of embeddings and the like
BLOCKS_OF_PAGE = 4


@dataclass
class Instance:
    workers: list[str]
    layers: list[str] = field(default_factory=lambda: ["full"] * NUM_LAYERS)
    layers_done: int | None = None  # of a transform under way
    kv_share: float = 0.4  # in use
    running: int = 6
    stages: list[dict[str, Any]] = field(default_factory=list)  # of a pipeline

    @property
    def id(self) -> str:
        return f"demo@{self.workers[0]}"

    @property
    def tp(self) -> int:
        return len(self.stages[0]["workers"]) if self.stages else len(self.workers)

    @property
    def weight_pages(self) -> int:
        """The layers of each worker: a third of a layer is attention, which every member has whole."""
        return REST + sum(PAGES[name] // 3 + PAGES[name] * 2 // 3 // self.tp for name in self.layers)

    @property
    def kv_pages(self) -> int:
        return min(BUDGET - self.weight_pages, 900 + 40 * sum(name != "full" for name in self.layers))

    @property
    def blocks(self) -> int:
        return self.kv_pages * BLOCKS_OF_PAGE * self.tp

    @property
    def used(self) -> int:
        return int(self.blocks * self.kv_share)

    def ranges(self) -> list[dict[str, Any]]:
        parts = [("attention", 3, 1), ("ffn", 3, 2)]
        weights = [
            _range(
                self.id, "weights", layer, part, name, PAGES[name] * num // of // (self.tp if num > 1 else 1)
            )
            for layer, name in enumerate(self.layers)
            for part, of, num in parts
        ]
        rest = _range(self.id, "weights", None, "", "full", REST)
        return [rest, *weights, _range(self.id, "kv", None, "", "full", self.kv_pages)]

    def as_json(self) -> dict[str, Any]:
        done = self.layers_done
        degrees = [self.tp] * NUM_LAYERS if done is None else [1] * (NUM_LAYERS - done) + [2] * done
        return {
            "id": self.id,
            "model": "demo",
            "workers": self.workers,
            "tp": self.tp,
            "pp": len(self.stages) or 1,
            "stages": self.stages,
            "state": "serving",
            "running": self.running,
            "waiting": 2,
            "layers": [{"attention": name, "ffn": name} for name in self.layers],
            "kv": {"blocks": self.blocks, "used": self.used, "block_tokens": 16, "precision": "full"},
            "num_layers": NUM_LAYERS,
            "layer_tp": degrees,
            "layers_below_full": sum(name != "full" for name in self.layers),
            "variants": list(PAGES),
            "order": list(range(NUM_LAYERS)),
            "min_blocks": 128,
            "layer_pages": PAGES,
            "degrees": [1, 2, 4],
        }

    def moment(self, at: float) -> dict[str, Any]:
        wave = 0.5 + 0.5 * math.sin(at / 90)
        return {
            "running": round(4 + 20 * wave),
            "waiting": round(6 * max(0.0, wave - 0.7)),
            "queue_delay_s": round(0.4 * wave**6, 4),
            "ttft_p95_s": round(0.1 + 2.4 * wave**5, 4),
            "tpot_p95_s": round(0.02 + 0.05 * wave, 4),
            "kv_blocks": self.blocks,
            "kv_used": int(self.blocks * (0.2 + 0.7 * wave)),
            "layers_below_full": sum(name != "full" for name in self.layers),
            "tp": self.tp,
            "tokens_per_s": round(300 * wave, 1),
        }


GPU = {
    "name": "NVIDIA H100",
    "memory_used_bytes": 71 << 30,
    "memory_total_bytes": 80 << 30,
    "utilization": 0.87,
    "memory_utilization": 0.5,
    "power_watts": 612.3,
    "power_limit_watts": 700.0,
    "temperature_celsius": 64.0,
    "sm_clock_hertz": 1.98e9,
    "sm_clock_max_hertz": None,
    "throttling": {"power_cap": 0.25, "thermal": 0.0},
    "ecc_corrected_errors": 0,
    "ecc_uncorrected_errors": None,
    "xid_errors": {},
}


def worker(name: str, instance: Instance | None, *, is_silent: bool = False) -> dict[str, Any]:
    """`is_silent`: it has not reported for a while, so nobody knows its pages."""
    weights, kv = (instance.weight_pages, instance.kv_pages) if instance else (0, 0)
    pages = {"budget": BUDGET, "weights": weights, "kv": kv, "free": BUDGET - weights - kv}
    return {
        "id": name,
        "host": "made-up",
        "pid": 1,
        "device": "cpu",
        "epoch": 1,
        "state": "serving" if instance else "loading",
        "progress": "" if instance else "weights 40 %",
        "page_bytes": 65536,
        "pages": None if is_silent else pages,
        "busy": None if is_silent else 0.62,
        "gpu": GPU if name == "w1" and not is_silent else None,
        "ranges": instance.ranges() if instance else [],
    }


def deployment(name: str, model: str, state: str, intent: dict[str, Any]) -> dict[str, Any]:
    """One that serves does so on w0 and w1, in two stages."""
    values = {"memory_bytes": 29 << 20, "ttft_s": 0.096, "tpot_s": 0.012, "latency_s": 0.85}
    stages = [
        {"workers": ["w0"], "first": 0, "end": 8},
        {"workers": ["w1"], "first": 8, "end": NUM_LAYERS},
    ]
    is_placed = state != "waiting"
    return {
        "id": name,
        "model": model,
        "intent": {"minimise": "cost", "max_latency_s": None, "max_cost": None, "max_loss": None} | intent,
        "state": state,
        "reason": "" if is_placed else "needs 30408704 bytes, 4096 are free on w0",
        "configuration": {"tp": 1, "pp": 2, "precision": "int4"} if is_placed else None,
        "stages": stages if is_placed else [],
        "expected": {name: {"value": value} for name, value in values.items()} if is_placed else None,
        "instance": "demo@w0" if state == "serving" else "",
        "since": 0.0,
        "kv": {"blocks": 512, "tokens": 8192, "bytes": 64 << 20} if state == "serving" else None,
    }


def burst(sent: int, state: str = "sending") -> dict[str, Any]:
    """A burst of 24 requests in eight seconds; all that were sent but the last have a first token."""
    firsts = max(0, sent - 1)
    rows = [
        [one / 3, 0.4 * one if one < firsts else None, "served" if one < firsts else ""]
        for one in range(sent)
    ]
    return {
        "id": "b1",
        "model": "demo",
        "state": state,
        "reason": "",
        "at": 0.0,
        "seconds": 8.0,
        "measured_s": 6.0,
        "tokens_per_s": 600.0,
        "planned": 24,
        "sent": sent,
        "served": firsts,
        "lost": 0,
        "elapsed_s": sent / 3,
        "ttft_s": {"p50": 1.2, "p95": 2.25} if firsts else None,
        "requests": rows,
    }


def weighed() -> dict[str, Any]:
    """A plan of the planner, as an event has it: a move is taken, a swap costs more, a merge cannot be."""
    option: dict[str, Any] = {
        "targets": ["demo@w0"],
        "tp": 0,
        "layers": 0,
        "precision": "full",
        "blocks": 0,
        "tokens_per_s": 0.0,
        "loss": 0.0,
        "stalled_s": 0.0,
        "nbytes": 0,
        "basis": "measured",
        "refusal": "",
        "is_taken": False,
    }
    costs: list[tuple[str, str, dict[str, Any]]] = [
        ("queue", "queue demo@w0", {"duration_s": 3600.0, "price_s": 0.0, "cost_s": 14400.0}),
        (
            "swap",
            "swap demo@w0: 3 layers to int4",
            {"duration_s": 0.3, "price_s": 6.5, "cost_s": 8.0, "blocks": 120, "loss": 0.0012},
        ),
        (
            "move",
            "move demo@w0 to demo@w1",
            {"duration_s": 0.1, "price_s": 0.4, "cost_s": 0.8, "blocks": 90, "is_taken": True},
        ),
        (
            "merge",
            "merge: not possible, groups are made for long requests only",
            {
                "refusal": "groups are made for long requests only",
                "duration_s": 0.0,
                "price_s": 0.0,
                "cost_s": 0.0,
            },
        ),
    ]
    return {
        "model": "demo",
        "subject": "demo@w0",
        "need": "4 requests wait for 90 KV blocks",
        "options": [option | {"lever": lever, "words": words} | more for lever, words, more in costs],
        "cost_s": 0.8,
        "wait_s": 0.1,
        "meets": True,
        "reason": "",
    }


def policy() -> dict[str, Any]:
    return {
        "revision": 3,
        "mode": "default",
        "kv_usage_high": 0.85,
        "queue_delay_high_s": 0.1,
        "kv_usage_low": 0.5,
        "queue_delay_low_s": 0.02,
        "windows": 3,
        "cooldown_s": 5.0,
        "ttft_slo_s": 2.0,
        "loss_budget": None,
        "max_layers": 0,
        "precision": "int4",
        "max_tp": 0,
        "long_patience_s": 30.0,
        "scale_down_free": 0.5,
    }


def _range(owner: str, kind: str, layer: int | None, part: str, precision: str, pages: int) -> dict[str, Any]:
    return {
        "owner": owner,
        "kind": kind,
        "layer": layer,
        "part": part,
        "precision": precision,
        "pages": pages,
    }
