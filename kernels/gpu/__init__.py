"""The Triton backend, for GPUs; for CPU tensors too under TRITON_INTERPRET=1, in tests.

Products with dense weights run on the reference: torch calls cuBLAS.
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
