"""Preparation for serving: sizing the thread pool, compiling all kernels."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch

from kernels import calls
from kernels.packing import TILE, packed_size
from kernels.plan import AttentionPlan
from kernels.quantized import QuantizedWeight


def configure(threads: int = 0) -> int:
    """Let products and kernels use `threads` threads; 0: as many as this process has cores.

    Both run on torch's OpenMP team, so one number sizes both. Returns it. Raises ValueError below 0.
    """
    if threads < 0:
        raise ValueError(f"{threads} threads: use 0 for every core, or a number of them")
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def warm_up(
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    device: str | torch.device = "cpu",
    bits: Sequence[int] = (),
) -> None:
    """Run every kernel once on a prefill chunk and a decode, so that no request waits for a compiler.

    The sizes are the model's; `bits` are those of its quantised variants. It takes some 40 s the first time
    on a machine and under 1 s afterwards, with the compiled code on disk.
    """
    with torch.device(device):
        plan = _tiny_plan(block_tokens)
        tokens = plan.positions.shape[0]
        x = torch.zeros(tokens, hidden_size, dtype=dtype)
        q = torch.zeros(tokens, num_heads, head_dim, dtype=dtype)
        k = torch.zeros(tokens, num_kv_heads, head_dim, dtype=dtype)
        kv = torch.zeros(2, num_kv_heads, 2, block_tokens, head_dim, dtype=dtype)
        gate = torch.zeros(tokens, intermediate_size, dtype=dtype)
        ids = torch.arange(2)
        cos_sin = torch.zeros(tokens, head_dim)
    weight, head_weight = x[0].clone(), q[0, 0].clone()
    calls.rms_norm(x, weight, 1e-5)
    calls.rms_norm(q, head_weight, 1e-5)
    calls.rms_norm(k, head_weight, 1e-5)
    calls.add_rms_norm(x, x.clone(), weight, 1e-5)
    calls.rotary(q, k, plan.positions, cos_sin)
    calls.store_kv(k, k, kv, plan.slot_mapping)
    calls.paged_attention(q, kv, plan, 1.0)
    calls.silu_mul(gate, gate)
    calls.linear(x, torch.zeros(TILE, hidden_size, dtype=dtype, device=device))
    calls.stacked_linear(x, torch.zeros(2, TILE, hidden_size, dtype=dtype, device=device))
    calls.linear_t(x, torch.zeros(hidden_size, 1, dtype=dtype, device=device))
    calls.copy_blocks(kv, ids[:1], ids[1:])
    for one_bits in bits:
        _warm_up_quantized(dtype, hidden_size, one_bits, torch.device(device))


def _warm_up_quantized(dtype: torch.dtype, inputs: int, bits: int, device: torch.device) -> None:
    """Run the product on each path: by number of tokens, by input scale and, on a GPU, split or not."""
    inputs = max(TILE, inputs // TILE * TILE)
    row = torch.zeros(1, 1, packed_size(inputs, bits), dtype=torch.uint8, device=device)
    level = torch.zeros(1, 1, inputs // TILE, device=device)
    scale = torch.ones(inputs, device=device)
    sizes = (TILE,) if device.type == "cpu" else (TILE, 512 * TILE)
    for outputs, tokens, input_scale in itertools.product(sizes, (1, 17, 33, 65), (None, scale)):
        codes, scales, zeros = (
            part.expand(1, outputs, -1) for part in (row, level.half(), level.to(torch.uint8))
        )
        weight = QuantizedWeight(codes, scales, zeros, bits, TILE, "outputs", input_scale)
        calls.quantized_linear(torch.zeros(tokens, inputs, dtype=dtype, device=device), weight)


def _tiny_plan(block_tokens: int) -> AttentionPlan:
    """Return a plan of a chunk of up to a block's tokens in block 0 and one decode in block 1."""
    chunk = min(block_tokens, 16) if block_tokens > 1 else 1
    return AttentionPlan(
        cu_seqlens_q=torch.tensor([0, chunk, chunk + 1], dtype=torch.int32),
        context_lens=torch.tensor([chunk, 1], dtype=torch.int32),
        block_table=torch.tensor([[0], [1]], dtype=torch.int32),
        slot_mapping=torch.cat([torch.arange(chunk), torch.tensor([block_tokens])]),
        positions=torch.cat([torch.arange(chunk), torch.tensor([0])]),
        max_q_len=chunk,
        max_context_len=chunk,
    )
