"""Kernels are compiled before they serve: which, in which processes, and what becomes of one that was not.

There is no GPU: Triton compiles for one all the same, and its driver is a fake.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import kernels
from bench.common.oracles import FAMILIES, make_oracle
from bench.gpu import compiled
from bench.gpu.common import Found
from bench.gpu.compiled import GPUS, MODELS, Gpu, launches, launches_of
from kernels import calls, setup
from kernels.examples import Sizes
from kernels.gpu import compiling
from kernels.gpu.compiling import Specialization, compile_apart, compile_for, compiled_late, recorded
from kernels.registry import use_backend
from worker.model import read_config

H100 = GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give Triton an empty folder for what it compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def gate(dtype: torch.dtype) -> None:
    with torch.device("meta"), use_backend("cuda"):
        kernels.silu_mul(torch.empty(3, 64, dtype=dtype), torch.empty(3, 64, dtype=dtype))


def recorded_gates(*dtypes: torch.dtype) -> list[Specialization]:
    with recorded(H100, 132) as found:
        for dtype in dtypes:
            gate(dtype)
    return found


def test_launches_are_recorded_once_for_each_kind_of_arguments_and_nothing_is_compiled(cache: Path) -> None:
    found = recorded_gates(torch.bfloat16, torch.float16, torch.bfloat16)
    assert [each.kernel for each in found] == ["kernels.gpu.rows._gate_mul_kernel"] * 2
    assert [each.pointers for each in found] == [["*bf16"] * 3, ["*fp16"] * 3]
    assert found[0].constants == {"BLOCK": 1024} and found[0].options["num_warps"] == 4
    assert not list(cache.iterdir())


def test_places_of_rows_in_their_buffers_make_no_other_kernel() -> None:
    scores, draws = (
        torch.empty(9, 50257, device="meta"),
        torch.empty(9, 3, dtype=torch.int32, device="meta"),
    )
    with recorded(H100, 132) as found, use_backend("cuda"):
        for first, rows in ((0, 1), (0, 9), (1, 2), (3, 4)):
            kernels.choose(scores[first:][:rows], draws[first:][:rows])
    assert [each.kernel.split(".")[-1] for each in found] == ["_part_kernel", "_join_kernel"]


def test_a_process_compiles_into_the_folder_that_others_read_and_names_what_does_not_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, other = recorded_gates(torch.bfloat16, torch.float16)
    wrong = replace(other, data=other.data.replace("1024", "1000"))
    with caplog.at_level(logging.ERROR):
        (problem,) = compile_apart([wrong, right], H100, processes=2)
    assert problem.startswith("kernels.gpu.rows._gate_mul_kernel: ") and "power of 2" in problem
    assert "not compiled: kernels.gpu.rows._gate_mul_kernel" in caplog.text
    hits = list[bool]()
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    try:
        assert compile_for(H100, right).asm["cubin"]
    finally:
        knobs.compilation.listener = None
    assert hits == [True]


class FakeGpu:
    """Triton's driver of an H100: it loads and launches nothing."""

    def __init__(self) -> None:
        self.launches = 0
        self.loaded: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda _: {"max_shared_mem": 227 << 10}
        )

    def get_current_target(self) -> GPUTarget:
        return H100

    def get_current_device(self) -> int:
        return 7  # no test on a real GPU finds what was compiled for this one

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return self._launch

    def _launch(self, *_: object) -> None:
        self.launches += 1

    def _load(self, name: str, *_: object) -> tuple[int, ...]:
        self.loaded.append(name)
        return (1, 2, 32, 0, 1024)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    monkeypatch.setattr(driver, "_default", fake)
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(compiling, "_watch", compiling._Watch())
    yield fake
    from kernels.gpu.rows import _gate_mul_kernel

    _gate_mul_kernel.device_caches.pop(7, None)


