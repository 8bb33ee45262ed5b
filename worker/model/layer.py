"""One layer for one rank, over the tensors of one of its variants; letters as in `transformer`.

A dense matrix is a tensor of its own name. A quantised one has `.codes`, `.scales`, `.zeros` and perhaps
`.input_scale` and `.input_order`, [outputs, ...] or [units, outputs, ...] (`layout`, `quantized_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bus.precisions import BITS, Precision
from kernels import (
    AttentionPlan,
    QuantizedWeight,
    clamped_silu_mul,
    gelu_mul,
    paged_attention,
    rms_norm,
    rotary_store_kv,
    silu_mul,
)
from kernels.quantized import Split
from worker.model.config import Activation, Mixture, ModelConfig
from worker.model.cut import heads_of
from worker.model.experts import Experts, Mix
from worker.model.linear import (
    DenseLinear,
    GroupedDense,
    GroupedLinear,
    GroupedQuantized,
    Linear,
    ObservedLinear,
    QuantizedLinear,
    StackedLinear,
    StackedTransposedLinear,
    SteadyLinear,
    TransposedLinear,
    inputs_of,
    outputs_of,
)
from worker.model.shard import ALONE, Shard


class Attention:
    """The attention of a layer for one rank. At size > 1 the group sums the ranks' outputs."""

    def __init__(
        self,
        config: ModelConfig,
        norms: Mapping[str, torch.Tensor],
        qkv: Sequence[Linear],
        o: Linear,
        *,
        num_heads: int,
        num_kv_heads: int,
        sliding_window: int,
        precision: Precision = "full",
    ) -> None:
        """Build from the norms of the layer, the FFN's among them, and maps.

        norms: input_norm, and what else the layer has (`worker.model.layout`); sinks [heads of this rank].
        qkv: one map that makes queries, keys and values in this order, or three. The numbers of heads are
        this rank's.
        """
        self.precision: Precision = precision
        self.qkv, self.o = list(qkv), o
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim, self.scale, self.softcap = config.head_dim, config.scale, config.attention_softcap
        self.eps, self.sliding_window = config.norm_eps, sliding_window
        self.rope = int(config.local_rope is not None and sliding_window > 0)  # number of the rotary table
        self.input_norm = norms["input_norm"]
        # A parallel FFN without a norm of its own reads what the attention reads.
        self.ffn_norm = norms.get("ffn_norm", self.input_norm)
        self.out_norm, self.ffn_out_norm = norms.get("attention_out_norm"), norms.get("ffn_out_norm")
        self.q_norm, self.k_norm = norms.get("q_norm"), norms.get("k_norm")
        self.sinks = norms.get("sinks")

    @property
    def linears(self) -> list[Linear]:
        return [*self.qkv, self.o]

    def __call__(
        self,
        x: torch.Tensor,
        plan: AttentionPlan,
        cache: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run normed x [T, H] to [T, H], or to [R, H] if only `rows` are wanted.

        cache [B, Hkv, 2, bt, D] takes the keys and values of all T.
        """
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        rotary_store_kv(q, k, v, plan.positions, cos_sin, cache, plan.slot_mapping)
        window = self.sliding_window
        mixed = paged_attention(q, cache, plan, self.scale, None, window, self.softcap, self.sinks)
        mixed = mixed.view(mixed.shape[0], -1)
        return self.o(mixed if rows is None else mixed[rows])

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, Hq, D], k and v [T, Hkv, D]; views of one buffer if one map makes them all."""
        made = [linear(x).view(x.shape[0], -1, self.head_dim) for linear in self.qkv]
        q, k, v = made if len(made) == 3 else made[0].split_with_sizes(self._split, 1)
        return q, k, v


_GATED: dict[Activation, Mix] = {"silu": silu_mul, "gelu of tanh": gelu_mul}
_PLAIN: dict[Activation, Mix] = {"gelu": F.gelu, "gelu of tanh": partial(F.gelu, approximate="tanh")}


class FeedForward:
    """The FFN of a layer for one rank. At size > 1 the group sums the ranks' outputs."""

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        mix: Mix,
        *,
        matrices: int,
        size: int,
        units: int = 1,
        precision: Precision = "full",
    ) -> None:
        """Build from gate_up, whose outputs are `size` of each of its matrices for each unit.

        down reads units * size inputs, what `mix` makes of them.
        """
        self.precision: Precision = precision
        self.gate_up, self.down, self._mix = gate_up, down, mix
        self._matrices, self._size, self._units = matrices, size, units

    @property
    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run [T, H] to [T, H]."""
        made, tokens = self.gate_up(x), x.shape[0]
        if self._units > 1 and not made.is_contiguous():  # tokens lie within units
            by_unit = made.transpose(0, 1).reshape(self._units * tokens, self._matrices, self._size)
            mixed = self._mix(*by_unit.unbind(1)).view(self._units, tokens, self._size)
            return self.down(mixed.transpose(0, 1))
        made = made.view(tokens * self._units, self._matrices, self._size)
        return self.down(self._mix(*made.unbind(1)).view(tokens, self._units * self._size))


@dataclass(slots=True)
class Layer:
    """A layer. A morph replaces either half between two steps. Both compute the part of `shard`."""

    attention: Attention
    feed_forward: FeedForward | Experts
    shard: Shard

    def observed(self, observe: Callable[[str, torch.Tensor], None]) -> Layer:
        """Return this layer with the inputs of its linear maps reported to observe(name, [T, K]).

        The names are "qkv", "o", "gate_up" and "down".
        """
        attention, feed_forward = copy(self.attention), copy(self.feed_forward)
        assert isinstance(feed_forward, FeedForward), "experts are not quantised offline"
        attention.qkv = [ObservedLinear(each, partial(observe, "qkv")) for each in attention.qkv]
        attention.o = ObservedLinear(attention.o, partial(observe, "o"))
        feed_forward.gate_up = ObservedLinear(feed_forward.gate_up, partial(observe, "gate_up"))
        feed_forward.down = ObservedLinear(feed_forward.down, partial(observe, "down"))
        return Layer(attention, feed_forward, self.shard)


LayerHalf = Attention | FeedForward | Experts
Tensors = Mapping[str, torch.Tensor]


def build_layer(
    config: ModelConfig,
    index: int,
    attention: Tensors,
    feed_forward: Tensors,
    *,
    precision: Precision = "full",
    shard: Shard = ALONE,
) -> Layer:
    """Build layer `index` of the model for one rank. The tensors of the FFN are that rank's part."""
    return Layer(
        build_attention(config, attention, shard, config.sliding_windows[index], precision),
        build_feed_forward(config, feed_forward, precision, shard),
        shard,
    )


