"""Packing, rounding to nearest and the shape of a quantised weight."""

from __future__ import annotations

import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch

import kernels
from bench.kernels.checks import assert_close
from bench.kernels.quantized_checks import quantized_checks
from bench.kernels.quantized_weights import quantized
from kernels.cpu import quantized as cpu_quantized
from kernels.cpu.choice import TABLE, of_quantized
from kernels.cpu.quantized_bytes import can_multiply
from kernels.packing import CODE_BITS
from kernels.product import Product
from kernels.quantized import QuantizedWeight


@pytest.mark.parametrize("bits", CODE_BITS)
def test_unpacking_gives_back_every_code(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, 192), dtype=torch.uint8)
    packed = kernels.pack(codes, bits)
    assert packed.shape == (3, 5, 192 * bits // 8)
    assert torch.equal(kernels.unpack(packed, bits), codes)
    wide = torch.zeros(3, 9, packed.shape[2], dtype=torch.uint8)
    wide[:, ::2] = packed
    assert torch.equal(kernels.unpack(wide[:, ::2], bits), codes)  # any outer strides


@pytest.mark.parametrize("bits", CODE_BITS)
def test_packing_gives_back_every_byte(bits: int) -> None:
    packed = torch.randint(0, 256, (7, 64 * bits // 8 * 3), dtype=torch.uint8)
    assert torch.equal(kernels.pack(kernels.unpack(packed, bits), bits), packed)


@pytest.mark.parametrize(
    ("bits", "inputs", "group"), [*itertools.product(CODE_BITS, (64, 96, 200), (32, 64, 96))]
)
def test_a_rounded_weight_is_within_half_a_step(bits: int, inputs: int, group: int) -> None:
    w = torch.randn(12, inputs) * torch.logspace(-10, 1, 12)[:, None]
    codes, scales, zeros = kernels.quantize_rtn(w, bits, group)
    groups = -(-inputs // group)
    assert codes.shape == w.shape and scales.shape == zeros.shape == (12, groups)
    assert int(codes.max()) < 2**bits
    steps = scales.float().repeat_interleave(group, 1)[:, :inputs]
    values = (codes.float() - zeros.float().repeat_interleave(group, 1)[:, :inputs]) * steps
    # Half a step for the code, and at the ends what float16 took off the scale.
    assert bool(((values - w).abs() <= steps * (0.5 + 2**bits * 2**-11)).all())
    # A step is no longer than the group's range needs, but for a unit in float16's last place.
    spread = w.amax(-1).clamp(min=0) - w.amin(-1).clamp(max=0)
    assert bool((scales.amax(-1) <= spread / (2**bits - 1) * (1 + 2**-11) + 2**-24).all())


@pytest.mark.parametrize("bits", CODE_BITS)
def test_zeros_stay_exactly_zero(bits: int) -> None:
    w = torch.randn(5, 256)
    w[4] *= 1e-9  # less than half of the smallest float16
    w[1] = 0.0  # a padding row
    w[2, 64:128] = 0.0  # a padding group
    w[3, 130:] = 0.0  # padding inside a group
    w[0].abs_()  # zero outside the range of the values
    codes, scales, zeros = kernels.quantize_rtn(w, bits, 64)
    weight = QuantizedWeight(kernels.pack(codes, bits)[None], scales[None], zeros[None], bits, 64)
    assert bool((kernels.dequantize(weight)[w == 0] == 0).all())
    assert bool((scales[4] == 2**-24).all())
    assert not codes[1].any() and not scales[1].any() and not zeros[1].any()
    assert torch.equal(kernels.quantized_linear(torch.randn(3, 256), weight)[:, 1], torch.zeros(3))


def test_weights_that_no_float16_scale_holds_are_refused() -> None:
    for bad in (float("inf"), float("nan"), 3e38):
        w = torch.zeros(2, 64)
        w[1, 3] = bad
        with pytest.raises(
            ValueError, match="cannot be quantised to 4 bits: a float16 scale holds 982560 at"
        ):
            kernels.quantize_rtn(w, 4, 64)


@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_units_are_put_together_in_order(split: Any) -> None:
    weight, w = quantized(units=3, unit_outputs=5, unit_inputs=128, bits=8, group=64, split=split)
    assert (
        (weight.num_outputs, weight.num_inputs) == w.shape == ((15, 128) if split == "outputs" else (5, 384))
    )
    assert float((kernels.dequantize(weight) - w).abs().max()) < 0.05
    run = QuantizedWeight(weight.codes[1:], weight.scales[1:], weight.zeros[1:], 8, 64, split)
    part = w[5:] if split == "outputs" else w[:, 128:]
    assert float((kernels.dequantize(run) - part).abs().max()) < 0.05  # a run of units is a shard


IN_BYTES = [name for name in of_quantized() if name != "decode"]


@pytest.mark.parametrize("name", of_quantized())
@pytest.mark.parametrize(
    "check", [pytest.param(check, id=name) for name, check in quantized_checks("cpu", "cpu", assert_close)]
)
def test_each_kernel_of_quantised_products_agrees_with_the_oracle(
    name: str, check: Callable[[], None]
) -> None:
    TABLE.fix(name)
    check()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are processors of x86-64")
@pytest.mark.parametrize("features", ["+avx2,+fma,+f16c", "+avx2,+fma,+f16c,+avxvnni"])
def test_the_kernels_for_other_processors_agree_with_their_oracles(features: str) -> None:
    """A processor with AVX2 alone, and one with products of bytes in vectors of 256 bits."""
    has_dots = "avxvnni" in features
    if has_dots and not llvm.get_host_cpu_features().get("avxvnni"):
        pytest.skip("the processor has no AVX-VNNI")
    code = f"""
from bench.kernels.checks import assert_close, dense_checks
from bench.kernels.quantized_checks import quantized_checks
from kernels.cpu.choice import of_quantized
assert of_quantized() == {("vnni", "decode") if has_dots else ("decode",)}, of_quantized()
for name, check in quantized_checks("cpu", "cpu", assert_close):
    check()
for name, check in dense_checks("cpu", "cpu"):
    if "product" in name:
        check()
"""
    # The compiler takes its target when it is imported, so it needs a process of its own.
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(not IN_BYTES, reason="the processor has no products of bytes")
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(
    ("units", "unit_outputs", "unit_inputs", "group", "split"),
    [(1, 16, 64, 64, "outputs"), (3, 17, 192, 192, "outputs"), (2, 100, 1088, 64, "inputs")],
)
def test_a_product_of_bytes_is_the_plain_one_whatever_the_number_of_tokens(
    bits: int, units: int, unit_outputs: int, unit_inputs: int, group: int, split: Any
) -> None:
    weight, _ = quantized(
        units=units,
        unit_outputs=unit_outputs,
        unit_inputs=unit_inputs,
        bits=bits,
        group=group,
        split=split,
        is_scaled=True,
    )
    x, bias = torch.randn(16, weight.num_inputs), torch.randn(weight.num_outputs)
    assert can_multiply(x, weight)
    made = {name: [_product(name, x[:tokens], weight, bias) for tokens in range(1, 17)] for name in IN_BYTES}
    for products in made.values():
        for tokens, product in enumerate(products, 1):
            assert torch.equal(product, products[15][:tokens])
            assert torch.equal(product, made[IN_BYTES[0]][tokens - 1])  # AMX and vectors agree
    for tokens, product in enumerate(made[IN_BYTES[0]], 1):
        expected = _product("decode", x[:tokens], weight, bias)
        size = expected.norm() / expected.numel() ** 0.5
        assert float((product - expected).abs().max() / size) < 1e-5


@pytest.mark.parametrize("name", of_quantized())
def test_products_with_scales_that_float16_stores_coarsely_agree(name: str) -> None:
    codes, scales, zeros = kernels.quantize_rtn(torch.randn(144, 128) * 1e-5, 8, 64)
    assert float(scales.max()) < 2**-14
    weight = QuantizedWeight(kernels.pack(codes, 8)[None], scales[None], zeros[None], 8, 64)
    x = torch.randn(5, 128)
    expected = x @ kernels.dequantize(weight).T
    torch.testing.assert_close(_product(name, x, weight, torch.zeros(144)), expected, rtol=1e-4, atol=1e-8)


def _product(name: str, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor) -> torch.Tensor:
    TABLE.fix(name)
    return kernels.quantized_linear(x, weight, bias)


def test_the_chosen_kernel_multiplies_all_numbers_of_tokens_up_to_16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = quantized(units=1, unit_outputs=128, unit_inputs=64, bits=8, group=64)
    taken: list[str] = []

    def noted(name: str, *args: Any) -> torch.Tensor:
        taken.append(name)
        return multiply(name, *args)

    multiply: Any = cpu_quantized._multiply
    monkeypatch.setattr(cpu_quantized, "_multiply", noted)
    for chosen in of_quantized():
        TABLE.adopt({Product.quantized(8, 64, 128, 64): dict.fromkeys((1, 4, 16), chosen)})
        taken.clear()
        for tokens in (1, 3, 7, 16, 17, 200):
            kernels.quantized_linear(torch.randn(tokens, 64), weight)
        assert taken == [chosen] * 4 + ["decode"] * 2


@pytest.mark.parametrize("bits", CODE_BITS)
def test_one_bad_input_spoils_its_own_token_only(bits: int) -> None:
    weight, _ = quantized(units=1, unit_outputs=144, unit_inputs=128, bits=bits, group=64)
    x = torch.randn(4, 128)
    whole = kernels.quantized_linear(x, weight)
    x[1, 3], x[2, 7] = float("inf"), float("nan")
    spoilt = kernels.quantized_linear(x, weight)
    assert torch.equal(spoilt[[0, 3]], whole[[0, 3]])
    assert not spoilt[[1, 2]].isfinite().any()
    x[1:] = torch.tensor([0.0, 1e-40, 3e38])[:, None]
    extremes = kernels.quantized_linear(x, weight)
    assert bool((extremes[1] == 0).all()) and float(extremes[2].abs().max()) < 1e-36
    assert torch.equal(extremes[0], whole[0])


U8, F16 = torch.uint8, torch.float16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, f"codes of 9 bits cannot be packed; use one of {', '.join(map(str, CODE_BITS))}"),
        ({"split": "rows"}, "split is 'rows'; it must be 'outputs' or 'inputs'"),
        ({"group": 48}, "groups of 48 do not fit 128 inputs of a unit; a group is a multiple of 32"),
        ({"group": 96}, "groups of 96 do not fit 128 inputs"),
        ({"group": 0}, "groups of 0 do not fit 128 inputs"),
        ({"codes": torch.zeros(2, 6, 60, dtype=U8)}, "60 bytes of codes to an output are no whole tiles"),
        ({"codes": torch.zeros(6, 64, dtype=U8)}, "codes are torch.uint8 [6, 64] with strides (64, 1)"),
        ({"codes": torch.zeros(2, 6, 64)}, "codes are torch.float32 [2, 6, 64]"),
        ({"scales": torch.zeros(2, 6, 2)}, "scales are torch.float32 [2, 6, 2]"),
        (
            {"scales": torch.zeros(2, 6, 4, dtype=F16)},
            "scales are [2, 6, 4]; codes in groups of 64 need [2, 6, 2]",
        ),
        (
            {"zeros": torch.zeros(2, 5, 2, dtype=U8)},
            "zeros are [2, 5, 2]; codes in groups of 64 need [2, 6, 2]",
        ),
        ({"zeros": torch.zeros(2, 6, 4, dtype=U8)[..., ::2]}, "with strides (24, 4, 2)"),
        ({"input_scale": torch.ones(3)}, "input_scale is [3]; the weight has 128 inputs"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "codes": torch.zeros(2, 6, 64, dtype=U8),
        "scales": torch.zeros(2, 6, 2, dtype=F16),
        "zeros": torch.zeros(2, 6, 2, dtype=U8),
        "bits": 4,
        "group": 64,
    }
    QuantizedWeight(**fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantizedWeight(**fields | change)


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="100 codes do not fill tiles of 64; pad them"):
        kernels.pack(torch.zeros(100, dtype=U8), 4)
    with pytest.raises(ValueError, match="code 8 does not fit 3 bits; the largest is 7"):
        kernels.pack(torch.full((64,), 8, dtype=U8), 3)
    with pytest.raises(ValueError, match="100 bytes are no whole tiles of 3-bit codes, which have 24 bytes"):
        kernels.unpack(torch.zeros(100, dtype=U8), 3)


def test_a_product_with_unfit_tensors_is_refused_by_name() -> None:
    weight, _ = quantized(units=2, unit_outputs=6, unit_inputs=128, bits=4, group=64, split="inputs")
    with pytest.raises(ValueError, match=re.escape("x is [3, 128]; the weight takes [tokens, 256]")):
        kernels.quantized_linear(torch.zeros(3, 128), weight)
    with pytest.raises(ValueError, match=re.escape("bias is [12]; the weight has 6 outputs")):
        kernels.quantized_linear(torch.zeros(3, 256), weight, torch.zeros(12))
