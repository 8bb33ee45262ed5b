"""What would make room for a model that does not fit: retirements, or morphs of what stays. Pure.

Every way is a list of steps that each free pages on some workers: one step if one suffices, of the least
loaded instance; else those that free most, until the model fits, without those that prove needless.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bus.deployments import Configuration
from bus.precisions import QUANTIZED, Precision, is_below
from bus.shapes import natural
from controller.planning.fitting import Device, Refusal, fit, sized
from controller.planning.memory import Footprint

Kind = Literal["resize", "swap", "retire"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An instance and what it holds on each of its workers, in bytes of whole pages.

    A deployment on several workers may be several tenants; it is retired as one.
    """

    instance: str
    deployment: str = ""  # "": served by the worker's settings, and not retired
    workers: tuple[str, ...]
    weight_bytes: int
    kv_bytes: int
    kv_kept_bytes: int = 0  # of these: what its requests use, or it must have
    load: float = 0.0  # of its workers; the least loaded goes first
    layers: Mapping[Precision, int] = field(default_factory=dict)  # how many in each precision
    layer_bytes: Mapping[Precision, int] = field(default_factory=dict)  # of one in each it can have


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomStep:
    """A morph or retirement that frees memory."""

    kind: Kind
    target: str  # an instance, or of a retirement the deployment
    freed: Mapping[str, int]  # worker -> bytes
    load: float = 0.0
    precision: Precision | None = None  # of a swap

    @property
    def freed_bytes(self) -> int:
        """What it frees on all workers together."""
        return sum(self.freed.values())


@dataclass(frozen=True, slots=True)
class Way:
    """Steps that together make room."""

    steps: tuple[RoomStep, ...]

    @property
    def kind(self) -> Kind:
        """The kind of all its steps."""
        return self.steps[0].kind

    def __str__(self) -> str:
        return " and ".join(_SAYS[one.kind](one) for one in self.steps)


def ways_to_fit(
    need: Footprint,
    configuration: Configuration,
    num_layers: int,
    devices: Iterable[Device],
    tenants: Iterable[Tenant],
) -> list[Way]:
    """Return ways, cheapest first: shrink idle KV, hold layers in fewer bits, retire deployments.

    Empty: it fits as it is, or nothing helps.
    """
    there, all_tenants = list(devices), list(tenants)

    def fits(steps: Sequence[RoomStep]) -> bool:
        return not isinstance(fit(need, configuration, num_layers, _after(there, steps)), Refusal)

    if fits(()):
        return []
    resizes = [_resize(one) for one in all_tenants if one.kv_bytes > one.kv_kept_bytes]
    found = [_way(resizes, fits)]
    for precision in QUANTIZED:
        swaps = [one for tenant in all_tenants if (one := _swap(tenant, precision))]
        if way := _way(swaps, fits):
            found.append(way)
            break
    found.append(_way(_retirements(all_tenants), fits))
    return [way for way in found if way]


def _way(steps: Iterable[RoomStep], fits: Callable[[Sequence[RoomStep]], bool]) -> Way | None:
    """Return one step if one suffices; else those that free most, as many as it takes."""
    least_first = sorted(steps, key=lambda one: (one.load, one.freed_bytes, natural(one.target)))
    for step in least_first:
        if fits([step]):
            return Way((step,))
    taken: list[RoomStep] = []
    for step in sorted(least_first, key=lambda one: -one.freed_bytes):
        taken.append(step)
        if fits(taken):
            break
    else:
        return None
    for step in list(taken):
        if fits(fewer := [one for one in taken if one is not step]):
            taken = fewer
    return Way(tuple(taken))


def _after(devices: Iterable[Device], steps: Sequence[RoomStep]) -> list[Device]:
    """Return the devices after these steps. None is called empty: other models may be left."""
    freed = {one.worker: 0 for one in devices}
    for step in steps:
        for worker in freed.keys() & step.freed.keys():
            freed[worker] += step.freed[worker]
    return [replace(one, free_bytes=one.free_bytes + freed[one.worker]) for one in devices]


def _resize(tenant: Tenant) -> RoomStep:
    return _step("resize", tenant, tenant.kv_bytes - tenant.kv_kept_bytes)


def _retirements(tenants: Iterable[Tenant]) -> list[RoomStep]:
    freed: dict[str, Counter[str]] = defaultdict(Counter)
    loads: dict[str, float] = defaultdict(float)
    for one in tenants:
        if one.deployment:
            for worker in one.workers:
                freed[one.deployment][worker] += one.weight_bytes + one.kv_bytes
            loads[one.deployment] = max(loads[one.deployment], one.load)
    return [
        RoomStep(kind="retire", target=name, freed=found, load=loads[name]) for name, found in freed.items()
    ]


def _swap(tenant: Tenant, precision: Precision) -> RoomStep | None:
    """Swap all layers with more bits to `precision`; None if that frees nothing."""
    if precision not in tenant.layer_bytes:
        return None
    freed = sum(
        count * max(0, tenant.layer_bytes.get(now, 0) - tenant.layer_bytes[precision])
        for now, count in tenant.layers.items()
        if is_below(precision, now)
    )
    return replace(_step("swap", tenant, freed), precision=precision) if freed else None


def _step(kind: Kind, tenant: Tenant, freed_bytes: int) -> RoomStep:
    freed = dict.fromkeys(tenant.workers, freed_bytes)
    return RoomStep(kind=kind, target=tenant.instance, freed=freed, load=tenant.load)


_SAYS: dict[Kind, Callable[[RoomStep], str]] = {
    "resize": lambda one: f"shrink the KV cache of {one.target} by {sized(one.freed_bytes)}",
    "swap": lambda one: f"hold the layers of {one.target} in {one.precision} ({sized(one.freed_bytes)})",
    "retire": lambda one: f"retire deployment {one.target} ({sized(one.freed_bytes)})",
}
