"""What weights take where several devices share the layers: exact, from their layout. Where a device's
activations were measured there, they are with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bus.deployments import Configuration, MemorySample, Profile
from worker.fingerprint.cut import CutPlan

STAGES = 2


def with_shapes(profile: Profile, plan: CutPlan) -> Profile:
    """With a sample for every degree, and one of two stages: iServe's further equations (§5.2)."""
    measured = [one for one in profile.memory if one.activation_bytes is not None]
    known = {(one.num_layers, one.configuration) for one in measured}
    others = [one for one in _laid_out(plan) if (one.num_layers, one.configuration) not in known]
    return replace(profile, memory=[*measured, *others], degrees=plan.degrees)


def _laid_out(plan: CutPlan) -> Iterator[MemorySample]:
    for precision in plan.all_precisions:
        for depth in plan.depths:
            for tp in plan.degrees[1:]:
                yield MemorySample(
                    num_layers=depth,
                    configuration=Configuration(tp=tp, precision=precision),
                    weight_bytes=plan.weight_bytes(depth, precision, tp),
                )
            if depth >= STAGES:  # no stage repeats anything: the first alone has the ends
                yield MemorySample(
                    num_layers=depth,
                    configuration=Configuration(pp=STAGES, precision=precision),
                    weight_bytes=plan.weight_bytes(depth, precision),
                )
