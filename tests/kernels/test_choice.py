"""The choice of the kernels of products: the rule, what is measured, and the file between them."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels.cpu import timing
from kernels.cpu.choice import (
    COUNTS,
    TABLE,
    KernelName,
    Table,
    built_in,
    candidates,
    counts,
    decide,
    describe,
    of_dense,
    of_quantized,
)
from kernels.cpu.products import can_run, multiply
from kernels.cpu.products_few import few
from kernels.product import Product, parse_product

DENSE = Product("linear", "float32", 96, 64)
TURNED = Product("linear_t", "float32", 64, 96)
SHORT = Product("linear", "bfloat16", 96, 64)
CODES = Product.quantized(4, 64, 96, 64)
ALL = (DENSE, TURNED, CODES)


def pairs() -> list[timing.Pair]:
    return timing.missing_pairs(ALL, {})


# --------------------------------------------------------------------------- the rule


def test_the_fastest_kernel_is_chosen_but_not_for_a_little() -> None:
    times = {
        1: {"few": [10.0] * 4, "torch": [9.0] * 4},  # within what a measurement is worth
        2: {"few": [10.0] * 4, "torch": [2.0, 11.0, 11.0, 2.0]},  # the machine was busy
        4: {"few": [10.0] * 4, "torch": [5.0, 5.0, 30.0, 6.0]},
        12: {"few": [10.0] * 4, "lanes": [7.0] * 4, "torch": [9.0] * 4},
        64: {"lanes": [10.0] * 4, "torch": [3.0] * 4},
    }
    chosen = {1: "few", 2: "few", 4: "torch", 12: "lanes", 64: "torch"}
    assert decide({DENSE: times}) == {DENSE: chosen}  # type: ignore[dict-item]
    assert decide({}) == {}


def test_of_two_kernels_that_can_be_recorded_the_faster_is_chosen() -> None:
    times = {4: {"few": [10.0] * 4, "row": [9.0] * 4, "torch": [9.5] * 4}}
    assert decide({DENSE: times}) == {DENSE: {4: "row"}}  # type: ignore[dict-item]


def test_a_quantised_product_has_one_kernel_for_all_numbers_of_tokens() -> None:
    """The one that loses least beside the best of each number."""
    times: Any = {
        1: {"vnni": [1.0], "decode": [1.2]},
        4: {"vnni": [3.0], "decode": [3.0]},
        16: {"vnni": [6.0], "decode": [9.0]},
    }
    assert decide({CODES: times}) == {CODES: {1: "vnni", 4: "vnni", 16: "vnni"}}
    times[1]["vnni"] = [2.0]
    assert decide({CODES: times}) == {CODES: {1: "decode", 4: "decode", 16: "decode"}}
    del times[16]
    assert decide({CODES: times}) == {CODES: {}}  # the rest is measured first


def test_torch_must_save_time_in_the_step_as_a_whole() -> None:
    """One product of torch's, and the step cannot be recorded."""
    small = {1: {"few": [2.0] * 4, "torch": [1.0] * 4}}
    large = {1: {"few": [20.0] * 4, "torch": [20.0] * 4}}
    times: Any = {DENSE: small, TURNED: large}
    assert decide(times) == {DENSE: {1: "few"}, TURNED: {1: "few"}}
    large[1]["torch"] = [10.0] * 4
    assert decide(times) == {DENSE: {1: "torch"}, TURNED: {1: "torch"}}
    alone: Any = {1: {"torch": [20.0] * 4}}  # cannot be recorded anyway
    assert decide({DENSE: small, TURNED: alone}) == {DENSE: {1: "torch"}, TURNED: {1: "torch"}}  # type: ignore[dict-item]


@pytest.mark.parametrize("product", [DENSE, TURNED, SHORT, CODES])
@pytest.mark.parametrize("fixed", ["", "few", "lanes", "torch", "decode"])
def test_a_table_names_a_kernel_that_can_run_for_every_number_of_tokens(product: Product, fixed: str) -> None:
    table = Table()
    table.fix(fixed)
    for tokens in range(300):
        name = table.pick(*product, tokens)
        assert name in candidates(product, tokens)
        if fixed in candidates(product, tokens):
            assert name == fixed
        elif not fixed:
            assert name == built_in(product, tokens)


