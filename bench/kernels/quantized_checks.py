"""Checks of products with quantised weights against their oracle.

They cover every number of bits, group, split and dtype, and some numbers of units and tokens, and are plain
functions as in `bench.kernels.checks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import get_args
from unittest import mock

import torch

import kernels
from bench.kernels.quantized_weights import quantized
from kernels.packing import CODE_BITS
from kernels.quantized import QuantizedWeight, Split
from kernels.routing import Routing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (32, 64, 96, 192)  # half a tile, a tile, no whole tiles, all inputs of a unit
INPUTS = 192
OUTPUTS = (48, 50, 3)  # outputs of a unit: whole vectors on the CPU, and others
TOKENS = (0, 1, 3, 6, 15, 16, 70)

# Units, inputs of a unit, group and split of weights whose rows lie on 16 bytes.
TILED: tuple[tuple[int, int, int, Split], ...] = (
    (1, 768, 64, "outputs"),
    (2, 256, 64, "inputs"),
    (2, 512, 128, "outputs"),
    (1, 384, 64, "inputs"),
    (1, 384, 192, "outputs"),
)

AssertClose = Callable[[torch.Tensor, torch.Tensor], None]


def quantized_checks(
    backend: str, device: str, assert_close: AssertClose
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what should hold, and a call that raises AssertionError if it does not."""
    is_slow = is_interpreted(backend, device)  # thousands of times slower: every corner once
    for bits, group, split in itertools.product(CODE_BITS, GROUPS, get_args(Split)):
        for dtype in DTYPES:
            is_corner = (dtype, group) in ((torch.float32, 96), (torch.bfloat16, 64))
            if is_slow and not is_corner:
                continue
            tokens = (1, 17) if is_slow else TOKENS
            check = partial(check_quantized, backend, device, assert_close, bits, group, split, dtype, tokens)
            yield f"product with {bits} bits in groups of {group}, split by {split}, {dtype}", check
    for tokens_of_all in (5,) if is_slow else (5, 33, 300):
        check = partial(check_many_inputs, backend, device, assert_close, tokens_of_all)
        yield f"product with bits of many inputs, {tokens_of_all} tokens", check
    for bits in CODE_BITS[:1] if is_slow else CODE_BITS:
        yield f"experts with {bits} bits", partial(check_experts, backend, device, assert_close, bits)
    if backend == "cuda":
        yield "product with bits in pieces", partial(check_pieces, device, assert_close)
        for bits, case in itertools.product(CODE_BITS, TILED):
            if is_slow and TILED.index(case) % len(CODE_BITS) != CODE_BITS.index(bits):
                continue
            yield (
                f"product with {bits} bits on 16 bytes, {case}",
                partial(check_tiles, device, assert_close, bits, *case),
            )


def is_interpreted(backend: str, device: str) -> bool:
    return backend == "cuda" and device == "cpu"


def check_quantized(
    backend: str,
    device: str,
    assert_close: AssertClose,
    bits: int,
    group: int,
    split: Split,
    dtype: torch.dtype,
    tokens: tuple[int, ...],
) -> None:
    for units, outputs in ((1, OUTPUTS[0]), (3, OUTPUTS[1]), (2, OUTPUTS[2])):
        weight, _ = quantized(
            units=units,
            unit_outputs=outputs,
            unit_inputs=INPUTS,
            bits=bits,
            group=group,
            split=split,
            is_scaled=units != 1,
        )
        # In the interpreter, where every call counts, one of the three is with biases.
        biases = (units == 3,) if is_interpreted(backend, device) else (False, True)
        for count in tokens:
            check_product(backend, device, assert_close, weight, dtype, count, biases)


def check_product(
    backend: str,
    device: str,
    assert_close: AssertClose,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    tokens: int,
    biases: tuple[bool, ...] = (False, True),
    size: float = 0.5,
) -> None:
    """Check a product with and without `biases`; most results are of `size`, the tolerance is that of 1."""
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, weight.num_inputs + 8, generator=random)[:, 8:]  # rows lie apart
    x = (x * size / weight.num_inputs**0.5).to(dtype)
    bias = torch.randn(weight.num_outputs, generator=random).to(dtype)
    scaled = x.double() if weight.input_scale is None else x.double() * weight.input_scale.double()
    expected = scaled @ kernels.dequantize(weight).double().t()
    there = _moved(weight, device)
    for has_bias in biases:
        with kernels.use_backend(backend):
            added = bias.to(device) if has_bias else None
            result = kernels.quantized_linear(x.to(device), there, added)
        assert result.dtype == dtype and result.shape == expected.shape
        if tokens:
            assert_close(result, expected + bias.double() if has_bias else expected)


