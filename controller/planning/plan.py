"""From a profile and an intent to a place: rank, take the first feasible, map it (iServe §6). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bus.deployments import Estimate, Intent, Profile
from bus.messages import Stage
from controller.planning.estimates import estimate_all
from controller.planning.fitting import Device, Refusal
from controller.planning.intent import UnmetError, judge, rank, validate
from controller.planning.making_room import Tenant, Way, ways_to_fit
from controller.planning.memory import MemoryModel, kv_blocks
from controller.planning.placement import Placing, place


@dataclass(frozen=True, slots=True)
class Plan:
    """`estimates`: the whole map, what can be had first, best first; a `refusal` says why not. `chosen` on
    `stages` with at least `blocks` of KV, if there is one. Else `reason` says why not: `best` is what the
    intent would have if there were room, and `ways` what would make it; without `ways` and with `is_unmet`
    no cluster helps. `free_bytes`: of the devices that were looked at, then."""

    estimates: list[Estimate]
    chosen: Estimate | None = None
    stages: list[Stage] = field(default_factory=list)
    blocks: int = 0
    reason: str = ""
    best: Estimate | None = None
    ways: list[Way] = field(default_factory=list)
    is_unmet: bool = False
    free_bytes: dict[str, int] = field(default_factory=dict)


def plan(
    profile: Profile,
    intent: Intent,
    devices: Iterable[Device],
    *,
    degrees: Iterable[int] = (1,),
    max_stages: int = 1,
    placing: Placing | None = None,
    tenants: Iterable[Tenant] = (),
    whole_first: bool = True,
) -> Plan:
    """`devices`: those of the profile's kind that may be used. IntentError. `whole_first`: see
    `MemoryModel.need`."""
    validate(intent)
    there, memory = list(devices), MemoryModel(profile)
    estimates = estimate_all(profile, intent, degrees=degrees, max_stages=max_stages)
    try:
        allowed = rank(estimates, intent)
    except UnmetError as unmet:
        return Plan(judge(estimates, intent), reason=str(unmet), best=unmet.best, is_unmet=True)
    places = [
        place(
            memory.need(one.configuration, intent, whole_first=whole_first),
            one.configuration,
            profile.num_layers,
            there,
            placing,
        )
        for one in allowed
    ]
    refused = {
        one.configuration: found.reason
        for one, found in zip(allowed, places, strict=True)
        if isinstance(found, Refusal)
    }
    judged = judge([replace(one, refusal=refused.get(one.configuration, "")) for one in estimates], intent)
    for one, found in zip(allowed, places, strict=True):
        if not isinstance(found, Refusal):
            return Plan(judged, one, found, kv_blocks(profile, intent))
    return _without_room(judged, allowed, profile, intent, there, list(tenants), memory, whole_first)


def _without_room(
    judged: list[Estimate],
    allowed: Sequence[Estimate],
    profile: Profile,
    intent: Intent,
    devices: Sequence[Device],
    tenants: Sequence[Tenant],
    memory: MemoryModel,
    whole_first: bool,
) -> Plan:
    """The best configuration for which something would make room, else the best."""
    ways: list[Way] = []
    best = allowed[0]
    for one in allowed:
        need = memory.need(one.configuration, intent, whole_first=whole_first)
        if ways := ways_to_fit(need, one.configuration, profile.num_layers, devices, tenants):
            best = one
            break
    refusal = next(one.refusal for one in judged if one.configuration == best.configuration)
    free = {one.worker: one.free_bytes for one in devices}
    return Plan(judged, reason=refusal, best=best, ways=ways, free_bytes=free)
