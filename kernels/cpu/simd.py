"""Sixteen float32 lanes inside numba, which has no vectors, no bfloat16 and no float16 arithmetic.

Each intrinsic writes LLVM IR on `<16 x float>`, which LLVM turns into AVX-512 or into several narrower
instructions. Memory is addressed in bytes by plain integers, so tensors of any strides and dtypes share one
signature. The `kind` of an element is a numpy scalar class, or a pointer to one: it is the dtype that a
kernel is compiled for. Numba has no type for short floats; integers of their size stand for them:

==========  ==========  ==================================================
kind        memory      becomes float32 by
==========  ==========  ==================================================
float32     float32     nothing
int16       float16     fpext (one instruction with F16C)
uint16      bfloat16    a shift: bfloat16 is the upper half of a float32
==========  ==========  ==================================================
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import operator
import platform
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16
IS_X86 = platform.machine() in ("x86_64", "AMD64")
KINDS = {torch.float32: types.float32, torch.float16: types.int16, torch.bfloat16: types.uint16}

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
ELEMENTS = {types.float32: F32, types.int16: F16, types.uint16: I16}


class VecType(types.Type):  # type: ignore[misc]  # numba is untyped
    """A register of sixteen float32."""

    def __init__(self) -> None:
        super().__init__("vec16f32")


vec = VecType()


@register_model(VecType)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, wide(F32))


# --------------------------------------------------------------------------- fragments of LLVM IR


def wide(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def constant(element: Any, value: float) -> Any:
    return ir.Constant(wide(element), [value] * LANES)


def call(builder: Any, name: str, result: Any, *operands: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call an LLVM intrinsic by its mangled name."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    callee = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(callee, operands, fastmath=fastmath)


def plus(builder: Any, base: Any, count: int) -> Any:
    return builder.add(base, ir.Constant(I64, count)) if count else base


def times(builder: Any, step: Any, count: int) -> Any:
    return builder.mul(step, ir.Constant(I64, count))


def emit_prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at a byte address into the second-level cache; never faults."""
    read, keep, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    pointer = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, read, keep, data)


