"""The CPU's kernels against their oracles, and the calls themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernels
from bench.kernels.checks import checks
from kernels import calls
from kernels.gpu.attention import MAX_SPLITS, num_splits
from kernels.gpu.attention_configs import CHUNKS, fitting
from kernels.gpu.product_configs import MOST_SPLITS, TABLE, product_config
from kernels.gpu.product_configs import num_splits as splits_of_product
from kernels.packing import CODE_BITS
from kernels.registry import KERNELS, KernelCall

# Compiling attention takes 8 s for each form of its arguments; full precision has this one.
CODES_OF_HALVES = "attention to codes: decodes and chunks in one call, torch.bfloat16"


def is_slow(name: str) -> bool:
    """Return whether a check runs with the slow tests. Those of float16 do: bfloat16 takes the same ways."""
    return name == CODES_OF_HALVES or name.endswith("torch.float16")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=name, marks=[pytest.mark.slow] if is_slow(name) else [])
        for name, check in checks("cpu", "cpu")
    ],
)
def test_a_cpu_kernel_agrees_with_its_oracle(check: Callable[[], None]) -> None:
    check()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", ["dense", "quantized"])
def test_triton_kernels_agree_with_their_oracles_in_the_interpreter(part: str) -> None:
    # The interpreter is chosen when triton is imported, so it needs a process of its own.
    run = subprocess.run(
        [sys.executable, "-m", "bench.kernels.checks", "cuda", "cpu", part],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no backend 'tpu' of the kernels; use one of reference, cpu, cuda"):
        kernels.use_backend("tpu").__enter__()


def test_one_number_sizes_the_team_of_products_and_kernels() -> None:
    before = torch.get_num_threads()
    try:
        assert kernels.configure(1) == 1 == torch.get_num_threads()
        assert kernels.configure() == len(os.sched_getaffinity(0))
        with pytest.raises(ValueError, match="-1 threads"):
            kernels.configure(-1)
    finally:
        kernels.configure(before)


def test_warm_up_runs_every_kernel_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def call(self: KernelCall[Any, Any], *args: Any, **kwargs: Any) -> Any:
        called.add(self.reference.__name__)
        return run(self, *args, **kwargs)

    run = KernelCall.__call__
    monkeypatch.setattr(KernelCall, "__call__", call)
    kernels.warm_up(
        torch.float32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_tokens=16,
        hidden_size=128,
        intermediate_size=352,
        bits=CODE_BITS,
    )
    assert called == set(calls.__all__) == {call.reference.__name__ for call in KERNELS}


@pytest.mark.parametrize(
    ("programs", "keys", "processors", "splits"),
    [(8, 8192, 132, 32), (512, 8192, 132, 1), (64, 8192, 132, 5), (8, 300, 132, 2), (1, 10, 132, 1)],
)
def test_a_context_is_split_only_as_far_as_processors_and_keys_go(
    programs: int, keys: int, processors: int, splits: int
) -> None:
    assert num_splits(programs, keys, processors) == splits <= MAX_SPLITS


@pytest.mark.parametrize(
    ("programs", "steps", "waves", "splits"),
    [(64, 16, 4, 8), (448, 16, 4, 1), (32, 3, 4, 1), (1, 1000, 4, MOST_SPLITS)],
)
def test_inputs_are_split_only_as_far_as_processors_and_steps_go(
    programs: int, steps: int, waves: int, splits: int
) -> None:
    assert splits_of_product(programs, steps, 132, waves) == splits <= MOST_SPLITS


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("limit", [227 << 10, 163 << 10, 99 << 10])
def test_every_product_config_fits_the_shared_memory_there_is(bits: int, limit: int) -> None:
    for _, config in TABLE[bits]:
        fitted = config.fitted(bits, limit)
        assert fitted.shared_bytes(bits) <= limit or (fitted.num_stages == 2 and fitted.tiles == 1)
        assert fitted == config or config.shared_bytes(bits) > limit


def test_more_tokens_than_the_table_has_go_through_memory() -> None:
    for bits in CODE_BITS:
        most, config = TABLE[bits][-1]
        assert product_config(bits, most) == config and product_config(bits, most + 1) is None


def test_attention_takes_the_first_config_that_fits() -> None:
    assert fitting(CHUNKS, 128, 227 << 10) == CHUNKS[0]
    assert fitting(CHUNKS, 256, 163 << 10) == CHUNKS[1]
    assert fitting(CHUNKS, 1024, 1 << 10) == CHUNKS[-1]
