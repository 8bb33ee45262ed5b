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
int8        int8        a conversion; stored ones are rounded, and must lie
                        between -127 and 127
==========  ==========  ==================================================

A function that writes IR takes the builder and values of LLVM. `intrinsic_of` makes an intrinsic of it, which
numba code calls without the builder; the annotations are the types of its parameters and of its result.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16
IS_X86 = platform.machine() in ("x86_64", "AMD64")
OWN_WORDS = 16  # the first byte of a kernel's own words (`kernels.cpu.team`)
KINDS = {torch.float32: types.float32, torch.float16: types.int16, torch.bfloat16: types.uint16}

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
ELEMENTS = {types.float32: F32, types.int16: F16, types.uint16: I16, types.int8: I8}


class VecType(types.Type):  # type: ignore[misc]  # numba is untyped
    """A register of sixteen float32."""

    def __init__(self) -> None:
        super().__init__("vec16f32")


@register_model(VecType)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, wide(F32))


# --------------------------------------------------------------------------- from IR to intrinsics

Int = Annotated[Any, types.int64]
Float = Annotated[Any, types.float32]
Vec = Annotated[Any, VecType()]
Value = Annotated[Any, "value"]  # of any other type
Kind = Annotated[Any, "kind"]  # no value: the type of an element
Literal = Annotated[int, "literal"]  # an integer that the compiler knows


