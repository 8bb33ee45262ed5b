"""The common part of `attention_few` and `attention_many`: a call's parameters, addresses of blocks."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.simd import LANES, read, read_i32, vexp2, vsplat
from kernels.kv_codes import SCALE_BYTES

FEW = 8  # rows; more than this and transposing the queries pays
ROWS = 48  # rows of a prefill item: three vectors, so that an 8 x 3 tile of scores fills 24 registers
ROW_BYTES = ROWS * 4
CHUNK = 64  # tokens between two corrections of the running maximum
SPAN = CHUNK + LANES  # row of the score buffer: whole vectors, and room for tiles that overshoot
NEVER = -1e30  # running maximum before the first key; finite, so that a hidden key gives 2^-inf = 0, no NaN
F32, BF16 = np.float32, np.uint16
CODE = np.int8  # an element of a cache of codes


class AttentionCall(NamedTuple):
    """The parameters of one call. Addresses and strides are in bytes."""

    items: int  # int32 [n, 2]: sequence, first row
    q: int
    q_token: int
    q_head: int
    kv: int
    kv_block: int
    kv_head: int
    kv_value: int  # distance from a key to its value
    kv_token: int
    out: int
    out_token: int
    out_head: int
    table: int
    table_row: int
    bounds: int  # cu_seqlens_q
    contexts: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    window: int  # 0: none
    element: int  # bytes of one, in queries and output
    kv_element: int  # bytes of one in the cache
    sinks: int  # [heads]: the score of a key that every query sees; 0: none
    scale: float  # scores are in powers of two, like the cap
    softcap: float  # 0: none


LAYOUT = "q" * (len(AttentionCall._fields) - 2) + "dd"


@compiled
def cap(a, score):
    """Return softcap * tanh(score / softcap), of vectors; tanh(y) = 1 - 2 / (1 + e^2y)."""
    one, two = vsplat(F32(1.0)), vsplat(F32(2.0))
    power = vexp2(score * vsplat(F32(2.0 * math.log2(math.e) / a.softcap)))
    return vsplat(F32(a.softcap)) * (one - two / (one + power))


@compiled
def first_state(a, kind, head):
    """Return the running maximum and sum of a query head before the first key."""
    if a.sinks == 0:
        return F32(NEVER), F32(0.0)
    return read(kind, a.sinks + head * a.element) * F32(math.log2(math.e)), F32(1.0)


@compiled
def aligned(floats):
    """Return a buffer and its first address on a cache line: loads across two lines take twice as long."""
    buffer = np.empty(floats + LANES, np.float32)
    return buffer, (buffer.ctypes.data + 63) // 64 * 64


@compiled
def block_of(a, seq, head, token):
    """Return the address of a token's key and the number of tokens from it to the end of its block."""
    index, offset = token // a.block_tokens, token % a.block_tokens
    block = read_i32(a.table + seq * a.table_row + index * 4)
    return a.kv + block * a.kv_block + head * a.kv_head + offset * a.kv_token, a.block_tokens - offset


@compiled
def scales_of(a, room, keys):
    """Return the address of the scale of a token's key, in a cache of codes (`kernels.kv_codes`).

    keys and room: as `block_of` gave them. That of its value lies as far behind as its value.
    """
    return keys + room * a.kv_token + (a.block_tokens - room) * SCALE_BYTES
