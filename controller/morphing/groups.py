"""What the scheduler of shapes sees of each instance, of one worker or of several. Pure.

A group's members each have a card and metrics of their own; the leader's metrics tell of the KV cache, which
is one, and what waits or runs is summed. Whose requests the KV belongs to matters when the group parts, since
they stay with the member that took them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bus.client import LiveWorker
from bus.messages import InstanceCard, InstanceMetrics, LayerShape, Metrics, WorkerCard
from bus.shapes import kv_tokens_at
from controller.morphing.view import Rests, rest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Members in the order of their shards; the first leads. Tokens are KV, prompt and output."""

    model: str
    host: str
    device: str = ""  # its kind
    workers: tuple[str, ...]
    instances: tuple[str, ...]
    epochs: tuple[int, ...]
    tp: int
    tokens_at: Mapping[int, int] = field(default_factory=dict)  # degree -> what one sequence may have there
    kv_tokens_at: Mapping[int, int] = field(default_factory=dict)  # what all have, if that is not the same
    max_tokens: int  # of one sequence, as it is now
    kv_tokens: int = 0  # of all, if that is not the same
    used_tokens: int = 0
    own_tokens: tuple[int, ...] = ()  # by member: of its own requests, with a spare block for each that runs
    layers: tuple[LayerShape, ...] = ()  # their precisions, the same at all members
    longest_tokens: int = 0  # of the requests that run or wait here
    load: float = 0.0  # sequences that run or wait
    waiting: float = 0.0  # of these
    age_s: float = 0.0  # of the oldest report of its members
    resting_tp: int = 1  # it never parts into less

    @property
    def leader(self) -> str:
        return self.workers[0]

    @property
    def instance(self) -> str:
        return self.instances[0]

    @property
    def usage(self) -> float:
        there = self.kv_tokens or self.max_tokens
        return self.used_tokens / there if there else 1.0

    def kv_at(self, tp: int) -> int:
        """Tokens of KV at a degree of `tokens_at`; one sequence may have no more than these say."""
        return self.kv_tokens_at.get(tp, self.tokens_at[tp])


GroupMember = tuple[WorkerCard, InstanceCard]


def groups_of(
    metrics: Metrics, workers: Iterable[LiveWorker], lag_s: float = 0.0, rests: Rests | None = None
) -> list[Group]:
    """Every instance all of whose members serve, with metrics of their own epochs. `lag_s`: the age of the
    metrics themselves. `rests`: of deployments; those that are not among them are left as they are."""
    cards = {live.card.id: live.card for live in workers if live.card.state == "serving"}
    numbers = {(one.worker, one.id, one.epoch): one for one in metrics.instances}
    ages = {(one.worker, one.epoch): one.age_seconds + lag_s for one in metrics.workers}
    groups = []
    for worker in cards.values():
        for card in worker.instances:
            members = _members(worker, card, cards)
            seen = [numbers.get((member.id, one.id, member.epoch)) for member, one in members]
            told = [one for one in seen if one is not None]
            if members and len(told) == len(members):
                age_s = max(ages.get((member.id, member.epoch), float("inf")) for member, _ in members)
                known = [rest_of(one, rests or {}) for _, one in members]
                resting = [one.tp for one in known if one is not None]
                if len(resting) == len(members):
                    groups.append(_group(members, told, age_s, max(resting)))
    return groups


def _members(worker: WorkerCard, card: InstanceCard, cards: Mapping[str, WorkerCard]) -> list[GroupMember]:
    """[] unless this worker leads, and every other member says the same of the group."""
    names = card.workers or [worker.id]
    if names[0] != worker.id:
        return []
    members = [(cards[name], one) for name in names if name in cards for one in cards[name].instances]
    agreeing = [
        (member, one)
        for member, one in members
        if one.model == card.model and one.tp == card.tp and (one.workers or [member.id]) == names
    ]
    return agreeing if len(agreeing) == len(names) == card.tp else []


def _group(members: list[GroupMember], told: list[InstanceMetrics], age_s: float, resting_tp: int) -> Group:
    worker, card = members[0]
    last = told[0].last
    longest, kv_tokens = min(one.max_model_len for _, one in members), last.kv_blocks * card.block_tokens
    degrees = set.intersection(*({1, *one.degrees} for _, one in members))
    kv_at = {
        degree: tokens
        for degree in sorted(degrees)
        if (tokens := min(kv_tokens_at(*member, degree) for member in members))
    }
    return Group(
        model=card.model,
        host=worker.host,
        device=worker.device_kind,
        workers=tuple(member.id for member, _ in members),
        instances=tuple(one.id for _, one in members),
        epochs=tuple(member.epoch for member, _ in members),
        tp=card.tp,
        tokens_at={degree: min(longest, tokens) for degree, tokens in kv_at.items()},
        kv_tokens_at=kv_at,
        max_tokens=min(card.max_model_len, kv_tokens),
        kv_tokens=kv_tokens,
        used_tokens=last.kv_used * card.block_tokens,
        own_tokens=tuple((one.last.kv_own + one.last.running) * card.block_tokens for one in told),
        layers=tuple(last.layers),
        longest_tokens=max(one.last.longest_tokens for one in told),
        load=sum(one.running + one.waiting for one in told),
        waiting=sum(one.waiting for one in told),
        age_s=age_s,
        resting_tp=resting_tp,
    )
