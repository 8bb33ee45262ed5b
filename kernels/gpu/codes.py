"""Weights from packed codes in registers, four at a time (`kernels.packing`).

A float whose lowest bits of the mantissa are a code is a power of two plus the code: 128 in bfloat16 for
codes of up to 7 bits, 1024 in float16 and 2^23 in float32 for codes of 8. Permuting bytes makes four such
floats of four codes; subtracting the power and the zero is exact, and the product with the scale rounds once.
Only bfloat16 from codes of fewer than 8 bits multiplies by a rounded scale, as Marlin does (Frantar et al.
2024).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import triton
import triton.language as tl


def _pieces(source: str, shift: int, mask: int, high: str) -> str:
    """Return code that shifts and masks four bytes into t, and adds the bits that `high` has in place."""
    lines = [f"shr.b32 t, {source}, {shift};" if shift else f"mov.b32 t, {source};"]
    lines += [f"and.b32 t, t, {mask * 0x01010101:#010x};"] if mask < 255 else []
    if high:
        lines += [f"and.b32 h, {high}, 0x04040404;", "or.b32 t, t, h;"]
    return "\n".join(lines)


def _in_pairs(kind: str, power: int, one: int, shift: int, mask: int, high: str = "") -> tl.constexpr:
    """Return code for four weights in two registers: ((power + code) * 1 + negative) * scale - 0."""
    return tl.constexpr(
        f"""{{
.reg .b32 t, h, a, b, power, one, none;
mov.b32 power, {power * 0x01010101:#010x};
mov.b32 one, {one * 0x00010001:#010x};
mov.b32 none, 0x80008000;
{_pieces("$2", shift, mask, high)}
prmt.b32 a, t, power, 0x4140;
prmt.b32 b, t, power, 0x4342;
fma.rn.{kind} a, a, one, $3;
fma.rn.{kind} b, b, one, $4;
fma.rn.{kind} $0, a, $5, none;
fma.rn.{kind} $1, b, $6, none;
}}"""
    )


_BF16 = ("bf16x2", 0x43, 0x3F80)
_F16 = ("f16x2", 0x64, 0x3C00)
BF16_4_LOW = _in_pairs(*_BF16, shift=0, mask=15)
BF16_4_HIGH = _in_pairs(*_BF16, shift=4, mask=15)
BF16_3_0 = _in_pairs(*_BF16, shift=0, mask=3, high="$7")
BF16_3_1 = _in_pairs(*_BF16, shift=2, mask=3, high="$7")
BF16_3_2 = _in_pairs(*_BF16, shift=4, mask=3, high="$7")
BF16_3_3 = _in_pairs(*_BF16, shift=6, mask=3, high="$7")
F16_8 = _in_pairs(*_F16, shift=0, mask=255)
F16_4_LOW = _in_pairs(*_F16, shift=0, mask=15)
F16_4_HIGH = _in_pairs(*_F16, shift=4, mask=15)
F16_3_0 = _in_pairs(*_F16, shift=0, mask=3, high="$7")
F16_3_1 = _in_pairs(*_F16, shift=2, mask=3, high="$7")
F16_3_2 = _in_pairs(*_F16, shift=4, mask=3, high="$7")
F16_3_3 = _in_pairs(*_F16, shift=6, mask=3, high="$7")
BF16_8 = tl.constexpr(
    """{
.reg .b32 a, b, c, d, power;
mov.b32 power, 0x4b000000;
prmt.b32 a, $2, power, 0x7440;
prmt.b32 b, $2, power, 0x7441;
prmt.b32 c, $2, power, 0x7442;
prmt.b32 d, $2, power, 0x7443;
add.rn.f32 a, a, $3;
add.rn.f32 b, b, $4;
add.rn.f32 c, c, $5;
add.rn.f32 d, d, $6;
mul.rn.f32 a, a, $7;
mul.rn.f32 b, b, $8;
mul.rn.f32 c, c, $9;
mul.rn.f32 d, d, $10;
cvt.rn.bf16x2.f32 $0, b, a;
cvt.rn.bf16x2.f32 $1, d, c;
}"""
)


_PAIRS = tl.constexpr("=r,=r,r,r,r,r,r")
_PAIRS_AND_HIGH = tl.constexpr("=r,=r,r,r,r,r,r,r")
_FOURS = tl.constexpr("=r,=r,r,r,r,r,r,r,r,r,r")


@triton.jit
def _float16_of(pieces, high, zero, scale, part: tl.constexpr, BITS: tl.constexpr):
    """Decode as `weights_of` to float16 by the code above."""
    negative = (-1024.0 - zero.to(tl.float32)).to(tl.float16)
    scale = scale.to(tl.float16)
    if BITS == 3:
        of_three: tl.constexpr = (F16_3_0, F16_3_1, F16_3_2, F16_3_3)[part]
        values = [pieces, negative, scale, high]
        w = tl.inline_asm_elementwise(of_three, _PAIRS_AND_HIGH, values, tl.float16, True, 4)
    else:
        code: tl.constexpr = F16_8 if BITS == 8 else (F16_4_HIGH if part else F16_4_LOW)
        w = tl.inline_asm_elementwise(code, _PAIRS, [pieces, negative, scale], tl.float16, True, 4)
    return w


@triton.jit
def _bfloat16_of(pieces, high, zero, scale, part: tl.constexpr, BITS: tl.constexpr):
    """Decode as `weights_of` to bfloat16 by the code above."""
    if BITS == 8:
        negative = (-8388608.0 - zero.to(tl.float32)).to(tl.int32, bitcast=True)
        factor = scale.to(tl.float32).to(tl.int32, bitcast=True)
        w = tl.inline_asm_elementwise(BF16_8, _FOURS, [pieces, negative, factor], tl.bfloat16, True, 4)
    else:
        negative = (-128.0 - zero.to(tl.float32)).to(tl.bfloat16)
        factor = scale.to(tl.bfloat16)
        if BITS == 3:
            of_three: tl.constexpr = (BF16_3_0, BF16_3_1, BF16_3_2, BF16_3_3)[part]
            values = [pieces, negative, factor, high]
            w = tl.inline_asm_elementwise(of_three, _PAIRS_AND_HIGH, values, tl.bfloat16, True, 4)
        else:
            code: tl.constexpr = BF16_4_HIGH if part else BF16_4_LOW
            w = tl.inline_asm_elementwise(code, _PAIRS, [pieces, negative, factor], tl.bfloat16, True, 4)
    return w


@triton.jit
def weights_of(
    pieces,
    high,
    zero,
    scale,
    part: tl.constexpr,
    BITS: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """Decode OPERAND [rows, bytes]: the weights of a part of the bytes `pieces`.

    A part is one code of each byte of the widest plane. high: bytes that have the third bit of three where a
    code has it. zero uint8 or int32 and scale float16 [rows, 1].
    """
    if HAS_ASM:
        if OPERAND == tl.float16:  # noqa: SIM300 a constant of the compiler
            w = _float16_of(pieces, high, zero, scale, part, BITS)
        else:
            w = _bfloat16_of(pieces, high, zero, scale, part, BITS)
    else:
        codes = pieces.to(tl.int32)
        if BITS == 4:
            codes = (codes >> (4 * part)) & 15
        if BITS == 3:
            codes = ((codes >> (2 * part)) & 3) | (high.to(tl.int32) & 4)
        w = ((codes - zero.to(tl.int32)).to(tl.float32) * scale.to(tl.float32)).to(OPERAND)
    return w