def test_what_was_rehearsed_is_launched_without_a_compiler_and_the_rest_is_an_error(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(setup, "KERNELS", [calls.silu_mul])
    sizes = Sizes(
        dtype=torch.bfloat16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        block_tokens=16,
        hidden_size=64,
        intermediate_size=64,
    )
    with caplog.at_level(logging.INFO):
        setup._compile_for_gpu(sizes, lambda: gate(torch.float16))
    assert gpu.loaded == ["_gate_mul_kernel"] * 2 and gpu.launches == 0
    assert "compiled 2 kernels" in caplog.text and compiling.compiled_ahead().kernels == 2

    setup._compile_for_gpu(sizes, None)
    assert len(gpu.loaded) == 2, "another model of the same shapes needs no new kernels"

    gate(torch.bfloat16)
    gate(torch.float16)
    assert gpu.launches == 2 and compiled_late() == [] and driver.active is gpu
    caplog.clear()
    gate(torch.float32)
    gate(torch.float32)
    assert gpu.launches == 4
    (late,) = compiled_late()
    assert kernels.num_compiled_late() == 1
    assert late.startswith("kernels.gpu.rows._gate_mul_kernel ") and "fp32" in late
    assert "_gate_mul_kernel was not compiled before serving" in caplog.text and "*fp32" in caplog.text
    with compiling.compiling():
        gate(torch.float64)
    assert len(compiled_late()) == 1


def test_what_another_process_compiles_is_waited_for_and_not_compiled_again(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, calls_made = recorded_gates(torch.bfloat16), list[object]()
    monkeypatch.setattr(compiling, "compile_apart", lambda *given: calls_made.append(given))
    thread = threading.Thread(target=compiling.compile_all, args=(wanted,))
    with compiling._alone():  # as another worker does
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not gpu.loaded
        compiling._mark(wanted[0], H100).touch()
    thread.join(60)
    assert gpu.loaded == ["_gate_mul_kernel"] and calls_made == [] and compiled_late() == []


def test_kernels_of_a_model_fit_a_gpu() -> None:
    """The forms that take most; those of all models, on all kinds of GPU, are slow."""
    found = launches(MODELS["llama-3-8b"], GPUS[1], max_tp=1)
    wanted = {each.kernel.split(".")[-1]: each for each in found}
    for name in ("chunk_kernel", "tiles_kernel", "rows_kernel", "columns_kernel"):
        taken = compiled.compiled(wanted[name], GPUS[1])
        assert taken.problem == "" and 0 < taken.registers <= 255


@pytest.mark.parametrize(("block_t", "instruction"), [(16, "mma.sync"), (64, "wgmma.mma_async")])
def test_weights_go_from_registers_into_the_tensor_cores(block_t: int, instruction: str) -> None:
    found = launches(MODELS["llama-3-8b"], GPUS[1], precisions=["int4"], max_tp=1)
    tiles = (each for each in found if each.kernel.endswith(".tiles_kernel"))
    wanted = next(each for each in tiles if each.constants["BLOCK_T"] == block_t)
    ptx = compile_for(H100, wanted).asm["ptx"]
    loop = ptx[ptx.index(instruction) : ptx.rindex(instruction)]
    assert "bf16x2" in loop and "st.shared" not in loop and "ld.global" not in loop


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_steps_of_every_family_are_rehearsed(family: str, tmp_path: Path) -> None:
    make_oracle(family).config.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    found = launches_of(config, torch.float32, GPUS[1], max_tp=2, max_num_batched_tokens=32)
    names = {each.kernel.split(".")[-1] for each in found}
    assert {"chunk_kernel", "decode_kernel", "_rms_norm_kernel", "_store_kv_codes_kernel"} <= names
    assert {
        "_part_kernel",
        "_join_kernel",
        "_least_kernel",
        "_copy_blocks_kernel",
    } <= names  # choice, and moved blocks


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_all_kernels_of_all_models_fit_a_gpu(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_BENCH_GPU_FOLDER", str(tmp_path))
    found = Found("compiled")
    compiled.measure(list(MODELS), [gpu], processes=2, found=found)
    assert found.values["problems"] == [] and sum(row["forms"] for row in found.values["rows"]) > 100
    assert any("attention.chunk" in line for line in compiled.lines(found.values))
    assert json.loads(found.path.read_text())["rows"]
