"""Norms, rotary embedding, gated activations and the cache's writes for GPUs: one pass over each row.

Each kernel is compiled once per model and dtype, for any batch. Strides count elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_codes import LARGEST, SCALE_BYTES, is_codes


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    if all(grid):
        kernel[grid](*args, **options)


def _warps(elements: int) -> int:
    return min(8, max(1, elements // 512))


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    outer_stride,
    inner_stride,
    inner_rows,
    residual_stride,
    shift_offset,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,). x [rows / inner_rows, inner_rows, width] by its strides; out [rows, width] contiguous.

    With a residual [rows, width], residual += x, and that is normalised. Centred: a layer norm, whose shift
    lies shift_offset elements behind the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dtype = out_ptr.dtype.element_ty
    source = x_ptr + row // inner_rows * outer_stride + row % inner_rows * inner_stride
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)  # before x is waited for
    if HAS_RESIDUAL:
        place = residual_ptr + row * residual_stride + columns
        total = (tl.load(place, mask=inside, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    if IS_CENTRED:
        x = tl.where(inside, x - tl.sum(x) / width, 0.0)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x) / width + eps))
    if IS_CENTRED:
        shift = tl.load(weight_ptr + shift_offset + columns, mask=inside, other=0.0).to(tl.float32)
        normed = normed * weight + shift
    elif weight_ptr.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32) * weight  # rounded as by Hugging Face
    else:
        normed = normed * weight
    tl.store(out_ptr + row * width + columns, normed.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed(x, None, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    return _normed(x, residual, weight, eps, out)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed(x, None, weight, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    return _normed(x, residual, weight, eps, out)


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Normalise x; a weight [2, H] is that of a layer norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    width = x.shape[-1]
    x = x if x.dim() <= 3 else x.reshape(-1, width)
    inner_rows, inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    residual_stride = 0 if residual is None else residual.stride(0)
    block = triton.next_power_of_2(width)
    _launch(
        _rms_norm_kernel,
        (x.numel() // width,),
        *(x, residual, weight, out, x.stride(0), inner, inner_rows, residual_stride),
        *(weight.stride(0), width, eps),
        HAS_RESIDUAL=residual is not None,
        IS_CENTRED=weight.dim() == 2,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


@triton.jit
def _rotate(base_ptr, head_stride, num_heads, heads, columns, cosine, sine, HALF: tl.constexpr):
    """Rotate the heads [BLOCK_HEADS, 1] of one token in place; dimension i pairs with i + HALF.

    Returns the new halves [BLOCK_HEADS, BLOCK_HALF].
    """
    inside = (heads < num_heads) & (columns < HALF)
    place = base_ptr + heads * head_stride + columns
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    new_low = (low * cosine - high * sine).to(base_ptr.dtype.element_ty)
    new_high = (high * cosine + low * sine).to(base_ptr.dtype.element_ty)
    tl.store(place, new_low, mask=inside)
    tl.store(place + HALF, new_high, mask=inside)
    return new_low, new_high


@triton.jit(do_not_specialize_on_alignment=("positions_ptr",))
def _rotary_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cos_sin_stride,
    q_heads,
    k_heads,
    HALF: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Grid (T,): the first 2 HALF dimensions of all heads of one token; cos_sin [positions, 2 HALF]."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride + columns
    cosine = tl.load(angles, mask=columns < HALF, other=0.0)
    sine = tl.load(angles + HALF, mask=columns < HALF, other=0.0)
    heads = tl.arange(0, BLOCK_Q_HEADS)[:, None]
    _rotate(q_ptr + token * q_token_stride, q_head_stride, q_heads, heads, columns, cosine, sine, HALF)
    heads = tl.arange(0, BLOCK_K_HEADS)[:, None]
    _rotate(k_ptr + token * k_token_stride, k_head_stride, k_heads, heads, columns, cosine, sine, HALF)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    half = cos_sin.shape[1] // 2
    block_heads, block_half = triton.next_power_of_2(q.shape[1]), triton.next_power_of_2(half)
    _launch(
        _rotary_kernel,
        (q.shape[0],),
        *(q, k, positions, cos_sin, *q.stride()[:2], *k.stride()[:2], cos_sin.stride(0)),
        *(q.shape[1], k.shape[1]),
        HALF=half,
        BLOCK_Q_HEADS=block_heads,
        BLOCK_K_HEADS=triton.next_power_of_2(k.shape[1]),
        BLOCK_HALF=block_half,
        num_warps=_warps(block_heads * block_half),
    )


@triton.jit
def _gate_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, linear, cubic, BLOCK: tl.constexpr
):
    """Grid (T, ceil(width / BLOCK)): gate * sigmoid(linear * gate + cubic * gate^3) * up.

    gate, up [T, width] by their row strides; out contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    slope = linear + cubic * gate * gate
    product = gate / (1.0 + tl.exp(-gate * slope)) * up
    tl.store(out_ptr + row * width + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


# gelu(x) = x (1 + tanh(t)) / 2 = x sigmoid(2 t) with t = sqrt(2 / pi) (x + 0.044715 x^3)
_GELU = 2 * math.sqrt(2 / math.pi)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gated(gate, up, 1.0, 0.0)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gated(gate, up, _GELU, _GELU * 0.044715)


def _gated(gate: Tensor, up: Tensor, linear: float, cubic: float) -> Tensor:
    rows, width = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(
        _gate_mul_kernel,
        (rows, triton.cdiv(width, 1024)),
        *(gate, up, out, gate.stride(0), up.stride(0), width, linear, cubic),
        BLOCK=1024,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=("slots_ptr",))
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    block_tokens,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (T,): keys and values of all heads of one token, unless its slot is below 0.

    kv [B, Hkv, 2, bt, D] by its strides.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    slot = tl.load(slots_ptr + token)
    inside = (heads < num_heads) & (columns < HEAD_DIM) & (slot >= 0)
    place = kv_ptr + slot // block_tokens * block_stride + slot % block_tokens * token_stride
    place = place + heads * head_stride + columns
    key = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + columns, mask=inside)
    value = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + columns, mask=inside)
    tl.store(place, key, mask=inside)
    tl.store(place + value_stride, value, mask=inside)


