"""The padding table: the paper's numbers, and ours beside them; and what computes over padded weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels
from bench.transform.padding import (
    MAX_DEGREES,
    MEMORY_BAR,
    MODELS,
    PAGE_BYTES,
    STEP_BAR,
    PaddingSizes,
    ffn_overhead,
    largest_difference,
    model_overhead,
    pages_per_tensor,
    planned,
    step_overhead,
)
from bus.precisions import QUANTIZED, Precision
from worker.model.layer import build_feed_forward
from worker.model.layout import degrees, plan_model
from worker.model.quantized_layout import plan_quantized
from worker.model.row_units import full_units
from worker.model.shard import Shard
from worker.model.weights import tensors_in

BY_NAME = {model.name: model for model in MODELS}
PAPER = {  # Gyges, Table 3: pages per tensor at TP1 and at TP4
    "GPT-OSS-120B": ([1012.5, 2025], [253.125, 506.25]),
    "GPT-OSS-20B": ([253.125, 506.25], [63.28125, 126.5625]),
    "Llama-3.1-70B": ([224], [56]),
    "Qwen2.5-32B": ([135], [33.75]),
}
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


@pytest.mark.parametrize("name", PAPER)
def test_pages_per_tensor_are_those_of_the_paper(name: str) -> None:
    assert tuple(pages_per_tensor(BY_NAME[name], tp) for tp in (1, 4)) == PAPER[name]
    assert BY_NAME[name].is_in_paper


@each_model
@pytest.mark.parametrize("precision", ["full", "int4"])
@pytest.mark.parametrize("max_tp", MAX_DEGREES)
def test_every_shard_of_every_degree_is_pages_of_its_own(
    model: PaddingSizes, max_tp: int, precision: Precision
) -> None:
    plan = planned(model, max_tp)
    halves = plan.layers[0]
    if precision != "full":
        halves = plan_quantized(model.config(), plan, PAGE_BYTES, precision)
    _, ffn = halves
    router = ffn.params.get("router")
    own = router.offset_bytes // PAGE_BYTES if router else -(-ffn.nbytes // PAGE_BYTES)
    for tp in degrees(model.config(), max_tp):
        masks = [ffn.at(Shard(rank, tp)).pages(PAGE_BYTES)[:own] for rank in range(tp)]
        assert np.array_equal(np.sum(masks, 0), np.ones(own))
        assert len({int(mask.sum()) for mask in masks}) == 1


@pytest.mark.parametrize(
    ("name", "overhead"),
    [
        ("GPT-OSS-120B", 0.0008),
        ("GPT-OSS-20B", 0.0008),
        ("Llama-3.1-70B", 0.0),
        ("Qwen2.5-32B", 0.0074),
        ("Qwen3-32B", 0.0027),
        ("Qwen3-30B-A3B", 0.0),
        ("Mixtral-8x7B", 0.0),
        ("Qwen3-4B", 0.0105),
        ("Qwen2.5-7B", 0.0296),  # four KV heads: at degree 8 two ranks have the same one
        ("Llama-3-8B", 0.0),
        ("Llama-2-7B", 0.0543),
        ("Llama-2-13B", 0.0272),
    ],
)
def test_padding_for_eight_ranks_stays_within_what_the_paper_has_for_four(name: str, overhead: float) -> None:
    model = BY_NAME[name]
    most = degrees(model.config(), 8)[-1]
    assert ffn_overhead(model, most) == pytest.approx(overhead, abs=5e-5)
    for max_tp in MAX_DEGREES:
        assert 0 <= model_overhead(model, max_tp) <= ffn_overhead(model, max_tp) + 1e-9 <= MEMORY_BAR


@each_model
@pytest.mark.parametrize("max_tp", MAX_DEGREES)
def test_ranks_of_every_degree_are_even(model: PaddingSizes, max_tp: int) -> None:
    for tp in degrees(model.config(), max_tp):
        assert largest_difference(model, max_tp, tp) == 0
        assert largest_difference(model, max_tp, tp, "int4") <= 64  # a tile of codes
        assert step_overhead(model, max_tp, tp) <= STEP_BAR


@each_model
@pytest.mark.parametrize("max_tp", MAX_DEGREES)
@pytest.mark.parametrize("precision", QUANTIZED)
def test_quantised_ranks_read_empty_tiles_of_one_model_alone(
    model: PaddingSizes, max_tp: int, precision: Precision
) -> None:
    tps = degrees(model.config(), max_tp)
    added = [step_overhead(model, max_tp, tp, precision) for tp in tps]
    if (model.name, max_tp) == ("Llama-2-7B", 8):  # 172 tiles for eight ranks: 21 or 22 to each
        assert STEP_BAR < max(added) < 1.6 * STEP_BAR
    else:
        assert added == [0.0] * len(tps)


@pytest.mark.parametrize("tokens", [1, 16, 128])
@pytest.mark.parametrize("intermediate", [96, 128, 192])  # uneven units; whole matrices; units with gaps
def test_a_feed_forward_over_padded_weights_never_reads_the_padding(tokens: int, intermediate: int) -> None:
    config = PaddingSizes("toy", 64, intermediate, 1, 8, 4, 16, 100).config()
    plan = plan_model(config, torch.float32, 8192, 4).layers[0][1]
    tensors = tensors_in(torch.full((plan.nbytes // 4,), torch.nan).view(torch.uint8), plan)
    matrices = torch.randn(3, intermediate, 64, generator=torch.Generator().manual_seed(1)) / 8
    units = full_units(intermediate, 4)
    for stored in (*tensors["gate_up"].unbind(1), tensors["down"]):
        stored.zero_()  # rows that a unit has less than the largest are zeros, the rest stays NaN
    for stored, matrix in zip((*tensors["gate_up"].unbind(1), tensors["down"]), matrices, strict=True):
        units.spread(matrix, stored)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2))
    gate, up, down = matrices
    wanted = kernels.linear_t(kernels.silu_mul(x @ gate.T, x @ up.T), down)
    torch.testing.assert_close(build_feed_forward(config, tensors)(x), wanted)
