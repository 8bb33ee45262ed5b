"""Plan a deployment from a profile and an intent: rank, take the first feasible, map it (iServe §6). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bus.deployments import Estimate, Intent, Profile
from bus.messages import Stage
from controller.planning.estimates import estimate_all
from controller.planning.fitting import Device, Refusal
from controller.planning.intent import UnmetError, judge, name_of, rank, validate
from controller.planning.making_room import Retirement, Tenant, retirements_to_fit
from controller.planning.memory import MemoryModel, kv_blocks
from controller.planning.placement import Placing, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The configuration that was `chosen` for an intent, with its place, or why there is none.

    `estimates`: the whole configuration map, what can be had first, best first; `refusal` says why a row
    cannot be had. Without `chosen`, `reason` says why, `best` is the first choice if there were room, and
    `retirements` would make room. `is_unmet`: no cluster would help.
    """

    estimates: list[Estimate] = field(default_factory=list)
    chosen: Estimate | None = None
    stages: list[Stage] = field(default_factory=list)
    blocks: int = 0  # KV blocks, at least
    reason: str = ""
    best: Estimate | None = None
    retirements: list[Retirement] = field(default_factory=list)
    is_unmet: bool = False
    free_bytes: dict[str, int] = field(default_factory=dict)  # free bytes of the devices considered

    @property
    def workers(self) -> list[str]:
        """The workers of all stages."""
        return [worker for stage in self.stages for worker in stage.workers]


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
    """Plan on `devices`, all of the profile's kind. Raises IntentError.

    `tenants`: what might make room. `whole_first`: see `MemoryModel.need`.
    """
    validate(intent)
    there, memory = list(devices), MemoryModel(profile)
    estimates = estimate_all(profile, intent, degrees=degrees, max_stages=max_stages)
    try:
        allowed = rank(estimates, intent, len(there))
    except UnmetError as unmet:
        return Plan(estimates=judge(estimates, intent), reason=str(unmet), best=unmet.best, is_unmet=True)
    needs = [memory.need(one.configuration, intent, whole_first=whole_first) for one in allowed]
    places = {
        one.configuration: place(need, one.configuration, profile.num_layers, there, placing)
        for one, need in zip(allowed, needs, strict=True)
    }
    refused = {shape: found.reason for shape, found in places.items() if isinstance(found, Refusal)}
    judged = judge([replace(one, refusal=refused.get(one.configuration, "")) for one in estimates], intent)
    for one in allowed:
        stages = places[one.configuration]
        if not isinstance(stages, Refusal):
            return Plan(estimates=judged, chosen=one, stages=stages, blocks=kv_blocks(profile, intent))
    best, gone, all_tenants = allowed[0], list[Retirement](), list(tenants)
    for one, need in zip(allowed, needs, strict=True):
        if gone := retirements_to_fit(need, one.configuration, profile.num_layers, there, all_tenants):
            best = one  # the first for which something would make room
            break
    reason = f"{name_of(best)} {refused[best.configuration]}"
    free = {one.worker: one.free_bytes for one in there}
    return Plan(estimates=judged, reason=reason, best=best, retirements=gone, free_bytes=free)
