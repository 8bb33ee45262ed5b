"""What a mode makes of a policy: thresholds, step and limit for a model of so many layers. Pure.

============  ===========================================  ===========  ==========  =======
mode          thresholds                                   layers       layers      windows
                                                           in a morph   below full
============  ===========================================  ===========  ==========  =======
accuracy      morphs later, goes back earlier (below)      1/8          1/4         as set
default       as set                                       1/4          1/2         as set
performance   as set                                       1/2          all         half
manual        nothing morphs by itself
============  ===========================================  ===========  ==========  =======

`accuracy` halves the room above the high KV threshold, doubles both delays, and is at ease half-way between
the two KV thresholds. `step_layers` and `max_layers` of the policy win over the table. The modes are those of
MorphServe (§5); the numbers are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import Policy, Precision

SHARES = {"accuracy": (1 / 8, 1 / 4), "default": (1 / 4, 1 / 2), "performance": (1 / 2, 1.0)}
RETURN_MARGIN = 4  # of the dead zone this part stays free after a way back, or noise would undo it at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A policy as it holds for one instance. Usage 0..1, delays and cool-down in seconds."""

    kv_usage_high: float
    queue_delay_high_s: float
    kv_usage_low: float
    queue_delay_low_s: float
    windows: int
    cooldown_s: float
    step_layers: int
    max_layers: int
    precision: Precision
    kv_usage_after: float  # giving pages back must leave the KV use below this


def rules_of(policy: Policy, num_layers: int) -> Rules | None:
    """None: manual, nothing is decided."""
    if policy.mode == "manual":
        return None
    step_share, max_share = SHARES[policy.mode]
    cautious, bold = policy.mode == "accuracy", policy.mode == "performance"
    high, low = policy.kv_usage_high, policy.kv_usage_low
    return Rules(
        kv_usage_high=(1 + high) / 2 if cautious else high,
        queue_delay_high_s=policy.queue_delay_high_s * (2 if cautious else 1),
        kv_usage_low=(low + high) / 2 if cautious else low,
        queue_delay_low_s=policy.queue_delay_low_s * (2 if cautious else 1),
        windows=max(1, policy.windows // 2 if bold else policy.windows),
        cooldown_s=policy.cooldown_s,
        step_layers=min(num_layers, policy.step_layers or max(1, round(num_layers * step_share))),
        max_layers=min(num_layers, policy.max_layers or max(1, round(num_layers * max_share))),
        precision=policy.precision,
        kv_usage_after=high - (high - low) / RETURN_MARGIN,
    )
