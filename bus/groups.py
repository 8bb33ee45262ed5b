"""The tensor-parallel groups that workers form or could form, and how long a sequence each holds. Pure.

Shards nest: shard s of n groups becomes n shards of the larger group, one at each, and back.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from bus.messages import InstanceCard, WorkerCard

Members = tuple[str, ...]  # members of one group, in the order of their shards
GroupMember = tuple[WorkerCard, InstanceCard]


def members_of(leader: str, card: InstanceCard, workers: Mapping[str, WorkerCard]) -> list[GroupMember]:
    """Return the members of a group that serve and whose cards agree on it, in the order of their shards.

    card: the leader's. An instance of one worker has that member alone.
    """
    names = card.members(leader)
    return [
        (worker, one)
        for worker in (workers[name] for name in names if name in workers)
        if worker.state == "serving"
        for one in worker.instances
        if one.model == card.model and one.tp == card.tp and one.members(worker.id) == names
    ]


def kv_tokens_at(worker: WorkerCard, card: InstanceCard, degree: int) -> int:
    """Return the tokens of KV in a group of `degree` such workers; 0: it takes no part in such a group."""
    if degree not in card.degrees or (degree > 1 and not worker.link):
        return 0
    return card.tokens_at.get(degree, 0)


def capacity_at(worker: WorkerCard, card: InstanceCard, degree: int) -> int:
    """Return the most tokens, prompt and output, of a sequence in such a group."""
    return min(card.max_model_len, kv_tokens_at(worker, card, degree))


def longest_tokens(workers: Iterable[WorkerCard], model: str, max_tp: int = 0) -> int:
    """Return the most tokens of a sequence in a group of these workers; 0: none. max_tp 0: any degree."""
    capacities: dict[tuple[str, int], list[int]] = defaultdict(list)  # by host and degree
    for worker in workers:
        for card in worker.instances:
            for degree in card.degrees if card.model == model else ():
                if 1 < degree <= (max_tp or degree):
                    capacities[worker.host, degree].append(capacity_at(worker, card, degree))
    # The member with the least memory limits its group: the best group has the `degree` largest.
    best = (sorted(found)[-degree] for (_, degree), found in capacities.items() if len(found) >= degree)
    return max(best, default=0)


def can_change(low: int, high: int, kv_heads: int) -> bool:
    """Return whether groups of degree `low` become one of `high` in one change, and back.

    Above the number of KV heads several workers have the same one, and blocks take more room. Single workers
    move theirs into what is left when they join, and take all of it back when they part; groups do neither.
    kv_heads: of the model; 0: unknown.
    """
    return low == 1 or not kv_heads or high <= kv_heads


def joined(groups: Sequence[Members]) -> Members:
    """Return the group that groups of one degree become."""
    return tuple(chain.from_iterable(zip(*groups, strict=True)))


def parted(group: Sequence[str], degree: int) -> list[Members]:
    """Return the groups of `degree` that a group becomes."""
    num_groups = len(group) // degree
    return [tuple(group[start::num_groups]) for start in range(num_groups)]


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key by which w2 comes before w10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)
