"""Checks of every kernel against its oracle, over a sweep.

They are plain functions, so that a machine with a GPU and nothing but torch and triton can run them too
(`bench/gpu/kernels.py`).

    python -m bench.kernels.checks BACKEND DEVICE [PART]

BACKEND: cpu, cuda (Triton; with TRITON_INTERPRET=1 on cpu). PART: one of PARTS.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

import kernels
from bench.kernels.quantized_checks import quantized_checks
from kernels import AttentionPlan, kv_codes
from kernels.examples import Sizes
from kernels.kv_codes import SCALE_BYTES
from kernels.noise import gumbel
from kernels.registry import KERNELS, KernelCall
from kernels.routing import Routing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Two roundings of the last bit of values around 1; the interpreter truncates to bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
# A GPU's 2^x and division are off by up to 2^-22 of the result (PTX ISA: ex2.approx, div.full). In attention
# the weights, their sum and the quotient are, each times values of up to 4: 3 * 2^-20 beside the roundings.
GPU_TOLERANCE = TOLERANCE | {torch.float32: 2e-6 + 3 * 2**-20}

Check = tuple[str, Callable[[], None]]


@dataclass(frozen=True)
class AttentionCase:
    """A call of attention; `lengths` are the new tokens and the context of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_raw: bool = False  # the cache is [B, 2, bt, H, D], seen through a permuted view


MIXED = ((1, 7), (9, 9), (1, 130), (20, 53), (3, 3), (1, 1))
CASES = (
    AttentionCase("decodes and chunks in one call", MIXED),
    AttentionCase("the first token of a sequence", ((1, 1),)),
    AttentionCase("decodes and an empty row", ((1, 70), (1, 0), (1, 5)), window=20),
    AttentionCase("chunks, a decode and empty sequences", ((20, 30), (1, 9), (3, 3), (0, 0), (0, 0))),
    AttentionCase("an empty row with a sink", ((1, 70), (1, 0)), has_sinks=True),
    AttentionCase("one decode over a split context", ((1, 700),), head_dim=128),
    AttentionCase("a chunk that continues a long context", ((33, 300),), num_heads=2, num_kv_heads=1),
    AttentionCase("eight heads to a KV head", MIXED, num_heads=8, num_kv_heads=1, head_dim=32),
    AttentionCase("seven heads to a KV head", MIXED, num_heads=14, num_kv_heads=2),
    AttentionCase("a KV head each", MIXED, num_heads=3, num_kv_heads=3, head_dim=32),
    AttentionCase("heads of 128, blocks of 32", MIXED, head_dim=128, block_tokens=32),
    AttentionCase("heads of 80, no power of two", MIXED, head_dim=80, block_tokens=8),
    AttentionCase("blocks of 5 tokens", MIXED, block_tokens=5),
    AttentionCase("a sliding window", MIXED, window=20),
    AttentionCase("a window of one token", MIXED, window=1),
    AttentionCase("a window over blocks of 8", ((1, 90), (40, 90), (5, 6)), block_tokens=8, window=17),
    AttentionCase("another order of the cache", MIXED, is_raw=True, window=30),
    AttentionCase("heads too small for vectors", MIXED, head_dim=8),
    AttentionCase("capped scores", MIXED, softcap=2.0, window=20),
    AttentionCase("sinks", MIXED, has_sinks=True, window=20),
    AttentionCase("sinks and caps over a split context", ((1, 700), (20, 60)), softcap=1.5, has_sinks=True),
)


PARTS = ("all", "dense", "quantized")


def checks(backend: str, device: str, part: str = "all") -> Iterator[Check]:
    """Yield what should hold, and a call that raises AssertionError if it does not."""
    if part != "quantized":
        yield from dense_checks(backend, device)
    if part != "dense":
        yield from quantized_checks(backend, device, assert_close)


def dense_checks(backend: str, device: str) -> Iterator[Check]:
    for case, dtype in itertools.product(CASES, DTYPES):
        if case is not CASES[0] and dtype == torch.float16:
            continue  # bfloat16 takes the same ways; this keeps the interpreter's run short
        yield f"attention: {case.name}, {dtype}", partial(check_attention, backend, device, case, dtype)
    for case, dtype in itertools.product(CASES, DTYPES):
        if not case.is_raw and (case is CASES[0] or dtype == torch.float32):
            name = f"attention to codes: {case.name}, {dtype}"
            yield name, partial(check_attention_to_codes, backend, device, case, dtype)
    for call, dtype in itertools.product(KERNELS, DTYPES):
        name = f"examples of {call.reference.__name__}, {dtype}"
        yield name, partial(check_examples, backend, device, call, dtype)
    for check, dtype in itertools.product(ROW_CHECKS, DTYPES):
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield f"{name}, {dtype}", partial(check, backend, device, dtype)


