"""The CPU backend: vector code in numba where torch is slow, MKL where it is fast.

Operations that are not here (linear_t, copy_blocks) run on the reference, and so do sizes that are not whole
vectors.
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
