"""Fragments of LLVM IR that turn packed codes into float32 lanes.

A quantised row is read through its levels: a float32 scale and offset for each group, so that a weight is
code * scale + offset. Both are exact (a scale has 11 significant bits, a zero 8, a code less its zero 9), so
a weight here has the very bits that `kernels.dequantize` gives it.

Where a processor permutes sixteen floats by sixteen indices (AVX-512), the values of a group are made once
and the first plane of codes below 8 bits looks them up: nothing is masked, converted or scaled per weight.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.processor import has_all
from kernels.cpu.simd import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Int,
    call,
    constant,
    fused_multiply_add,
    intrinsic_of,
    load_as,
    load_splat,
    plus,
    splat,
    store,
    times,
    vector,
    wide,
)
from kernels.packing import planes

CAN_PERMUTE = has_all("avx512f")


class Levels:
    """The values that the codes of one group stand for."""

    def __init__(self, builder: Any, bits: int, scale_at: Any, offset_at: Any) -> None:
        self.planes = list(planes(bits))
        self.scale = load_splat(builder, types.float32, scale_at)
        self.offset = load_splat(builder, types.float32, offset_at)
        self.table = None
        first, _ = self.planes[0]
        if CAN_PERMUTE and first <= 4:
            # A lookup minds the lower four bits of an index. In a plane of two bits, the other bits of an
            # index are the next piece's, so the table repeats.
            codes = [float(i % 2**first) for i in range(LANES)]
            self.table = self._scaled(builder, ir.Constant(wide(F32), codes))

    def weights(self, builder: Any, tile: Any, quarter: int) -> Any:
        """Return float32 [16]: inputs [16 quarter, 16 quarter + 16) of the tile at this byte address."""
        total = None
        for width, lowest in self.planes:
            plane = plus(builder, tile, 8 * lowest)
            if width == 1:
                step = builder.fmul(self.scale, constant(F32, float(2**lowest)))
                mask = _mask(builder, plus(builder, plane, 2 * quarter))
                total = self._scaled(builder, constant(F32, 0.0)) if total is None else total
                total = builder.select(mask, builder.fadd(total, step), total)
                continue
            place, byte = divmod(16 * quarter, 8 * width)
            pieces = builder.lshr(_bytes(builder, plus(builder, plane, byte)), constant(I32, width * place))
            if total is None:
                total = self._looked_up(builder, pieces, width)
            else:
                step = builder.fmul(self.scale, constant(F32, float(2**lowest)))
                total = fused_multiply_add(
                    builder, _floats(builder, _lowest(builder, pieces, width)), step, total
                )
        return total

    def _scaled(self, builder: Any, codes: Any) -> Any:
        return fused_multiply_add(builder, codes, self.scale, self.offset)

    def _looked_up(self, builder: Any, pieces: Any, width: int) -> Any:
        if self.table is not None:
            return call(builder, "llvm.x86.avx512.permvar.sf.512", wide(F32), self.table, pieces)
        return self._scaled(builder, _floats(builder, _lowest(builder, pieces, width)))


def _lowest(builder: Any, pieces: Any, width: int) -> Any:
    """Keep the lowest `width` bits of each lane, which holds a byte."""
    return pieces if width == 8 else builder.and_(pieces, constant(I32, 2**width - 1))


def _floats(builder: Any, codes: Any) -> Any:
    return builder.uitofp(codes, wide(F32))


def _bytes(builder: Any, address: Any) -> Any:
    """Load sixteen bytes, each into a lane of 32 bits."""
    return builder.zext(load_as(builder, wide(I8), address), wide(I32))


def _mask(builder: Any, address: Any) -> Any:
    """Load sixteen bits, one for each lane."""
    return builder.bitcast(load_as(builder, I16, address), wide(I1))


@intrinsic_of
def make_levels(builder: Any, scales: Int, zeros: Int, count: Int, target: Int, width: Int) -> None:
    """Write levels of `count` groups to byte address target, from float16 scales and uint8 zeros.

    The scales are followed, `width` bytes on, by the offsets -scale * zero, all float32. It writes whole
    vectors but reads nothing past the ends, where no page may be mapped.
    """
    step = ir.Constant(I64, LANES)
    with cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, step) as (at, _):
        inside = lanes_below(builder, builder.sub(count, at))
        scale = masked(builder, F16, builder.add(scales, times(builder, at, 2)), inside)
        scale = builder.fpext(scale, wide(F32))
        zero = builder.zext(masked(builder, I8, builder.add(zeros, at), inside), wide(I32))
        offset = builder.fmul(builder.fsub(constant(F32, 0.0), scale), _floats(builder, zero))
        place = builder.add(target, times(builder, at, 4))
        store(builder, types.float32, place, scale)
        store(builder, types.float32, builder.add(place, width), offset)


def lanes_below(builder: Any, count: Any) -> Any:
    return builder.icmp_signed("<", vector(I64, list(range(LANES))), splat(builder, count))


def masked(builder: Any, element: Any, address: Any, mask: Any) -> Any:
    """Load the lanes inside the mask; the others are zero, and their memory is not read."""
    pointer = builder.inttoptr(address, wide(element).as_pointer())
    name = f"llvm.masked.load.v{LANES}{'f16' if element == F16 else 'i8'}.p0"
    return call(builder, name, wide(element), pointer, ir.Constant(I32, 1), mask, constant(element, 0))
