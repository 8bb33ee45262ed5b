"""`python -m bench.gpu attention` over a FlashInfer in plain torch, and where there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from bench.gpu import attention as gpu_attention
from bench.gpu.attention_cases import BLOCK_TOKENS, attention_of
from bench.gpu.common import Found
from bench.gpu.parts import FOLDER
from tests.support import fake_flashinfer

CPU = torch.device("cpu")
EVERY = (*gpu_attention.DECODE_WAYS, *gpu_attention.CHUNK_WAYS)


def test_blocks_are_told_as_flashinfer_takes_them() -> None:
    lengths = ((1, 2 * BLOCK_TOKENS), (3, BLOCK_TOKENS + 1), (2, 5))
    (plan,), _, _ = attention_of(CPU, lengths, 1)
    pages = gpu_attention.pages_of(plan, BLOCK_TOKENS)
    assert pages.qo_indptr.tolist() == [0, 1, 4, 6]
    assert pages.indptr.tolist() == [0, 2, 4, 5]
    assert pages.last_page_len.tolist() == [BLOCK_TOKENS, 1, 5]
    table = plan.block_table
    assert pages.indices.tolist() == [*table[0].tolist(), *table[1].tolist(), int(table[2, 0])]
    assert {one.dtype for one in (pages.indptr, pages.indices, pages.last_page_len)} == {torch.int32}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Found:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(gpu_attention, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(gpu_attention, "bandwidth", lambda device: 1e12)
    monkeypatch.setattr(gpu_attention, "peak", lambda device: 1e14)
    monkeypatch.setattr(gpu_attention, "ready_ways", lambda device, found: EVERY)
    return Found("attention")


def test_every_way_agrees_with_the_oracle_and_has_a_time_beside_the_own_kernels(
    monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    fake_flashinfer.install(monkeypatch)
    gpu_attention.measure(CPU, found)
    assert not found.values["problems"]
    rows = found.values["rows"]
    decodes = ["own", *gpu_attention.DECODE_WAYS]
    assert [row["way"] for row in rows] == [*decodes, "own", *gpu_attention.CHUNK_WAYS]
    assert all(row["us"] > 0 and row["error"] < gpu_attention.ERROR for row in rows)
    assert all((row["way"] == "own") != ("plan_us" in row) for row in rows)
    decode, chunk = gpu_attention.lines(found.values)
    assert decode.startswith("attention 2 x 1 of 40, floor ") and "; decode by fa2 " in decode
    assert chunk.startswith("attention 1 x 20 of 33, floor ") and " TFLOP/s, plan " in chunk


def test_a_wrong_result_is_a_problem_and_a_way_that_fails_costs_itself(
    monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    fake = fake_flashinfer.install(monkeypatch)
    planned = fake_flashinfer.Planned.attend

    def late(self: fake_flashinfer.Planned, *tensors: torch.Tensor) -> None:
        planned(self, *tensors)
        tensors[-1][-1] *= 2

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(fake_flashinfer.Planned, "attend", late)
    monkeypatch.setattr(fake, "BatchPrefillWithPagedKVCacheWrapper", refuse)
    gpu_attention.measure(CPU, found)
    problems = found.values["problems"]
    assert len(problems) == len(EVERY)  # two that are wrong, two that fail
    assert sum("no kernel image is available" in problem for problem in problems) == 2
    assert any("fa3 failed: no kernel image" in line for line in gpu_attention.lines(found.values))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_a_way_that_cannot_be_imported_or_is_not_ready_in_time_says_so() -> None:
    (missing,) = gpu_attention.try_ways(["fa2"], 60).values()
    assert missing == {"problem": "ModuleNotFoundError: No module named 'flashinfer'"}
    (late,) = gpu_attention.try_ways(["fa3"], 0.01).values()
    assert late["problem"].startswith("not ready within 0 s")
