"""The padding table: the paper's numbers, and ours beside them; and what computes over padded weights."""

from __future__ import annotations

import pytest
import torch

import kernels
from bench.transform.padding import (
    BAR,
    MODELS,
    PAGE_BYTES,
    PaddingSizes,
    ffn_overhead,
    model_overhead,
    padded,
    pages_per_tensor,
)
from worker.model.layer import build_feed_forward

BY_NAME = {model.name: model for model in MODELS}
PAPER = {  # Gyges, Table 3: pages per tensor at TP1 and at TP4
    "GPT-OSS-120B": ([1012.5, 2025], [253.125, 506.25]),
    "GPT-OSS-20B": ([253.125, 506.25], [63.28125, 126.5625]),
    "Llama-3.1-70B": ([224], [56]),
    "Qwen2.5-32B": ([135], [33.75]),
}


@pytest.mark.parametrize("name", PAPER)
def test_pages_per_tensor_are_those_of_the_paper(name: str) -> None:
    assert tuple(pages_per_tensor(BY_NAME[name], tp) for tp in (1, 4)) == PAPER[name]
    assert BY_NAME[name].is_in_paper


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("max_tp", [2, 4, 8])
def test_every_shard_of_every_degree_ends_on_a_page(model: PaddingSizes, max_tp: int) -> None:
    stored = padded(model, max_tp)
    for tp in (1, 2, 4, 8):
        if tp <= max_tp:
            rows, rest = divmod(stored.rows, tp)
            assert rest == 0 and rows * stored.row_size * 2 % PAGE_BYTES == 0
    assert stored.rows >= model.intermediate * max(1, model.num_experts) and stored.row_size >= model.hidden


@pytest.mark.parametrize(
    ("name", "overhead"),
    [
        ("GPT-OSS-120B", 0.0667),
        ("GPT-OSS-20B", 0.0904),
        ("Llama-3.1-70B", 0.0),
        ("Qwen2.5-32B", 0.037),
        ("Qwen3-32B", 0.12),
        ("Llama-3-8B", 0.0),
        ("Llama-2-7B", 0.0233),
    ],
)
def test_padding_for_four_ranks_stays_within_what_the_paper_has(name: str, overhead: float) -> None:
    assert ffn_overhead(BY_NAME[name], 4) == pytest.approx(overhead, abs=5e-5) and overhead <= BAR
    assert 0 <= model_overhead(BY_NAME[name], 4) <= ffn_overhead(BY_NAME[name], 4)


@pytest.mark.parametrize("tokens", [1, 16, 128])
@pytest.mark.parametrize(("rows", "row_size"), [(96, 64), (112, 64), (96, 80), (112, 80)])
def test_a_feed_forward_over_padded_weights_never_reads_the_padding(
    tokens: int, rows: int, row_size: int
) -> None:
    config = PaddingSizes("toy", 64, 96, 1, 4, 2, 16, 100).config()
    stored = torch.full((3, rows, row_size), torch.nan)
    stored[:, :96, :64] = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(1)) / 8
    tensors = {"gate_up": stored[:2, :, :64], "down": stored[2, :, :64]}
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2))
    gate, up, down = stored[:, :96, :64]
    wanted = kernels.linear_t(kernels.silu_mul(x @ gate.T, x @ up.T), down)
    torch.testing.assert_close(build_feed_forward(config, tensors)(x), wanted)
