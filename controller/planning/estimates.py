"""The configuration map: what every way to serve a model would take and give (iServe §4.2). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from bus.deployments import Configuration, Estimate, Intent, Profile
from bus.precisions import KVPrecision
from controller.planning.intent import loss_limit
from controller.planning.latency import LatencyModel
from controller.planning.memory import MemoryModel
from controller.planning.uncertainty import Uncertain, exactly, weakest

SECONDS_PER_HOUR = 3600.0


def estimate_all(
    profile: Profile,
    intent: Intent,
    *,
    degrees: Iterable[int] = (1,),
    max_stages: int = 1,
    groups: Collection[int] | None = None,
) -> list[Estimate]:
    """Return every degree x stages x measured precision x form of KV: fewest devices, then most bits.

    groups: the degrees of the groups that may part again; at others the degree stays. None: all may.
    """
    latency, memory = LatencyModel(profile), MemoryModel(profile)
    most = min(max_stages, profile.num_layers)
    shapes = [(tp, pp) for tp in {1, *degrees} for pp in range(1, most + 1)]
    return [
        _estimate(
            Configuration(tp=tp, pp=pp, precision=precision, kv_dtype=kv_dtype),
            profile,
            intent,
            latency,
            memory,
            is_fixed=not may_part(tp, groups),
        )
        for tp, pp in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
        for precision in latency.precisions()
        if precision in memory.precisions()
        for kv_dtype in _kv_forms(profile, intent)
    ]


def _kv_forms(profile: Profile, intent: Intent) -> list[KVPrecision]:
    """Return the forms of KV to choose from.

    Where the workers hold it in 8 bits by their settings, that is "full"; an intent may also fix it by name.
    """
    is_had = profile.kv_gain > 1 or profile.kv_dtype == intent.kv_dtype == "int8"
    return ["full", "int8"] if is_had else ["full"]


def may_part(tp: int, groups: Collection[int] | None) -> bool:
    """Return True if so many ranks of one stage are a group that may part again, or one worker alone."""
    return tp == 1 or groups is None or tp in groups


def _estimate(
    configuration: Configuration,
    profile: Profile,
    intent: Intent,
    latency: LatencyModel,
    memory: MemoryModel,
    *,
    is_fixed: bool,
) -> Estimate:
    timing = latency.timing(configuration, intent)
    seconds = timing.ttft + (intent.output_tokens - 1) * timing.tpot
    size = memory.total(configuration, intent, is_fixed=is_fixed)
    device_hours = configuration.num_devices / SECONDS_PER_HOUR * seconds
    costs = {"memory": size, "gpu_hours": device_hours, "memory_seconds": _product(size, seconds)}
    is_full = configuration.precision == configuration.kv_dtype == profile.kv_dtype == "full"
    loss = _loss(configuration, profile)
    return Estimate(
        configuration=configuration,
        memory_bytes=size.quantity(),
        ttft_s=timing.ttft.quantity(),
        tpot_s=timing.tpot.quantity(),
        latency_s=seconds.quantity(),
        cost=costs[intent.cost].quantity(),
        gpu_hours=device_hours.quantity(),
        # The loss of a quantised model was measured on another text: it is an extrapolation here.
        loss=None if loss is None else exactly(loss, "measured" if is_full else "extrapolated").quantity(),
        refusal=_refusal(configuration, profile, intent),
    )


def _loss(configuration: Configuration, profile: Profile) -> float | None:
    """Return the share of perplexity that layers and KV cache cost together; None: unknown of one of them."""
    layers = 0.0 if configuration.precision == "full" else profile.loss.get(configuration.precision)
    kv = profile.kv_loss_of(configuration.kv_dtype)
    return None if layers is None or kv is None else layers + kv


def _refusal(configuration: Configuration, profile: Profile, intent: Intent) -> str:
    """Return why KV in 8 bits by the settings of the workers rules a configuration out; "": it does not."""
    if configuration.kv_dtype != "full" or profile.kv_dtype == "full":
        return ""
    set_to = f"a KV cache in {profile.kv_dtype}, as worker.kv_dtype says"
    if intent.kv_dtype == "full":
        return f"the intent fixes kv_dtype full, and the workers have {set_to}; set that to full"
    if profile.kv_loss is None and loss_limit(intent) is not None:
        return (
            f"what {set_to}, loses is not known: run `instar profile` on the model's folder and register it "
            "again, fix precision, or set worker.kv_dtype to full"
        )
    return ""


def _product(one: Uncertain, other: Uncertain) -> Uncertain:
    """Multiply two that do not depend on each other and have small relative spreads."""
    spread = other.value * replace(one, value=0.0) + one.value * replace(other, value=0.0)
    return replace(spread, value=one.value * other.value, basis=weakest((one.basis, other.basis)))
