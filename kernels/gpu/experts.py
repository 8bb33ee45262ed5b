"""Products with the matrices of experts for GPUs: only those in use are read, and no call waits.

How many pairs an expert has is known on the device only. There are as many programs as there can be tiles of
pairs, and those too many end at once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention import operand
from kernels.routing import Routing

BLOCK_N, BLOCK_K = 64, 64
LEAST_ROWS, MOST_ROWS = 16, 64  # pairs of a tile


def grouped_linear(
    x: Tensor, weights: Tensor, routing: Routing, is_by_place: bool = False, bias: Tensor | None = None
) -> Tensor:
    pairs, (experts, outputs, inputs) = routing.rows.shape[0], weights.shape
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    if not pairs:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    block_m = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(-(-pairs // experts))))
    tiles = pairs // block_m + min(experts, pairs)
    _group_kernel[(tiles, triton.cdiv(outputs, BLOCK_N))](
        *(x, weights, bias, routing.bounds, routing.rows, out, experts, inputs, outputs),
        *(x.stride(0), weights.stride(0), weights.stride(1), 0 if bias is None else bias.stride(0)),
        BLOCK_E=triton.next_power_of_2(experts),
        IS_BY_PLACE=is_by_place,
        HAS_BIAS=bias is not None,
        OPERAND=operand(x),
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=("bounds_ptr", "rows_ptr"))
def _group_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    bounds_ptr,
    rows_ptr,
    out_ptr,
    experts,
    inputs,
    outputs,
    x_row,
    w_expert,
    w_row,
    bias_expert,
    BLOCK_E: tl.constexpr,
    IS_BY_PLACE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of one expert's pairs into out [P, N], contiguous.

    Grid (most tiles, ceil(N / BLOCK_N)).
    """
    index = tl.program_id(0)
    lane = tl.arange(0, BLOCK_E)
    begins = tl.load(bounds_ptr + lane, mask=lane < experts, other=0)
    ends = tl.load(bounds_ptr + lane + 1, mask=lane < experts, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), 0)
    if expert < experts:
        tile = index - tl.sum(tl.where(lane < expert, tiles, 0), 0)
        place = tl.load(bounds_ptr + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        is_place = place < tl.load(bounds_ptr + expert + 1)
        row = place if IS_BY_PLACE else tl.load(rows_ptr + place, mask=is_place, other=0)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        is_output = n < outputs
        # Names of their own: in a branch, the compiler lets no name take another shape.
        x_rows = x_ptr + row.to(tl.int64) * x_row
        w_rows = w_ptr + expert.to(tl.int64) * w_expert + n.to(tl.int64) * w_row
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, inputs, BLOCK_K):
            across, down = k + tl.arange(0, BLOCK_K)[None, :], k + tl.arange(0, BLOCK_K)[:, None]
            x = tl.load(x_rows + across, mask=is_place & (across < inputs), other=0.0)
            w = tl.load(w_rows + down, mask=is_output & (down < inputs), other=0.0)
            total = tl.dot(x.to(OPERAND), w.to(OPERAND), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias_ptr + expert * bias_expert + n, mask=is_output, other=0.0).to(tl.float32)
        out = out_ptr + place.to(tl.int64) * outputs + n
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_place & is_output)
