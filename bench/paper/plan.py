"""A mixed-precision plan made offline, as LLM-PQ makes its own.

It chooses the precision of each layer under a budget of bits, with the least predicted loss. The search is
exact: losses add up (MorphServe, Table 2) and bits are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from bus import precisions

# Nominal, without the scales of the groups. Full: as the benchmark serves it.
BITS: Final[dict[str, int]] = {"full": 32, **precisions.BITS}

Plan = tuple[str, ...]  # the precision of each layer


def plan(losses: Sequence[Mapping[str, float]], mean_bits: float) -> Plan:
    """Return the plan with the least loss, and of plans with equal losses the one with more bits.

    losses[layer][precision] is what that layer alone in that precision adds, in nats per token; its keys are
    the precisions that the layer may have. All layers have one size. Raises ValueError if no plan keeps the
    budget.
    """
    budget = mean_bits * len(losses)
    best: dict[int, tuple[float, Plan]] = {0: (0.0, ())}
    for options in losses:
        grown: dict[int, tuple[float, Plan]] = {}
        for bits, (loss, chosen) in best.items():
            for precision, added in options.items():
                total = bits + BITS[precision]
                if total <= budget and (total not in grown or loss + added < grown[total][0]):
                    grown[total] = (loss + added, (*chosen, precision))
        best = grown
    if not best:
        least = sum(min(BITS[precision] for precision in options) for options in losses)
        raise ValueError(f"{mean_bits:g} bits a layer are too few: the least is {least / len(losses):g}")
    bits = min(best, key=lambda total: (best[total][0], -total))
    return best[bits][1]


def bits_of(chosen: Plan) -> float:
    """Return the mean bits of the layers."""
    return sum(BITS[precision] for precision in chosen) / len(chosen)


def ceiling_bits(num_layers: int, num_below: int, precision: str) -> float:
    """Return the mean bits if `num_below` layers have `precision` and the rest is at full."""
    return (num_below * BITS[precision] + (num_layers - num_below) * BITS["full"]) / num_layers


def in_words(chosen: Plan) -> str:
    """Return the layers that are not at full, as in `int4: 1, 2; int8: 0`."""
    below = sorted(set(chosen) - {"full"}, key=lambda precision: BITS[precision])
    parts = [
        f"{precision}: " + ", ".join(str(i) for i, one in enumerate(chosen) if one == precision)
        for precision in below
    ]
    return "; ".join(parts) or "all full"
