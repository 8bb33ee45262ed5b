"""Whole experts of every kind of mixture go to other workers and come back: where they lie, what moves, and
that every token is what it would be alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.common.oracles import make_oracle
from kernels.routing import shared_units
from tests.support.group_workers import GroupWorker, transform, workers
from tests.worker.model.test_families import REAL
from tests.worker.tensor_parallel.test_rows import ffn_bytes, take  # noqa: F401 a fixture
from tests.worker.tensor_parallel.test_workers import Load
from worker.model import read_config
from worker.model.config import Mixture, ModelConfig
from worker.model.layout import degrees, plan_model
from worker.model.shard import Shard

LAYERS = 3
SLOW = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("base")
    raw = REAL["Qwen1.5 MoE A2.7B"] | {"architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder)


@given(
    num_experts=st.integers(1, 64),
    num_shared=st.integers(0, 8),
    width=st.integers(1, 96),
    hidden=st.integers(1, 48),
    page_bytes=st.sampled_from([4096, 16384, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_ranks_share_no_page_of_an_expert_and_have_all_of_them(
    base: ModelConfig,
    num_experts: int,
    num_shared: int,
    width: int,
    hidden: int,
    page_bytes: int,
    dtype: torch.dtype,
) -> None:
    mixture = Mixture(num_experts=num_experts, top_k=1, is_normalised=True, num_shared=num_shared)
    config = replace(base, mixture=mixture, intermediate_size=width, hidden_size=hidden)
    assume(len(degrees(config, 8)) > 1)
    plan = plan_model(config, dtype, page_bytes, 8).layers[0][1]
    whole, shared = plan.pages(page_bytes), shared_units(num_experts, num_shared)
    router = plan.params["router"]
    first_of_all = router.offset_bytes // page_bytes  # behind the experts are what every rank has
    assert len(set(shared)) == num_shared and all(0 <= unit < mixture.num_units for unit in shared)
    for tp in degrees(config, 8):
        owners = np.zeros(len(whole), np.int64)
        slices = []
        for rank in range(tp):
            pages = plan.at(Shard(rank, tp)).pages(page_bytes)
            owners += pages
            each = mixture.num_units // tp
            slices.append(sum(rank * each <= unit < (rank + 1) * each for unit in shared))
            assert int(whole.sum() - pages.sum()) * page_bytes == (
                0 if tp == 1 else first_of_all * page_bytes // tp * (tp - 1)
            )
        assert (owners[:first_of_all] == 1).all() and (owners[first_of_all:] == tp).all()
        assert max(slices) - min(slices) <= 1  # no rank has much more to compute for every token


@pytest.fixture(
    scope="module",
    params=["qwen2 moe", *(pytest.param(name, marks=SLOW) for name in ("qwen3 moe", "gpt-oss", "mixtral"))],
)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = make_oracle(request.param, max_position_embeddings=1024, num_hidden_layers=LAYERS)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 6))])
def test_any_run_of_changes_costs_no_token_and_brings_every_byte_back(
    mixture: tuple[Any, Path],
    take: Any,  # noqa: F811
    seed: int,
) -> None:
    """Which layers go together, and whether experts come from peers or from the host, is drawn by lot."""
    model, folder = mixture
    rng = random.Random(seed)
    with workers(folder, 2) as each:
        whole, pages = ffn_bytes(each[0]), [worker.pool.counts() for worker in each]
        load = Load(each, model)
        for _ in range(1 if seed == 1 else 4):
            take(rng.choice(["peers", "host"]))
            leader = rng.choice(each)
            for tp in (2, 1):
                members = [leader, *(worker for worker in each if worker is not leader)]
                order = transform(members, tp, layers_per_step=rng.randint(1, LAYERS))
                report = load.during(leader, order)
                assert report.state == "applied", report
                if tp == 2:
                    assert report.numbers["pages_freed"] == moved_pages(leader)
                for worker in each:
                    worker.wait_degree(tp)
        load.check()
        for worker in each:
            worker.check()
            assert worker.instance.scheduler.num_recomputed == 0
            for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                assert found.equal(wanted)
        assert [worker.pool.counts() for worker in each] == pages


def moved_pages(worker: GroupWorker) -> int:
    """Return the pages of the experts that a worker gives up at degree 2, in all layers."""
    plan, page_bytes = worker.model.plan.layers[0][1], worker.pool.page_bytes
    of_rank = plan.at(Shard(0, 2)).pages(page_bytes).sum()
    return LAYERS * int(plan.pages(page_bytes).sum() - of_rank)