def store_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    if is_codes(kv):
        _store_codes(k, v, kv, slot_mapping)
        return
    block_heads, block_dim = triton.next_power_of_2(k.shape[1]), triton.next_power_of_2(k.shape[2])
    _launch(
        _store_kv_kernel,
        (k.shape[0],),
        *(k, v, kv, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *kv.stride()[:4]),
        *(kv.shape[3], k.shape[1]),
        HEAD_DIM=k.shape[2],
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=_warps(block_heads * block_dim),
    )


@triton.jit(do_not_specialize_on_alignment=("positions_ptr", "slots_ptr"))
def _rotary_store_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    kv_ptr,
    slots_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_sin_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    block_tokens,
    q_heads,
    k_heads,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (T,): one token, as `_rotary_kernel` and `_store_kv_kernel` take it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    half = tl.arange(0, BLOCK_HALF)[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride + half
    heads = tl.arange(0, BLOCK_K_HEADS)[:, None]
    is_stored = (heads < k_heads) & (slot >= 0)
    target = kv_ptr + slot // block_tokens * block_stride + slot % block_tokens * token_stride
    target = target + heads * head_stride
    k_ptr += token * k_token_stride
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = is_stored & (columns < HEAD_DIM)
    value = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + columns, mask=inside)
    if HEAD_DIM > 2 * HALF:  # what stays as it is
        rest = inside & (columns >= 2 * HALF)
        tl.store(target + columns, tl.load(k_ptr + heads * k_head_stride + columns, mask=rest), mask=rest)
    cosine = tl.load(angles, mask=half < HALF, other=0.0)
    sine = tl.load(angles + HALF, mask=half < HALF, other=0.0)
    low, high = _rotate(k_ptr, k_head_stride, k_heads, heads, half, cosine, sine, HALF)
    tl.store(target + half, low, mask=is_stored & (half < HALF))
    tl.store(target + half + HALF, high, mask=is_stored & (half < HALF))
    tl.store(target + value_stride + columns, value, mask=inside)
    heads = tl.arange(0, BLOCK_Q_HEADS)[:, None]
    _rotate(q_ptr + token * q_token_stride, q_head_stride, q_heads, heads, half, cosine, sine, HALF)


