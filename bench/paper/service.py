"""The services under the paper's evaluation, and the ways of serving that it compares, all on one engine.

PyramidKV's way needs more KV blocks beside full weights than the budget has. Since the engine does not prune,
a second service with a larger budget grants it the memory that pruning would save, in full, and runs whole
caches: its latency is a bound in the baseline's favour, without the cost of choosing tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from bench.common.service import Service, noting_logs, wait_for
from bench.morph.service import BUDGET_MB, SETTINGS, Configuration, MorphService
from bench.paper.plan import Plan

FULL, INT4 = "full precision", "static INT4"
STATIC_4, STATIC_2 = "static 1/4", "static 1/2"
PLAN, PLAN_ANY = "LLM-PQ plan", "LLM-PQ plan, any bits"
PYRAMID: Final = "PyramidKV"
ACCURACY, DEFAULT, PERFORMANCE = "accuracy mode", "default mode", "performance mode"
MODES: Final = {ACCURACY: "accuracy", DEFAULT: "default", PERFORMANCE: "performance"}
PRECISION: Final = "int4"


@dataclass(frozen=True, slots=True)
class Way:
    """`below`: layers in INT4 for the whole run, in the model's order; `plan`: a precision for each layer;
    `mode`: of the policy. `is_roomy`: on the service with more memory."""

    name: str
    mode: str = "manual"
    below: int = 0
    plan: Plan = ()
    is_roomy: bool = False


def ways(num_layers: int, plans: Mapping[str, Plan]) -> list[Way]:
    return [
        Way(FULL),
        Way(INT4, below=num_layers),
        Way(STATIC_4, below=num_layers // 4),
        Way(STATIC_2, below=num_layers // 2),
        *(Way(name, plan=chosen) for name, chosen in plans.items()),
        Way(PYRAMID, is_roomy=True),
        *(Way(name, mode=mode) for name, mode in MODES.items()),
    ]


class PaperService(MorphService):
    """One instance that takes orders, a layer at a time too."""

    def take(self, way: Way) -> int:
        """Idle, full precision, then what the way says. Returns the KV blocks."""
        wait_for("an idle service", self._is_idle, within_s=60.0)
        blocks = self.use(Configuration(way.name, below=way.below), PRECISION)
        for precision in sorted(set(way.plan) - {"full"}):
            layers = [layer for layer, one in enumerate(way.plan) if one == precision]
            numbers = self._order("swap", {"layers": layers, "precision": precision})["numbers"]
            blocks = int(numbers["blocks_after"])
        self._set_mode(way.mode)
        return blocks

    def _is_idle(self) -> bool:
        instance = self.instance()
        return not (instance["running"] or instance["waiting"] or instance["kv"]["used"])

    def block_mb(self) -> float:
        """Of memory that a KV block takes in all layers."""
        pages = self._service.state()["workers"][0]["pages"]
        page_bytes: int = self._service.state()["workers"][0]["page_bytes"]
        return float(pages["kv"] * page_bytes / self.blocks_at_full / 2**20)


@contextmanager
def running(budget_mb: int = BUDGET_MB) -> Iterator[PaperService]:
    with Service(settings=SETTINGS | {"WORKER__MEMORY_MB": str(budget_mb)}) as service, noting_logs(service):
        yield PaperService(service)


@contextmanager
def roomy(beside: PaperService, memory_share: float) -> Iterator[PaperService]:
    """Another service, its KV cache larger by what pruning to `memory_share` would save."""
    blocks = math.floor(beside.blocks_at_full / memory_share)
    extra_mb = math.ceil((blocks - beside.blocks_at_full) * beside.block_mb() + 1.0)
    with running(BUDGET_MB + extra_mb) as service:
        if service.blocks_at_full < blocks:
            raise AssertionError(f"{service.blocks_at_full} KV blocks where {blocks} were to be granted")
        service.blocks_at_full = blocks
        yield service
