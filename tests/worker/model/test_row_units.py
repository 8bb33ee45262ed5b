"""The rows of an FFN over the ranks: even at every degree, the same sum, and pages that are only unmapped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from bench.transform.padding import PaddingSizes
from bus.precisions import BITS, PRECISIONS, Precision
from worker.model.layer import build_feed_forward
from worker.model.layout import CheckpointTensor, RangePlan, degrees, plan_model
from worker.model.quantized_layout import plan_quantized
from worker.model.quantized_sets import QuantizedMatrix, pack_matrix, round_to_nearest
from worker.model.row_units import RowUnits, full_units, quantized_units, unit_group
from worker.model.shard import Shard
from worker.model.weights import Tensors, tensors_in
from worker.shape.copier import Pause, lay_out
from worker.shape.host_images import write_half

CPU = torch.device("cpu")
EXACT = {"rtol": 2e-4, "atol": 2e-4}


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 16, 64, 128]))
def test_ranks_of_every_degree_differ_by_one_step_at_most(num_rows: int, count: int, step: int) -> None:
    units = RowUnits(num_rows, count, step)
    assert [row for rows in units for row in rows] == list(range(num_rows))
    assert all(rows.start % step == 0 for rows in units if rows)
    degree = 1
    while degree <= count:
        each = count // degree
        ranks = [sum(len(units.rows(rank * each + i)) for i in range(each)) for rank in range(degree)]
        assert max(ranks) - min(ranks) <= step
        degree *= 2
    whole, stored = torch.arange(num_rows)[:, None], torch.full((count, units.size + 3, 1), -1)
    units.spread(whole, stored)
    assert units.joined(stored).equal(whole) and int((stored >= 0).sum()) == num_rows


@pytest.mark.parametrize(
    ("num_rows", "count", "group", "step", "kept"),
    [
        (14336, 8, 128, 128, 128),  # Llama 3 8B: whole groups
        (11008, 4, 128, 64, 64),  # Llama 2 7B: 43 tiles to a unit, which groups of 128 would make 44
        (11008, 8, 128, 128, 128),  # 22 tiles either way
        (13824, 8, 128, 64, 64),
        (172, 1, 128, 128, 64),
        (11008, 4, 32, 64, 32),
    ],
)
def test_groups_are_divided_only_where_that_makes_units_smaller(
    num_rows: int, count: int, group: int, step: int, kept: int
) -> None:
    units = quantized_units(num_rows, count, group)
    assert (units.step, unit_group(units, group)) == (step, kept)


# ---------------------------------------------------------------------------- layouts


class NamedMatrices:
    """A source of dense tensors by the last words of their names."""

    depends_on_device = False

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self._named = named

    def check(self, sources: object) -> None:
        pass

    def close(self) -> None:
        pass

    def fill(
        self,
        targets: Sequence[torch.Tensor],
        source: CheckpointTensor,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        matrix = self._named[source.tensor.split(".")[-2]]
        rows = (matrix.T if source.is_transposed else matrix).split([len(target) for target in targets])
        for target, part in zip(targets, rows, strict=True):
            target.copy_(part)


class FixedMatrices:
    """Quantised matrices that are there already."""

    name, method, has_input_order, is_whole = "fixed", "rtn", True, False

    def __init__(self, made: dict[str, list[QuantizedMatrix]], group: int, has_input_scale: bool) -> None:
        self._made, self.group, self.has_input_scale = made, group, has_input_scale

    def read(self, layer: int, product: str, full: Tensors, pause: Pause) -> list[QuantizedMatrix]:
        return self._made[product]


def check_pages(plan: RangePlan, page_bytes: int, tps: list[int]) -> None:
    """Check that ranks of a degree share no page and leave none, and that a higher degree needs fewer."""
    masks = {tp: [plan.at(Shard(rank, tp)).pages(page_bytes) for rank in range(tp)] for tp in tps}
    for each in masks.values():
        assert np.array_equal(np.sum(each, 0), np.ones(len(each[0])))
        assert len({int(mask.sum()) for mask in each}) == 1
    for low, high in pairwise(tps):
        for rank, mask in enumerate(masks[high]):
            assert not (mask & ~masks[low][rank * low // high]).any()


def random_matrices(intermediate: int, hidden: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(intermediate)
    gate, up, down = torch.randn(3, intermediate, hidden, generator=random) / hidden**0.5
    return {"gate_proj": gate, "up_proj": up, "down_proj": down.T.contiguous()}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([16, 32, 48, 80]),
    st.integers(20, 400) | st.sampled_from([64, 128, 256, 384]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([4096, 8192]),
)
def test_ranks_of_every_degree_sum_to_the_whole_and_only_unmap(
    hidden: int, intermediate: int, max_tp: int, page_bytes: int
) -> None:
    config = PaddingSizes("toy", hidden, intermediate, 1, 8, 8, 16, 100).config()
    plan, tps = plan_model(config, torch.float32, page_bytes, max_tp).layers[0][1], degrees(config, max_tp)
    check_pages(plan, page_bytes, tps)
    named = random_matrices(intermediate, hidden)
    image = lay_out(plan, NamedMatrices(named), CPU)
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1))
    wanted = F.silu(x @ named["gate_proj"].T) * (x @ named["up_proj"].T) @ named["down_proj"].T
    units = full_units(intermediate, max_tp)
    drawn = sum(int(matrix.count_nonzero()) for matrix in named.values())  # a number may be 0 by chance
    assert int(image.view(torch.float32).count_nonzero()) == drawn > 3 * intermediate * hidden - 9
    for tp in tps:
        ranks = [
            build_feed_forward(config, tensors_in(image, plan.at(shard)), shard=shard)
            for shard in (Shard(rank, tp) for rank in range(tp))
        ]
        assert {rank.linears[1].num_inputs for rank in ranks} == {units.size * max_tp // tp}
        with kernels.use_backend("reference"):
            torch.testing.assert_close(torch.stack([rank(x) for rank in ranks]).sum(0), wanted, **EXACT)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([16, 32, 48, 80]),
    st.integers(20, 3000),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([4096, 16384]),
    st.sampled_from(PRECISIONS),
)
def test_no_layout_of_even_rows_on_pages_of_their_own_is_smaller(
    hidden: int, intermediate: int, max_tp: int, page_bytes: int, precision: Precision
) -> None:
    """A rank of the largest degree has the pages that its rows fill, begun ones included, and no other."""
    config = PaddingSizes("toy", hidden, intermediate, 1, 8, 8, 16, 100).config()
    full = plan_model(config, torch.float32, page_bytes, max_tp)
    plan = (
        full.layers[0][1] if precision == "full" else plan_quantized(config, full, page_bytes, precision)[1]
    )
    rank = plan.at(Shard(0, max_tp))
    filled = sum(-(-math.prod(one.shape) * one.dtype.itemsize // 256) * 256 for one in rank.params.values())
    for number in range(max_tp):
        pages = plan.at(Shard(number, max_tp)).pages(page_bytes)
        assert int(pages.sum()) == -(-filled // page_bytes)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(64, 900) | st.sampled_from([128, 512, 768]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["int8", "int4", "int3"]),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.booleans(),
)
def test_ranks_with_quantised_rows_sum_to_the_whole_and_only_unmap(
    intermediate: int, max_tp: int, precision: Precision, group: int, has_scale: bool, has_order: bool
) -> None:
    """The ranks divide groups of inputs, with activation-aware scales and activation-ordered groups too."""
    hidden, page_bytes, bits = 64, 4096, BITS[precision]
    config = PaddingSizes("toy", hidden, intermediate, 1, 8, 8, 16, 100).config()
    full = plan_model(config, torch.float32, page_bytes, max_tp)
    made = quantised(random_matrices(intermediate, hidden), bits, group, has_scale, has_order)
    matrices = FixedMatrices(made, group, has_scale)
    _, plan = plan_quantized(
        config, full, page_bytes, precision, group=group, has_input_scale=has_scale, has_input_order=True
    )
    tps = degrees(config, max_tp)
    check_pages(plan, page_bytes, tps)
    image = torch.zeros(plan.nbytes, dtype=torch.uint8)
    write_half(config, tensors_in(image, plan), matrices, 0, {})
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1))
    (gate, up), (down,) = ([matrix.dense() for matrix in made[name]] for name in ("gate_up", "down"))
    wanted = F.silu(x @ gate.T) * (x @ up.T) @ down.T
    for tp in tps:
        ranks = [
            build_feed_forward(config, tensors_in(image, plan.at(shard)), precision, shard)
            for shard in (Shard(rank, tp) for rank in range(tp))
        ]
        with kernels.use_backend("reference"):
            torch.testing.assert_close(torch.stack([rank(x) for rank in ranks]).sum(0), wanted, **EXACT)


def quantised(
    named: dict[str, torch.Tensor], bits: int, group: int, has_scale: bool, has_order: bool
) -> dict[str, list[QuantizedMatrix]]:
    random = torch.Generator().manual_seed(7)
    made: dict[str, list[QuantizedMatrix]] = {}
    for product, names in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
        inputs = named[names[0]].shape[1]
        scale = torch.rand(inputs, generator=random) + 0.5 if has_scale else None
        order = torch.randperm(inputs, generator=random).int() if has_order else None
        made[product] = []
        for name in names:
            matrix = named[name] if scale is None else named[name] / scale
            ordered = matrix if order is None else matrix[:, order.long()]
            codes, scales, zeros = kernels.quantize_rtn(ordered, bits, group)
            made[product].append(pack_matrix(codes, scales, zeros, bits, group, scale, order))
    assert (
        has_scale
        or has_order
        or made["down"][0].dense().equal(round_to_nearest(named["down_proj"], bits, group).dense())
    )
    return made