def build_attention(
    config: ModelConfig, tensors: Tensors, shard: Shard, sliding_window: int, precision: Precision = "full"
) -> Attention:
    """Build the attention for one rank out of the tensors of all heads.

    Raises ValueError if the heads cannot be split.
    """
    heads, kv_heads = heads_of(config.num_heads, config.num_kv_heads, shard)
    columns = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    o_bias = tensors.get("o_bias") if shard.rank == 0 else None
    norms = dict(tensors)
    if config.has_sinks:
        norms["sinks"] = tensors["sinks"][heads.start : heads.stop]
    return Attention(
        config,
        norms,
        _qkv(config, tensors, heads, kv_heads, precision),
        _o(tensors, columns if shard.size > 1 else None, o_bias, precision),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        sliding_window=sliding_window,
        precision=precision,
    )


def build_feed_forward(
    config: ModelConfig, tensors: Tensors, precision: Precision = "full", shard: Shard = ALONE
) -> FeedForward | Experts:
    """Build the FFN for one rank out of its part of the tensors (`RangePlan.at`)."""
    if config.mixture:
        return _experts(config, config.mixture, tensors, precision, shard)
    up_bias, down_bias = _ffn_biases(tensors, shard)
    if precision == "full":
        return _dense_feed_forward(config, tensors, up_bias, down_bias)
    down = _quantized(tensors, "down", "inputs", precision)
    return FeedForward(
        QuantizedLinear(
            _quantized(tensors, "gate_up", "outputs", precision), up_bias, _input_order(tensors, "gate_up")
        ),
        QuantizedLinear(down, down_bias),
        _mix(config),
        matrices=config.num_ffn_matrices,
        size=down.unit_inputs,
        units=down.num_units,
        precision=precision,
    )


def _experts(
    config: ModelConfig, mixture: Mixture, tensors: Tensors, precision: Precision, shard: Shard
) -> Experts:
    gate_up: GroupedLinear
    down: GroupedLinear
    up_bias, down_bias = tensors.get("up_bias"), tensors.get("down_bias")
    up_bias = None if up_bias is None else up_bias.flatten(1)
    if precision == "full":
        gate_up = GroupedDense(tensors["gate_up"].flatten(1, 2), up_bias)
        down = GroupedDense(tensors["down"], down_bias)
    else:
        gate_up = GroupedQuantized(_quantized(tensors, "gate_up", "outputs", precision), up_bias)
        down = GroupedQuantized(_quantized(tensors, "down", "outputs", precision), down_bias)
    return Experts(
        mixture,
        SteadyLinear(tensors["router"], tensors.get("router_bias")),
        _own_experts(config, mixture, shard),
        gate_up,
        down,
        _mix(config),
        matrices=config.num_ffn_matrices,
        precision=precision,
    )