def test_numbers_of_tokens_between_two_measured_ones_go_by_the_larger() -> None:
    table = Table()
    others: dict[int, KernelName] = dict.fromkeys(COUNTS, "torch")
    table.adopt({DENSE: {**others, 4: "few", 32: "lanes"}})
    found = {tokens: table.pick(*DENSE, tokens) for tokens in (1, 2, 3, 4, 5, 16, 17, 32, 33, 96, 257)}
    assert found == {
        **dict.fromkeys((1, 2, 5, 16, 33, 96, 257), "torch"),
        **dict.fromkeys((3, 4), "few"),
        **dict.fromkeys((17, 32), "lanes"),
    }
    assert table.pick(*TURNED, 3) == "few"  # not measured: the rule
    table.forget()
    assert table.pick(*DENSE, 1) == "few"


def test_a_kernel_that_the_processor_lacks_is_refused_with_those_it_has() -> None:
    there_are = ", ".join((*of_dense(), *of_quantized()))
    for name in ("mkl", *{"amx", "vnni"}.difference(of_quantized())):
        with pytest.raises(ValueError, match=f"no kernel '{name}' .* on this processor; it has {there_are}"):
            kernels.configure(0, f"few, {name}")


def test_one_kernel_can_be_fixed_for_dense_weights_and_one_for_codes() -> None:
    table = Table()
    table.fix("few,decode")
    assert [table.pick(*product, 2) for product in ALL] == ["few", "few", "decode"]
    assert [table.fixed(product) for product in ALL] == ["few", "few", "decode"]
    table.fix("decode")
    assert [table.fixed(product) for product in ALL] == [None, None, "decode"]


def test_choices_are_told_by_ranges_of_tokens() -> None:
    assert describe({DENSE: {}}) == ["linear float32 96x64: few to 16, lanes to 256"]
    told = "linear float32 96x64: few to 1, torch to 2, few to 16, lanes to 128, torch to 256"
    assert describe({DENSE: {1: "few", 2: "torch", 256: "torch"}}) == [told]
    assert all(parse_product(str(product)) == product for product in ALL)


# --------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 9, 12, 16, 40, 65, 97, 200])
def test_every_kernel_that_may_be_chosen_gives_the_product(tokens: int, dtype: torch.dtype) -> None:
    for form, weight in (("linear", torch.randn(96, 64)), ("linear_t", torch.randn(64, 96))):
        x, weight = torch.randn(tokens, 64).to(dtype), weight.to(dtype)
        expected = x.double() @ (weight.t() if form == "linear" else weight).double()
        product = Product(form, str(dtype).removeprefix("torch."), 96, 64)  # type: ignore[arg-type]
        for name in candidates(product, tokens):
            assert can_run(name, form, x, weight)  # type: ignore[arg-type]
            made = multiply(name, form, x, weight)  # type: ignore[arg-type]
            torch.testing.assert_close(
                made.double(), expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_steady_product_has_the_same_bits_whatever_was_chosen_and_beside_any_tokens(
    dtype: torch.dtype,
) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((40, 400), (64, 400), (64,)))
    whole = kernels.steady_linear(x, weight, bias)
    try:
        for name in of_dense():
            TABLE.fix(name)
            for tokens in (1, 7, 16, 40):
                assert kernels.steady_linear(x[:tokens], weight, bias).equal(whole[:tokens])
    finally:
        TABLE.forget()


@pytest.mark.skipif("pairs" not in of_dense(), reason="the processor has no products of bfloat16")
@pytest.mark.parametrize("inputs", [16, 64, 336])  # whole lines, and half a line
def test_pairs_of_bfloat16_are_as_exact_as_wide_ones_whatever_the_number_of_tokens(inputs: int) -> None:
    x, weights = torch.randn(16, inputs).bfloat16(), torch.randn(2, 70, inputs).bfloat16()
    bias = torch.randn(70).bfloat16()
    expected = torch.einsum("tk,mnk->tmn", x.double(), weights.double()) + bias.double()
    together = few(x, weights, bias, by_pairs=True)
    for tokens in (1, 2, 3, 4, 7, 15):
        assert few(x[:tokens], weights, bias, by_pairs=True).equal(together[:tokens])
    errors = [float((made.double() - expected).abs().max()) for made in (together, few(x, weights, bias))]
    assert errors[0] <= 1.01 * errors[1] + 1e-6  # what the result's own rounding makes of them