def load(builder: Any, kind: Any, address: Any) -> Any:
    """Load sixteen consecutive elements as float32."""
    element = ELEMENTS[kind]
    raw = builder.load(builder.inttoptr(address, wide(element).as_pointer()), align=kind.bitwidth // 8)
    return _widened(builder, raw, wide)


def load_scalar(builder: Any, kind: Any, address: Any) -> Any:
    element = ELEMENTS[kind]
    raw = builder.load(builder.inttoptr(address, element.as_pointer()), align=kind.bitwidth // 8)
    return _widened(builder, raw, lambda scalar: scalar)


def load_splat(builder: Any, kind: Any, address: Any) -> Any:
    """Load one element as float32 into every lane."""
    return splat(builder, load_scalar(builder, kind, address))


def splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(wide(F32), ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(wide(I32), [0] * LANES))


def store(builder: Any, kind: Any, address: Any, value: Any) -> Any:
    if kind == types.int16:
        value = builder.fptrunc(value, wide(F16))
    elif kind == types.uint16:
        value = _rounded_to_bf16(builder, value)
    return builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=kind.bitwidth // 8)


def store_scalar(builder: Any, kind: Any, address: Any, value: Any) -> Any:
    """Round one float32 to `kind` and write it at byte address."""
    if kind == types.int16:
        value = builder.fptrunc(value, F16)
    elif kind == types.uint16:
        rounded = _rounded_to_bf16(builder, splat(builder, value))
        value = builder.extract_element(rounded, ir.Constant(I32, 0))
    return builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=kind.bitwidth // 8)


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", wide(F32), a, b, c)


def _widened(builder: Any, raw: Any, shape: Any) -> Any:
    if raw.type == shape(F32):
        return raw
    if raw.type == shape(F16):
        return builder.fpext(raw, shape(F32))
    high = builder.zext(raw, shape(I32))
    shift = constant(I32, 16) if shape is wide else ir.Constant(I32, 16)
    return builder.bitcast(builder.shl(high, shift), shape(F32))


def _rounded_to_bf16(builder: Any, value: Any) -> Any:
    """Round to the nearest, ties to even; a NaN stays a NaN."""
    bits = builder.bitcast(value, wide(I32))
    odd = builder.and_(builder.lshr(bits, constant(I32, 16)), constant(I32, 1))
    rounded = builder.add(bits, builder.add(odd, constant(I32, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, constant(I32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, constant(I32, 16)), wide(I16))


def _exp2(builder: Any, x: Any) -> Any:
    """Return 2^x to about 2 ulp: 2^round(x) through the exponent bits, 2^rest by Taylor; 0 below 2^-126."""
    low, high = constant(F32, -126.0), constant(F32, 127.0)
    clamped = call(builder, "llvm.maxnum.v16f32", wide(F32), x, low)
    clamped = call(builder, "llvm.minnum.v16f32", wide(F32), clamped, high)
    whole = call(builder, "llvm.rint.v16f32", wide(F32), clamped)
    rest = builder.fsub(clamped, whole)
    # ln(2)^k / k! for k = 7..0; |rest| <= 1/2, so the first term left out is under 6e-9.
    total = constant(F32, 1.525273380405984e-05)
    for coefficient in (
        1.540353039338161e-04,
        1.333355814642844e-03,
        9.618129107628477e-03,
        5.550410866482158e-02,
        2.402265069591007e-01,
        6.931471805599453e-01,
        1.0,
    ):
        total = fused_multiply_add(builder, total, rest, constant(F32, coefficient))
    exponent = builder.add(builder.fptosi(whole, wide(I32)), constant(I32, 127))
    power = builder.bitcast(builder.shl(exponent, constant(I32, 23)), wide(F32))
    is_tiny = builder.fcmp_ordered("<", x, low)
    return builder.select(is_tiny, constant(F32, 0.0), builder.fmul(total, power))


# --------------------------------------------------------------------------- intrinsics for numba code


@intrinsic
def vload(typingctx: Any, kind: Any, address: Any) -> Any:
    """Load sixteen elements of `kind` from a byte address."""
    return vec(kind, types.int64), lambda _c, b, _s, args: load(b, kind.dtype, args[1])


@intrinsic
def vsplat_load(typingctx: Any, kind: Any, address: Any) -> Any:
    """Load one element of `kind` from a byte address into every lane."""
    return vec(kind, types.int64), lambda _c, b, _s, args: load_splat(b, kind.dtype, args[1])


@intrinsic
def vstore(typingctx: Any, kind: Any, address: Any, value: Any) -> Any:
    """Round sixteen lanes to `kind` and write them at byte address."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        store(builder, kind.dtype, args[1], args[2])
        return context.get_dummy_value()

    return types.void(kind, types.int64, vec), emit


@intrinsic
def vsplat(typingctx: Any, scalar: Any) -> Any:
    return vec(types.float32), lambda _c, b, _s, args: splat(b, args[0])


@intrinsic
def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return vec(vec, vec, vec), lambda _c, builder, _s, args: fused_multiply_add(builder, *args)


@intrinsic
def vmax(typingctx: Any, a: Any, b: Any) -> Any:
    return vec(vec, vec), lambda _c, b, _s, args: call(b, "llvm.maxnum.v16f32", wide(F32), *args)


@intrinsic
def vexp2(typingctx: Any, x: Any) -> Any:
    return vec(vec), lambda _c, b, _s, args: _exp2(b, args[0])


@intrinsic
def vwhere_le(typingctx: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """Return `then` in lanes where a <= b, `otherwise` in the others."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<=", args[0], args[1]), args[2], args[3])

    return vec(vec, vec, vec, vec), emit


@intrinsic
def hsum(typingctx: Any, a: Any) -> Any:
    """Return the sum of the lanes, added pairwise."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        zero = ir.Constant(F32, 0.0)
        return call(builder, "llvm.vector.reduce.fadd.v16f32", F32, zero, args[0], fastmath=("reassoc",))

    return types.float32(vec), emit


@intrinsic
def hmax(typingctx: Any, a: Any) -> Any:
    """Return the largest lane; no lane may be a NaN."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, args[0], fastmath=("nnan",))

    return types.float32(vec), emit


def _define_operator(python_operator: Any, instruction: str) -> None:
    @intrinsic
    def apply(typingctx: Any, a: Any, b: Any) -> Any:
        return vec(vec, vec), lambda _c, builder, _s, args: getattr(builder, instruction)(*args)

    @overload(python_operator, inline="always")
    def of_vectors(a, b):  # type: ignore[no-untyped-def]  # numba compares this signature with the lambda's
        is_ours = isinstance(a, VecType) and isinstance(b, VecType)
        return (lambda a, b: apply(a, b)) if is_ours else None


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    return types.int64(pointer), lambda _c, b, _s, args: b.ptrtoint(args[0], I64)


@intrinsic
def read_i64(typingctx: Any, address: Any) -> Any:
    return types.int64(types.int64), lambda _c, b, _s, args: b.load(b.inttoptr(args[0], I64.as_pointer()))


@intrinsic
def read_i32(typingctx: Any, address: Any) -> Any:
    """Load an int32 as int64."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], I32.as_pointer())), I64)

    return types.int64(types.int64), emit


@intrinsic
def read(typingctx: Any, kind: Any, address: Any) -> Any:
    """Load one element of `kind` as float32."""
    return types.float32(kind, types.int64), lambda _c, b, _s, args: load_scalar(b, kind.dtype, args[1])


@intrinsic
def read_f64(typingctx: Any, address: Any) -> Any:
    return types.float64(types.int64), lambda _c, b, _s, args: b.load(b.inttoptr(args[0], F64.as_pointer()))


@intrinsic
def write_f32(typingctx: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic
def fetch_add(typingctx: Any, address: Any, count: Any) -> Any:
    """Add to the int64 at a byte address, atomically; return its value before."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def arrive(typingctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at a byte address; return the sum (acquire and release)."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        one = ir.Constant(I64, 1)
        before = builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), one, "acq_rel")
        return builder.add(before, one)

    return types.int64(types.int64), emit


@intrinsic
def announce(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 behind all that was written before (release)."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def heard(typingctx: Any, address: Any) -> Any:
    """Read an int64 and let the processor rest a moment; what was written before it is seen (acquire)."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        if IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def cycles(typingctx: Any) -> Any:
    """Read the processor's cycle counter."""
    return types.int64(), lambda _c, b, _s, _a: call(b, "llvm.readcyclecounter", I64)


@intrinsic
def write_i64(typingctx: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_with(typingctx: Any, function: Any, argument: Any) -> Any:
    """Call the C function void(void *) at an address."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_for_int(typingctx: Any, function: Any) -> Any:
    """Call the C function int(void) at an address."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), emit


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at a byte address; never faults."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit
