"""Which groups the cards of workers allow, and how long a sequence each could hold. Pure.

A group of degree d takes d workers of one host that serve the same model, are prepared for that degree, and
can be reached by the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from bus.messages import InstanceCard, WorkerCard


def kv_tokens_at(worker: WorkerCard, card: InstanceCard, degree: int) -> int:
    """Tokens whose KV there is room for where this worker is one of `degree`, as its memory was when it
    loaded; 0: it takes no part in such a group."""
    if degree not in card.degrees or (degree > 1 and not worker.link):
        return 0
    return card.tokens_at.get(degree, 0)


def capacity_at(worker: WorkerCard, card: InstanceCard, degree: int) -> int:
    """Tokens, prompt and output, that a single sequence may have there."""
    return min(card.max_model_len, kv_tokens_at(worker, card, degree))


def longest_tokens(workers: Iterable[WorkerCard], model: str, max_tp: int = 0) -> int:
    """What the largest group that can be made of these workers holds; 0: there is none. `max_tp`: no degree
    beyond it; 0: any."""
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
    """The best `degree` of them; the one with the least memory decides."""
    capacities = sorted((capacity_at(worker, card, degree) for worker, card in there), reverse=True)
    return capacities[degree - 1] if len(capacities) >= degree else 0


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts w2 before w10, so that neighbours are neighbours."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)