def _own_experts(config: ModelConfig, mixture: Mixture, shard: Shard) -> slice:
    if config.cut:
        return slice(config.cut.experts.start, config.cut.experts.stop)
    return shard.part(mixture.num_units, "experts")


def _mix(config: ModelConfig) -> Mix:
    if config.mixture and config.activation == "clamped silu":
        return partial(clamped_silu_mul, slope=config.mixture.slope, limit=config.mixture.limit)
    return (_GATED if config.ffn == "gated" else _PLAIN)[config.activation]


def _ffn_biases(tensors: Tensors, shard: Shard) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rank's part of the bias before the activation, and the one behind it for one rank alone."""
    up_bias, down_bias = tensors.get("up_bias"), tensors.get("down_bias")
    if up_bias is not None:
        up_bias = up_bias[shard.part(up_bias.shape[0], "units of an FFN")].flatten()
    return up_bias, down_bias if shard.rank == 0 else None


def _dense_feed_forward(
    config: ModelConfig, tensors: Tensors, up_bias: torch.Tensor | None, down_bias: torch.Tensor | None
) -> FeedForward:
    gate_up, down = tensors["gate_up"], tensors["down"]  # [units, matrices, rows, H], [units, rows, H]
    units, matrices, size, _ = gate_up.shape
    if not down.is_contiguous():
        return FeedForward(
            StackedLinear(gate_up.flatten(1, 2), up_bias),
            StackedTransposedLinear(down, down_bias),
            _mix(config),
            matrices=matrices,
            size=size,
            units=units,
        )
    whole = gate_up.transpose(0, 1).flatten(1, 2)  # [matrices, rows of all units, H]
    return FeedForward(
        DenseLinear(whole.flatten(0, 1), up_bias) if whole.is_contiguous() else StackedLinear(whole),
        TransposedLinear(down.flatten(0, 1), down_bias),
        _mix(config),
        matrices=matrices,
        size=units * size,
    )


def _qkv(
    config: ModelConfig, tensors: Tensors, heads: range, kv_heads: range, precision: Precision
) -> list[Linear]:
    """Return one map for a rank with all heads; else three, as its rows do not lie together."""
    if len(heads) == config.num_heads:
        return [_rows(tensors, slice(None), precision)]
    starts = ((0, heads), (config.q_size, kv_heads), (config.q_size + config.kv_size, kv_heads))
    rows = (
        slice(start + part.start * config.head_dim, start + part.stop * config.head_dim)
        for start, part in starts
    )
    return [_rows(tensors, each, precision) for each in rows]


def _rows(tensors: Tensors, rows: slice, precision: Precision) -> Linear:
    bias = tensors.get("qkv_bias")
    bias = None if bias is None else bias[rows]
    if "qkv" in tensors:
        return DenseLinear(tensors["qkv"][rows], bias)
    whole = _quantized(tensors, "qkv", "outputs", precision)
    return QuantizedLinear(outputs_of(whole, rows), bias, _input_order(tensors, "qkv"))


def _o(tensors: Tensors, columns: slice | None, bias: torch.Tensor | None, precision: Precision) -> Linear:
    if "o" in tensors:
        return DenseLinear(tensors["o"] if columns is None else tensors["o"][:, columns], bias)
    whole = _quantized(tensors, "o", "inputs", precision)
    if columns is not None:
        return QuantizedLinear(inputs_of(whole, columns), bias)
    return QuantizedLinear(whole, bias, _input_order(tensors, "o"))


def _input_order(tensors: Tensors, name: str) -> torch.Tensor | None:
    order = tensors.get(f"{name}.input_order")
    return order if order is None or order.dim() == 1 else order[0]  # each unit has that of the whole input


def _quantized(tensors: Tensors, name: str, split: Split, precision: Precision) -> QuantizedWeight:
    bits = BITS[precision]
    codes, scales, zeros = (_by_units(tensors[f"{name}.{part}"]) for part in ("codes", "scales", "zeros"))
    group = codes.shape[2] * 8 // bits // scales.shape[2]
    input_scale = tensors.get(f"{name}.input_scale")
    if input_scale is not None and input_scale.dim() == 2:
        # Each unit has the scale of its inputs: of the whole input if outputs are split.
        input_scale = input_scale[0] if split == "outputs" else input_scale.flatten()
    return QuantizedWeight(codes, scales, zeros, bits, group, split, input_scale)


def _by_units(part: torch.Tensor) -> torch.Tensor:
    return part if part.dim() == 3 else part[None]
