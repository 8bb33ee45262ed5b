"""Products with quantised weights for GPUs (W8A16, W4A16, W3A16).

Up to FUSED_TOKENS, where reading weights takes most time, they are decoded on the way into the tensor cores.
Above, they are decoded into a scratch of SCRATCH_BYTES, and cuBLAS multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu.attention import operand
from kernels.gpu.device import num_processors
from kernels.gpu.quantized_kernels import decode_kernel, product_kernel
from kernels.packing import TILE, planes
from kernels.quantized import GROUP_STEP, QuantizedWeight

# Exact float32 products run on no tensor core: their tiles are unrolled into registers.
FUSED_TOKENS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
BLOCK_N = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
LEAST_ROWS = 16  # the smallest side of tl.dot
TILES_PER_SPLIT = 8  # fewer are not worth adding up
SCRATCH_BYTES = 64 << 20


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    weight.check_operands(x, bias)
    if not x.shape[0]:
        return torch.empty(0, weight.num_outputs, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.shape[0] <= FUSED_TOKENS[x.dtype]:
        return _fused(x, weight, bias)
    return _through_scratch(x, weight, bias)


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


def _through_scratch(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    if weight.input_scale is not None:
        x = (x.float() * weight.input_scale.float()).to(x.dtype)
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype, device=x.device)
    step = max(1, SCRATCH_BYTES // (weight.num_inputs * x.element_size()))
    for first in range(0, weight.num_outputs, step):
        rows = _decoded(weight, first, min(step, weight.num_outputs - first), x.dtype)
        torch.mm(x, rows.t(), out=out[:, first : first + rows.shape[0]])
    return out if bias is None else out.add_(bias)


def _decoded(weight: QuantizedWeight, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decode outputs [first, first + count) to [count, K] in `dtype`."""
    out = torch.empty(count, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    block_n = 64
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