def check_many_inputs(backend: str, device: str, assert_close: AssertClose, tokens: int) -> None:
    """Check many inputs: several pieces on the CPU, several splits on a GPU.

    300 tokens are several blocks.
    """
    for bits, split in zip(CODE_BITS, itertools.cycle(get_args(Split)), strict=False):
        weight, _ = quantized(
            units=2, unit_outputs=80, unit_inputs=1088, bits=bits, group=64, split=split, is_scaled=True
        )
        # A sum of 2000 products in float32 is off by 50 roundings or so, not by two.
        check_product(backend, device, assert_close, weight, torch.float32, tokens, size=0.1)


def check_experts(backend: str, device: str, assert_close: AssertClose, bits: int) -> None:
    """Check products with quantised experts, all of them and a rank's; a few have more than 16 tokens."""
    weight, _ = quantized(units=6, unit_outputs=50, unit_inputs=INPUTS, bits=bits, group=64)
    there, random = _moved(weight, device), torch.Generator().manual_seed(bits)
    counts = (9,) if is_interpreted(backend, device) else (1, 9, 16, 70)
    for tokens, is_by_place, dtype in itertools.product(counts, (False, True), DTYPES[:2]):
        routing = kernels.route.reference(torch.randn(tokens, 6, generator=random), 2, True)
        x = torch.randn(2 * tokens if is_by_place else tokens, INPUTS - 16, generator=random).to(dtype) / 8
        bias = torch.randn(6, 50, generator=random).to(dtype) if is_by_place else None
        expected = kernels.grouped_quantized_linear.reference(x, weight, routing, is_by_place, bias)
        moved = Routing(*(getattr(routing, field.name).to(device) for field in fields(routing)))
        with kernels.use_backend(backend):
            added = None if bias is None else bias.to(device)
            made = kernels.grouped_quantized_linear(x.to(device), there, moved, is_by_place, added)
        assert_close(made, expected)
        part = replace(weight, codes=weight.codes[2:4], scales=weight.scales[2:4], zeros=weight.zeros[2:4])
        here = slice(*routing.bounds[[2, 4]].tolist())
        with kernels.use_backend(backend):
            own = _moved(part, device), moved.part(slice(2, 4))
            added = None if bias is None else bias[2:4].to(device)
            made = kernels.grouped_quantized_linear(x.to(device), *own, is_by_place, added)
        assert_close(made[here], expected[here])


def check_tiles(
    device: str, assert_close: AssertClose, bits: int, units: int, inputs: int, group: int, split: Split
) -> None:
    """Check weights whose rows lie on 16 bytes, with as many tokens as each config takes, in every form."""
    from kernels.gpu import quantized as gpu
    from kernels.gpu.product_configs import TABLE, ProductConfig

    weight, _ = quantized(
        units=units,
        unit_outputs=70,
        unit_inputs=inputs,
        bits=bits,
        group=group,
        split=split,
        is_scaled=units > 1,
        gap=16,
        level_gap=16 if units == 1 else 15,  # words of four, two or one
    )
    tiles = gpu.tiles_of(_moved(weight, device))
    assert tiles is not None and tiles.has_words == (group != 192)
    every = (1, *(most + 1 for most, _ in TABLE[bits]))
    for tokens in every[:: len(every) - 1] if device == "cpu" else every:
        for dtype in DTYPES[1:]:
            check_product(
                "cuda", device, assert_close, weight, dtype, min(tokens, 70) if device == "cpu" else tokens
            )
    x = torch.randn(3, weight.num_inputs, dtype=torch.bfloat16).to(device)
    there = _moved(weight, device)
    expected = gpu.through_scratch(x, there, None).cpu()
    # Weights in registers, scaled and not, and through shared memory.
    forms = (TABLE[bits][-1][1], ProductConfig(8, 32, 2, 2, 2, 2), ProductConfig(64, 128, 2, 4, 2, 2, True))
    for config in forms:
        made = [gpu.multiply_tiles(x, there, None, tiles, config) for _ in range(2)]
        assert torch.equal(*made)
        assert_close(made[0], expected)


def check_pieces(device: str, assert_close: AssertClose) -> None:
    """Check a matrix that does not fit the scratch memory."""
    from kernels.gpu import quantized as gpu

    weight, _ = quantized(units=3, unit_outputs=50, unit_inputs=64, bits=4, group=32)
    with mock.patch.object(gpu, "SCRATCH_BYTES", 70 * 64 * 4):
        check_product("cuda", device, assert_close, weight, torch.float32, 33)


def _moved(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    """Copy to the device with its strides."""
    codes, scales, zeros = (
        torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device).copy_(part)
        for part in (weight.codes, weight.scales, weight.zeros)
    )
    input_scale = None if weight.input_scale is None else weight.input_scale.to(device)
    return QuantizedWeight(codes, scales, zeros, weight.bits, weight.group, weight.split, input_scale)
