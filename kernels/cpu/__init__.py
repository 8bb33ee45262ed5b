"""CPU faces: vector code in numba where torch is slow, MKL where it is fast.

What is not here (linear_t, copy_blocks) or cannot be done in whole vectors runs on the reference.
"""

from kernels.cpu.attention import paged_attention
from kernels.cpu.products import linear, stacked_linear
from kernels.cpu.quantized import quantized_linear
from kernels.cpu.rows import add_rms_norm, rms_norm, rotary, silu_mul, store_kv

__all__ = [
    "add_rms_norm",
    "linear",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "silu_mul",
    "stacked_linear",
    "store_kv",
]
