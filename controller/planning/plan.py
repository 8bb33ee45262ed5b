"""Plan a deployment from a profile and an intent: rank, take the first feasible, map it (iServe §6). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bus.deployments import Configuration, Estimate, Intent, Profile
from bus.messages import MOST_RANKS, Stage
from controller.planning.estimates import estimate_all, may_part
from controller.planning.fitting import Device, Refusal
from controller.planning.intent import UnmetError, judge, name_of, rank, validate
from controller.planning.making_room import Retirement, Tenant, retirements_to_fit
from controller.planning.memory import Footprint, MemoryModel, kv_blocks
from controller.planning.placement import Placing, place

NOT_CUT = (
    "the weights cannot be cut for this degree: the numbers of heads, KV heads and experts set that, and it "
    f"is at most {MOST_RANKS}"
)


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
    Where a group that may part again has no place, or the intent does not allow it, the degree stays.
    """
    validate(intent)
    there, memory, layers = list(devices), MemoryModel(profile), profile.num_layers
    estimated = partial(estimate_all, profile, intent, degrees=list(degrees), max_stages=max_stages)
    fixed = {one.configuration: one for one in estimated(groups=())} if profile.ranks else {}
    rows, ways = dict[Configuration, Estimate](), dict[Configuration, list[_Way]]()
    for one in estimated(groups=groups):
        shape = one.configuration
        needs = _needs(memory, shape, intent, groups, whole_first)
        stays = replace(fixed.get(shape, one), is_fixed=True)
        ways[shape] = [_Way(need, stays if need.is_fixed else one) for need in needs]
        rows[shape] = ways[shape][0].estimate if needs else replace(one, refusal=_not_cut(profile, shape))
    others = [way.estimate for each in ways.values() for way in each[1:]]
    try:
        allowed = rank([*rows.values(), *others], intent, len(there))
    except UnmetError as unmet:
        if unmet.best:
            rows[unmet.best.configuration] = unmet.best
        return Plan(estimates=judge(rows.values(), intent), reason=str(unmet), best=unmet.best, is_unmet=True)
    may_be = {(one.configuration, one.is_fixed) for one in allowed}
    tried = dict[Configuration, _Way]()
    for shape in dict.fromkeys(one.configuration for one in allowed):
        both = (way for way in ways[shape] if (shape, way.estimate.is_fixed) in may_be)
        tried[shape] = _tried(both, layers, there, placing)
    told = (tried[shape].estimate if shape in tried else one for shape, one in rows.items())
    judged = judge([_with_sizes(one, ways[one.configuration], layers) for one in told], intent)
    chosen = judged[0]
    if not chosen.refusal:
        stages = tried[chosen.configuration].stages
        return Plan(estimates=judged, chosen=chosen, stages=stages, blocks=kv_blocks(profile, intent))
    best, gone, all_tenants = next(iter(tried.values())).estimate, list[Retirement](), list(tenants)
    for shape, way in tried.items():
        if gone := retirements_to_fit(way.need, shape, layers, there, all_tenants):
            best = way.estimate  # the first for which something would make room
            break
    reason = f"{name_of(best)} {best.refusal}"
    free = {one.worker: one.free_bytes for one in there}
    return Plan(estimates=judged, reason=reason, best=best, retirements=gone, free_bytes=free)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to have a configuration: what each device needs, its estimate, and its place if it has one."""

    need: Footprint
    estimate: Estimate
    stages: list[Stage] = field(default_factory=list)


def _needs(
    memory: MemoryModel,
    shape: Configuration,
    intent: Intent,
    groups: Collection[int] | None,
    whole_first: bool,
) -> list[Footprint]:
    """Return what a device needs in each way to have `shape`: as a group that may part again, then fixed.

    Empty: the weights in this precision cannot be cut so.
    """
    fixed = memory.fixed_need(shape, intent) if shape.tp > 1 else None
    is_group = shape.pp == 1 and may_part(shape.tp, groups)
    if shape.tp > 1 and not is_group and (fixed or memory.knows_ranks):
        return [fixed] if fixed else []
    whole = memory.need(shape, intent, whole_first=whole_first)
    return [whole, fixed] if fixed else [whole]


def _not_cut(profile: Profile, shape: Configuration) -> str:
    """Return why no way leads to the degree of `shape`."""
    if shape.tp not in profile.fixed_degrees:
        return NOT_CUT
    which = f"the weights in {shape.precision} cannot be cut for this degree"
    return f"{which}: a part of the FFN would begin within a group of quantised weights"


def _tried(ways: Iterable[_Way], num_layers: int, devices: Sequence[Device], placing: Placing | None) -> _Way:
    """Return the first way that has a place, or the last one, with why it has none. There is at least one."""
    for way in ways:
        found = place(way.need, way.estimate.configuration, num_layers, devices, placing)
        if not isinstance(found, Refusal):
            return replace(way, stages=found)
        last = replace(way, estimate=replace(way.estimate, refusal=found.reason))
    return last


def _with_sizes(one: Estimate, ways: Iterable[_Way], num_layers: int) -> Estimate:
    """Return the estimate of ranks of one stage with what the fullest worker needs in each way."""
    if one.configuration.tp == 1 or one.configuration.pp > 1:
        return one
    sizes = {way.need.is_fixed: way.need.of(num_layers, leads=True) for way in ways}
    return replace(one, group_worker_bytes=sizes.get(False, 0), fixed_worker_bytes=sizes.get(True, 0))
