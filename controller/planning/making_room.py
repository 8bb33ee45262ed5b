"""The deployments that would have to be retired for a model that does not fit. Pure.

Idle KV of other instances counts as free before this is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bus.deployments import Configuration
from bus.groups import natural
from controller.planning.fitting import Device, Refusal, fit, sized
from controller.planning.memory import Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An instance and its bytes of whole pages on each worker. A deployment may be several tenants."""

    instance: str
    deployment: str = ""  # "": served by the worker's settings, and not retired
    workers: tuple[str, ...]
    weight_bytes: int
    kv_bytes: int  # bytes that its requests use, or that it must keep
    load: float = 0.0  # load of its workers; the least loaded goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """A deployment to retire with its instances, and the memory that this frees, by worker."""

    deployment: str
    instances: frozenset[str] = frozenset()
    freed: Mapping[str, int]
    load: float = 0.0

    @property
    def freed_bytes(self) -> int:
        """The bytes that it frees on all workers together."""
        return sum(self.freed.values())

    def __str__(self) -> str:
        return f"retire deployment {self.deployment} ({sized(self.freed_bytes)})"


def retirements_to_fit(
    need: Footprint,
    configuration: Configuration,
    num_layers: int,
    devices: Iterable[Device],
    tenants: Iterable[Tenant],
) -> list[Retirement]:
    """Return the least loaded that makes room alone, else those that free most; empty: none or no help."""
    there = list(devices)

    def fits(gone: Sequence[Retirement]) -> bool:
        return not isinstance(fit(need, configuration, num_layers, _after(there, gone)), Refusal)

    if fits(()):
        return []
    ordered = sorted(_retirements(tenants), key=lambda one: natural(one.deployment))
    least_first = sorted(ordered, key=lambda one: (one.load, one.freed_bytes))
    for one in least_first:
        if fits([one]):
            return [one]
    gone: list[Retirement] = []
    for one in sorted(least_first, key=lambda one: -one.freed_bytes):
        gone.append(one)
        if fits(gone):
            break
    else:
        return []
    for one in list(gone):
        if fits(fewer := [other for other in gone if other is not one]):
            gone = fewer  # the last one proved needless
    return gone


def _after(devices: Iterable[Device], gone: Sequence[Retirement]) -> list[Device]:
    """Return the devices after retirements."""
    freed: Counter[str] = Counter()
    for one in gone:
        freed.update(one.freed)
    ended = frozenset[str]().union(*(one.instances for one in gone))
    return [
        replace(
            one,
            free_bytes=one.free_bytes + freed[one.worker],
            instances=one.instances - ended,
            ranks=one.ranks - ended,
        )
        for one in devices
    ]


def _retirements(tenants: Iterable[Tenant]) -> list[Retirement]:
    found: dict[str, Retirement] = {}
    for one in tenants:
        if one.deployment:
            before = found.get(one.deployment, Retirement(deployment=one.deployment, freed={}))
            held = Counter(dict.fromkeys(one.workers, one.weight_bytes + one.kv_bytes))
            held.update(before.freed)
            instances = before.instances | {one.instance}
            load = max(before.load, one.load)
            found[one.deployment] = replace(before, instances=instances, freed=held, load=load)
    return list(found.values())
