"""Products with quantised weights for GPUs (W8A16, W4A16, W3A16).

Weights are decoded on the way into the tensor cores, in programs that `kernels.gpu.product_configs` has by
bits and tokens. With more tokens than it has rows for they are decoded into a scratch of SCRATCH_BYTES, which
stays in the second-level cache, and cuBLAS multiplies. float32, groups of no whole tiles and codes that do
not lie on 16 bytes take the way of `kernels.gpu.quantized_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu import quantized_tiles
from kernels.gpu.attention import operand
from kernels.gpu.device import num_processors, properties
from kernels.gpu.product_configs import MOST_SPLITS, SCRATCH_BYTES, ProductConfig, product_config
from kernels.gpu.product_configs import num_splits as splits_of_tiles
from kernels.gpu.quantized_kernels import decode_kernel, product_kernel
from kernels.packing import TILE, planes
from kernels.quantized import GROUP_STEP, QuantizedWeight

# Exact float32 products run on no tensor core: their tiles are unrolled into registers.
FUSED_TOKENS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
BLOCK_N = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
LEAST_ROWS = 16  # the smallest side of tl.dot
TILES_PER_SPLIT = 8  # fewer are not worth adding up
PIECE_ROWS = 256
LANE_BYTES = 16  # the widest load of a thread
JOINED = 1024  # results of a program that adds splits


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    weight.check_operands(x, bias)
    if not x.shape[0]:
        return torch.empty(0, weight.num_outputs, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = tiles_of(weight) if x.dtype != torch.float32 and has_tiles(x.device) else None
    if tiles is None:
        is_fused = x.shape[0] <= FUSED_TOKENS[x.dtype]
        return _fused(x, weight, bias) if is_fused else through_scratch(x, weight, bias)
    config = product_config(weight.bits, x.shape[0], properties(x.device).arch)
    if config is None:
        return through_scratch(x, weight, bias)
    return multiply_tiles(x, weight, bias, tiles, config)


# --------------------------------------------------------------------------- whole tiles


@dataclass(frozen=True, slots=True)
class Tiles:
    """The layout of a weight, as `quantized_tiles` needs it."""

    strides: tuple[int, ...]  # of units and rows: codes in 16 bytes, scales and zeros in elements
    group_tiles: int
    unit_tiles: int
    skews: tuple[int, int]  # of the first scale and zero behind 4 bytes, in elements

    @property
    def has_words(self) -> bool:
        """Return whether a step's scales and zeros come in whole words."""
        return self.group_tiles & (self.group_tiles - 1) == 0

    def step(self, most: int) -> int:
        """Return the tiles of a step, at most so many: units have whole steps, a step's zeros one word."""
        levels = (*self.strides[2:], *self.skews)
        steps = [step for step in (4, 2, 1) if step <= most and self.unit_tiles % step == 0]
        if not self.has_words:
            return steps[0]
        return next(step for step in steps if not any(at % max(1, step // self.group_tiles) for at in levels))


def tiles_of(weight: QuantizedWeight) -> Tiles | None:
    """Return the layout of a weight in whole tiles on 16 bytes; None if it does not lie so."""
    codes, levels = weight.codes.stride()[:2], (*weight.scales.stride()[:2], *weight.zeros.stride()[:2])
    if weight.group % TILE or any(at % LANE_BYTES for at in (*codes, weight.codes.data_ptr())):
        return None
    strides = (codes[0] // LANE_BYTES, codes[1] // LANE_BYTES, *levels)
    unit_tiles = weight.unit_inputs // TILE
    skews = (weight.scales.data_ptr() % 4 // 2, weight.zeros.data_ptr() % 4)
    return Tiles(strides, weight.group // TILE, unit_tiles, skews)


def multiply_tiles(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, tiles: Tiles, config: ProductConfig
) -> Tensor:
    """Multiply as quantized_linear does, in programs of a config."""
    x = _on_lanes(x) if weight.input_scale is None else _scaled(x, weight.input_scale)
    tokens, outputs = x.shape[0], weight.num_outputs
    config = config.fitted(weight.bits, properties(x.device).shared_bytes)
    step = tiles.step(config.tiles)
    row_blocks = triton.cdiv(weight.unit_outputs, config.block_n)
    programs = row_blocks * outputs // weight.unit_outputs
    token_blocks = triton.cdiv(tokens, config.block_t)
    steps = weight.num_inputs // TILE // step
    # Tokens count by powers of two, so that few numbers of them show all that is compiled.
    most_blocks = triton.cdiv(triton.next_power_of_2(tokens), config.block_t)
    splits = splits_of_tiles(programs * most_blocks, steps, num_processors(x.device), config.waves)
    # Shares of a split product are added in float32.
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.empty(splits, tokens, outputs, dtype=dtype, device=x.device)
    inner_bias = bias if splits == 1 else None
    quantized_tiles.tiles_kernel[(programs, token_blocks, splits)](
        *(x, weight.codes, weight.scales, weight.zeros, _lanes(x.device), inner_bias, out),
        *(tokens, splits, x.stride(0) // 8, *tiles.strides, *tiles.skews, weight.unit_outputs, row_blocks),
        *(tiles.unit_tiles, weight.num_inputs // weight.unit_inputs, tiles.group_tiles, outputs),
        BITS=weight.bits,
        TILES=step,
        HAS_WORDS=tiles.has_words,
        GROUP_TILES=tiles.group_tiles if tiles.has_words else 1,
        IS_ONE_UNIT=weight.unit_inputs == weight.num_inputs,
        HAS_BIAS=inner_bias is not None,
        OPERAND=operand(x),
        HAS_ASM=has_assembly(x.device),
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        SCALES_SUMS=config.scales_sums,
        IS_WIDE=config.is_wide,
        num_warps=config.num_warps,
        maxnreg=config.most_registers,
    )
    return out[0] if splits == 1 else _joined(out, bias, x.dtype)


def _joined(partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add partial results float32 [splits, T, N] in their order."""
    splits, tokens, outputs = partial.shape
    out = torch.empty(tokens, outputs, dtype=dtype, device=partial.device)
    size = tokens * outputs
    quantized_tiles.join_kernel[(triton.cdiv(size, JOINED),)](
        *(partial, bias, out, splits, size, outputs),
        HAS_BIAS=bias is not None,
        MOST=min(MOST_SPLITS, triton.next_power_of_2(splits)),
        BLOCK=JOINED,
        num_warps=4,
    )
    return out


def _on_lanes(x: Tensor) -> Tensor:
    """Return x [T, K] with rows on 16 bytes."""
    is_there = x.data_ptr() % LANE_BYTES == 0 and x.stride(0) * x.element_size() % LANE_BYTES == 0
    return x if is_there else x.clone(memory_format=torch.contiguous_format)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return x [T, K] times scale [K], contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    quantized_tiles.scale_kernel[(x.shape[0], triton.cdiv(x.shape[1], JOINED))](
        *(x, scale, out, x.stride(0), x.shape[1]), BLOCK=JOINED, num_warps=4
    )
    return out


@cache
def _lanes(device: torch.device) -> Tensor:
    return torch.arange(16, dtype=torch.int32, device=device)


def has_tiles(device: torch.device) -> bool:
    """Return whether the device runs `quantized_tiles`: a GPU of capability 8 or 9, or the interpreter.

    For capability 10, whose tensor cores take no weights from registers, Triton 3.6 and 3.7 compile it to an
    empty kernel.
    """
    return device.type == "cpu" or has_assembly(device)


def has_assembly(device: torch.device) -> bool:
    """Return whether the device runs the assembly of `kernels.gpu.codes`."""
    return device.type != "cpu" and torch.version.hip is None and properties(device).arch // 10 in (8, 9)


# --------------------------------------------------------------------------- any layout
def num_splits(programs: int, tiles: int, processors: int) -> int:
    """Return the programs per block of outputs that give each processor one, if there are enough inputs."""
    return max(1, min(processors // programs, tiles // TILES_PER_SPLIT))


def _fused(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    tokens, block_n = x.shape[0], BLOCK_N[x.dtype]
    row_blocks = triton.cdiv(weight.unit_outputs, block_n)
    programs = row_blocks * weight.num_outputs // weight.unit_outputs
    splits = num_splits(programs, weight.num_inputs // TILE, num_processors(x.device))
    # Shares of a split product are added in float32.
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.empty(splits, tokens, weight.num_outputs, dtype=dtype, device=x.device)
    inner_bias = bias if splits == 1 else None
    block_t = max(LEAST_ROWS, triton.next_power_of_2(tokens))
    product_kernel[(programs, 1, splits)](
        *(x, weight.codes, weight.scales, weight.zeros, weight.input_scale, inner_bias, out),
        *(tokens, splits, x.stride(0), *_strides(weight), weight.unit_outputs, row_blocks),
        *(weight.unit_inputs // TILE, weight.num_inputs // weight.unit_inputs),
        *(weight.group // GROUP_STEP, weight.num_outputs),
        **_shapes(weight),
        HAS_INPUT_SCALE=weight.input_scale is not None,
        HAS_BIAS=inner_bias is not None,
        OPERAND=operand(x),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=3,
    )
    if splits == 1:
        return out[0]
    total = out.sum(0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)


def through_scratch(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, scratch_bytes: int = 0
) -> Tensor:
    """Multiply as quantized_linear does, a part of the outputs after the other."""
    if weight.input_scale is not None:
        x = _scaled(x, weight.input_scale)
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype, device=x.device)
    rows = (scratch_bytes or SCRATCH_BYTES) // (weight.num_inputs * x.element_size())
    # Whole tiles of cuBLAS, and results on 16 bytes: with 585 outputs a piece it took 12 times as long.
    step = max(1, rows if rows < PIECE_ROWS else rows // PIECE_ROWS * PIECE_ROWS)
    for first in range(0, weight.num_outputs, step):
        rows = _decoded(weight, first, min(step, weight.num_outputs - first), x.dtype)
        torch.mm(x, rows.t(), out=out[:, first : first + rows.shape[0]])
    return out if bias is None else out.add_(bias)


def _decoded(weight: QuantizedWeight, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decode outputs [first, first + count) to [count, K] in `dtype`."""
    out = torch.empty(count, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    block_n = 64
    tiles = tiles_of(weight)
    if tiles is not None and has_tiles(out.device):
        step = 1 + (tiles.unit_tiles % 2 == 0)
        quantized_tiles.decode_tiles_kernel[(weight.num_inputs // TILE // step, triton.cdiv(count, block_n))](
            *(weight.codes, weight.scales, weight.zeros, _lanes(out.device), out, first, count),
            *(*tiles.strides, weight.unit_outputs, tiles.unit_tiles, tiles.group_tiles, weight.num_inputs),
            BITS=weight.bits,
            TILES=step,
            HAS_ASM=has_assembly(out.device) and dtype != torch.float32,
            BLOCK_N=block_n,
            num_warps=8,
        )
        return out
    decode_kernel[(triton.cdiv(count, block_n), weight.num_inputs // TILE)](
        *(weight.codes, weight.scales, weight.zeros, out, first, count, *_strides(weight)),
        *(weight.unit_outputs, weight.unit_inputs // TILE, weight.group // GROUP_STEP, weight.num_inputs),
        **_shapes(weight),
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out


def _strides(weight: QuantizedWeight) -> tuple[int, ...]:
    return (*weight.codes.stride()[:2], *weight.scales.stride()[:2], *weight.zeros.stride()[:2])


def _shapes(weight: QuantizedWeight) -> dict[str, Any]:
    widest, _ = next(planes(weight.bits))
    parts = max(2, 8 // widest)
    return {"BITS": weight.bits, "PARTS": parts, "WIDTH": TILE // parts}
