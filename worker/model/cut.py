"""The part of a model that one rank of a fixed degree holds: pure arithmetic.

A group that may part again keeps attention, embedding and head whole on every rank, and lays out the FFN so
that ranks give and take whole pages (`worker.model.layout`); of the attention a rank computes heads that are
dealt out in the same way. Where the degree is fixed, a rank holds its part of everything large, and reads
nothing else from the checkpoint (Megatron-LM, Shoeybi et al. 2019): the queries' heads with the KV heads that
they read, rows of the FFN or whole experts, and rows of embedding and head. Where there are fewer KV heads
than ranks, several ranks have the same one. Norms and the router are whole on every rank; the bias of an
output is on the first alone, as ranks add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import MOST_RANKS
from worker.model.shard import Shard

# Rows of the FFN that stay together: quantised groups of 128, 64 or 32 inputs keep their sizes.
_RUNS = (128, 64, 32)
_UNEVEN = 0.01  # share by which the largest part may exceed an even one for the sake of such runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSizes:
    """The numbers of a whole model that are divided among ranks."""

    heads: int
    kv_heads: int
    ffn_rows: int  # of a layer, or of one expert
    experts: int  # of a layer, and of slices of its shared expert; 0: it has one FFN instead
    vocab: int

    def why_not(self, degree: int) -> str:
        """Return why the model cannot be cut for so many ranks; "": it can."""
        if not 1 <= degree <= MOST_RANKS:
            return f"a degree is 1 to {MOST_RANKS}"
        if not can_deal_heads(self.heads, self.kv_heads, degree):
            return f"{self.kv_heads} KV heads, which {self.heads} heads read, cannot be dealt out to them"
        if self.experts % degree:
            return f"{self.experts} experts cannot be dealt out evenly to them"
        if not self.experts and self.ffn_rows < degree:
            return f"the FFN has {self.ffn_rows} rows"
        return f"the vocabulary has {self.vocab} tokens" if self.vocab < degree else ""

    def degrees(self) -> list[int]:
        """Return the degrees that the model can be cut for."""
        return [degree for degree in range(1, MOST_RANKS + 1) if not self.why_not(degree)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of `rank`, as ranges of the things of the whole model, whose `sizes` are kept."""

    rank: Shard
    sizes: CutSizes
    heads: range
    kv_heads: range
    ffn_rows: range  # of an expert, all
    experts: range
    vocab: range

    @classmethod
    def of(cls, sizes: CutSizes, rank: Shard) -> Cut:
        """Return the part of a rank. Raises ValueError for a degree that cannot be (`CutSizes.why_not`)."""
        if why := sizes.why_not(rank.size):
            raise ValueError(why)
        heads, kv_heads = heads_of(sizes.heads, sizes.kv_heads, rank)
        return cls(
            rank=rank,
            sizes=sizes,
            heads=heads,
            kv_heads=kv_heads,
            ffn_rows=range(sizes.ffn_rows) if sizes.experts else _ffn_rows(sizes.ffn_rows, rank),
            experts=_even(sizes.experts, rank),
            vocab=_even(sizes.vocab, rank),
        )

    def all_vocab(self) -> list[range]:
        """Return the parts of the vocabulary of all ranks."""
        return [_even(self.sizes.vocab, Shard(rank, self.rank.size)) for rank in range(self.rank.size)]


def _even(n: int, rank: Shard) -> range:
    """Return a rank's run of n things; the runs differ by one at most."""
    return range(n * rank.rank // rank.size, n * (rank.rank + 1) // rank.size)


def can_deal_heads(heads: int, kv_heads: int, degree: int) -> bool:
    """Return True if so many ranks can have equally many KV heads each, or each one that several have."""
    sharing, rest = divmod(degree, kv_heads)
    return kv_heads % degree == 0 or (rest == 0 and sharing <= heads // kv_heads)


def heads_of(heads: int, kv_heads: int, rank: Shard) -> tuple[range, range]:
    """Return the heads of a rank, and the KV heads that they read.

    Ranks that share a KV head divide the heads that read it, evenly or not. Raises ValueError where
    `can_deal_heads` says no.
    """
    if not can_deal_heads(heads, kv_heads, rank.size):
        raise ValueError(
            f"{kv_heads} KV heads, which {heads} heads read, cannot be split over {rank.size} ranks"
        )
    group = heads // kv_heads
    if kv_heads % rank.size == 0:
        kv = _even(kv_heads, rank)
        return range(kv.start * group, kv.stop * group), kv
    sharing = rank.size // kv_heads
    kv_head, place = divmod(rank.rank, sharing)
    part = _even(group, Shard(place, sharing))
    return range(kv_head * group + part.start, kv_head * group + part.stop), range(kv_head, kv_head + 1)


def _ffn_rows(rows: int, rank: Shard) -> range:
    """Return a rank's rows of an FFN: whole runs if that leaves the ranks nearly even."""
    for run in _RUNS:
        runs = -(-rows // run)
        if -(-runs // rank.size) * run * rank.size <= (1 + _UNEVEN) * rows:
            part = _even(runs, rank)
            return range(part.start * run, min(part.stop * run, rows))
    return _even(rows, rank)
