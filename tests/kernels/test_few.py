"""Products of few tokens on a GPU: what a measurement puts into force, and what it leaves to torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import kernels
from kernels.gpu import few, few_timing
from kernels.gpu.few import CANDIDATES, IN_FORCE, FewConfig, Form, Key
from kernels.gpu.timing import Call
from kernels.product import Product

CPU = torch.device("cpu")
QKV = Product("linear", "bfloat16", 48, 64)
DOWN = Product("linear_t", "bfloat16", 64, 32)


def plain(form: Form, x: Tensor, weight: Tensor, bias: Tensor | None, config: FewConfig) -> Tensor:
    return x @ (weight.t() if form == "linear" else weight)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Multiply by torch in place of Triton, in little memory, and forget what was chosen."""
    monkeypatch.setattr(few_timing, "MEMORY_BYTES", 1 << 15)
    monkeypatch.setattr(few_timing, "multiply", plain)
    yield
    IN_FORCE.clear()


def takes(*of_each: float) -> few_timing.Seconds:
    """Return a stopwatch: the time of torch's product, then of each config."""

    def seconds(ways: Sequence[Sequence[Call]], device: torch.device) -> list[float]:
        return list(of_each[: len(ways)])

    return seconds


def key(product: Product, tokens: int) -> Key:
    assert product.form != "quantized"
    return Key(product.form, torch.bfloat16, product.outputs, product.inputs, tokens)


def test_the_fastest_kernel_comes_into_force_if_it_beats_torch_by_the_margin() -> None:
    told = few_timing.choose([QKV, QKV, DOWN], CPU, takes(10.0, 9.9, 8.0, 9.0))
    for tokens in few.COUNTS:
        assert IN_FORCE[key(QKV, tokens)] == CANDIDATES["linear"][1]
        assert IN_FORCE[key(DOWN, tokens)] == CANDIDATES["linear_t"][1]
    assert len(told) == 6 and "linear bfloat16 48x64 x 1: FewConfig(" in told[0]
    IN_FORCE.clear()
    told = few_timing.choose([QKV], CPU, takes(10.0, 9.9, 9.8, 20.0))
    assert "x 1: torch;" in told[0] and not IN_FORCE


def test_a_kernel_that_gives_something_else_stays_out_of_force(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = CANDIDATES["linear"][0]

    def multiply(form: Form, x: Tensor, weight: Tensor, bias: None, config: FewConfig) -> Tensor:
        return plain(form, x, weight, bias, config) * (1.1 if config == wrong else 1.0)

    monkeypatch.setattr(few_timing, "multiply", multiply)
    with caplog.at_level(logging.WARNING):
        few_timing.choose([QKV], CPU, takes(10.0, 1.0, 2.0, 3.0))
    assert set(IN_FORCE.values()) == {CANDIDATES["linear"][1]}
    assert f"{wrong} of a linear product is off by" in caplog.text


def test_what_cannot_be_measured_is_told_and_stays_torchs(caplog: pytest.LogCaptureFixture) -> None:
    def fails(ways: Sequence[Sequence[Call]], device: torch.device) -> list[float]:
        raise RuntimeError("no graph")

    others = [
        Product.quantized(4, 64, 48, 64),
        Product("linear", "float32", 48, 64),
        Product("linear", "bfloat16", 48, 70),
        Product("linear", "bfloat16", 4800, 6400),
    ]
    with caplog.at_level(logging.WARNING):
        assert few_timing.choose([QKV], CPU, fails) == []
        assert few_timing.choose(others, CPU, takes(10.0, 1.0, 1.0, 1.0)) == []
        now = iter([0.0, 1.0, 9.0])
        told = few_timing.choose([QKV, DOWN], CPU, takes(10.0, 1.0, 2.0, 3.0), lambda: next(now))
    assert "linear bfloat16 48x64 of 1 tokens is torch's: no graph" in caplog.text
    assert len(told) == 2 and "lack of time" in told[1] and set(IN_FORCE) == {key(QKV, 1)}


def test_a_product_takes_what_is_in_force_for_its_tokens_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[tuple[int, FewConfig]]()

    def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None, config: FewConfig) -> Tensor:
        taken.append((len(x), config))
        return x @ weight.t()

    monkeypatch.setattr(few, "by_rows", by_rows)
    few_timing.choose([QKV], CPU, takes(10.0, 1.0, 2.0, 3.0))
    weight, other = torch.ones(48, 64).bfloat16(), torch.ones(32, 64).bfloat16()
    with kernels.use_backend("cuda"):
        for tokens in (1, 3, 4, 5, 0):
            assert kernels.linear(torch.ones(tokens, 64).bfloat16(), weight).shape == (tokens, 48)
        kernels.linear(torch.ones(1, 64).bfloat16(), other)
        kernels.linear(torch.ones(1, 65).bfloat16()[:, 1:], weight)  # not aligned as it was compiled for
        kernels.linear(torch.ones(1, 128).bfloat16()[:, ::2], weight)  # a row with gaps
        kernels.linear(torch.ones(1, 64).bfloat16(), torch.ones(64, 48).bfloat16().t())  # a column is one
    assert taken == [(count, CANDIDATES["linear"][0]) for count in (1, 3, 4)]


def test_kernels_that_a_table_may_choose_agree_with_plain_torch_in_the_interpreter() -> None:
    code = "import torch; from bench.kernels import checks; given = 'cuda', 'cpu', torch.float16; "
    code += "checks.check_products_of_few_tokens(*given); checks.check_decodes_of_every_config(*given)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
