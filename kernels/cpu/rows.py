"""Norms, rotary embedding, gates, reordering and the cache's writes on the CPU: one pass over each row.

Torch makes four to eight passes, each with a launch and a buffer. A work item is a few rows; a call too small
for two threads runs on the calling thread. Rows that are not whole vectors of 16 elements (32 for `rotary`)
and mixed dtypes run on the reference.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import math

import numpy as np
import torch

from kernels import calls
from kernels.cpu.compiled import compiled
from kernels.cpu.simd import (
    KINDS,
    LANES,
    hmax,
    hsum,
    read,
    read_i32,
    read_i64,
    vabs,
    vexp2,
    vfma,
    vload,
    vmax,
    vmin,
    vsplat,
    vstore,
    vwhere_le,
    words,
    write,
)
from kernels.cpu.team import Kernel, next_item
from kernels.kv_codes import LARGEST, SCALE_BYTES, is_codes

F32, BF16, CODE = np.float32, np.uint16, np.int8
# Layouts of words.
NORM, ROTATION, GATING, TAKING, STORING = "q" * 14 + "d", "q" * 15, "q" * 9 + "dd", "q" * 8, "q" * 18
CODING = "q" * 17
ITEM_ELEMENTS = 16384  # elements of a work item: some 4 us, twice the cost of waking a team


def _rows_per_item(row_elements: int) -> int:
    return max(1, ITEM_ELEMENTS // max(1, row_elements))


def _is_vectors(width: int, *tensors: torch.Tensor) -> bool:
    """Return True if all have one known dtype, a contiguous last dimension and whole vectors as rows."""
    dtype = tensors[0].dtype
    if dtype not in KINDS or width % LANES:
        return False
    for tensor in tensors:  # noqa: SIM110  a generator costs as much as a whole small kernel
        if tensor.dtype is not dtype or tensor.stride()[-1] != 1:
            return False
    return True


def _new(like: torch.Tensor) -> torch.Tensor:
    """Return an empty contiguous tensor of the same shape, in half the time of torch.empty."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------- norms


@compiled
def _rms_factor(kind, source, vectors, width, eps):
    """Return rsqrt(mean(source^2) + eps) in all lanes."""
    total = vsplat(F32(0.0))
    for v in range(vectors):
        x = vload(kind, source + v * width)
        total = vfma(x, x, total)
    return vsplat(F32(1.0 / math.sqrt(np.float64(hsum(total)) / (vectors * LANES) + eps)))


@compiled
def _normed_row(kind, source, weight, target, vectors, width, eps):
    """Write source * rsqrt(mean(source^2) + eps), rounded to the dtype, times weight to target."""
    factor = _rms_factor(kind, source, vectors, width, eps)
    for v in range(vectors):
        place = target + v * width
        vstore(kind, place, vload(kind, source + v * width) * factor)
        vstore(kind, place, vload(kind, place) * vload(kind, weight + v * width))


@compiled
def _normed_row_of_float32(kind, source, weight, target, vectors, width, eps):
    """Write what `_normed_row` does with a float32 weight, and without the rounding before it."""
    factor = _rms_factor(kind, source, vectors, width, eps)
    for v in range(vectors):
        made = vload(kind, source + v * width) * factor * vload(F32, weight + v * LANES * 4)
        vstore(kind, target + v * width, made)


@compiled
def _centred_row(kind, source, weight, shift, target, vectors, width, eps):
    """Write (source - mean) / deviation * weight + shift to target."""
    total = vsplat(F32(0.0))
    for v in range(vectors):
        total = total + vload(kind, source + v * width)
    mean = vsplat(F32(np.float64(hsum(total)) / (vectors * LANES)))
    total = vsplat(F32(0.0))
    for v in range(vectors):
        x = vload(kind, source + v * width) - mean
        total = vfma(x, x, total)
    factor = vsplat(F32(1.0 / math.sqrt(np.float64(hsum(total)) / (vectors * LANES) + eps)))
    for v in range(vectors):
        x = (vload(kind, source + v * width) - mean) * factor
        made = vfma(x, vload(kind, weight + v * width), vload(kind, shift + v * width))
        vstore(kind, target + v * width, made)


