"""Instances of one worker or of several, as the decisions on tensor parallelism see them. Pure.

The leader's metrics are those of the KV cache, which is one; what waits or runs is summed over the members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bus.client import LiveWorker
from bus.groups import GroupMember, can_change, kv_tokens_at, members_of
from bus.levers import CostBasis
from bus.messages import InstanceCard, InstanceMetrics, LayerShape, Metrics, PageCounts
from bus.precisions import KVPrecision, Precision
from controller.morphing.resting import Rest, Rests, rest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """An instance. Members are in the order of their shards, the first leads. Tokens are of KV."""

    model: str
    host: str
    device: str = ""  # kind
    workers: tuple[str, ...]
    instances: tuple[str, ...]
    epochs: tuple[int, ...]
    tp: int
    tokens_at: Mapping[int, int] = field(default_factory=dict)  # degree -> those of one sequence there
    kv_tokens_at: Mapping[int, int] = field(default_factory=dict)  # total of all sequences, if it differs
    max_tokens: int  # most tokens of one sequence, now
    kv_tokens: int = 0  # total of all sequences, if it differs
    used_tokens: int = 0
    own_tokens: tuple[int, ...] = ()  # by member: its requests, and a spare block for each that runs
    layers: tuple[LayerShape, ...] = ()  # the same at all members
    losses: Mapping[Precision, float] = field(default_factory=dict)  # measured, of the whole model
    kv_precision: KVPrecision = "full"
    kv_rest: KVPrecision = "full"  # what its KV cache goes back to
    kv_loss: float | None = None  # by a KV cache in 8 bits; None: not measured
    kv_gain: float = 1.0  # KV blocks in 8 bits for each in full precision
    layer_blocks: Mapping[Precision, float] = field(default_factory=dict)  # that a layer below full frees
    layer_bytes: Mapping[Precision, int] = field(default_factory=dict)
    weight_bytes: int = 0  # of a worker alone, in the precision of its deployment; 0: unknown
    rest: Rest = field(default_factory=Rest)
    block_tokens: int = 1
    queued_tokens: int = 0  # of the prompts that wait
    running: float = 0.0
    oldest_wait_s: float = 0.0
    max_model_len: int = 0  # tokens of one sequence, whatever the KV; 0: no limit
    tokens_per_s: float = 0.0  # prompts and outputs
    speed_basis: CostBasis = "measured"
    spare_tokens: int = 0  # of KV that free pages would make
    longest_tokens: int = 0  # tokens of the longest request that runs or waits here
    load: float = 0.0  # sequences that run or wait
    waiting: float = 0.0  # sequences of these
    age_s: float = 0.0  # age of the oldest report of its members
    resting_tp: int = 1  # the degree below which it never parts

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that neither requests have nor prompts wait for."""
        return max(0, (self.kv_tokens or self.max_tokens) - self.used_tokens - self.queued_tokens)

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
        """Return the tokens of all sequences at a degree of `tokens_at`."""
        return self.kv_tokens_at.get(tp, self.tokens_at[tp])


def groups_of(
    metrics: Metrics, workers: Iterable[LiveWorker], lag_s: float = 0.0, rests: Rests | None = None
) -> list[Group]:
    """Return every instance whose members serve and rest as `rests` says, by metrics `lag_s` old."""
    cards = {live.card.id: live.card for live in workers}
    numbers = {(one.worker, one.id, one.epoch): one for one in metrics.instances}
    pages = {(one.worker, one.epoch): one.pages for one in metrics.workers}
    ages = {(one.worker, one.epoch): one.age_seconds + lag_s for one in metrics.workers}
    groups = []
    for worker in cards.values():
        for card in worker.instances:
            names, members = card.members(worker.id), members_of(worker.id, card, cards)
            if names[0] != worker.id or not len(members) == len(names) == card.tp:
                continue  # another leads, or not all agree
            found = [numbers.get((member.id, one.id, member.epoch)) for member, one in members]
            seen = [one for one in found if one is not None]
            resting = [rest for _, one in members if (rest := rest_of(one, rests or {}))]
            if len(seen) == len(resting) == len(members):
                age_s = max(ages.get((member.id, member.epoch), float("inf")) for member, _ in members)
                group = _group(members, seen, age_s, max(resting, key=lambda rest: rest.tp))
                there = pages.get((worker.id, worker.epoch))
                groups.append(_with_pages(group, members, there) if there else group)
    return groups


