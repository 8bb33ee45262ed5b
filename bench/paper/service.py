"""The ways of serving that the paper's evaluation compares, all on one engine, and the second service.

PyramidKV's way needs more KV blocks beside full weights than the budget has. Since the engine does not prune,
a second service with a larger budget grants it the memory that pruning would save, in full, and runs whole
caches: its latency is a bound in the baseline's favour, without the cost of choosing tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from bench.morph.service import BUDGET_MB, MorphService, Way
from bench.paper.plan import Plan

FULL, INT4, INT8 = "full precision", "static INT4", "static INT8"
STATIC_4, STATIC_2 = "static 1/4", "static 1/2"
PLAN, PLAN_ANY = "LLM-PQ plan", "LLM-PQ plan, any bits"
PYRAMID: Final = "PyramidKV"
ACCURACY, DEFAULT, PERFORMANCE = "accuracy mode", "default mode", "performance mode"
MODES: Final = {ACCURACY: "accuracy", DEFAULT: "default", PERFORMANCE: "performance"}


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


@contextmanager
def roomy(beside: MorphService, memory_share: float) -> Iterator[MorphService]:
    """Start another service, its KV cache larger by what pruning to `memory_share` would save."""
    blocks = math.floor(beside.blocks_at_full / memory_share)
    extra_mb = math.ceil((blocks - beside.blocks_at_full) * beside.block_mb() + 1.0)
    with MorphService(BUDGET_MB + extra_mb) as service:
        if service.blocks_at_full < blocks:
            raise AssertionError(
                f"the service has {service.blocks_at_full} KV blocks, {blocks} were to be granted"
            )
        service.blocks_at_full = blocks
        yield service