def rotary_store_kv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv: Tensor, slot_mapping: Tensor
) -> None:
    if is_codes(kv):
        rotary(q, k, positions, cos_sin)
        _store_codes(k, v, kv, slot_mapping)
        return
    half, block_heads = cos_sin.shape[1] // 2, triton.next_power_of_2(q.shape[1])
    block_dim = triton.next_power_of_2(k.shape[2])
    _launch(
        _rotary_store_kv_kernel,
        (q.shape[0],),
        *(q, k, v, positions, cos_sin, kv, slot_mapping),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos_sin.stride(0), *kv.stride()[:4]),
        *(kv.shape[3], q.shape[1], k.shape[1]),
        HALF=half,
        HEAD_DIM=k.shape[2],
        BLOCK_Q_HEADS=block_heads,
        BLOCK_K_HEADS=triton.next_power_of_2(k.shape[1]),
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_DIM=block_dim,
        num_warps=_warps(block_heads * block_dim // 2),
    )


@triton.jit
def _code_heads(source, target, scales, scaled, inside, LARGEST: tl.constexpr):
    """Write codes [BLOCK_HEADS, BLOCK_DIM] and scales bfloat16 [BLOCK_HEADS, 1] (`kernels.kv_codes`)."""
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    peaks = tl.div_rn(tl.max(tl.abs(x), 1, keep_dims=True), tl.full([x.shape[0], 1], LARGEST, tl.float32))
    # Rounded in integers: the interpreter would truncate.
    bits = peaks.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = (bits << 16).to(tl.float32, bitcast=True)
    tl.store(scales, bits.to(tl.uint16), mask=scaled)
    codes = x / tl.where(rounded > 0, rounded, 1.0)
    codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
    whole = (codes + 12582912.0) - 12582912.0  # 1.5 * 2^23: leaves the nearest whole number
    tl.store(target, whole.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize_on_alignment=("slots_ptr",))
def _store_kv_codes_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    head_stride,
    value_stride,
    block_tokens,
    num_heads,
    SCALE_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (T,): as `_store_kv_kernel`, to a cache of codes int8 [B, Hkv, 2, bt, D + SCALE_BYTES]."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    slot = tl.load(slots_ptr + token)
    scaled = (heads < num_heads) & (slot >= 0)
    inside = scaled & (columns < HEAD_DIM)
    offset = slot % block_tokens
    keys = kv_ptr + slot // block_tokens * block_stride + heads * head_stride
    codes, scales = keys + offset * HEAD_DIM + columns, keys + block_tokens * HEAD_DIM + offset * SCALE_BYTES
    key = k_ptr + token * k_token_stride + heads * k_head_stride + columns
    value = v_ptr + token * v_token_stride + heads * v_head_stride + columns
    word = tl.pointer_type(tl.uint16)
    _code_heads(key, codes, scales.to(word), scaled, inside, LARGEST)
    codes, scales = codes + value_stride, (scales + value_stride).to(word)
    _code_heads(value, codes, scales, scaled, inside, LARGEST)


def _store_codes(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    block_heads, block_dim = triton.next_power_of_2(k.shape[1]), triton.next_power_of_2(k.shape[2])
    _launch(
        _store_kv_codes_kernel,
        (k.shape[0],),
        *(k, v, kv, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *kv.stride()[:3]),
        *(kv.shape[3], k.shape[1]),
        SCALE_BYTES=SCALE_BYTES,
        LARGEST=LARGEST,
        HEAD_DIM=k.shape[2],
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=_warps(block_heads * block_dim),
    )


@triton.jit(do_not_specialize_on_alignment=("source_ptr", "target_ptr"))
def _copy_blocks_kernel(
    kv_ptr,
    source_ptr,
    target_ptr,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    block_tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (n, Hkv, 2): the keys or the values of one head of one block."""
    part = tl.program_id(1).to(tl.int64) * head_stride + tl.program_id(2) * value_stride
    tokens = tl.arange(0, BLOCK_TOKENS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (tokens < block_tokens) & (columns < HEAD_DIM)
    place = kv_ptr + part + tokens * token_stride + columns
    source = tl.load(source_ptr + tl.program_id(0)).to(tl.int64) * block_stride
    target = tl.load(target_ptr + tl.program_id(0)).to(tl.int64) * block_stride
    tl.store(place + target, tl.load(place + source, mask=inside), mask=inside)


def copy_blocks(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    block_tokens, block_dim = triton.next_power_of_2(kv.shape[3]), triton.next_power_of_2(kv.shape[4])
    _launch(
        _copy_blocks_kernel,
        (src.shape[0], kv.shape[1], 2),
        *(kv, src, dst, *kv.stride()[:4], kv.shape[3]),
        HEAD_DIM=kv.shape[4],
        BLOCK_TOKENS=block_tokens,
        BLOCK_DIM=block_dim,
        num_warps=_warps(block_tokens * block_dim),
    )
