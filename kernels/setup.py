"""Preparation for serving: sizing the thread pool, compiling all kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from kernels.cpu.choice import TABLE, describe
from kernels.examples import Sizes
from kernels.product import Product
from kernels.registry import KERNELS, use_backend


def configure(threads: int = 0, product_kernel: str = "") -> int:
    """Let products and kernels use `threads` threads; 0: as many as this process has cores.

    Both run on torch's OpenMP team, so one number sizes both. Returns it. product_kernel: the kernels of
    products on a CPU, wherever they can run; empty: the fastest (`choose_products`). Raises ValueError for a
    number below 0 and for a kernel that this processor does not have.
    """
    TABLE.fix(product_kernel)
    if threads < 0:
        raise ValueError(f"{threads} threads: use 0 for every core, or a number of them")
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def choose_products(products: Iterable[Product], model: str, device: str | torch.device = "cpu") -> list[str]:
    """Find the fastest kernels for these products on this machine's CPU or GPU, and put them into force.

    The first products are measured first. model: what the choices of a CPU are kept under in the user's cache
    folder. The first time on a machine it takes 2 s at most, on a GPU 4 s each time. Returns the choices as
    text. Where a kernel is fixed there is nothing to choose.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from kernels.gpu import few_timing  # Triton is not on every machine

        return few_timing.choose(products, device)
    wanted = list(dict.fromkeys(products))
    fixed = {product: name for product in wanted if (name := TABLE.fixed(product))}
    free = [product for product in wanted if product not in fixed]
    told = [f"{product}: {name}, as the settings say" for product, name in sorted(fixed.items())]
    if not free:
        return told
    from kernels.cpu import timing  # numba compiles on import

    return [*told, *describe(timing.choose(free, model))]


def warm_up(
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    device: str | torch.device = "cpu",
    bits: Sequence[int] = (),
    has_kv_codes: bool = False,
    rotary_dim: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    rehearse: Callable[[], None] | None = None,
) -> None:
    """Run every kernel once on a prefill chunk and a decode, so that no request waits for a compiler.

    The sizes are the model's (`kernels.examples.Sizes`); `bits` are those of its quantised variants.
    has_kv_codes: its KV cache may be in 8 bits. It takes some 40 s the first time on a CPU and under 1 s
    afterwards, with the compiled code on disk.

    rehearse: runs the model's own steps on device "meta". On a GPU, what they and the examples launch is
    compiled first, in processes of their own, and what is compiled later is an error in the log.
    """
    sizes = Sizes(
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        bits=tuple(bits),
        has_codes=has_kv_codes,
        rotary_dim=rotary_dim,
        softcap=softcap,
        has_sinks=has_sinks,
    )
    device = torch.device(device)
    if device.type == "cuda":
        _compile_for_gpu(sizes, rehearse)
    with device:
        _run_examples(sizes)


def num_compiled_late() -> int:
    """Return how many kernels a GPU compiled after `warm_up`, in a step."""
    compiling = sys.modules.get("kernels.gpu.compiling")  # Triton is not on every machine
    return len(compiling.compiled_late()) if compiling else 0


def _compile_for_gpu(sizes: Sizes, rehearse: Callable[[], None] | None) -> None:
    from kernels.gpu.compiling import compile_all, recorded, watch  # Triton is not on every machine

    with recorded() as wanted, use_backend("cuda"):
        if rehearse:
            rehearse()
        with torch.device("meta"):
            _run_examples(sizes)
    compile_all(wanted)
    watch()


def _run_examples(sizes: Sizes) -> None:
    for call in KERNELS:
        for arguments in call.examples(sizes):
            call(*arguments)
