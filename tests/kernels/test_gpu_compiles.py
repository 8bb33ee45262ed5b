"""Triton kernels become machine code of a GPU, on a machine that has none."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu.attention_kernels import chunk_kernel, decode_kernel
from kernels.gpu.experts import _group_kernel
from kernels.gpu.rows import _store_kv_codes_kernel
from kernels.kv_codes import LARGEST, SCALE_BYTES

POINTERS = {
    "x": "bf16",
    "w": "bf16",
    "bias": "bf16",
    "q": "bf16",
    "k": "bf16",
    "v": "bf16",
    "out": "bf16",
    "kv": "i8",
    "slots": "i64",
    "partial": "fp32",
    "state": "fp32",
}
SIZES: dict[str, Any] = {
    "GROUP": 4,
    "BLOCK_TOKENS": 16,
    "HEAD_DIM": 128,
    "BLOCK_DIM": 128,
    "BLOCK_HEADS": 8,
    "BLOCK_E": 128,
    "BLOCK_K": 64,
    "IS_BY_PLACE": False,
    "HAS_BIAS": True,
    "BLOCK_Q": 16,
    "BLOCK_N": 64,
    "OPERAND": tl.bfloat16,
    "SCALE_BYTES": SCALE_BYTES,
    "LARGEST": LARGEST,
    "BLOCK_M": 64,
}


@pytest.mark.parametrize(
    ("kernel", "rows"),
    [(_store_kv_codes_kernel, 0), (_group_kernel, 0), (chunk_kernel, 64), (decode_kernel, 16)],
)
def test_a_kernel_compiles_for_compute_capability_9(kernel: Any, rows: int) -> None:
    sizes = {
        name: value for name, value in (SIZES | {"BLOCK_ROWS": rows}).items() if name in kernel.arg_names
    }
    types = {name: "constexpr" if name in sizes else type_of(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
    made = triton.compile(ASTSource(kernel, types, constexprs=places), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]


def type_of(name: str) -> str:
    """Return the type of an argument, as Triton finds it at a launch."""
    if name.endswith("_ptr"):
        return f"*{POINTERS.get(name.removesuffix('_ptr'), 'i32')}"
    return "fp32" if name == "scale" else "i32"
