"""Products for 1 to 16 tokens as a decode step runs them: recorded, one launch for many.

    python -m bench.kernels few [--threads 2] [--seconds 0.5] [--tokens 1 4]

Called one by one, most of the time of such a product is to wake the team (`bench.kernels measure`). Each
product here reads other weights than the one before, so that all come from memory. Next to it, by turns,
torch sums float32 values of as many bytes: the memory's speed. Writes bench/results/few.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import bench.common.own_cores  # noqa: F401 before torch, as the next
import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import conclude, parser, say

# isort: split
import torch

from bench.common.engines import best_of
from bench.common.machine import describe_machine
from bench.kernels.quantized import random_weight
from kernels import linear, quantized_linear
from kernels.cpu.program import KernelProgram

SHAPES = ((512, 2816), (1408, 512), (768, 4096), (2048, 768))  # inputs, outputs: of Llama with 30M and 110M
TOKENS = (1, 2, 4, 8, 16)
KINDS = ("float32", "bfloat16", "int8", "int4", "int3")
ROTATED_BYTES = 200e6

Products = list[Callable[[], torch.Tensor]]


def products_of(kind: str, inputs: int, outputs: int, tokens: int) -> tuple[Products, int]:
    """Return calls that multiply by one weight each, and the bytes of one weight with all that it needs."""
    if kind.startswith("int"):
        weights = [random_weight(inputs, outputs, int(kind[3:]))]
        nbytes = sum(part.nbytes for part in (weights[0].codes, weights[0].scales, weights[0].zeros))
        weights += [random_weight(inputs, outputs, int(kind[3:])) for _ in range(int(ROTATED_BYTES / nbytes))]
        x = torch.randn(tokens, inputs)
        return [partial(quantized_linear, x, weight) for weight in weights], nbytes
    dtype = getattr(torch, kind)
    nbytes = inputs * outputs * dtype.itemsize
    dense = [torch.randn(outputs, inputs).to(dtype) for _ in range(int(ROTATED_BYTES / nbytes))]
    return [partial(linear, torch.randn(tokens, inputs).to(dtype), weight) for weight in dense], nbytes


def record(products: Products) -> KernelProgram:
    def run_all() -> torch.Tensor:
        *_, last = [product() for product in products]
        return last

    return KernelProgram(run_all)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=0, help="0: every core")
    options.add_argument("--seconds", type=float, default=0.5, help="for each side of each row")
    options.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    options.add_argument("--kernel", default="few", help="worker.product_kernel, such as few,decode")
    args = options.parse_args()
    threads = kernels.configure(args.threads, args.kernel)
    machine = describe_machine()
    torch.set_num_threads(threads)
    say(f"{machine['processor']}, {threads} threads; GB/s, and the share of a plain sum's")
    rows: list[dict[str, Any]] = []
    for (inputs, outputs), tokens in itertools.product(SHAPES, args.tokens):
        shares = []
        for kind in KINDS:
            products, nbytes = products_of(kind, inputs, outputs, tokens)
            program, data = record(products), torch.ones(nbytes * len(products) // 4)
            took, sum_took = best_of(args.seconds, program.run, data.sum)
            speed, share = nbytes * len(products) / took / 1e9, sum_took / took
            row = {"inputs": inputs, "outputs": outputs, "tokens": tokens, "kind": kind}
            rows.append(row | {"gb_s": round(speed, 2), "share": round(share, 3)})
            shares.append(f"{kind} {speed:5.1f} {share:4.0%}")
        say(f"{inputs:>5} x {outputs:<5} {tokens:>3} tokens   " + "   ".join(shares))
    return conclude(
        {"bench": "few", "machine": machine, "threads": threads, "rows": rows},
        is_kept=list(args.tokens) == list(TOKENS) and args.kernel == "few",
    )
