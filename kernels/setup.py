"""Preparation for serving: sizing the thread pool, compiling all kernels."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from kernels import calls
from kernels.cpu.choice import TABLE, Product, describe
from kernels.packing import TILE, packed_size
from kernels.plan import AttentionPlan
from kernels.quantized import GROUP_STEP, QuantizedWeight


def configure(threads: int = 0, product_kernel: str = "") -> int:
    """Let products and kernels use `threads` threads; 0: as many as this process has cores.

    Both run on torch's OpenMP team, so one number sizes both. Returns it. product_kernel: the kernels of
    products on a CPU, wherever they can run; empty: the fastest (`choose_products`). Raises ValueError for a
    number below 0 and for a kernel that this processor does not have.
    """
    TABLE.fix(product_kernel)
    if threads < 0:
        raise ValueError(f"{threads} threads: use 0 for every core, or a number of them")
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def choose_products(products: Iterable[Product], model: str) -> list[str]:
    """Find the fastest kernels for these products on this machine's CPU, and put them into force.

    The first products are measured first. model: what the choices are kept under in the user's cache folder.
    The first time on a machine it takes 2 s at most. Returns the choices as text. Where a kernel is fixed
    there is nothing to choose.
    """
    wanted = list(dict.fromkeys(products))
    fixed = {product: name for product in wanted if (name := TABLE.fixed(product))}
    free = [product for product in wanted if product not in fixed]
    told = [f"{product}: {name}, as the settings say" for product, name in sorted(fixed.items())]
    if not free:
        return told
    from kernels.cpu import timing  # numba compiles on import

    return [*told, *describe(timing.choose(free, model))]


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
    zeros = partial(torch.zeros, dtype=dtype)
    with torch.device(device):
        plan, ids = _tiny_plan(block_tokens), torch.arange(2)
        tokens = plan.positions.shape[0]
        x, gate = zeros(tokens, hidden_size), zeros(tokens, intermediate_size)
        q, k = zeros(tokens, num_heads, head_dim), zeros(tokens, num_kv_heads, head_dim)
        kv = zeros(2, num_kv_heads, 2, block_tokens, head_dim)
        weight, head_weight = zeros(hidden_size), zeros(head_dim)
        calls.rms_norm(x, weight, 1e-5)
        calls.rms_norm(q, head_weight, 1e-5)
        calls.rms_norm(k, head_weight, 1e-5)
        calls.add_rms_norm(x, x.clone(), weight, 1e-5)
        calls.rotary(q, k, plan.positions, torch.zeros(tokens, head_dim))
        calls.store_kv(k, k, kv, plan.slot_mapping)
        calls.paged_attention(q, kv, plan, 1.0)
        calls.silu_mul(gate, gate)
        for some in (x, x[:1]):  # a product has a kernel for few tokens and one for more
            calls.linear(some, zeros(TILE, hidden_size))
            calls.stacked_linear(some, zeros(2, TILE, hidden_size))
            calls.linear_t(some, zeros(hidden_size, TILE))
        calls.copy_blocks(kv, ids[:1], ids[1:])
        for one_bits in bits:
            _warm_up_quantized(dtype, hidden_size, one_bits, torch.device(device))


def _warm_up_quantized(dtype: torch.dtype, inputs: int, bits: int, device: torch.device) -> None:
    """Run the product on each path: by number of tokens, by input scale and, on a GPU, split or not."""
    inputs = max(TILE, inputs // TILE * TILE)
    row = torch.zeros(1, 1, packed_size(inputs, bits), dtype=torch.uint8)
    scale = torch.ones(inputs)
    is_cpu = device.type == "cpu"
    sizes = (TILE,) if is_cpu else (TILE, 512 * TILE)
    groups = (TILE, GROUP_STEP) if is_cpu else (TILE,)  # some kernels of a CPU take whole tiles only
    for outputs, tokens, input_scale, group in itertools.product(
        sizes, (1, 17, 33, 65), (None, scale), groups
    ):
        level = torch.zeros(1, 1, inputs // group)
        parts = (row, level.half(), level.to(torch.uint8))
        codes, scales, zeros = (part.expand(1, outputs, -1) for part in parts)
        weight = QuantizedWeight(codes, scales, zeros, bits, group, "outputs", input_scale)
        calls.quantized_linear(torch.zeros(tokens, inputs, dtype=dtype), weight)


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