def check_examples(backend: str, device: str, call: KernelCall[Any, Any], dtype: torch.dtype) -> None:
    """Compare a kernel with its plain torch on the arguments that it is declared with, in small."""
    random = torch.Generator(device).manual_seed(0)
    sizes = Sizes(
        dtype=dtype,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_tokens=16,
        hidden_size=128,
        intermediate_size=192,
        has_codes=True,
        make=partial(torch.randn, generator=random),
    )
    with torch.device(device):
        for arguments in call.examples(sizes):
            wanted = deepcopy(arguments)  # kernels may write to their arguments
            expected = call.reference(*wanted)
            with kernels.use_backend(backend):
                made = call(*arguments)
            for result, should_be in zip((made, *arguments), (expected, *wanted), strict=True):
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    assert_close(result, should_be.cpu())


def check_attention(backend: str, device: str, case: AttentionCase, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    plan, num_blocks = plan_of(case, random)
    shape = (num_blocks, case.num_kv_heads, 2, case.block_tokens, case.head_dim)
    if case.is_raw:
        shape = (num_blocks, 2, case.block_tokens, case.num_kv_heads, case.head_dim)
    # What no sequence owns is NaN: reading past a context shows.
    kv = torch.randn(shape, generator=random)
    kv = kv.permute(0, 3, 1, 2, 4) if case.is_raw else kv
    _hide_unowned(kv, plan)
    tokens = int(plan.cu_seqlens_q[-1])
    # Rows of a wider buffer, as in the output of one fused projection.
    q = torch.randn(tokens, case.num_heads + 1, case.head_dim, generator=random)[:, 1:].to(dtype)
    kv = kv.to(dtype)
    _compare_attention(backend, device, case, q, kv, plan)


def check_decodes_of_every_config(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check the shapes of programs of a GPU's decodes that are no other check's, split and not."""
    if backend != "cuda" or dtype != (torch.bfloat16 if device == "cuda" else torch.float16):
        return  # the interpreter takes long for bfloat16
    from kernels.gpu import attention, attention_configs  # Triton is not on every machine

    configs = {replace(config, waves=2) for config in attention_configs.DECODE_CANDIDATES}
    for lengths in (((1, 130), (1, 0), (1, 40)), ((1, 600),)):  # in one split, and in several
        case = AttentionCase("decodes", lengths, num_heads=4, num_kv_heads=1, window=500)
        plan, num_blocks = plan_of(case, torch.Generator().manual_seed(1))
        kv = _randn(num_blocks, case.num_kv_heads, 2, case.block_tokens, case.head_dim, dtype=dtype)
        q, on_device = _randn(len(lengths), case.num_heads, case.head_dim, dtype=dtype), plan_on(device, plan)
        expected = kernels.paged_attention.reference(q, kv, plan, 0.1, None, case.window)
        for config in configs:
            out = torch.empty_like(q, device=device)
            shapes = attention_configs.CHUNKS[0], config
            attention.attend(q.to(device), kv.to(device), on_device, 0.1, out, *shapes, case.window)
            assert_close(out, expected)


def check_attention_to_codes(backend: str, device: str, case: AttentionCase, dtype: torch.dtype) -> None:
    """Compare attention to a cache in 8 bits, and with attention to the numbers that were stored."""
    random = torch.Generator().manual_seed(1)
    plan, num_blocks = plan_of(case, random)
    shape = (num_blocks, case.num_kv_heads, 2, case.block_tokens)
    numbers = torch.randn(*shape, case.head_dim, generator=random) * torch.rand(*shape, 1, generator=random)
    _hide_unowned(numbers, plan)
    kv = torch.full((*shape, case.head_dim + SCALE_BYTES), 0x7F, dtype=torch.int8)  # scales of 3e38
    owned = ~numbers[:, 0, 0, :, 0].isnan()
    slots = owned.flatten().nonzero()[:, 0]
    keys, values = numbers.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, slots].to(dtype)
    kernels.store_kv.reference(keys, values, kv, slots)
    tokens = int(plan.cu_seqlens_q[-1])
    q = torch.randn(tokens, case.num_heads, case.head_dim, generator=random).to(dtype)
    result = _compare_attention(backend, device, case, q, kv, plan)
    exact = kernels.paged_attention.reference(
        *(q, numbers.to(dtype), plan, case.head_dim**-0.5, None, case.window, case.softcap),
        sinks_of(case, dtype),
    )
    # A code is off by half a step, 1/254 of the largest number of its row, 4 at most.
    assert (result.cpu().double() - exact.double()).abs().max() < 0.05


def _compare_attention(
    backend: str, device: str, case: AttentionCase, q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    scale = case.head_dim**-0.5
    sinks = sinks_of(case, q.dtype)
    expected = kernels.paged_attention.reference(
        q, kv, plan, scale, sliding_window=case.window, softcap=case.softcap, sinks=sinks
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    with kernels.use_backend(backend):
        result = kernels.paged_attention(
            q.to(device),
            _moved(kv, device),
            plan_on(device, plan),
            scale,
            out=out,
            sliding_window=case.window,
            softcap=case.softcap,
            sinks=None if sinks is None else sinks.to(device),
        )
    assert result is out
    assert_close(result, expected)
    return result


def sinks_of(case: AttentionCase, dtype: torch.dtype) -> torch.Tensor | None:
    random = torch.Generator().manual_seed(2)
    return torch.randn(case.num_heads, generator=random).to(dtype) if case.has_sinks else None


def plan_of(case: AttentionCase, random: torch.Generator) -> tuple[AttentionPlan, int]:
    """Return a plan whose blocks are in shuffled order, and the number of blocks, some unowned."""
    new = torch.tensor([length for length, _ in case.lengths])
    contexts = torch.tensor([context for _, context in case.lengths])
    blocks = -(-contexts // case.block_tokens)
    num_blocks = int(blocks.sum()) + 3
    ids = torch.randperm(num_blocks, generator=random).int()
    table = torch.full((len(new), int(blocks.max())), -1, dtype=torch.int32)
    for seq, part in enumerate(ids[: int(blocks.sum())].split(blocks.tolist())):
        table[seq, : len(part)] = part
    positions = torch.cat(
        [torch.arange(c - n, c) for n, c in zip(new.tolist(), contexts.tolist(), strict=True)]
    )
    owners = torch.repeat_interleave(torch.arange(len(new)), new)
    slots = table[owners, positions // case.block_tokens].long() * case.block_tokens
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()])
    plan = AttentionPlan(
        bounds,
        contexts.int(),
        table,
        slots + positions % case.block_tokens,
        positions,
        int(new.max()),
        int(contexts.max()),
    )
    return plan, num_blocks


def plan_on(device: str, plan: AttentionPlan) -> AttentionPlan:
    """Return the plan on another device, without the values that backends derived."""
    moved = {
        field.name: value.to(device)
        for field in fields(plan)
        if isinstance(value := getattr(plan, field.name), torch.Tensor)
    }
    return replace(plan, derived={}, **moved)


def _hide_unowned(kv: torch.Tensor, plan: AttentionPlan) -> None:
    block_tokens = kv.shape[3]
    owned = torch.zeros(kv.shape[0], block_tokens, dtype=torch.bool)
    for row, context in zip(plan.block_table, plan.context_lens.tolist(), strict=True):
        places = torch.arange(context)
        owned[row[places // block_tokens].long(), places % block_tokens] = True
    kv.masked_fill_(~owned[:, None, None, :, None], float("nan"))


def check_rms_norm(backend: str, device: str, dtype: torch.dtype) -> None:
    for shape in ((5, 512), (1, 64), (40, 6, 64), (3, 100)):
        x, weight = _randn(*shape, dtype=dtype), _randn(shape[-1], dtype=dtype)
        wide = _randn(*shape[:-1], 2 * shape[-1], dtype=dtype)
        wide[..., : shape[-1]] = x  # a strided view holds the same
        expected = kernels.rms_norm.reference(x, weight, 1e-5)
        with kernels.use_backend(backend):
            moved = wide.to(device)[..., : shape[-1]]
            assert_close(kernels.rms_norm(moved, weight.to(device), 1e-5), expected)


def check_norms_of_float32(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check norms whose weight is float32 whatever x is."""
    for shape in ((5, 512), (40, 6, 64), (3, 100)):
        x, weight = _randn(*shape, dtype=dtype), _randn(shape[-1], dtype=torch.float32)
        with kernels.use_backend(backend):
            made = kernels.rms_norm(x.to(device), weight.to(device), 1e-5)
        assert_close(made, kernels.rms_norm.reference(x, weight, 1e-5))


def check_layer_norm(backend: str, device: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 64), (70, 512), (3, 100)):
        x, residual, weight = (
            _randn(*size, dtype=dtype) for size in ((rows, width), (rows, width), (2, width))
        )
        x += 3.0  # a mean that is no small number
        sums = residual.to(device, copy=True)
        alone = kernels.layer_norm.reference(x, weight, 1e-5)
        expected = kernels.add_layer_norm.reference(x, residual, weight, 1e-5)
        with kernels.use_backend(backend):
            assert_close(kernels.layer_norm(x.to(device), weight.to(device), 1e-5), alone)
            place = x.to(device, copy=True)
            made = kernels.add_layer_norm(place, sums, weight.to(device), 1e-5, place)
            assert_close(made, expected)
            assert_close(place, expected)
        assert_close(sums, residual)


def check_add_rms_norm(backend: str, device: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 64), (70, 512), (3, 100)):
        x, residual, weight = (
            _randn(*size, dtype=dtype) for size in ((rows, width), (rows, width), (width,))
        )
        sums = residual.to(device, copy=True)
        expected = kernels.add_rms_norm.reference(x, residual, weight, 1e-5)
        with kernels.use_backend(backend):
            assert_close(kernels.add_rms_norm(x.to(device), sums, weight.to(device), 1e-5), expected)
            place, again = x.to(device, copy=True), residual.to(device) - x.to(device)
            kernels.add_rms_norm(place, again, weight.to(device), 1e-5, place)
            assert_close(place, kernels.rms_norm.reference(again.cpu(), weight, 1e-5))
        assert_close(sums, residual)