@pytest.mark.parametrize("tokens", [9, 14, 65, 97, 193])
def test_many_tokens_are_multiplied_where_the_weights_lie(tokens: int) -> None:
    """Weights and inputs are parts of wider tensors; more inputs than are taken at a time."""
    x = torch.randn(tokens, 400)[:, 8:312]
    for form, wide in (("linear", torch.randn(80, 400)), ("linear_t", torch.randn(310, 160))):
        weight = wide[:, 16:320] if form == "linear" else wide[3:307, 32:112]
        expected = x.double() @ (weight.t() if form == "linear" else weight).double()
        assert can_run("lanes", form, x, weight)  # type: ignore[arg-type]
        made = multiply("lanes", form, x, weight)  # type: ignore[arg-type]
        torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fixed", ["few", "row", "lanes", "torch"])
def test_a_fixed_kernel_runs_all_that_it_can(fixed: str) -> None:
    TABLE.fix(fixed)
    for tokens in (1, 12, 40, 120):
        x, weight = torch.randn(tokens, 64), torch.randn(96, 64)
        torch.testing.assert_close(kernels.linear(x, weight), x @ weight.t(), rtol=1e-4, atol=1e-4)
    assert kernels.choose_products([DENSE], "m") == [f"{DENSE}: {fixed}, as the settings say"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_by_row_gives_the_same_bits(dtype: torch.dtype) -> None:
    weights = torch.randn(2, 70, 96).to(dtype)
    for tokens in (2, 3, 4):
        x = torch.randn(tokens, 96).to(dtype)
        assert few(x, weights, by_row=True).equal(few(x, weights))


# --------------------------------------------------------------------------- measurements and their file


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other process takes a processor, and there is time for all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "_interruptions", lambda: 0)
    monkeypatch.setattr(timing, "TURN_BYTES", 1 << 17)
    whole = timing.measure
    monkeypatch.setattr(timing, "measure", lambda pairs: whole(pairs, 100.0))


@pytest.mark.usefixtures("quiet_machine")
def test_every_candidate_is_timed_by_the_importance_of_the_number_of_tokens() -> None:
    for product, by_tokens in timing.measure(pairs()).times.items():
        assert list(by_tokens) == [n for n in timing.BY_IMPORTANCE if n in counts(product)]
        assert set(by_tokens) == set(counts(product))
        for tokens, seconds in by_tokens.items():
            assert set(seconds) == set(candidates(product, tokens))
            assert all(len(rounds) == timing.ROUNDS and min(rounds) > 0 for rounds in seconds.values())


@pytest.mark.parametrize(
    "product",
    [
        Product("linear", "float32", 200_000, 1024),
        Product("linear_t", "bfloat16", 1024, 50_000),
        Product.quantized(3, 128, 400_000, 512),
        Product("linear", "float32", 2816, 512),
        Product.quantized(4, 64, 2816, 512),
    ],
)
def test_a_turn_reads_the_same_bytes_whatever_the_product(product: Product) -> None:
    """Otherwise a matrix of many outputs would have the time of all others."""
    memory = timing.WeightMemory()
    for _ in range(12):  # more than the memory has: it begins again
        some = memory.take(product)
        read = sum(one.nbytes if isinstance(one, torch.Tensor) else one.codes.nbytes for one in some)
        assert 0.6 * timing.TURN_BYTES <= read <= timing.TURN_BYTES


@pytest.mark.parametrize(("outputs", "can_use_lanes"), [(4864, True), (8192, True), (8200, False)])
def test_a_part_of_a_matrix_is_measured_with_the_kernels_of_the_whole(
    outputs: int, can_use_lanes: bool
) -> None:
    product = Product("linear", "float32", outputs, 768)
    (part,) = timing.WeightMemory().take(product)
    assert isinstance(part, torch.Tensor) and part.shape[0] < outputs
    x = torch.ones(64, 768)
    assert can_run("lanes", "linear", x, part) is can_use_lanes
    assert can_run("lanes", "linear", x, torch.ones(outputs, 768)) is can_use_lanes


