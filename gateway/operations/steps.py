"""The steps from the groups that workers form to groups of another degree. Pure: names in, steps out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bus.groups import Members, can_change, joined, parted


@dataclass(frozen=True, slots=True)
class DegreeStep:
    """One change of degree. `workers` are in the order of their shards at the higher of both degrees."""

    workers: Members
    tp: int

    def __str__(self) -> str:
        return f"tp {self.tp} on {', '.join(self.workers)}"


def plan_steps(
    groups: Iterable[Members],
    wanted: Sequence[str],
    tp: int,
    degrees: Collection[int],
    kv_heads: int = 0,
) -> list[DegreeStep]:
    """Return the fewest steps after which the `wanted` workers form groups of degree `tp`; [] for none.

    `groups`: those that they are in now. First parts groups above `tp` or with other workers, then joins the
    smallest first. Where sizes do not fit or groups may not join (`bus.groups.can_change`), and if it takes
    fewer steps, single workers join at once.
    """
    named = set(wanted)
    parts, left = [], []
    for group in groups:
        degree = _largest_part(group, named, tp, degrees, kv_heads)
        if degree < len(group):
            parts.append(DegreeStep(group, degree))
        left += [one for one in parted(group, degree) if named.issuperset(one)]
    finished = {group for group in left if len(group) == tp}
    whole = (group for group in groups if len(group) > 1 and group not in finished)
    singly = [DegreeStep(group, 1) for group in whole if not named.isdisjoint(group)]
    singles = [(name,) for name in wanted if not any(name in group for group in finished & set(groups))]
    at_once = singly + (_joins(singles, wanted, tp, kv_heads) or [])
    joins = _joins(left, wanted, tp, kv_heads)
    return at_once if joins is None or len(at_once) < len(parts) + len(joins) else parts + joins


def _largest_part(group: Members, named: set[str], tp: int, degrees: Collection[int], kv_heads: int) -> int:
    """Return the highest degree up to `tp` that splits named workers from the others."""
    for degree in range(min(tp, len(group)), 1, -1):
        is_possible = degree == len(group) or (
            len(group) % degree == 0 and degree in degrees and can_change(degree, len(group), kv_heads)
        )
        if is_possible and not any(_is_mixed(one, named) for one in parted(group, degree)):
            return degree
    return 1


def _is_mixed(group: Members, named: set[str]) -> bool:
    return not (named.issuperset(group) or named.isdisjoint(group))


def _joins(
    groups: Iterable[Members], wanted: Sequence[str], tp: int, kv_heads: int
) -> list[DegreeStep] | None:
    """Return the steps that make groups of degree `tp`; None where the sizes do not fit together."""
    waiting = sorted(groups, key=lambda group: (len(group), min(map(wanted.index, group))))
    steps: list[DegreeStep] = []
    while waiting and (size := len(waiting[0])) < tp:
        same = [group for group in waiting if len(group) == size]
        larger = [group for group in waiting if len(group) > size]
        target = len(larger[0]) if larger else tp
        num = target // size
        if target % size or len(same) % num or not can_change(size, target, kv_heads):
            return None
        made = [joined(same[start : start + num]) for start in range(0, len(same), num)]
        steps += [DegreeStep(group, target) for group in made]
        waiting = sorted(made + larger, key=lambda group: (len(group), min(map(wanted.index, group))))
    return steps
