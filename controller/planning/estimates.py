"""The configuration map: what every way to serve a model would take and give (iServe §4.2). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bus.deployments import Configuration, Estimate, Intent, Profile
from controller.planning.latency import LatencyModel
from controller.planning.memory import MemoryModel
from controller.planning.uncertainty import Uncertain, combine, exactly, weakest

SECONDS_PER_HOUR = 3600.0


def estimate_all(
    profile: Profile, intent: Intent, *, degrees: Iterable[int] = (1,), max_stages: int = 1
) -> list[Estimate]:
    """Every degree x number of stages x precision of which a single device was measured: fewest devices
    first, then most bits. `degrees`: those that the weights can be cut to."""
    latency, memory = LatencyModel(profile), MemoryModel(profile)
    precisions = [one for one in latency.precisions() if one in memory.precisions()]
    return [
        _estimate(configuration, profile, intent, latency, memory)
        for configuration in configurations(degrees, min(max_stages, profile.num_layers))
        for configuration in (
            Configuration(tp=configuration.tp, pp=configuration.pp, precision=one) for one in precisions
        )
    ]


def configurations(degrees: Iterable[int], max_stages: int) -> Iterator[Configuration]:
    shapes = [(tp, pp) for tp in sorted({1, *degrees}) for pp in range(1, max_stages + 1)]
    for tp, pp in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])):
        yield Configuration(tp=tp, pp=pp)


def _estimate(
    configuration: Configuration,
    profile: Profile,
    intent: Intent,
    latency: LatencyModel,
    memory: MemoryModel,
) -> Estimate:
    timing = latency.timing(configuration, intent)
    seconds = combine([(1.0, timing.ttft), (intent.output_tokens - 1.0, timing.tpot)])
    size = memory.total(configuration, intent)
    device_hours = seconds.times(configuration.num_devices / SECONDS_PER_HOUR)
    costs = {"memory": size, "gpu_hours": device_hours, "memory_seconds": _product(size, seconds)}
    loss = _loss(profile, configuration)
    return Estimate(
        configuration=configuration,
        memory_bytes=size.quantity(),
        ttft_s=timing.ttft.quantity(),
        tpot_s=timing.tpot.quantity(),
        latency_s=seconds.quantity(),
        cost=costs[intent.cost].quantity(),
        gpu_hours=device_hours.quantity(),
        loss=None if loss is None else loss.quantity(),
    )


def _product(one: Uncertain, other: Uncertain) -> Uncertain:
    """Of two that do not depend on each other; relative spreads are small."""
    spread = combine(
        [
            (other.value, Uncertain(0.0, one.down, one.up)),
            (one.value, Uncertain(0.0, other.down, other.up)),
        ]
    )
    basis = weakest((one.basis, other.basis))
    return Uncertain(one.value * other.value, spread.down, spread.up, basis)


def _loss(profile: Profile, configuration: Configuration) -> Uncertain | None:
    """Full precision loses nothing. What another one loses was predicted, not measured here."""
    if configuration.precision == "full":
        return exactly(0.0)
    loss = profile.loss.get(configuration.precision)
    return None if loss is None else exactly(loss, "extrapolated")
