"""The halves of a layer over the tensors of one of its variants, whichever that is.

A dense matrix is a tensor of its own name; a quantised one has `.codes`, `.scales`, `.zeros` and perhaps
`.input_scale`, [outputs, ...] or [units, outputs, ...] (see `layout` and `quantized_layout`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bus.messages import Precision
from kernels import QuantizedWeight
from kernels.quantized import Split
from worker.model.config import ModelConfig
from worker.model.layer import Attention, FeedForward
from worker.model.products import (
    DenseProduct,
    Product,
    QuantizedProduct,
    StackedProduct,
    TransposedProduct,
    inputs_of,
    outputs_of,
)
from worker.model.quantized_layout import BITS
from worker.model.shard import Shard

Half = Attention | FeedForward
Tensors = Mapping[str, torch.Tensor]


def attention(
    config: ModelConfig, tensors: Tensors, shard: Shard, sliding_window: int, precision: Precision = "full"
) -> Attention:
    """For one rank; `tensors` are those of all heads. Raises ValueError where the heads cannot be split."""
    heads = shard.part(config.num_heads, "attention heads")
    kv_heads = shard.part(config.num_kv_heads, "KV heads")
    columns = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    o_bias = tensors.get("o_bias") if shard.rank == 0 else None
    return Attention(
        config,
        tensors,
        _qkv(config, tensors, heads, kv_heads, precision),
        _o(tensors, columns if shard.size > 1 else None, o_bias, precision),
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        sliding_window=sliding_window,
        precision=precision,
    )


def feed_forward(config: ModelConfig, tensors: Tensors, precision: Precision = "full") -> FeedForward:
    """For one rank, whose part `tensors` are (`RangePlan.at`)."""
    if precision == "full":
        return _dense_feed_forward(config, tensors)
    down = _quantized(tensors, "down", "inputs", precision)
    return FeedForward(
        QuantizedProduct(_quantized(tensors, "gate_up", "outputs", precision)),
        QuantizedProduct(down),
        size=down.unit_inputs,
        units=down.num_units,
        precision=precision,
    )


def _dense_feed_forward(config: ModelConfig, tensors: Tensors) -> FeedForward:
    size = min(tensors["down"].shape[0], config.intermediate_size)  # nothing needs the padding
    gate_up, down = tensors["gate_up"][:, :size], tensors["down"][:size]
    lies_together = gate_up.stride(0) == size * gate_up.stride(1)
    both: Product = DenseProduct(gate_up.flatten(0, 1)) if lies_together else StackedProduct(gate_up)
    return FeedForward(both, TransposedProduct(down), size=size)


def _qkv(
    config: ModelConfig, tensors: Tensors, heads: slice, kv_heads: slice, precision: Precision
) -> list[Product]:
    """One product for a rank that has all heads; else three, as its rows do not lie together."""
    if heads.stop - heads.start == config.num_heads:
        return [_rows(tensors, slice(None), precision)]
    starts = ((0, heads), (config.q_size, kv_heads), (config.q_size + config.kv_size, kv_heads))
    rows = (
        slice(start + part.start * config.head_dim, start + part.stop * config.head_dim)
        for start, part in starts
    )
    return [_rows(tensors, each, precision) for each in rows]


def _rows(tensors: Tensors, rows: slice, precision: Precision) -> Product:
    bias = tensors.get("qkv_bias")
    bias = None if bias is None else bias[rows]
    if "qkv" in tensors:
        return DenseProduct(tensors["qkv"][rows], bias)
    return QuantizedProduct(outputs_of(_quantized(tensors, "qkv", "outputs", precision), rows), bias)


def _o(tensors: Tensors, columns: slice | None, bias: torch.Tensor | None, precision: Precision) -> Product:
    if "o" in tensors:
        return DenseProduct(tensors["o"] if columns is None else tensors["o"][:, columns], bias)
    whole = _quantized(tensors, "o", "inputs", precision)
    return QuantizedProduct(whole if columns is None else inputs_of(whole, columns), bias)


def _quantized(tensors: Tensors, name: str, split: Split, precision: Precision) -> QuantizedWeight:
    bits = BITS[precision]
    codes, scales, zeros = (_by_units(tensors[f"{name}.{part}"]) for part in ("codes", "scales", "zeros"))
    group = codes.shape[2] * 8 // bits // scales.shape[2]
    input_scale = tensors.get(f"{name}.input_scale")
    if input_scale is not None and input_scale.dim() == 2:
        # Every unit has the scale of what it reads: the whole input where outputs are split.
        input_scale = input_scale[0] if split == "outputs" else input_scale.flatten()
    return QuantizedWeight(codes, scales, zeros, bits, group, split, input_scale)


def _by_units(part: torch.Tensor) -> torch.Tensor:
    return part if part.dim() == 3 else part[None]
