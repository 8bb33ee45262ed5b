"""Weights from packed codes in registers, four at a time (`kernels.packing`).

A float whose lowest bits of the mantissa are a code is a power of two plus the code: 128 in bfloat16 for
codes of up to 7 bits, 1024 in float16 and 2^23 in float32 for codes of 8. Permuting bytes makes four such
floats of four codes; subtracting the power and the zero is exact, and the product with the scale rounds once.
Only bfloat16 from codes of fewer than 8 bits multiplies by a rounded scale, as Marlin does (Frantar et al.
2024).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="no-any-return"
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _pieces(source: str, shift: int, mask: int, high: str) -> str:
    """Return code that shifts and masks four bytes into t, and adds the bits that `high` has in place."""
    lines = [f"shr.b32 t, {source}, {shift};" if shift else f"mov.b32 t, {source};"]
    lines += [f"and.b32 t, t, {mask * 0x01010101:#010x};"] if mask < 255 else []
    if high:
        lines += [f"and.b32 h, {high}, 0x04040404;", "or.b32 t, t, h;"]
    return "\n".join(lines)


@triton.constexpr_function
def _in_pairs(kind: str, is_scaled: bool, shift: int, mask: int, has_high: bool) -> str:
    """Return code for four weights in two registers: ((power + code) * 1 + negative) * scale - 0."""
    power, one = (0x43, 0x3F80) if kind == "bf16" else (0x64, 0x3C00)
    high = ("$7" if is_scaled else "$5") if has_high else ""
    last = "\n".join(
        f"fma.rn.{kind}x2 ${i}, {name}, ${5 + i}, none;" if is_scaled else f"mov.b32 ${i}, {name};"
        for i, name in enumerate("ab")
    )
    return f"""{{
.reg .b32 t, h, a, b, power, one, none;
mov.b32 power, {power * 0x01010101:#010x};
mov.b32 one, {one * 0x00010001:#010x};
mov.b32 none, 0x80008000;
{_pieces("$2", shift, mask, high)}
prmt.b32 a, t, power, 0x4140;
prmt.b32 b, t, power, 0x4342;
fma.rn.{kind}x2 a, a, one, $3;
fma.rn.{kind}x2 b, b, one, $4;
{last}
}}"""


@triton.constexpr_function
def _in_float32(is_scaled: bool) -> str:
    """Return code for four weights bfloat16 of codes of 8 bits: (2^23 + code + negative) * scale."""
    parts = [f"prmt.b32 {name}, $2, power, {0x7440 + i:#06x};" for i, name in enumerate("abcd")]
    parts += [f"add.rn.f32 {name}, {name}, ${3 + i};" for i, name in enumerate("abcd")]
    parts += [f"mul.rn.f32 {name}, {name}, ${7 + i};" for i, name in enumerate("abcd") if is_scaled]
    return "\n".join(
        [
            "{",
            ".reg .b32 a, b, c, d, power;",
            "mov.b32 power, 0x4b000000;",
            *parts,
            "cvt.rn.bf16x2.f32 $0, b, a;",
            "cvt.rn.bf16x2.f32 $1, d, c;",
            "}",
        ]
    )


@triton.constexpr_function
def assembly(bits: int, part: int, is_bfloat16: bool, is_scaled: bool) -> str:
    """Return code for the weights of a part of four bytes, as `weights_of` has them.

    $0 and $1 are the weights, $2 the bytes, then come the negative numbers, the scales if there are any, and
    the bytes with the third bit of three.
    """
    if bits == 8 and is_bfloat16:
        return _in_float32(is_scaled)
    width = {8: 8, 4: 4, 3: 2}[bits]
    kind = "bf16" if is_bfloat16 else "f16"
    return _in_pairs(kind, is_scaled, part * width, 2**width - 1, bits == 3)


@triton.constexpr_function
def constraints(bits: int, is_bfloat16: bool, is_scaled: bool) -> str:
    """Return the registers of `assembly`: numbers of 16 bits go two in one."""
    of_each = 4 if bits == 8 and is_bfloat16 else 2
    return ",".join(["=r", "=r"] + ["r"] * (1 + of_each * (1 + is_scaled) + (bits == 3)))


@triton.jit
def _by_assembly(
    pieces,
    high,
    zero,
    scale,
    part: tl.constexpr,
    BITS: tl.constexpr,
    OPERAND: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Decode as `weights_of` by the code above."""
    IS_BFLOAT16: tl.constexpr = tl.bfloat16 == OPERAND
    if IS_BFLOAT16 and BITS == 8:
        negative = (-8388608.0 - zero.to(tl.float32)).to(tl.int32, bitcast=True)
        factor = scale.to(tl.float32).to(tl.int32, bitcast=True)
    else:
        POWER: tl.constexpr = 128.0 if IS_BFLOAT16 else 1024.0
        negative = (-POWER - zero.to(tl.float32)).to(OPERAND)
        factor = scale.to(OPERAND)
    code: tl.constexpr = assembly(BITS, part, IS_BFLOAT16, IS_SCALED)
    registers: tl.constexpr = constraints(BITS, IS_BFLOAT16, IS_SCALED)
    if BITS == 3:
        values = [pieces, negative, factor, high] if IS_SCALED else [pieces, negative, high]
    else:
        values = [pieces, negative, factor] if IS_SCALED else [pieces, negative]
    if IS_BFLOAT16:  # the type is taken as it stands
        w = tl.inline_asm_elementwise(code, registers, values, tl.bfloat16, True, 4)
    else:
        w = tl.inline_asm_elementwise(code, registers, values, tl.float16, True, 4)
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
    IS_SCALED: tl.constexpr = True,
):
    """Decode OPERAND [rows, bytes]: the weights of a part of the bytes `pieces`.

    A part is one code of each byte of the widest plane. high: bytes that have the third bit of three where a
    code has it. zero uint8 or int32 and scale float16 [rows, 1]. Without IS_SCALED: the weights divided by
    their scale, which are exact.
    """
    if HAS_ASM:
        w = _by_assembly(pieces, high, zero, scale, part, BITS, OPERAND, IS_SCALED)
    else:
        codes = pieces.to(tl.int32)
        if BITS == 4:
            codes = (codes >> (4 * part)) & 15
        if BITS == 3:
            codes = ((codes >> (2 * part)) & 3) | (high.to(tl.int32) & 4)
        w = (codes - zero.to(tl.int32)).to(tl.float32)
        if IS_SCALED:
            w *= scale.to(tl.float32)
        w = w.to(OPERAND)
    return w
