"""The worker's kernels: one public call each, with an implementation for each kind of device.

Letters: T tokens of the step, H hidden size, Hq and Hkv query and KV heads, D head dimension, B blocks of
the KV cache, bt tokens of a block, I width of the FFN, K and N inputs and outputs of a product, U units of a
quantised weight.
dtypes: float32, bfloat16, float16; sums, softmax and norms are float32 inside. The last dimension of
every tensor is contiguous unless a call says otherwise; the other strides are free.

Import this package before torch: it asks the OpenMP runtime to let waiting threads sleep, and the runtime
reads that once, when torch loads it.
"""

import os

# By default a thread that waits for the others of a product spins for some 15 ms. Where anything else wants
# the cores (a gateway, Redis, a second worker), the one it waits for does not run: a step of 9 ms took 695.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from kernels import calls
from kernels.calls import *  # noqa: F403 every kernel
from kernels.packing import pack, unpack
from kernels.plan import AttentionPlan
from kernels.quantized import QuantizedWeight, dequantize, quantize_rtn
from kernels.registry import use_backend
from kernels.routing import Routing
from kernels.setup import choose_products, configure, num_compiled_late, warm_up

__all__ = [
    "AttentionPlan",
    "QuantizedWeight",
    "Routing",
    "choose_products",
    "configure",
    "dequantize",
    "num_compiled_late",
    "pack",
    "quantize_rtn",
    "unpack",
    "use_backend",
    "warm_up",
]
__all__ += calls.__all__