def _rms_norm(kind):
    """Normalise rows, or the sums of these and the residual, which stay in the residual.

    Words: x and its two row strides, rows within the second, residual and its row stride or zeros, weight, 1
    if it is float32 and x is not, what is added (layer norm) or 0, out, rows, rows of an item, vectors, bytes
    of a vector, eps.
    """
    (
        x, outer, inner, depth, sums, sums_row, weight, is_wide, shift, out, rows, step, vectors, width, eps
    ) = words(kind, NORM)  # fmt: skip
    item = next_item(kind)
    while item >= 0:
        for row in range(item * step, min(rows, item * step + step)):
            source = x + row // depth * outer + row % depth * inner
            if sums != 0:
                total = sums + row * sums_row
                for v in range(0, vectors * width, width):
                    vstore(kind, total + v, vload(kind, total + v) + vload(kind, source + v))
                source = total
            target = out + row * vectors * width
            if shift != 0:
                _centred_row(kind, source, weight, shift, target, vectors, width, eps)
            elif is_wide != 0:
                _normed_row_of_float32(kind, source, weight, target, vectors, width, eps)
            else:
                _normed_row(kind, source, weight, target, vectors, width, eps)
        item = next_item(kind)


RMS_NORM = Kernel(_rms_norm, NORM)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dim() > 3 or x.dim() < 2 or not _is_normed(x.shape[-1], weight, x):
        return calls.rms_norm.reference(x, weight, eps)
    return _normed(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if x.dim() != 2 or not _is_normed(x.shape[-1], weight, x, residual):
        return calls.add_rms_norm.reference(x, residual, weight, eps, out)
    return _normed(x, residual, weight, eps, out)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dim() != 2 or not _is_vectors(x.shape[-1], x, weight):
        return calls.layer_norm.reference(x, weight, eps)
    return _normed(x, None, weight, eps)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if x.dim() != 2 or not _is_vectors(x.shape[-1], x, residual, weight):
        return calls.add_layer_norm.reference(x, residual, weight, eps, out)
    return _normed(x, residual, weight, eps, out)


def _is_normed(width: int, weight: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Return True if a kernel takes rows of these tensors and a weight of their dtype or of float32."""
    if weight.dtype is torch.float32 and weight.stride(0) == 1:
        return _is_vectors(width, *tensors)
    return _is_vectors(width, *tensors, weight)


def _normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise x; a weight [2, H] is that of a layer norm."""
    out, width, size = _new(x) if out is None else out, x.shape[-1], x.element_size()
    rows, step = x.numel() // width, _rows_per_item(width)
    inner_rows, inner = (x.shape[1], x.stride(1) * size) if x.dim() == 3 else (1, 0)
    first = weight.data_ptr()
    RMS_NORM(
        x.dtype,
        -(-rows // step),
        *(x.data_ptr(), x.stride(0) * size, inner, inner_rows),
        *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0) * size)),
        *(first, weight.dtype is not x.dtype, first + weight.stride(0) * size if weight.dim() == 2 else 0),
        *(out.data_ptr(), rows, step, width // LANES, LANES * size, eps),
    )
    return out


# --------------------------------------------------------------------------- rotary embedding


@compiled
def _rotate_heads(kind, heads, count, stride, cos_sin, half, element):
    """Rotate `count` heads of 2 * half dimensions; cos_sin holds half cosines, then half sines."""
    for h in range(count):
        for d in range(0, half, LANES):
            low = heads + h * stride + d * element
            high = low + half * element
            x, y = vload(kind, low), vload(kind, high)
            cosine, sine = vload(F32, cos_sin + d * 4), vload(F32, cos_sin + (half + d) * 4)
            vstore(kind, low, x * cosine - y * sine)
            vstore(kind, high, y * cosine + x * sine)


def _rotary(kind):
    """Rotate queries and keys.

    Words: q, its strides and heads; k, its strides and heads; positions, cos_sin, its row stride, tokens,
    tokens of an item, half of the dimensions that turn, bytes of an element.
    """
    (
        q, q_token, q_head, q_heads, k, k_token, k_head, k_heads, positions, table, table_row, tokens, step,
        half, element
    ) = words(kind, ROTATION)  # fmt: skip
    item = next_item(kind)
    while item >= 0:
        for t in range(item * step, min(tokens, item * step + step)):
            angles = table + read_i64(positions + t * 8) * table_row
            _rotate_heads(kind, q + t * q_token, q_heads, q_head, angles, half, element)
            _rotate_heads(kind, k + t * k_token, k_heads, k_head, angles, half, element)
        item = next_item(kind)


ROTARY = Kernel(_rotary, ROTATION)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    head_dim, size, turning = q.shape[2], q.element_size(), cos_sin.shape[1]
    if turning % (2 * LANES) or cos_sin.dtype != torch.float32 or not _is_vectors(head_dim, q, k):
        return calls.rotary.reference(q, k, positions, cos_sin)
    step = _rows_per_item((q.shape[1] + k.shape[1]) * head_dim)
    return ROTARY(
        q.dtype,
        -(-q.shape[0] // step),
        *(q.data_ptr(), q.stride(0) * size, q.stride(1) * size, q.shape[1]),
        *(k.data_ptr(), k.stride(0) * size, k.stride(1) * size, k.shape[1]),
        *(positions.data_ptr(), cos_sin.data_ptr(), cos_sin.stride(0) * 4),
        *(q.shape[0], step, turning // 2, size),
    )


# --------------------------------------------------------------------------- gated activations


def _gate_mul(kind):
    """Compute gate * sigmoid(u) * up with u = linear * gate + cubic * gate^3.

    Words: gate, up and their row strides, out, rows, rows of an item, vectors, bytes of a vector, linear and
    cubic.
    """
    gate, gate_row, up, up_row, out, rows, step, vectors, width, linear, cubic = words(kind, GATING)
    one, minus_log2e = vsplat(F32(1.0)), vsplat(F32(-math.log2(math.e)))
    first, third = vsplat(F32(linear)), vsplat(F32(cubic))
    item = next_item(kind)
    while item >= 0:
        for row in range(item * step, min(rows, item * step + step)):
            target = out + row * vectors * width
            for v in range(0, vectors * width, width):
                g = vload(kind, gate + row * gate_row + v)
                slope = vfma(third, g * g, first)
                sigmoid = one / (one + vexp2(g * slope * minus_log2e))
                vstore(kind, target + v, g * sigmoid * vload(kind, up + row * up_row + v))
        item = next_item(kind)


@compiled
def _clamped(x, low, high):
    """Return x within [low, high]; a NaN stays one."""
    least = vwhere_le(high, x, high, x)
    return vwhere_le(least, low, low, least)


def _clamped_gate_mul(kind):
    """Compute g * sigmoid(slope * g) * (u + 1): g is the gate, at most `limit`, and u is up within it.

    Words: those of _gate_mul, with slope and limit at the end.
    """
    gate, gate_row, up, up_row, out, rows, step, vectors, width, slope, limit = words(kind, GATING)
    one, factor = vsplat(F32(1.0)), vsplat(F32(-slope * math.log2(math.e)))
    none, low, high = vsplat(F32(-np.inf)), vsplat(F32(-limit)), vsplat(F32(limit))
    item = next_item(kind)
    while item >= 0:
        for row in range(item * step, min(rows, item * step + step)):
            target = out + row * vectors * width
            for v in range(0, vectors * width, width):
                g = _clamped(vload(kind, gate + row * gate_row + v), none, high)
                u = _clamped(vload(kind, up + row * up_row + v), low, high)
                vstore(kind, target + v, g / (one + vexp2(g * factor)) * (u + one))
        item = next_item(kind)


GATE_MUL = Kernel(_gate_mul, GATING)
CLAMPED_GATE_MUL = Kernel(_clamped_gate_mul, GATING)
_SILU = (1.0, 0.0)
# gelu(x) = x (1 + tanh(t)) / 2 = x sigmoid(2 t) with t = sqrt(2 / pi) (x + 0.044715 x^3)
_GELU = (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.dim() != 2 or not _is_vectors(gate.shape[-1], gate, up):
        return calls.silu_mul.reference(gate, up)
    return _gated(gate, up, _SILU)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.dim() != 2 or not _is_vectors(gate.shape[-1], gate, up):
        return calls.gelu_mul.reference(gate, up)
    return _gated(gate, up, _GELU)


def clamped_silu_mul(gate: torch.Tensor, up: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    if gate.dim() != 2 or not _is_vectors(gate.shape[-1], gate, up):
        return calls.clamped_silu_mul.reference(gate, up, slope, limit)
    return _gated(gate, up, (slope, limit), CLAMPED_GATE_MUL)


def _gated(
    gate: torch.Tensor, up: torch.Tensor, coefficients: tuple[float, float], kernel: Kernel = GATE_MUL
) -> torch.Tensor:
    out, width = _new(gate), gate.shape[-1]
    rows, size, step = gate.shape[0], gate.element_size(), _rows_per_item(2 * width)
    kernel(
        gate.dtype,
        -(-rows // step),
        *(gate.data_ptr(), gate.stride(0) * size, up.data_ptr(), up.stride(0) * size),
        *(out.data_ptr(), rows, step, width // LANES, LANES * size, *coefficients),
    )
    return out


# --------------------------------------------------------------------------- columns in another order


def _take_columns(kind):
    """Take columns one by one.

    Words: x and its row stride, order, out, rows, rows of an item, columns, bytes of an element.
    """
    x, x_row, order, out, rows, step, columns, size = words(kind, TAKING)
    item = next_item(kind)
    while item >= 0:
        for row in range(item * step, min(rows, item * step + step)):
            source, target = x + row * x_row, out + row * columns * size
            for j in range(columns):
                write(kind, target + j * size, read(kind, source + read_i32(order + j * 4) * size))
        item = next_item(kind)


TAKE_COLUMNS = Kernel(_take_columns, TAKING)


def take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    width, size = x.shape[1], x.element_size()
    if not _is_vectors(width, x):
        return calls.take_columns.reference(x, order)
    out, rows, step = _new(x), x.shape[0], _rows_per_item(4 * width)
    TAKE_COLUMNS(
        x.dtype,
        -(-rows // step),
        *(x.data_ptr(), x.stride(0) * size, order.data_ptr(), out.data_ptr(), rows, step, width, size),
    )
    return out


# --------------------------------------------------------------------------- writes to the cache


@compiled
def _copy_row(kind, source, target, vectors, width):
    for v in range(0, vectors * width, width):
        vstore(kind, target + v, vload(kind, source + v))


def _store_kv(kind):
    """Write keys and values to the cache.

    Words: k, v and their strides; cache and its strides; slots, tokens, tokens of an item, heads, tokens of a
    block, vectors, bytes of a vector.
    """
    (
        k, k_token, k_head, v, v_token, v_head, kv, kv_block, kv_head, kv_value, kv_token, slots, tokens,
        step, heads, block_tokens, vectors, width
    ) = words(kind, STORING)  # fmt: skip
    item = next_item(kind)
    while item >= 0:
        for t in range(item * step, min(tokens, item * step + step)):
            slot = read_i64(slots + t * 8)
            if slot < 0:
                continue
            place = kv + slot // block_tokens * kv_block + slot % block_tokens * kv_token
            for h in range(heads):
                _copy_row(kind, k + t * k_token + h * k_head, place + h * kv_head, vectors, width)
                _copy_row(kind, v + t * v_token + h * v_head, place + h * kv_head + kv_value, vectors, width)
        item = next_item(kind)


STORE_KV = Kernel(_store_kv, STORING)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    head_dim, size = k.shape[2], k.element_size()
    if not _is_vectors(head_dim, k, v, kv):
        return _store_codes(k, v, kv, slot_mapping)
    step = _rows_per_item(2 * k.shape[1] * head_dim)
    return STORE_KV(
        k.dtype,
        -(-k.shape[0] // step),
        *(k.data_ptr(), k.stride(0) * size, k.stride(1) * size),
        *(v.data_ptr(), v.stride(0) * size, v.stride(1) * size),
        *(kv.data_ptr(), *(stride * size for stride in kv.stride()[:4]), slot_mapping.data_ptr()),
        *(k.shape[0], step, k.shape[1], kv.shape[3], head_dim // LANES, LANES * size),
    )


def rotary_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    rotary(q, k, positions, cos_sin)
    store_kv(k, v, kv, slot_mapping)


@compiled
def _code_row(kind, source, codes, scale, vectors, width):
    """Write the codes of a row, and their scale as bfloat16 (`kernels.kv_codes.quantize`)."""
    peak = vsplat(F32(0.0))
    for v in range(vectors):
        peak = vmax(peak, vabs(vload(kind, source + v * width)))
    write(BF16, scale, hmax(peak) / F32(LARGEST))
    rounded = read(BF16, scale)
    divisor, most, least = vsplat(rounded if rounded > 0 else F32(1.0)), vsplat(F32(LARGEST)), F32(-LARGEST)
    for v in range(vectors):
        code = vload(kind, source + v * width) / divisor
        vstore(CODE, codes + v * LANES, vmax(vmin(code, most), vsplat(least)))


def _store_kv_codes(kind):
    """Write keys and values as codes to the cache.

    Words: k, v and their strides; cache, bytes of a block, a head and its keys; slots, tokens, tokens of an
    item, heads, tokens of a block, vectors, bytes of a vector.
    """
    (
        k, k_token, k_head, v, v_token, v_head, kv, kv_block, kv_head, kv_value, slots, tokens, step, heads,
        block_tokens, vectors, width
    ) = words(kind, CODING)  # fmt: skip
    head_dim = vectors * LANES
    item = next_item(kind)
    while item >= 0:
        for t in range(item * step, min(tokens, item * step + step)):
            slot = read_i64(slots + t * 8)
            if slot < 0:
                continue
            offset = slot % block_tokens
            for h in range(heads):
                keys = kv + slot // block_tokens * kv_block + h * kv_head
                codes, scale = keys + offset * head_dim, keys + block_tokens * head_dim + offset * SCALE_BYTES
                _code_row(kind, k + t * k_token + h * k_head, codes, scale, vectors, width)
                _code_row(
                    kind, v + t * v_token + h * v_head, codes + kv_value, scale + kv_value, vectors, width
                )
        item = next_item(kind)


STORE_KV_CODES = Kernel(_store_kv_codes, CODING)


def _store_codes(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store as codes what a kernel can, and all else by the reference."""
    head_dim, size = k.shape[2], k.element_size()
    if not (is_codes(kv) and kv.is_contiguous() and _is_vectors(head_dim, k, v)):
        return calls.store_kv.reference(k, v, kv, slot_mapping)
    step = _rows_per_item(2 * k.shape[1] * head_dim)
    return STORE_KV_CODES(
        k.dtype,
        -(-k.shape[0] // step),
        *(k.data_ptr(), k.stride(0) * size, k.stride(1) * size),
        *(v.data_ptr(), v.stride(0) * size, v.stride(1) * size),
        *(kv.data_ptr(), *kv.stride()[:3], slot_mapping.data_ptr()),
        *(k.shape[0], step, k.shape[1], kv.shape[3], head_dim // LANES, LANES * size),
    )
