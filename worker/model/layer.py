"""One layer for one rank, over the tensors of one of its variants; letters as in `transformer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bus.messages import Precision
from kernels import AttentionPlan, paged_attention, rms_norm, rotary, silu_mul, store_kv
from worker.model.config import ModelConfig
from worker.model.products import Product
from worker.model.shard import Shard


class Attention:
    """One layer's attention for one rank; at size > 1 the group's sum of the outputs is the layer's."""

    def __init__(
        self,
        config: ModelConfig,
        norms: Mapping[str, torch.Tensor],
        qkv: Sequence[Product],
        o: Product,
        *,
        num_heads: int,
        num_kv_heads: int,
        sliding_window: int,
        precision: Precision = "full",
    ) -> None:
        """norms: input_norm and post_norm, q_norm and k_norm where the family has them. qkv: one product
        that makes queries, keys and values in this order, or three. The numbers of heads are this rank's."""
        self.precision: Precision = precision
        self.qkv, self.o = list(qkv), o
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        self.eps, self.sliding_window = config.rms_norm_eps, sliding_window
        self.input_norm, self.post_norm = norms["input_norm"], norms["post_norm"]
        self.q_norm, self.k_norm = norms.get("q_norm"), norms.get("k_norm")

    @property
    def products(self) -> list[Product]:
        return [*self.qkv, self.o]

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
        return self.o(mixed if rows is None else mixed[rows])

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D]; views of one buffer where one product makes them all."""
        made = [product(x).view(x.shape[0], -1, self.head_dim) for product in self.qkv]
        q, k, v = made if len(made) == 3 else made[0].split_with_sizes(self._split, 1)
        return q, k, v


class FeedForward:
    """One layer's SwiGLU for one rank; at size > 1 the group's sum of the outputs is the layer's."""

    def __init__(
        self,
        gate_up: Product,
        down: Product,
        *,
        size: int,
        units: int = 1,
        precision: Precision = "full",
    ) -> None:
        """gate_up makes for each of `units` the gate's `size` outputs, then as many of up; down reads
        units * size inputs."""
        self.precision: Precision = precision
        self.gate_up, self.down = gate_up, down
        self._size, self._units = size, units

    @property
    def products(self) -> list[Product]:
        return [self.gate_up, self.down]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        gate, up = self.gate_up(x).view(x.shape[0] * self._units, 2, self._size).unbind(1)
        return self.down(silu_mul(gate, up).view(x.shape[0], self._units * self._size))


@dataclass(slots=True)
class Layer:
    """What a step runs; a morph replaces either half between two steps. Both compute `shard`'s part."""

    attention: Attention
    feed_forward: FeedForward
    shard: Shard
