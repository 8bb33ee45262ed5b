"""The tensor-parallel groups that workers could form, and how long a sequence each group holds. Pure.

A group of degree d needs d workers of one host that serve the same model, are prepared for that degree, and
can connect to each other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from bus.messages import InstanceCard, WorkerCard


def kv_tokens_at(worker: WorkerCard, card: InstanceCard, degree: int) -> int:
    """Return how many tokens of KV a group of `degree` members with this worker's memory holds.

    The memory is what the worker had when it loaded. 0: it takes no part in such a group.
    """
    if degree not in card.degrees or (degree > 1 and not worker.link):
        return 0
    return card.tokens_at.get(degree, 0)


def capacity_at(worker: WorkerCard, card: InstanceCard, degree: int) -> int:
    """Return the most tokens, prompt and output, of a sequence in such a group."""
    return min(card.max_model_len, kv_tokens_at(worker, card, degree))


def longest_tokens(workers: Iterable[WorkerCard], model: str, max_tp: int = 0) -> int:
    """Return the most tokens of a sequence in any group that these workers could form; 0: they form none.

    max_tp: the highest degree to consider; 0: any.
    """
    hosts: dict[str, list[tuple[WorkerCard, InstanceCard]]] = defaultdict(list)
    for worker in workers:
        hosts[worker.host] += [(worker, card) for card in worker.instances if card.model == model]
    longest = 0
    for there in hosts.values():
        for degree in {degree for _, card in there for degree in card.degrees}:
            if 1 < degree <= (max_tp or degree):
                longest = max(longest, _longest_at(there, degree))
    return longest


def _longest_at(there: list[tuple[WorkerCard, InstanceCard]], degree: int) -> int:
    """Return the capacity of the best `degree` of them, which the one with the least memory limits."""
    capacities = sorted((capacity_at(worker, card, degree) for worker, card in there), reverse=True)
    return capacities[degree - 1] if len(capacities) >= degree else 0


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key by which w2 comes before w10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)
