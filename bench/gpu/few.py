"""Products of few tokens with dense weights on a GPU: each kernel beside torch's, which take turns.

    python -m bench.gpu few [--device cpu]

A row has the time of a call, as a step makes it: in a CUDA graph, its weight in no cache. The ratio is of the
fastest to torch's. `--device cpu` compares the kernels with plain torch in the interpreter and times nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.gpu.card import bandwidth
from bench.gpu.common import Found, run_alone
from kernels.product import Product
from kernels.registry import use_backend

# Products of an 8B model: qkv, o, gate_up, down.
SHAPES = (
    Product("linear", "bfloat16", 6144, 4096),
    Product("linear", "bfloat16", 4096, 4096),
    Product("linear", "bfloat16", 28672, 4096),
    Product("linear_t", "bfloat16", 4096, 14336),
)


def measure(device: torch.device, found: Found) -> None:
    if device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        from bench.kernels.checks import check_products_of_few_tokens

        check_products_of_few_tokens("cuda", "cpu", torch.float16)
        return
    from kernels.gpu import few, few_timing
    from kernels.gpu.compiling import compile_all, recorded

    with recorded() as wanted, use_backend("cuda"), torch.device("meta"):
        for product in SHAPES:
            _multiply_once(product)
    compile_all(wanted)
    reads, memory = bandwidth(device), few_timing.memory_on(device)
    for tokens, product in itertools.product(few.COUNTS, SHAPES):
        taken = few_timing.measure(product, tokens, memory)
        usual = _us(taken.pop(None))
        own = {str(astuple(config)): _us(each) for config, each in taken.items() if config}
        assert product.form != "quantized"
        if len(own) < len(few.CANDIDATES[product.form]):
            found.problem(f"{product} of {tokens} tokens: a kernel does not give what torch gives")
        floor = _us(2 * product.outputs * product.inputs / reads)
        row = {"product": str(product), "tokens": tokens, "torch_us": usual, "floor_us": floor}
        found.add("rows", row | {"own_us": own, "ratio": round(min(own.values(), default=usual) / usual, 3)})
    found.put(chosen=kernels.choose_products(SHAPES, "", device))


def _multiply_once(product: Product) -> None:
    x = torch.empty(1, product.inputs, dtype=torch.bfloat16)
    weight = torch.empty(product.outputs, product.inputs, dtype=torch.bfloat16)
    if product.form == "linear":
        kernels.linear(x, weight)
    else:
        kernels.linear_t(x, weight.view(product.inputs, product.outputs))


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield "products of few tokens: all of a case take turns"
    for row in found.get("rows", []):
        own = ", ".join(f"{name} {us:.1f}" for name, us in row["own_us"].items())
        yield (
            f"{row['product']:28} x {row['tokens']}: torch {row['torch_us']:6.1f} us, {own};"
            f" best {row['ratio']:.2f} of torch's, floor {row['floor_us']:.1f}"
        )


def main() -> int:
    return run_alone(__doc__, "few", measure, lines)
