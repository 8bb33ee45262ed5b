"""A model's steps on device "meta": all their calls of kernels in their real shapes, and no arithmetic.

It finds what a GPU's kernels must be compiled for before they serve (`kernels.warm_up`). What a kernel is
compiled for depends on the step through its number of tokens alone, rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bus.messages import PARTS, Part
from bus.precisions import Precision
from kernels import AttentionPlan, choose, copy_blocks, least_remaining
from kernels.kv_codes import SCALE_BYTES
from worker.model.config import ModelConfig
from worker.model.cut import heads_of
from worker.model.layer import Layer, build_layer
from worker.model.layout import ModelPlan, RangePlan, degrees
from worker.model.shard import ALONE, Shard
from worker.model.transformer import Ends, Transformer
from worker.model.weights import tensors_in

NUM_BLOCKS = 2
MANY_KEYS = 1 << 16  # a context that attention splits
MOST_OF_BOTH_ENDS = 128  # tokens up to which both ends of a range between powers of two are run


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The steps to run: of every layout and degree that a model can have.

    quantized: layouts below full precision (`plan_quantized`). has_kv_codes: the KV cache may be in 8 bits.
    """

    config: ModelConfig
    plan: ModelPlan
    quantized: Mapping[tuple[Part, Precision], RangePlan] = field(default_factory=dict)
    block_tokens: int
    has_kv_codes: bool
    max_num_batched_tokens: int

    def __call__(self) -> None:
        """Run all steps on device "meta", with the kernels of the backend in force."""
        with torch.device("meta"):
            for shard in self._shards():
                for precision in ("full", *dict.fromkeys(name for _, name in self.quantized)):
                    self._run(shard, precision)

    def _shards(self) -> list[Shard]:
        """Every rank of every degree: where its part of a matrix begins decides how it is aligned."""
        if self.config.cut:
            return [ALONE]
        sizes = degrees(self.config, self.plan.max_tp)
        return [Shard(rank, size) for size in sizes for rank in range(size)]

    def _run(self, shard: Shard, precision: Precision) -> None:
        layers = self._layers(shard, precision)
        transformer = Transformer(self.config, layers, ends=self._ends())
        steps = [self._step([1]), self._step([1, 1])]
        steps += [self._step([tokens - 1, 1]) for tokens in self._token_counts()]
        steps.append(self._step([1], MANY_KEYS))
        for is_codes in (False, True)[: 1 + (self.has_kv_codes and precision == "full")]:
            cache = self._cache(shard, is_codes)
            self._run_steps(transformer, cache, steps)
            copy_blocks(cache, *torch.empty(2, NUM_BLOCKS, dtype=torch.int64))
        # A norm between two layers, and the rows whose logits are wanted.
        between = Transformer(self.config, [*layers, layers[0]], ends=self._ends())
        rows = torch.empty(1, dtype=torch.int64)
        self._run_steps(between, self._cache(shard, False), steps[:3], rows)

    def _run_steps(
        self,
        transformer: Transformer,
        cache: torch.Tensor,
        steps: list[AttentionPlan],
        rows: torch.Tensor | None = None,
    ) -> None:
        for plan in steps:
            residual = torch.empty(len(plan.positions), self.config.hidden_size, dtype=self.plan.dtype)
            residual = transformer.run(residual, plan, [cache] * len(transformer.layers), rows)
            if rows is not None and self.plan.head and not self.config.cut:
                _choose(transformer.logits(residual))

    def _token_counts(self) -> list[int]:
        """Return the numbers of tokens of steps with a prompt."""
        most = max(3, self.max_num_batched_tokens)
        powers = [2**i for i in range(1, most.bit_length())]
        nexts = [power + 1 for power in powers if power <= MOST_OF_BOTH_ENDS]
        return sorted({min(most, max(3, count)) for count in (*powers, *nexts, most)})

    def _layers(self, shard: Shard, precision: Precision) -> list[Layer]:
        """Build one layer of each kind."""
        kinds = {window > 0: i for i, window in reversed(list(enumerate(self.config.sliding_windows)))}
        halves = self.plan.layers[0]
        if precision != "full":
            attention, feed_forward = (self.quantized[part, precision] for part in PARTS)
            halves = attention, feed_forward
        attention_of_all, feed_forward_of_rank = halves[0], halves[1].at(shard)
        return [
            build_layer(
                self.config,
                index,
                _imagined(attention_of_all),
                _imagined(feed_forward_of_rank),
                precision=precision,
                shard=shard,
            )
            for index in kinds.values()
        ]

    def _ends(self) -> Ends | None:
        if not (self.plan.embedding and self.plan.head):
            return None
        return Ends.of(_imagined(self.plan.embedding), _imagined(self.plan.head))

    def _cache(self, shard: Shard, is_codes: bool) -> torch.Tensor:
        config, dtype = self.config, torch.int8 if is_codes else self.plan.dtype
        dim = config.head_dim + SCALE_BYTES * is_codes
        kv_heads = len(heads_of(config.num_heads, config.num_kv_heads, shard)[1])
        shape = (NUM_BLOCKS * (config.num_kv_heads // kv_heads), kv_heads, 2, self.block_tokens, dim)
        return torch.empty(shape, dtype=dtype)

    def _step(self, lengths: list[int], max_context_len: int = 0) -> AttentionPlan:
        """Return a step of sequences with so many new tokens each; 0: nothing is before them."""
        tokens, longest = sum(lengths), max(lengths)
        return AttentionPlan(
            cu_seqlens_q=torch.empty(len(lengths) + 1, dtype=torch.int32),
            context_lens=torch.empty(len(lengths), dtype=torch.int32),
            block_table=torch.empty(len(lengths), NUM_BLOCKS, dtype=torch.int32),
            slot_mapping=torch.empty(tokens, dtype=torch.int64),
            positions=torch.empty(tokens, dtype=torch.int64),
            max_q_len=longest,
            max_context_len=max_context_len or longest,
        )


def _choose(logits: torch.Tensor) -> None:
    """Choose tokens as the sampler does: the likeliest, by draws, and by draws from what filters leave."""
    rows = len(logits)
    draws, is_known = torch.empty(rows, 3, dtype=torch.int32), torch.empty(rows, dtype=torch.bool)
    top_k, shares = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    choose(logits)
    choose(logits, draws)
    choose(logits, draws, None, least_remaining(logits, top_k, shares, shares, is_known))


def _imagined(plan: RangePlan) -> dict[str, torch.Tensor]:
    return tensors_in(torch.empty(plan.nbytes, dtype=torch.uint8), plan)
