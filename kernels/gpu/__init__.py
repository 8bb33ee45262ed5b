"""Triton faces, for GPUs; on CPU tensors under TRITON_INTERPRET=1, for tests.

Products with dense weights are cuBLAS's, through torch: the reference's.
"""

from kernels.batched import stacked_linear
from kernels.gpu.attention import paged_attention
from kernels.gpu.quantized import quantized_linear
from kernels.gpu.rows import add_rms_norm, copy_blocks, rms_norm, rotary, silu_mul, store_kv

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "silu_mul",
    "stacked_linear",
    "store_kv",
]