def check_rotary(backend: str, device: str, dtype: torch.dtype) -> None:
    for tokens, q_heads, k_heads, head_dim in ((1, 2, 1, 32), (50, 8, 4, 64), (3, 6, 2, 128), (4, 3, 3, 80)):
        both = _randn(tokens, q_heads + k_heads, head_dim, dtype=dtype)
        moved = both.to(device, copy=True)
        positions = torch.randint(0, 90, (tokens,), generator=torch.Generator().manual_seed(2))
        angles = torch.randn(90, head_dim // 2, generator=torch.Generator().manual_seed(3))
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        kernels.rotary.reference(both[:, :q_heads], both[:, q_heads:], positions, cos_sin)
        with kernels.use_backend(backend):
            kernels.rotary(moved[:, :q_heads], moved[:, q_heads:], positions.to(device), cos_sin.to(device))
        assert_close(moved, both)


def check_partial_rotary(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check that the dimensions behind those that turn stay as they are."""
    for head_dim, turning in ((64, 32), (96, 64), (80, 20)):
        q, k = _randn(5, 4, head_dim, dtype=dtype), _randn(5, 2, head_dim, dtype=dtype)
        moved, positions = (q.to(device, copy=True), k.to(device, copy=True)), torch.tensor([7, 0, 3, 88, 1])
        cos_sin = torch.randn(90, turning, generator=torch.Generator().manual_seed(3))
        rest = [x[..., turning:].clone() for x in (q, k)]
        kernels.rotary.reference(q, k, positions, cos_sin)
        with kernels.use_backend(backend):
            kernels.rotary(*moved, positions.to(device), cos_sin.to(device))
        for got, wanted, same in zip(moved, (q, k), rest, strict=True):
            assert_close(got, wanted)
            assert torch.equal(got[..., turning:].cpu(), same)


def check_silu_mul(backend: str, device: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 16), (40, 1408), (3, 100)):
        both = 4 * _randn(rows, 2 * width, dtype=dtype)
        both[0, 0] = -100.0  # e^100 overflows float32
        expected = kernels.silu_mul.reference(both[:, :width], both[:, width:])
        moved = both.to(device)
        with kernels.use_backend(backend):
            assert_close(kernels.silu_mul(moved[:, :width], moved[:, width:]), expected)


def check_take_columns(backend: str, device: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 64), (70, 512), (3, 100)):
        wide = _randn(rows, 2 * width, dtype=dtype)
        order = torch.randperm(width, generator=torch.Generator().manual_seed(5)).int()
        expected = torch.stack([wide[:, k] for k in order.tolist()], 1)
        with kernels.use_backend(backend):
            taken = kernels.take_columns(wide.to(device)[:, :width], order.to(device))
        assert torch.equal(taken.cpu(), expected)


def check_gelu_mul(backend: str, device: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 16), (40, 1408), (3, 100)):
        both = 4 * _randn(rows, 2 * width, dtype=dtype)
        both[0, :2] = torch.tensor([-100.0, 100.0])
        expected = kernels.gelu_mul.reference(both[:, :width], both[:, width:])
        moved = both.to(device)
        with kernels.use_backend(backend):
            assert_close(kernels.gelu_mul(moved[:, :width], moved[:, width:]), expected)


def check_clamped_silu_mul(backend: str, device: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 16), (40, 1408), (3, 100)):
        both = 4 * _randn(rows, 2 * width, dtype=dtype)
        both[0, :3] = torch.tensor([-100.0, 100.0, torch.inf])
        both[0, width : width + 2] = torch.tensor([-100.0, 100.0])
        moved = both.to(device)
        for slope, limit in ((1.702, 7.0), (1.0, 0.5)):
            expected = kernels.clamped_silu_mul.reference(both[:, :width], both[:, width:], slope, limit)
            with kernels.use_backend(backend):
                made = kernels.clamped_silu_mul(moved[:, :width], moved[:, width:], slope, limit)
            assert_close(made, expected)


def _some_slots(tokens: int, num_slots: int) -> torch.Tensor:
    """Return a slot for each token in any order; every third one, if there are as many, has none (-1)."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(4))[:tokens]
    slots[2::3] = -1
    return slots


def _store_expected(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store by the oracle in all blocks of a cache but the first, of zeros, which a stray slot would hit."""
    again, stored = cache.clone(), slots >= 0
    kernels.store_kv.reference(k[stored], v[stored], cache[1:], slots[stored])
    kernels.store_kv.reference(k, v, again[1:], slots)
    assert torch.equal(again, cache)


def check_store_kv(backend: str, device: str, dtype: torch.dtype) -> None:
    for tokens, heads, head_dim, block_tokens in (
        (1, 1, 32, 16),
        (90, 3, 64, 8),
        (7, 2, 80, 5),
        (4, 2, 8, 4),
    ):
        k, v = _randn(tokens, heads, head_dim, dtype=dtype), _randn(tokens, heads, head_dim, dtype=dtype)
        slots = _some_slots(tokens, 20 * block_tokens)
        expected = torch.zeros(1 + 20, heads, 2, block_tokens, head_dim, dtype=dtype)
        kv = _moved(expected.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4), device)
        _store_expected(k, v, expected, slots)
        with kernels.use_backend(backend):
            kernels.store_kv(k.to(device), v.to(device), kv[1:], slots.to(device))
        assert torch.equal(kv.cpu(), expected)


def check_rotary_store_kv(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check queries, keys and the cache: heads that turn whole and in part, rows without a slot."""
    for tokens, heads, head_dim, turning in ((1, 1, 32, 32), (50, 2, 64, 64), (7, 3, 80, 80), (6, 2, 96, 64)):
        rows = _randn(tokens, 6 * heads, head_dim, dtype=dtype)
        moved, slots = rows.to(device, copy=True), _some_slots(tokens, 20 * 8)
        positions = torch.randint(0, 90, (tokens,), generator=torch.Generator().manual_seed(2))
        cos_sin = torch.randn(90, turning, generator=torch.Generator().manual_seed(3))
        expected = torch.zeros(1 + 20, heads, 2, 8, head_dim, dtype=dtype)
        kv, parts = expected.to(device, copy=True), (4 * heads, heads, heads)
        q, k, v = rows.split_with_sizes(parts, 1)
        kernels.rotary_store_kv.reference(q, k, v, positions, cos_sin, expected[1:], slots)
        with kernels.use_backend(backend):
            q, k, v = moved.split_with_sizes(parts, 1)
            kernels.rotary_store_kv(
                q, k, v, positions.to(device), cos_sin.to(device), kv[1:], slots.to(device)
            )
        assert_close(moved, rows)
        assert_close(kv, expected)


def check_store_kv_in_codes(backend: str, device: str, dtype: torch.dtype) -> None:
    for tokens, heads, head_dim, block_tokens in (
        (1, 1, 32, 16),
        (90, 3, 64, 8),
        (7, 2, 80, 5),
        (4, 2, 8, 4),
    ):
        k, v = (_randn(tokens, heads, head_dim, dtype=dtype) for _ in range(2))
        k[0, 0], v[0, 0] = 0.0, torch.arange(head_dim) * 1e-6  # a scale of zero, and one that is small
        slots = _some_slots(tokens, 20 * block_tokens)
        expected = torch.zeros(1 + 20, heads, 2, block_tokens, head_dim + SCALE_BYTES, dtype=torch.int8)
        kv = expected.to(device, copy=True)
        _store_expected(k, v, expected, slots)
        with kernels.use_backend(backend):
            kernels.store_kv(k.to(device), v.to(device), kv[1:], slots.to(device))
        assert not kv[0].any(), "something was written before the cache"
        codes, scales = kv_codes.parts_of(kv[1:].cpu())
        wanted, wanted_scales = kv_codes.parts_of(expected[1:])
        assert torch.equal(scales, wanted_scales)
        # A GPU divides with an error of 2 ulp, which turns a tie.
        assert (codes.int() - wanted.int()).abs().max() <= (backend == "cuda")
        stored = slots >= 0
        numbers = kv_codes.dequantize(codes, scales).permute(2, 0, 3, 1, 4).flatten(1, 2)[:, slots[stored]]
        step = scales.permute(2, 0, 3, 1).flatten(1, 2)[:, slots[stored]].float()[..., None]
        wanted_numbers = torch.stack([k[stored], v[stored]]).float()
        assert bool(((numbers - wanted_numbers).abs() <= 0.51 * step).all())


def check_choice(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check the largest scores, the first of equal ones, and draws, which only a near tie may turn."""
    vocab = 9001
    scores = (3 * _randn(6, vocab + 3, dtype=torch.float32))[:, :vocab]
    scores[1, 4500:] = 20.0
    scores[2] = -torch.inf
    scores[2, 7] = 0.0
    temperature = torch.tensor([0.0, 0.0, 0.7, 0.9, 1.3, 5.0])
    keys = torch.randint(-(2**31), 2**31, (6, 2), generator=torch.Generator().manual_seed(6))
    draws = torch.cat([temperature.view(torch.int32)[:, None], keys.int()], 1)
    with kernels.use_backend(backend):
        moved = scores.to(device)
        largest, out = kernels.choose(moved), torch.zeros(6, dtype=torch.int64, device=device)
        assert kernels.choose(moved, draws.to(device), out) is out
    assert largest.tolist() == scores.argmax(1).tolist()
    made, heat = out.cpu(), temperature.where(temperature > 0, 1.0)[:, None]
    noise = gumbel(draws[:, 1:], torch.arange(vocab, dtype=torch.int32))
    noised = scores / heat + noise * (temperature > 0)[:, None]
    below = noised.amax(1) - noised.gather(1, made[:, None])[:, 0]
    assert (made[:3] == torch.tensor([int(scores[0].argmax()), 4500, 7])).all()
    assert bool((below <= 1e-5).all()), f"{made}: {below} below the best"


def check_filters(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check what filters leave of rows, but for a token at a rounded edge, and draws of that alone."""
    kept = ((0, 0.95, 0.0), (700, 1.0, 0.0), (700, 0.5, 0.0), (0, 0.9, 0.01), (1, 1.0, 0.0), (0, 0.0, 0.0))
    scores = _randn(len(kept), 5003, dtype=torch.float32)
    top_k, top_p, min_p = (torch.tensor(one) for one in zip(*kept, strict=True))
    known = torch.zeros(len(kept), dtype=torch.bool)
    expected = kernels.least_remaining.reference(scores, top_k, top_p, min_p, known)
    heat, keys = torch.ones(len(kept)).view(torch.int32), torch.arange(2 * len(kept)).view(-1, 2).int()
    draws = torch.cat([heat[:, None], keys], 1)
    with kernels.use_backend(backend):
        moved = [one.to(device) for one in (scores, top_k, top_p, min_p, known)]
        floors = kernels.least_remaining(*moved)
        drawn = kernels.choose(moved[0], draws.to(device), None, floors)
    for i in range(len(kept)):
        mine, wanted = ((scores[i] >= floor).sum() for floor in (floors[i].cpu(), expected[i]))
        assert abs(int(mine) - int(wanted)) <= (kept[i][1] < 1), f"{kept[i]}: {mine} tokens of {wanted}"
    assert bool((scores.gather(1, drawn.cpu()[:, None])[:, 0] >= floors.cpu()).all())


def check_copy_blocks(backend: str, device: str, dtype: torch.dtype) -> None:
    expected = _randn(9, 2, 2, 5, 80, dtype=dtype)
    kv = expected.to(device, copy=True)
    source, target = torch.tensor([1, 7, 3]), torch.tensor([0, 8, 4])
    kernels.copy_blocks.reference(expected, source, target)
    with kernels.use_backend(backend):
        kernels.copy_blocks(kv, source.to(device), target.to(device))
    assert torch.equal(kv.cpu(), expected)


def check_products(backend: str, device: str, dtype: torch.dtype) -> None:
    counts, sizes = (1, 2, 3, 5, 15, 16, 64, 100), ((48, 512, 1392), (16, 33, 200))
    for rows, inputs, outputs in itertools.product(counts, *sizes):
        x, weight = _randn(rows, inputs, dtype=dtype), _randn(outputs, inputs, dtype=dtype)
        bias = _randn(outputs, dtype=dtype)
        expected = x.double() @ weight.double().t()
        x, weight, bias = x.to(device), weight.to(device), bias.to(device)
        with kernels.use_backend(backend):
            assert_close(kernels.linear(x, weight), expected)
            assert_close(kernels.linear(x, weight, bias), expected + bias.cpu().double())
            assert_close(kernels.steady_linear(x, weight, bias), expected + bias.cpu().double())
            assert_close(kernels.linear_t(x, weight.t().contiguous()), expected)


def check_products_of_few_tokens(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check a GPU's kernels for few tokens, any of which a measurement may put into force."""
    if backend != "cuda" or dtype not in (torch.float16, torch.bfloat16 if device == "cuda" else None):
        return  # the interpreter takes long for bfloat16
    from kernels.gpu import few  # Triton is not on every machine

    few_sizes = ((1, 528, 16), (3, 272, 48))
    large = ((1, 4096, 1024), (2, 14336, 4096), (3, 2064, 272), (4, 4096, 1024))
    for tokens, inputs, outputs in few_sizes + (large if device == "cuda" else ()):
        x, weight = _randn(tokens, inputs + 16, dtype=dtype)[:, :inputs], _randn(outputs, inputs, dtype=dtype)
        bias, expected = _randn(outputs, dtype=dtype), x.double() @ weight.double().t()
        stored_as: dict[few.Form, torch.Tensor] = {"linear": weight, "linear_t": weight.t().contiguous()}
        for form, stored in stored_as.items():
            assert few.can_run(x, stored)
            for config in few.CANDIDATES[form]:
                made = few.multiply(form, x.to(device), stored.to(device), None, config)
                assert_close(made, expected)
                if form == "linear":
                    made = few.multiply(form, x.to(device), stored.to(device), bias.to(device), config)
                    assert_close(made, expected + bias.double())


def check_products_of_one_row(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check that on a CPU up to 16 tokens get the very bits that each gets alone."""
    weight = _randn(72, 1392, dtype=dtype)
    x, wide, bias = _randn(16, 1392, dtype=dtype), weight.t().contiguous()[:, :64], _randn(72, dtype=dtype)
    for tokens in (2, 3, 6, 7, 16) if backend == "cpu" else ():
        some = x[:tokens]
        with kernels.use_backend(backend):
            together = kernels.linear(some, weight, bias), kernels.linear_t(some, wide)
            for t in range(tokens):
                row = some[t : t + 1]
                assert torch.equal(together[0][t], kernels.linear(row, weight, bias)[0]), f"{tokens} tokens"
                assert torch.equal(together[1][t], kernels.linear_t(row, wide)[0]), f"{tokens} tokens"


def check_stacked_products(backend: str, device: str, dtype: torch.dtype) -> None:
    for tokens, inputs, outputs in itertools.product((1, 2, 16, 64, 100), (48, 512), (16, 33, 200)):
        x, stored = _randn(tokens, inputs, dtype=dtype), _randn(3, outputs + 7, inputs + 16, dtype=dtype)
        stored[:, outputs:], stored[..., inputs:] = torch.nan, torch.nan  # the part in between is not read
        weights = stored[:, :outputs, :inputs]
        expected = torch.einsum("tk,mnk->tmn", x.double(), weights.double())
        x, weights = x.to(device), stored.to(device)[:, :outputs, :inputs]
        with kernels.use_backend(backend):
            assert_close(kernels.stacked_linear(x, weights), expected)


def check_stacked_products_t(backend: str, device: str, dtype: torch.dtype) -> None:
    for tokens, inputs, outputs in itertools.product((1, 2, 16, 64, 100), (33, 150), (16, 48, 192)):
        x, stored = _randn(tokens, 3, inputs + 9, dtype=dtype), _randn(3, inputs + 7, outputs, dtype=dtype)
        x[..., inputs:], stored[:, inputs:] = torch.nan, torch.nan  # the part in between is not read
        some, weights = x[..., :inputs], stored[:, :inputs]
        expected = torch.einsum("tmk,mkn->tn", some.double(), weights.double())
        by_part = some.transpose(0, 1).contiguous().to(device).transpose(0, 1)
        weights = stored.to(device)[:, :inputs]
        with kernels.use_backend(backend):
            assert_close(kernels.stacked_linear_t(x.to(device)[..., :inputs], weights), expected)
            assert_close(kernels.stacked_linear_t(by_part, weights), expected)
            if backend == "cpu" and 1 < tokens <= 16:  # a token gets the very bits that it gets alone
                together = kernels.stacked_linear_t(by_part, weights)
                alone = [kernels.stacked_linear_t(by_part[t : t + 1], weights) for t in range(tokens)]
                assert torch.equal(together, torch.cat(alone)), f"{tokens} tokens"


def check_routing(backend: str, device: str, dtype: torch.dtype) -> None:
    for tokens, experts, top_k in ((1, 8, 2), (5, 128, 8), (40, 6, 6), (3, 1, 1)):
        stored = 3 * _randn(tokens, experts + 3, dtype=dtype)
        stored[:, 1::4] = stored[:, ::4][:, : stored[:, 1::4].shape[1]]  # some are equal
        for is_normalised, num_shared in itertools.product((False, True), (0, 1, 4, 5)):
            width = experts + (num_shared > 0)
            expected = kernels.route.reference(stored[:, :width], top_k, is_normalised, num_shared)
            use = torch.ones(experts + num_shared, dtype=torch.int64, device=device)
            with kernels.use_backend(backend):
                made = kernels.route(stored.to(device)[:, :width], top_k, is_normalised, num_shared, use)
            assert torch.equal(use.cpu(), 1 + expected.bounds.diff()), "use"
            assert_close(made.weights, expected.weights)
            for name in ("places", "rows", "bounds"):
                assert torch.equal(getattr(made, name).cpu(), getattr(expected, name)), name


def check_mixtures(backend: str, device: str, dtype: torch.dtype) -> None:
    """Check the products of experts and the sums of their pairs, of all experts and of a rank's."""
    for tokens, num_experts, top_k, inputs in ((1, 8, 2, 64), (7, 40, 8, 48), (16, 4, 2, 64), (90, 6, 3, 80)):
        routing = kernels.route.reference(_randn(tokens, num_experts, dtype=dtype), top_k, True)
        stored = _randn(num_experts, 33 * inputs + 16, dtype=dtype)
        weights = stored[:, : 32 * inputs].view(num_experts, 32, inputs)
        is_used = routing.bounds[1:] > routing.bounds[:-1]
        stored[~is_used] = torch.nan  # the others are not read
        for part, is_by_place in itertools.product((slice(0, num_experts), slice(2, 4)), (False, True)):
            x = _randn(tokens * top_k if is_by_place else tokens, inputs, dtype=dtype)
            own = routing.part(part)
            bias = _randn(num_experts, 40, dtype=dtype)[part, 8:] if is_by_place else None  # rows lie apart
            expected = kernels.grouped_linear.reference(x, weights[part], own, is_by_place, bias)
            summed = kernels.combine.reference(expected, own)
            moved = Routing(*(getattr(own, field.name).to(device) for field in fields(own)))
            on_device = stored.to(device)[:, : 32 * inputs].view(num_experts, 32, inputs)[part]
            with kernels.use_backend(backend):
                added = None if bias is None else bias.to(device)
                made = kernels.grouped_linear(x.to(device), on_device, moved, is_by_place, added)
                assert_close(kernels.combine(made, moved), summed)
            here = slice(int(own.bounds[0]), int(own.bounds[-1]))
            assert_close(made[here], expected[here])


ROW_CHECKS = (
    check_rms_norm,
    check_norms_of_float32,
    check_add_rms_norm,
    check_layer_norm,
    check_rotary,
    check_partial_rotary,
    check_silu_mul,
    check_take_columns,
    check_gelu_mul,
    check_clamped_silu_mul,
    check_store_kv,
    check_rotary_store_kv,
    check_store_kv_in_codes,
    check_choice,
    check_filters,
    check_copy_blocks,
    check_products,
    check_decodes_of_every_config,
    check_products_of_few_tokens,
    check_products_of_one_row,
    check_stacked_products,
    check_stacked_products_t,
    check_routing,
    check_mixtures,
)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare within the dtype's tolerance, relative to the largest expected value of the row."""
    tolerance = (GPU_TOLERANCE if result.is_cuda else TOLERANCE)[result.dtype]
    made, wanted = result.cpu().double(), expected.double()
    largest = wanted.abs().masked_fill(wanted.isinf(), 0.0).amax(-1, keepdim=True)
    bound = tolerance * largest.clamp(min=1.0)
    error = (made - wanted).abs().masked_fill(made == wanted, 0.0)  # an infinity that is expected
    assert bool((error <= bound).all()), f"off by {error.max():.3g}, at most {bound.max():.3g} allowed"


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy to the device with the strides, which `to` may not keep."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def failures(backend: str, device: str, part: str = "all") -> Iterator[tuple[str, str | None]]:
    """Yield each check and what went wrong with it, or None."""
    for name, check in checks(backend, device, part):
        try:
            check()
        except Exception as problem:  # noqa: BLE001 a kernel that a compiler refuses must not hide the others
            yield name, f"{type(problem).__name__}: {problem}"
        else:
            yield name, None


def main() -> int:
    problems = [f"{name}: {problem}" for name, problem in failures(*sys.argv[1:]) if problem]
    sys.stdout.write("\n".join([*problems, f"{len(problems)} failed", ""]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
