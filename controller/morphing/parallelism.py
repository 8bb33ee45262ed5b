"""The groups that instances could form, and those that a group could part into. Pure.

Algorithm 2 of Gyges (section 5) and the scale-up of its Algorithm 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bus.groups import natural
from controller.morphing.groups import Group


@dataclass(frozen=True, slots=True)
class Merge:
    """`groups` of one degree that become one of degree `tp`: all steps of x2 at once."""

    groups: tuple[Group, ...]
    tp: int
    are_neighbours: bool = False

    @property
    def workers(self) -> list[str]:
        return _in_shard_order([group.workers for group in self.groups])

    @property
    def used_tokens(self) -> int:
        return sum(group.used_tokens for group in self.groups)

    @property
    def tokens_after(self) -> int:
        """Tokens of one sequence in the new group."""
        return min(group.tokens_at[self.tp] for group in self.groups)

    @property
    def kv_tokens_after(self) -> int:
        """Tokens of all sequences in the new group."""
        return min(group.kv_at(self.tp) for group in self.groups)

    def missing(self, num_tokens: int) -> int:
        """Return the tokens that must come free until it holds a sequence beside what the caches hold."""
        return max(0, self.used_tokens + num_tokens - self.kv_tokens_after)


def merges_for(groups: Iterable[Group], num_tokens: int, max_tp: int = 0) -> list[Merge]:
    """Return the merges that make room for a request of `num_tokens` that no instance holds.

    They are of instances of one degree, model and host, up to degree `max_tp` (0: any). Beside what the
    caches hold now (the reserve of section 5) there may be no room yet: see `Merge.missing`. Of equal prices
    the planner takes the first: the lowest degree, then the fewest shapes that change, then neighbours, then
    the least loaded.
    """
    there = list(groups)
    places, found = _places(there), dict[tuple[str, ...], Merge]()
    for kind_of in (_kind_and_precisions, _kind):  # layers that differ in precision are made alike first
        for alike in _alike(there, kind_of):
            for tp in _degrees_for(alike, num_tokens, max_tp):
                for merge in _merges(alike, tp, places):
                    if num_tokens <= merge.tokens_after:
                        found.setdefault(tuple(merge.workers), merge)
    return sorted(found.values(), key=_preference)


def parts_of(group: Group, tp: int) -> list[Group]:
    """Return the groups of degree `tp` that a group would part into, each with its share of what runs."""
    workers, instances, epochs = group.workers, group.instances, group.epochs
    num_parts = group.tp // tp
    return [
        replace(
            group,
            workers=workers[part::num_parts],
            instances=instances[part::num_parts],
            epochs=epochs[part::num_parts],
            tp=tp,
            max_tokens=group.tokens_at[tp],
            kv_tokens=group.kv_at(tp),
            used_tokens=tokens,
            own_tokens=(),
            load=group.load / num_parts,
        )
        for part, tokens in enumerate(_tokens_of_parts(group, tp))
    ]


def degrees_below(group: Group, free_share: float) -> list[int]:
    """Return the degrees that a group may part into, the lowest first.

    Each part must hold the longest request here and its members' own requests, and `free_share` (0..1) of
    the KV must be free. A deployment's group does not part below the degree that it was deployed with.
    """
    if group.tp == 1 or group.usage > 1 - free_share:
        return []
    lower = [tp for tp in group.tokens_at if group.resting_tp <= tp < group.tp and group.tp % tp == 0]
    holding = [tp for tp in lower if group.longest_tokens <= group.tokens_at[tp]]
    return sorted(tp for tp in holding if max(_tokens_of_parts(group, tp)) <= group.kv_at(tp))


def _tokens_of_parts(group: Group, tp: int) -> list[int]:
    # Where members do not report their own tokens, all may belong to one.
    own = group.own_tokens or (group.used_tokens,)
    num_parts = group.tp // tp
    return [sum(own[part::num_parts]) for part in range(num_parts)]


def _places(groups: Iterable[Group]) -> dict[str, int]:
    """Return each worker's number among those of its host and model."""
    workers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for group in groups:
        workers[group.host, group.model] += group.workers
    return {name: i for names in workers.values() for i, name in enumerate(sorted(names, key=natural))}


def _kind(group: Group) -> tuple[object, ...]:
    return group.host, group.device, group.model, group.tp


def _kind_and_precisions(group: Group) -> tuple[object, ...]:
    return *_kind(group), group.layers, group.kv_precision


def _alike(groups: Iterable[Group], kind_of: Callable[[Group], tuple[object, ...]]) -> Iterator[list[Group]]:
    kinds: dict[tuple[object, ...], list[Group]] = defaultdict(list)
    for group in groups:
        kinds[kind_of(group)].append(group)
    for kind in kinds.values():
        yield sorted(kind, key=lambda group: natural(group.leader))


def _degrees_for(alike: Sequence[Group], num_tokens: int, max_tp: int) -> Iterator[int]:
    """Yield the degrees that hold so many tokens, by steps of x2; the lowest may have no room."""
    tp, most = 2 * alike[0].tp, len(alike) * alike[0].tp
    while tp <= min(most, max_tp or most):
        if any(group.tokens_at.get(tp, 0) >= num_tokens for group in alike):
            yield tp
        tp *= 2


def _merges(alike: Sequence[Group], tp: int, places: dict[str, int]) -> Iterator[Merge]:
    """Yield neighbours (`tp` workers from a multiple of `tp` on), and the least loaded of all."""
    num_groups = tp // alike[0].tp
    able = [group for group in alike if tp in group.tokens_at]
    blocks: dict[int, list[Group]] = defaultdict(list)
    for group in able:
        first, *others = {places[worker] // tp for worker in group.workers}
        if not others:
            blocks[first].append(group)
    for block in blocks.values():
        if len(block) == num_groups:
            yield Merge(tuple(block), tp, are_neighbours=True)
    if len(able) >= num_groups:
        idle = sorted(able, key=lambda group: (group.load, natural(group.leader)))[:num_groups]
        yield Merge(tuple(sorted(idle, key=lambda group: natural(group.leader))), tp)


def _preference(merge: Merge) -> tuple[object, ...]:
    load = sum(group.load for group in merge.groups)
    return merge.tp, -merge.groups[0].tp, not merge.are_neighbours, load, natural(merge.groups[0].leader)


def _in_shard_order(groups: Sequence[Sequence[str]]) -> list[str]:
    # Shards nest: low shard s of the j-th of n groups becomes high shard s * n + j.
    return [worker for shard in zip(*groups, strict=True) for worker in shard]
