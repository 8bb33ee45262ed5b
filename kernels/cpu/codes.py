"""From packed codes to float32 lanes: fragments of LLVM IR.

A quantised row is read through its levels: a float32 scale and offset for each group, so that a weight is
code * scale + offset. Both are exact (a scale has 11 significant bits, a zero 8, a code less its zero 9), so
a weight here has the very bits that `kernels.dequantize` gives it.

Where a processor permutes sixteen floats by sixteen indices (AVX-512), the values of a group are made once
and codes of 4 and 3 bits look them up: nothing is masked, converted or scaled per weight.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.simd import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    call,
    constant,
    fused_multiply_add,
    load_splat,
    store,
    wide,
)


def _can_permute() -> bool:
    is_for_this_processor = config.CPU_NAME is None and config.CPU_FEATURES is None
    return is_for_this_processor and bool(llvm.get_host_cpu_features().get("avx512f"))


CAN_PERMUTE = _can_permute()


def plus(builder: Any, address: Any, count: int) -> Any:
    return builder.add(address, ir.Constant(I64, count)) if count else address


def times(builder: Any, step: Any, count: int) -> Any:
    return builder.mul(step, ir.Constant(I64, count))


class Levels:
    """The values that the codes of one group stand for."""

    def __init__(self, builder: Any, bits: int, scale_at: Any, offset_at: Any) -> None:
        self.bits = bits
        self.scale = load_splat(builder, types.float32, scale_at)
        self.offset = load_splat(builder, types.float32, offset_at)
        self.table = None
        if CAN_PERMUTE and bits < 8:
            # A lookup minds the lower four bits of an index. Of a code of 3 bits it takes the lower two; the
            # next code's, which stand above them there, make no difference.
            codes = [float(i % (16 if bits == 4 else 4)) for i in range(LANES)]
            self.table = self._scaled(builder, ir.Constant(wide(F32), codes))

    def weights(self, builder: Any, tile: Any, quarter: int) -> Any:
        """Of inputs [16 quarter, 16 quarter + 16) of the tile at this byte address (`kernels.packing`)."""
        if self.bits == 8:
            return self._scaled(builder, _floats(builder, _bytes(builder, plus(builder, tile, 16 * quarter))))
        if self.bits == 4:
            pairs = _bytes(builder, plus(builder, tile, 16 * (quarter % 2)))
            return self._looked_up(builder, builder.lshr(pairs, constant(I32, 4 * (quarter // 2))), 15)
        lower = builder.lshr(_bytes(builder, tile), constant(I32, 2 * quarter))
        without = self._looked_up(builder, lower, 3)
        with_upper = builder.fadd(without, builder.fmul(self.scale, constant(F32, 4.0)))
        return builder.select(_mask(builder, plus(builder, tile, 16 + 2 * quarter)), with_upper, without)

    def _scaled(self, builder: Any, codes: Any) -> Any:
        return fused_multiply_add(builder, codes, self.scale, self.offset)

    def _looked_up(self, builder: Any, codes: Any, mask: int) -> Any:
        if self.table is not None:
            return call(builder, "llvm.x86.avx512.permvar.sf.512", wide(F32), self.table, codes)
        return self._scaled(builder, _floats(builder, builder.and_(codes, constant(I32, mask))))


def _floats(builder: Any, codes: Any) -> Any:
    return builder.uitofp(codes, wide(F32))


def _bytes(builder: Any, address: Any) -> Any:
    """Sixteen bytes, each in a lane of 32 bits."""
    raw = builder.load(builder.inttoptr(address, wide(I8).as_pointer()), align=1)
    return builder.zext(raw, wide(I32))


def _mask(builder: Any, address: Any) -> Any:
    """Sixteen bits, one to a lane."""
    raw = builder.load(builder.inttoptr(address, I16.as_pointer()), align=1)
    return builder.bitcast(raw, wide(I1))


@intrinsic
def make_levels(typingctx: Any, scales: Any, zeros: Any, count: Any, target: Any, width: Any) -> Any:
    """float32 scales at byte address target, and offsets -scale * zero `width` bytes behind them, from
    `count` float16 scales and uint8 zeros. Writes whole vectors; reads nothing past the ends, where no page
    may be."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        scales, zeros, count, target, width = args
        step = ir.Constant(I64, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, step) as (at, _):
            inside = _lanes_below(builder, builder.sub(count, at))
            scale = _masked(builder, F16, builder.add(scales, times(builder, at, 2)), inside)
            scale = builder.fpext(scale, wide(F32))
            zero = builder.zext(_masked(builder, I8, builder.add(zeros, at), inside), wide(I32))
            offset = builder.fmul(builder.fsub(constant(F32, 0.0), scale), _floats(builder, zero))
            place = builder.add(target, times(builder, at, 4))
            store(builder, types.float32, place, scale)
            store(builder, types.float32, builder.add(place, width), offset)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), emit


def _lanes_below(builder: Any, count: Any) -> Any:
    first = builder.insert_element(ir.Constant(wide(I64), ir.Undefined), count, ir.Constant(I32, 0))
    counts = builder.shuffle_vector(first, first, ir.Constant(wide(I32), [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(wide(I64), list(range(LANES))), counts)


def _masked(builder: Any, element: Any, address: Any, mask: Any) -> Any:
    """Lanes outside the mask are zero and their memory is not touched."""
    pointer = builder.inttoptr(address, wide(element).as_pointer())
    name = f"llvm.masked.load.v{LANES}{'f16' if element == F16 else 'i8'}.p0"
    zeros = ir.Constant(wide(element), [0] * LANES)
    return call(builder, name, wide(element), pointer, ir.Constant(I32, 1), mask, zeros)
