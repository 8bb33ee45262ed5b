"""Kernels read and write every layout of the KV cache, unchanged, and give the same result."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import kernels
from bench.kernels.checks import MIXED, AttentionCase, assert_close, plan_of
from tests.support.kv_layouts import Layout, as_kernels_see, kv_stride_order, pieces_per_shard, storage_shape

SIZES = (5, 4, 8, 16)  # blocks, heads, tokens, dim


def check_kernels(backend: str, device: str = "cpu") -> None:
    """Store, move blocks and attend over each layout: the same bits as over the header-centric one."""
    for case in (AttentionCase("plain", MIXED), AttentionCase("window", MIXED, block_tokens=8, window=20)):
        random = torch.Generator().manual_seed(1)
        plan, num_blocks = plan_of(case, random)
        heads, head_dim, tokens = case.num_kv_heads, case.head_dim, case.block_tokens
        q = torch.randn(int(plan.cu_seqlens_q[-1]), case.num_heads, head_dim, generator=random)
        k, v = (torch.randn(num_blocks * tokens, heads, head_dim, generator=random) for _ in range(2))
        slots = torch.arange(num_blocks * tokens)
        expected = torch.zeros(num_blocks + 2, heads, 2, tokens, head_dim)
        kernels.store_kv.reference(k, v, expected, slots)
        wanted = kernels.paged_attention.reference(q, expected, plan, 0.1, sliding_window=case.window)
        results = []
        for layout in Layout:
            storage = torch.zeros(storage_shape(layout, num_blocks + 2, heads, tokens, head_dim))
            kv = as_kernels_see(storage.to(device), layout)
            with kernels.use_backend(backend):
                kernels.store_kv(k.to(device), v.to(device), kv, slots.to(device))
                results.append(
                    kernels.paged_attention(q.to(device), kv, plan, 0.1, sliding_window=case.window)
                )
                moved = torch.tensor([0]), torch.tensor([num_blocks])
                kernels.copy_blocks(kv, *(ids.to(device) for ids in moved))
            assert torch.equal(kv[:num_blocks].cpu(), expected[:num_blocks]), layout
            assert torch.equal(kv[num_blocks].cpu(), expected[0]), layout
            assert torch.equal(results[-1], results[0]), layout
            assert_close(results[-1], wanted)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_kernels_read_every_layout_unchanged(backend: str) -> None:
    check_kernels(backend)


@pytest.mark.slow
def test_triton_reads_every_layout_unchanged_in_the_interpreter() -> None:
    # The interpreter is chosen when triton is imported, so it needs a process of its own.
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.worker.memory.test_kv_layouts import check_kernels; check_kernels('cuda')",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("layout", Layout)
def test_the_order_takes_the_storage_to_what_kernels_take(layout: Layout) -> None:
    named = {"raw": "2BTHD", "page-friendly": "B2THD", "header-centric": "BH2TD"}[layout]
    blocks, heads, tokens, dim = SIZES
    sizes = {"B": blocks, "H": heads, "2": 2, "T": tokens, "D": dim}
    shape = storage_shape(layout, *SIZES)
    assert shape == tuple(sizes[name] for name in named)
    assert "".join(named[i] for i in kv_stride_order(layout)) == "BH2TD"
    assert as_kernels_see(torch.empty(shape), layout).shape == (blocks, heads, 2, tokens, dim)


@pytest.mark.parametrize("layout", Layout)
def test_only_header_centric_blocks_leave_a_shard_in_one_piece(layout: Layout) -> None:
    blocks, heads, tokens, dim = SIZES
    storage = torch.arange(blocks * heads * 2 * tokens * dim).view(storage_shape(layout, *SIZES))
    shard = as_kernels_see(storage, layout)[3, : heads // 2].flatten().sort().values
    assert 1 + int((shard.diff() != 1).sum()) == pieces_per_shard(layout, tokens)