def _group(members: list[GroupMember], seen: list[InstanceMetrics], age_s: float, rest: Rest) -> Group:
    worker, card = members[0]
    last = seen[0].last
    longest, kv_tokens = min(one.max_model_len for _, one in members), last.kv_blocks * card.block_tokens
    degrees = set.intersection(*({1, *one.degrees} for _, one in members))
    kv_at = {
        degree: tokens
        for degree in sorted(degrees)
        if (degree == card.tp or can_change(min(degree, card.tp), max(degree, card.tp), card.kv_heads))
        and (tokens := min(kv_tokens_at(*member, degree) for member in members))
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
        own_tokens=tuple((one.last.kv_own + one.last.running) * card.block_tokens for one in seen),
        layers=tuple(last.layers),
        longest_tokens=max(one.last.longest_tokens for one in seen),
        load=sum(one.running + one.waiting for one in seen),
        waiting=sum(one.waiting for one in seen),
        age_s=age_s,
        resting_tp=rest.tp,
        rest=rest,
        losses=card.losses,
        kv_precision=last.kv_precision,
        kv_rest=card.kv_dtype,
        kv_loss=card.kv_loss,
        kv_gain=card.kv_gain,
        block_tokens=card.block_tokens,
        queued_tokens=sum(one.last.waiting_tokens for one in seen),
        running=sum(one.running for one in seen),
        max_model_len=longest,
        oldest_wait_s=max(one.last.oldest_wait_seconds for one in seen),
        tokens_per_s=sum(one.prompt_tokens_per_second + one.generation_tokens_per_second for one in seen),
    )


def _with_pages(group: Group, members: list[GroupMember], pages: PageCounts) -> Group:
    """Add what pages would make; not known where a worker shares them among several models."""
    worker, card = members[0]
    blocks = group.kv_tokens // group.block_tokens
    if len(worker.instances) != 1 or not (pages.kv and blocks and "full" in card.layer_pages):
        return group
    per_block = pages.kv / blocks
    saved = {
        precision: (card.layer_pages["full"] - num_pages) / group.tp
        for precision, num_pages in card.layer_pages.items()
        if precision in card.variants and precision != "full"
    }
    return replace(
        group,
        layer_blocks={precision: num_pages / per_block for precision, num_pages in saved.items()},
        layer_bytes={one: card.layer_pages[one] * worker.page_bytes for one in saved},
        weight_bytes=_weight_pages(group, pages, card) * worker.page_bytes if group.tp == 1 else 0,
        spare_tokens=int(_unreserved(pages, card) / per_block) * group.block_tokens,
    )


def _weight_pages(group: Group, pages: PageCounts, card: InstanceCard) -> int:
    """Return the pages of all weights once every layer is in the precision of its deployment again."""
    attention, whole = card.attention_pages, card.layer_pages
    now = sum(
        attention[one.attention] + whole[one.ffn] - attention[one.ffn]
        for one in group.layers
        if {one.attention, one.ffn} <= attention.keys() & whole.keys()
    )
    return pages.weights - now + len(group.layers) * whole.get(card.precision, 0) if now else pages.weights


def _unreserved(pages: PageCounts, card: InstanceCard) -> int:
    """Return the free pages beyond those of a layer, which a worker keeps to swap with."""
    return max(0, pages.free - max(card.layer_pages.values()))