def intrinsic_of(emit: Callable[..., Any]) -> Any:
    """Return an intrinsic whose code `emit` writes when it is called with a builder and the parameters."""
    hints = get_type_hints(emit, include_extras=True).values()
    _, *forms, result = (get_args(hint)[1] if get_args(hint) else types.void for hint in hints)

    @wraps(emit)
    def typed(typingctx: Any, *own: Any) -> Any:
        literals = (argument for form, argument in zip(forms, own, strict=True) if form == "literal")
        if not all(isinstance(argument, types.IntegerLiteral) for argument in literals):
            return None  # numba asks a second time with the literals

        def write(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            given = (
                argument.literal_value if form == "literal" else argument.dtype if form == "kind" else value
                for form, argument, value in zip(forms, own, values, strict=True)
            )
            written = emit(builder, *given)
            return context.get_dummy_value() if result == types.void else written

        taken = [
            argument if isinstance(form, str) else form for form, argument in zip(forms, own, strict=True)
        ]
        return result(*taken), write

    return intrinsic(typed)


# --------------------------------------------------------------------------- fragments of LLVM IR


def wide(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def constant(element: Any, value: float) -> Any:
    return ir.Constant(wide(element), [value] * LANES)


def vector(element: Any, values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(element, len(values)), values)


def call(builder: Any, name: str, result: Any, *operands: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call an LLVM intrinsic by its mangled name."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    callee = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(callee, operands, fastmath=fastmath)


def plus(builder: Any, base: Any, count: int) -> Any:
    return builder.add(base, ir.Constant(I64, count)) if count else base


def times(builder: Any, step: Any, count: int) -> Any:
    return builder.mul(step, ir.Constant(I64, count))


def nth(builder: Any, base: Any, step: Any, count: int) -> Any:
    """Return the address `count` steps behind `base`."""
    return builder.add(base, times(builder, step, count)) if count else base


def registers(builder: Any, values: list[Any]) -> list[Any]:
    """Return a register for each of the values, which it has at first."""
    found = [cgutils.alloca_once(builder, value.type) for value in values]
    for register, value in zip(found, values, strict=True):
        builder.store(value, register)
    return found


def add_product(builder: Any, register: Any, a: Any, b: Any) -> None:
    """Add a * b to a register."""
    builder.store(fused_multiply_add(builder, a, b, builder.load(register)), register)


def load_as(builder: Any, element: Any, address: Any, align: int = 1) -> Any:
    """Load a value of LLVM from a byte address."""
    return builder.load(builder.inttoptr(address, element.as_pointer()), align=align)


def store_as(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    """Write a value of LLVM at a byte address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def emit_prefetch(builder: Any, address: Int) -> None:
    """Prefetch the cache line at a byte address into the second-level cache; never faults."""
    read, keep, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    pointer = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, read, keep, data)


def load(builder: Any, kind: Kind, address: Int) -> Vec:
    """Load sixteen consecutive elements of `kind` from a byte address as float32."""
    return _widened(builder, load_as(builder, wide(ELEMENTS[kind]), address, kind.bitwidth // 8), wide)


def load_scalar(builder: Any, kind: Kind, address: Int) -> Float:
    """Load one element of `kind` from a byte address as float32."""
    return _widened(builder, load_as(builder, ELEMENTS[kind], address, kind.bitwidth // 8), lambda one: one)


def load_splat(builder: Any, kind: Kind, address: Int) -> Vec:
    """Load one element of `kind` from a byte address as float32 into every lane."""
    return splat(builder, load_scalar(builder, kind, address))


def splat(builder: Any, scalar: Float) -> Vec:
    """Return a scalar, of any type, in every lane."""
    first = builder.insert_element(ir.Constant(wide(scalar.type), ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(wide(I32), [0] * LANES))


def store(builder: Any, kind: Kind, address: Int, value: Vec) -> None:
    """Round sixteen lanes to `kind` and write them at a byte address."""
    if kind == types.int16:
        value = builder.fptrunc(value, wide(F16))
    elif kind == types.uint16:
        value = _rounded_to_bf16(builder, value)
    elif kind == types.int8:
        whole = call(builder, "llvm.rint.v16f32", wide(F32), value)
        value = builder.trunc(builder.fptosi(whole, wide(I32)), wide(I8))
    store_as(builder, value, address, kind.bitwidth // 8)


def store_scalar(builder: Any, kind: Kind, address: Int, value: Float) -> None:
    """Round one float32 to `kind` and write it at a byte address."""
    if kind == types.int16:
        value = builder.fptrunc(value, F16)
    elif kind == types.uint16:
        rounded = _rounded_to_bf16(builder, splat(builder, value))
        value = builder.extract_element(rounded, ir.Constant(I32, 0))
    store_as(builder, value, address, kind.bitwidth // 8)


def fused_multiply_add(builder: Any, a: Vec, b: Vec, c: Vec) -> Vec:
    """Return a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", wide(F32), a, b, c)


def _widened(builder: Any, raw: Any, shape: Any) -> Any:
    if raw.type == shape(F32):
        return raw
    if raw.type == shape(F16):
        return builder.fpext(raw, shape(F32))
    if raw.type == shape(I8):
        return builder.sitofp(builder.sext(raw, shape(I32)), shape(F32))
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


def exp2(builder: Any, x: Vec) -> Vec:
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

vload = intrinsic_of(load)
vsplat_load = intrinsic_of(load_splat)
vstore = intrinsic_of(store)
vsplat = intrinsic_of(splat)
vfma = intrinsic_of(fused_multiply_add)
vexp2 = intrinsic_of(exp2)
read = intrinsic_of(load_scalar)
write = intrinsic_of(store_scalar)
prefetch = intrinsic_of(emit_prefetch)


@intrinsic_of
def vmax(builder: Any, a: Vec, b: Vec) -> Vec:
    return call(builder, "llvm.maxnum.v16f32", wide(F32), a, b)


@intrinsic_of
def vmin(builder: Any, a: Vec, b: Vec) -> Vec:
    return call(builder, "llvm.minnum.v16f32", wide(F32), a, b)


@intrinsic_of
def vabs(builder: Any, a: Vec) -> Vec:
    return call(builder, "llvm.fabs.v16f32", wide(F32), a)


@intrinsic_of
def vwhere_le(builder: Any, a: Vec, b: Vec, then: Vec, otherwise: Vec) -> Vec:
    """Return `then` in lanes where a <= b, `otherwise` in the others."""
    return builder.select(builder.fcmp_ordered("<=", a, b), then, otherwise)


@intrinsic_of
def hsum(builder: Any, a: Vec) -> Float:
    """Return the sum of the lanes, added pairwise."""
    zero = ir.Constant(F32, 0.0)
    return call(builder, "llvm.vector.reduce.fadd.v16f32", F32, zero, a, fastmath=("reassoc",))


@intrinsic_of
def hmax(builder: Any, a: Vec) -> Float:
    """Return the largest lane; no lane may be a NaN."""
    return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, a, fastmath=("nnan",))


def _define_operator(python_operator: Any, instruction: str) -> None:
    @intrinsic_of
    def apply(builder: Any, a: Vec, b: Vec) -> Vec:
        return getattr(builder, instruction)(a, b)

    @overload(python_operator, inline="always")
    def of_vectors(a, b):  # type: ignore[no-untyped-def]  # numba compares this signature with the lambda's
        is_ours = isinstance(a, VecType) and isinstance(b, VecType)
        return (lambda a, b: apply(a, b)) if is_ours else None


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


@intrinsic_of
def address_of(builder: Any, pointer: Value) -> Int:
    return builder.ptrtoint(pointer, I64)


@intrinsic_of
def read_i64(builder: Any, address: Int) -> Int:
    return load_as(builder, I64, address, 8)


@intrinsic_of
def read_i32(builder: Any, address: Int) -> Int:
    """Load an int32 as int64."""
    return builder.sext(load_as(builder, I32, address, 4), I64)


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def words(typingctx: Any, kind: Any, layout: Any) -> Any:
    """Return a kernel's own words as a tuple: an int64 for each q of its layout, a float64 for each d."""
    if not isinstance(layout, types.StringLiteral):
        return None  # numba asks a second time with the literals
    forms = [(I64, types.int64) if letter == "q" else (F64, types.float64) for letter in layout.literal_value]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = plus(builder, builder.ptrtoint(args[0], I64), OWN_WORDS)
        found = [load_as(builder, form, plus(builder, first, 8 * i), 8) for i, (form, _) in enumerate(forms)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.BaseTuple.from_types([one for _, one in forms])(kind, layout), emit


@intrinsic_of
def write_f32(builder: Any, address: Int, value: Float) -> None:
    store_as(builder, value, address, 4)


@intrinsic_of
def write_i32(builder: Any, address: Int, value: Int) -> None:
    """Write the low half of an int64."""
    store_as(builder, builder.trunc(value, I32), address, 4)


@intrinsic_of
def write_i64(builder: Any, address: Int, value: Int) -> None:
    store_as(builder, value, address, 8)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic_of
def fetch_add(builder: Any, address: Int, count: Int) -> Int:
    """Add to the int64 at a byte address, atomically; return its value before."""
    return builder.atomic_rmw("add", _word(builder, address), count, "monotonic")


@intrinsic_of
def arrive(builder: Any, address: Int) -> Int:
    """Add 1 to the int64 at a byte address; return the sum (acquire and release)."""
    one = ir.Constant(I64, 1)
    return builder.add(builder.atomic_rmw("add", _word(builder, address), one, "acq_rel"), one)


@intrinsic_of
def announce(builder: Any, address: Int, value: Int) -> None:
    """Write an int64 behind all that was written before (release)."""
    builder.store_atomic(value, _word(builder, address), "release", 8)


@intrinsic_of
def heard(builder: Any, address: Int) -> Int:
    """Read an int64 and let the processor rest a moment; what was written before it is seen (acquire)."""
    if IS_X86:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    return builder.load_atomic(_word(builder, address), "acquire", 8)


@intrinsic_of
def cycles(builder: Any) -> Int:
    """Read the processor's cycle counter."""
    return call(builder, "llvm.readcyclecounter", I64)


@intrinsic_of
def call_with(builder: Any, function: Int, argument: Int) -> None:
    """Call the C function void(void *) at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


@intrinsic_of
def call_for_int(builder: Any, function: Int) -> Int:
    """Call the C function int(void) at an address."""
    kind = ir.FunctionType(I32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), I64)
