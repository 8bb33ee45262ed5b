"""The decoder of Llama, Mistral, Qwen2 and Qwen3, over packed tokens and a paged cache.

Letters as in `kernels`: T tokens of the step, R rows whose logits are asked for, H hidden size, Hq and Hkv
heads of this rank, D head dimension. Norms and the residual follow the pre-norm Transformer (Llama,
Touvron et al. 2023); grouped-query attention, SwiGLU and rotary embeddings are the kernels'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels import (
    AttentionPlan,
    add_rms_norm,
    linear,
    linear_t,
    paged_attention,
    rms_norm,
    rotary,
    silu_mul,
    store_kv,
)
from worker.model.config import ModelConfig
from worker.model.shard import Shard

Product = tuple[torch.Tensor, torch.Tensor | None]  # weight [N, K], bias [N]

# With more padding than this, computing it costs more than a second product does (measured: one product
# instead of two saves 3 % at T = 1 and at T = 64, on two cores).
_MAX_COMPUTED_PADDING = 0.03


class Attention:
    """One layer's attention for one rank; at size > 1 the group's sum of the outputs is the layer's."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], shard: Shard, sliding_window: int
    ) -> None:
        heads = shard.part(config.num_heads, "attention heads")
        kv_heads = shard.part(config.num_kv_heads, "KV heads")
        num_heads, num_kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        self.eps, self.sliding_window = config.rms_norm_eps, sliding_window
        self.input_norm, self.post_norm = weights["input_norm"], weights["post_norm"]
        self.q_norm, self.k_norm = weights.get("q_norm"), weights.get("k_norm")
        self.qkv = _qkv_products(config, weights, heads, kv_heads)
        columns = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        self.o = weights["o"] if shard.size == 1 else weights["o"][:, columns]
        self.o_bias = weights.get("o_bias") if shard.rank == 0 else None

    def __call__(
        self,
        x: torch.Tensor,
        plan: AttentionPlan,
        cache: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, H], normed, to [T, H], or to [R, H] where only `rows` are asked for. cache [B, Hkv, 2, bt, D]
        takes the keys and values of all T."""
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        rotary(q, k, plan.positions, cos_sin)
        store_kv(k, v, cache, plan.slot_mapping)
        mixed = paged_attention(q, cache, plan, self.scale, sliding_window=self.sliding_window)
        mixed = mixed.view(mixed.shape[0], -1)
        return linear(mixed if rows is None else mixed[rows], self.o, self.o_bias)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D]; views of one buffer where one product makes them all."""
        tokens = x.shape[0]
        made = [linear(x, weight, bias).view(tokens, -1, self.head_dim) for weight, bias in self.qkv]
        q, k, v = made if len(made) == 3 else made[0].split_with_sizes(self._split, 1)
        return q, k, v


class FeedForward:
    """One layer's SwiGLU for one rank; at size > 1 the group's sum of the outputs is the layer's."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], shard: Shard) -> None:
        gate_up, down = weights["gate_up"], weights["down"]
        padded = down.shape[0]
        rows = shard.part(padded, "padded FFN rows")
        if shard.size == 1:
            rows = slice(0, config.intermediate_size)  # nothing needs the padding
        self.size = rows.stop - rows.start
        self.down = down[rows]
        is_one_product = shard.size == 1 and padded <= (1 + _MAX_COMPUTED_PADDING) * self.size
        self.gate_up = gate_up.flatten(0, 1) if is_one_product else None
        self.up_at = padded
        self.gate, self.up = gate_up[0, rows], gate_up[1, rows]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        if self.gate_up is None:
            gate, up = linear(x, self.gate), linear(x, self.up)
        else:
            both = linear(x, self.gate_up)
            gate, up = both[:, : self.size], both[:, self.up_at : self.up_at + self.size]
        return linear_t(silu_mul(gate, up), self.down)


@dataclass(slots=True)
class Layer:
    """What a step runs; a morph replaces either half between two steps."""

    attention: Attention
    feed_forward: FeedForward


class Transformer:
    """Everything between token ids and logits."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Layer],
        *,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        """embedding and head [vocab, H], norm [H]."""
        self.layers, self.eps = layers, config.rms_norm_eps
        self.embedding, self.norm, self.head = embedding, norm, head
        self.cos_sin = config.rope.table(config.max_position_embeddings, embedding.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        caches: list[torch.Tensor],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids int64 [T]; caches[i] is layer i's; logit_rows int64 [R] of 0..T-1. float32 [R, vocab].

        In the last layer only the R rows go on after attention: nothing reads the others any more.
        """
        residual = self.embedding.index_select(0, token_ids)
        x = rms_norm(residual, self.layers[0].attention.input_norm, self.eps)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            rows = logit_rows if i == last else None
            x = layer.attention(x, plan, caches[i], self.cos_sin, rows)
            residual = residual if rows is None else residual[rows]
            x = add_rms_norm(x, residual, layer.attention.post_norm, self.eps)
            x = layer.feed_forward(x)
            next_norm = self.norm if i == last else self.layers[i + 1].attention.input_norm
            x = add_rms_norm(x, residual, next_norm, self.eps)
        return linear(x, self.head).float()


def _qkv_products(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], heads: slice, kv_heads: slice
) -> list[Product]:
    """One product for a rank that has all heads; else three, as its rows do not lie together."""
    weight, bias = weights["qkv"], weights.get("qkv_bias")
    if heads.stop - heads.start == config.num_heads:
        return [(weight, bias)]
    products: list[Product] = []
    for start, part in ((0, heads), (config.q_size, kv_heads), (config.q_size + config.kv_size, kv_heads)):
        rows = slice(start + part.start * config.head_dim, start + part.stop * config.head_dim)
        products.append((weight[rows], None if bias is None else bias[rows]))
    return products
