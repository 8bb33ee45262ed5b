"""The measurements of `make gpu` on tensor parallelism, on a CPU: their parts, and once the whole."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from bench.gpu import transform as gpu_transform
from bench.gpu import transform_workers as gpu_transform_workers
from bench.gpu.common import Found
from bench.gpu.transform import CPU
from bench.transform.group import Made
from worker.distributed.communicator import Staged, connect

HERE = torch.device("cpu")
VOCABULARY = 8


def test_pages_are_timed_one_by_one_and_as_many_as_a_layer_gives_back() -> None:
    one, layer = gpu_transform.page_rows(HERE, CPU)
    assert (one["pages"], layer["pages"]) == (1, CPU.layer_pages * 3 // 4)
    for row in (one, layer):
        assert all(row[f"{name}_us"] > 0 for name in ("made", "map", "map_unzeroed", "unmap"))


def test_attention_is_right_and_timed_at_every_degree(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    rows = list(gpu_transform.attention_rows(HERE, CPU, problems))
    assert [row["degree"] for row in rows] == [1, 2, 4] * 2 and not problems

    def differ(*_: object) -> None:
        raise AssertionError("off by a lot")

    monkeypatch.setattr(gpu_transform, "assert_close", differ)
    assert not list(gpu_transform.attention_rows(HERE, CPU, problems))
    assert len(problems) == 6 and problems[0] == "attention at degree 1 in torch.float32: off by a lot"


@pytest.mark.parametrize("is_staged", [False, True])
def test_ranks_exchange_and_check_what_came(is_staged: bool) -> None:
    store = HashStore()

    def run(rank: int) -> list[tuple[float, int]]:
        group = connect(PrefixStore("group", store), rank, 2, timeout_s=20)
        try:
            return gpu_transform._exchange(
                Staged(group, pins=False) if is_staged else group, CPU, ["cpu"] * 2
            )
        finally:
            group.close()

    with ThreadPoolExecutor(2) as threads:
        for turns in threads.map(run, range(2)):
            assert len(turns) == gpu_transform.ROUNDS and all(nbytes > 0 for _, nbytes in turns)


def test_no_nccl_without_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_transform.nccl_row(HERE, CPU) == {"skipped": "no GPU"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "one rank on each" in gpu_transform.nccl_row(torch.device("cuda"), CPU)["skipped"]


class Counting:
    """A model to which the next number is by far the likeliest, and all others are alike."""

    device = HERE

    def __call__(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=10.0 * torch.eye(VOCABULARY)[(ids + 1) % VOCABULARY])


def made(tokens: list[int], off: float = 0.0) -> Iterator[Made]:
    """The numbers of a model that says the same, up to `off`."""
    likely = float((10 * torch.eye(VOCABULARY)[0]).log_softmax(0)[0])
    for i, token in enumerate(tokens):
        yield Made(token, likely + off, (1, 2, 4)[i % 3], boundary=i % 2)


def test_tokens_that_the_oracle_chooses_are_right_in_every_kind_of_step() -> None:
    compared = gpu_transform_workers._compare(
        Counting(), [([5, 6], list(made([7, 0, 1, 2, 3, 4])))], torch.float32
    )
    assert not compared["problems"]
    kinds = ["TP1", "TP1, on the way", "TP2", "TP2, on the way", "TP4", "TP4, on the way"]
    assert list(compared["off"]) == kinds


def test_another_token_another_probability_and_a_missing_shape_are_problems() -> None:
    def problems(*tokens: Made) -> list[str]:
        found = gpu_transform_workers._compare(Counting(), [([5, 6], list(tokens))], torch.bfloat16)
        return list(found["problems"])

    other, off, missing, way = problems(*list(made([7, 0, 3, 4]))[::2])
    assert other == "token 1 of 2, TP4: 10 less likely than the oracle's"
    assert "log-probability" in off
    assert missing == "no token at TP2" and way == "no token in a step with layers at two degrees"
    *doubtful, _ = problems(*made([7, 0, 1, 2], off=0.3))
    assert len(doubtful) == 4 and all("off by 0.3 in a log-probability" in each for each in doubtful)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_runs_on_a_cpu() -> None:
    results = Found("transform", is_kept=False)
    gpu_transform.measure(HERE, results)
    found = results.values
    assert not found["problems"]
    assert [row["ranks"] for row in found["exchange"]] == [2, 4]
    assert len(list(gpu_transform.lines(found))) > 20
