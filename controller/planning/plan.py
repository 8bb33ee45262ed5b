"""Plan a deployment from a profile and an intent: rank, take the first feasible, map it (iServe §6). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bus.deployments import Configuration, Estimate, Intent, Profile
from bus.messages import Stage
from controller.planning.estimates import estimate_all, may_part
from controller.planning.fitting import Device, Refusal
from controller.planning.intent import UnmetError, judge, name_of, rank, validate
from controller.planning.making_room import Retirement, Tenant, retirements_to_fit
from controller.planning.memory import Footprint, MemoryModel, kv_blocks
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
    groups: Collection[int] | None = None,
) -> Plan:
    """Plan on `devices`, all of the profile's kind. Raises IntentError.

    `tenants`: what might make room. `whole_first`: see `MemoryModel.need`. `groups`: see `estimate_all`.
    Where a group that may part again has no place, the degree stays.
    """
    validate(intent)
    there, memory, layers = list(devices), MemoryModel(profile), profile.num_layers
    estimated = partial(estimate_all, profile, intent, degrees=list(degrees), max_stages=max_stages)
    estimates = estimated(groups=groups)
    try:
        allowed = rank(estimates, intent, len(there))
    except UnmetError as unmet:
        return Plan(estimates=judge(estimates, intent), reason=str(unmet), best=unmet.best, is_unmet=True)
    shapes = [one.configuration for one in estimates]
    needs = {shape: _needs(memory, shape, intent, groups, whole_first) for shape in shapes}
    ways = {
        shape: _way(needs[shape], shape, layers, there, placing)
        for shape in (one.configuration for one in allowed)
    }
    fixed = {one.configuration: one for one in estimated(groups=())} if profile.ranks else {}
    told = [_in_its_place(one, ways.get(one.configuration), fixed) for one in estimates]
    judged = judge([_with_sizes(one, needs[one.configuration], layers) for one in told], intent)
    chosen = judged[0]
    if not chosen.refusal:
        stages = ways[chosen.configuration].stages
        return Plan(estimates=judged, chosen=chosen, stages=stages, blocks=kv_blocks(profile, intent))
    best, gone, all_tenants = allowed[0], list[Retirement](), list(tenants)
    for one in allowed:
        need = ways[one.configuration].need
        if gone := retirements_to_fit(need, one.configuration, layers, there, all_tenants):
            best = one  # the first for which something would make room
            break
    refused = {one.configuration: one.refusal for one in judged}
    reason = f"{name_of(best)} {refused[best.configuration]}"
    free = {one.worker: one.free_bytes for one in there}
    return Plan(estimates=judged, reason=reason, best=best, retirements=gone, free_bytes=free)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to have a configuration: what each device needs, and its place or why there is none."""

    need: Footprint
    place: list[Stage] | Refusal

    @property
    def stages(self) -> list[Stage]:
        return [] if isinstance(self.place, Refusal) else self.place

    @property
    def refusal(self) -> str:
        return self.place.reason if isinstance(self.place, Refusal) else ""


def _needs(
    memory: MemoryModel,
    shape: Configuration,
    intent: Intent,
    groups: Collection[int] | None,
    whole_first: bool,
) -> list[Footprint]:
    """Return what a device needs in each way to have `shape`: as a group that may part again, then fixed."""
    fixed = memory.fixed_need(shape, intent) if shape.tp > 1 else None
    if fixed and (shape.pp > 1 or not may_part(shape.tp, groups)):
        return [fixed]
    whole = memory.need(shape, intent, whole_first=whole_first)
    return [whole, fixed] if fixed else [whole]


def _way(
    needs: Sequence[Footprint],
    shape: Configuration,
    num_layers: int,
    devices: Sequence[Device],
    placing: Placing | None,
) -> _Way:
    """Return the first way that has a place, or the last one that was tried."""
    for need in needs:
        way = _Way(need, place(need, shape, num_layers, devices, placing))
        if way.stages:
            break
    return way


def _in_its_place(one: Estimate, way: _Way | None, fixed: Mapping[Configuration, Estimate]) -> Estimate:
    """Return the estimate of the way that has a place, or why there is none. None: it was not tried.

    fixed: the estimates of degrees that stay.
    """
    if way is None:
        return one
    if not way.stages:
        return replace(one, refusal=way.refusal)
    return replace(fixed[one.configuration], is_fixed=True) if way.need.is_fixed else one


def _with_sizes(one: Estimate, needs: Iterable[Footprint], num_layers: int) -> Estimate:
    """Return the estimate of ranks of one stage with what the fullest worker needs in each way."""
    if one.configuration.tp == 1 or one.configuration.pp > 1:
        return one
    sizes = {need.is_fixed: need.of(num_layers, leads=True) for need in needs}
    return replace(one, group_worker_bytes=sizes.get(False, 0), fixed_worker_bytes=sizes.get(True, 0))
