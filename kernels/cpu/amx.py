"""The tile registers of AMX inside numba: products of bytes, 16 rows by 16 columns by 64 inputs at a time.

A register has 16 rows of 64 bytes. One instruction multiplies A [16, 64] of unsigned bytes by B [64, 16] of
signed bytes into C [16, 16] of int32, without rounding. B lies as [16, 16, 4]: the four bytes of column j in
row i are its inputs 4 i to 4 i + 3. (Intel, Architecture Instruction Set Extensions Programming Reference,
chapter 3.)

A thread calls `configure` before the first product and `release` behind the last one: Linux saves 8 KB more
for a thread whose tile registers are in use. On a processor without AMX these compile to nothing.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import ir

from kernels.cpu.processor import has_all
from kernels.cpu.simd import I8, I64, Int, call, intrinsic_of, store_as

TILE_ROWS = 16
ROW_BYTES = 64
CONFIG_BYTES = 64
_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM of Linux on x86-64


def _can_use() -> bool:
    """Return True if the processor has AMX, numba compiles for it and Linux lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not has_all("amx-tile", "amx-int8", "avx512f", "avx512bw"):
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


CAN_USE = _can_use()


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I8.as_pointer())


@intrinsic_of
def configure(builder: Any, address: Int) -> None:
    """Make all eight registers 16 rows of 64 bytes; 64 bytes at `address` are overwritten."""
    if not CAN_USE:
        return
    bytes_of_row = [byte for _ in range(8) for byte in (ROW_BYTES, 0)]
    words = [1, *[0] * 15, *bytes_of_row, *[0] * 16, *[TILE_ROWS] * 8, *[0] * 8]
    block = ir.Constant(ir.VectorType(I8, CONFIG_BYTES), words)
    store_as(builder, block, address)
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _pointer(builder, address))


@intrinsic_of
def release(builder: Any) -> None:
    """Give the registers up."""
    if CAN_USE:
        call(builder, "llvm.x86.tilerelease", ir.VoidType())


def emit_product(builder: Any, a: Any, a_row: Any, b: Any, c: Any) -> None:
    """Write to c int32 [16, 16] the product of a uint8 [16, 64] and b int8 [16, 16, 4].

    Byte addresses; the rows of a are a_row bytes apart, the others contiguous.
    """
    line = ir.Constant(I64, ROW_BYTES)
    first, second, third = (ir.Constant(I8, register) for register in range(3))
    for name, *operands in (
        ("tileloadd64", first, _pointer(builder, a), a_row),
        ("tileloadd64", second, _pointer(builder, b), line),
        ("tilezero", third),
        ("tdpbusd", third, first, second),
        ("tilestored64", third, _pointer(builder, c), line),
    ):
        call(builder, f"llvm.x86.{name}", ir.VoidType(), *operands)