def test_measuring_ends_in_time_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "_interruptions", lambda: 0)
    monkeypatch.setattr(timing, "TURN_BYTES", 1 << 17)
    whole, asked = timing.measure, list[list[timing.Pair]]()

    def some(pairs: Any) -> timing.Measured:
        asked.append(list(pairs))
        now = iter(range(100_000))
        return whole(pairs, 1100, lambda: float(next(now)))

    monkeypatch.setattr(timing, "measure", some)
    products = (*ALL, *(Product.quantized(4, 64, 96 + 16 * more, 64) for more in range(1, 15)))
    with caplog.at_level(logging.INFO):
        first = timing.choose(products, "a model")
    assert 1 in first[DENSE] and 128 not in first[DENSE]
    assert "are left for the next start" in caplog.text
    while asked[-1]:
        known = timing.load(timing.choices_file("a model"), "a model")
        if known and not timing.missing_pairs(products, known):
            break
        assert len(asked) < 10
        timing.choose(products, "a model")
    assert all(len(later) < len(before) for before, later in itertools.pairwise(asked))
    last = timing.choose(products, "a model")
    assert {product: set(names) for product, names in last.items()} == {p: set(counts(p)) for p in products}
    assert last[DENSE][1] == first[DENSE][1]  # measured once


def test_rounds_in_which_the_machine_was_busy_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the rule holds, and the next start tries again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    count = itertools.count()
    monkeypatch.setattr(timing, "_interruptions", lambda: next(count))
    whole = timing.measure
    monkeypatch.setattr(timing, "TURN_BYTES", 1 << 17)
    whole(pairs(), 0.0)  # compiles
    monkeypatch.setattr(timing, "measure", lambda pairs: whole(pairs, 0.5))
    with caplog.at_level(logging.INFO):
        assert timing.choose(ALL, "a model") == {product: {} for product in ALL}
    assert "was busy" in caplog.text
    assert not list(tmp_path.glob("**/*.json"))
    assert TABLE.pick(*DENSE, 1) == "few"


@pytest.mark.usefixtures("quiet_machine")
def test_choices_are_measured_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    first = timing.choose(ALL, "a model")
    asked: list[timing.Pair] = []
    whole: Any = timing.measure

    def noted(pairs: Any) -> timing.Measured:
        asked.extend(pairs)
        measured: timing.Measured = whole(pairs)
        return measured

    monkeypatch.setattr(timing, "measure", noted)
    assert timing.choose(ALL, "a model") == first
    assert {product: TABLE.pick(*product, 1) for product in first} == {p: n[1] for p, n in first.items()}
    assert not asked
    timing.choose((*ALL, SHORT), "a model")  # another shape: only that
    assert {product for product, _ in asked} == {SHORT}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is damaged"),
        ("[1, 2]", "is damaged"),
        ('{"version": 1}', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        ({"machine": {"processor": "another"}}, "is of another machine or model"),
        ({"model": "another"}, "is of another machine or model"),
        ({"version": 99}, "is of another machine or model"),
        ({"choices": {"linear float32 96x64": {"1": "decode"}}}, "is damaged"),
        ({"choices": {"quantized int4/64 96x64": {"1": "few"}}}, "is damaged"),
        ({"choices": {"linear float32 96x64": {"64": "few"}}}, "is damaged"),
        ({"choices": {"matmul": {}}}, "is damaged"),
        ({"choices": []}, "is damaged"),
    ],
)
@pytest.mark.usefixtures("quiet_machine")
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning(
    text: str | bytes | dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = timing.choices_file("a model")
    timing.choose(ALL, "a model")
    good = json.loads(path.read_text())
    if isinstance(text, dict):
        text = json.dumps(good | text)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        choices = timing.choose(ALL, "a model")
    assert why in caplog.text
    assert choices.keys() == set(ALL)
    assert json.loads(path.read_text())["model"] == "a model"  # mended


@pytest.mark.usefixtures("quiet_machine")
def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert timing.choose(ALL, "a model").keys() == set(ALL)
    assert "cannot be" in caplog.text
