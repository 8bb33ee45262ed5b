"""The CPU kernels, each beside what torch takes for the same, in float32.

    python -m bench.kernels [--threads 2] [--seconds 0.2] [--only quantized]

Products are measured against the machine's own matrix peak (a 2048^3 product in this run) and, for one token,
against the bandwidth of reading memory; weights rotate so that none stays in a core's caches. Both sides of a
row take turns, and the best time of each counts. Prints a card, writes bench/results/kernels.json and ends in
the same JSON on one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import conclude, parser, say

# isort: split
import torch

from bench.common.engines import best_of
from bench.kernels.checks import AttentionCase, plan_of
from bench.kernels.quantized import quantized_products

SHAPES = ((512, 512), (512, 1408), (1408, 512), (512, 4096), (768, 2048), (2048, 768))  # inputs, outputs
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
ROTATED_BYTES = 64e6
PARTS = ("attention", "rows", "products", "quantized")

# --------------------------------------------------------------------------- the machine


def matrix_peak(seconds: float) -> float:
    """Return the FLOP/s of a large product."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return float(2 * 2048**3) / best_of(max(seconds, 1.0), lambda: a @ b)[0]


def read_bandwidth(seconds: float) -> float:
    """Return the bytes/s of a matrix-vector product over 1 GiB, none of which is cached."""
    matrix, vector = torch.ones(65536, 4096), torch.ones(4096)
    return float(matrix.numel() * 4) / best_of(max(seconds, 1.0), lambda: torch.mv(matrix, vector))[0]


# --------------------------------------------------------------------------- rows of the card


def _next(product: Callable[..., object], x: torch.Tensor, weights: Iterator[torch.Tensor]) -> object:
    return product(x, next(weights))


def products(seconds: float, peak: float, bandwidth: float) -> Iterator[dict[str, Any]]:
    for (inputs, outputs), tokens in itertools.product(SHAPES, TOKENS):
        copies = max(2, int(ROTATED_BYTES / (inputs * outputs * 4)))
        plain = [torch.randn(outputs, inputs) for _ in range(copies)]
        turned = [weight.t().contiguous() for weight in plain]
        x = torch.randn(tokens, inputs)
        # Two walks through the weights, half a round apart.
        ours, theirs, turns = (itertools.cycle(w) for w in (plain, plain[copies // 2 :] + plain, turned))
        times = best_of(
            seconds,
            partial(_next, kernels.linear, x, ours),
            partial(_next, torch.nn.functional.linear, x, theirs),
            partial(_next, kernels.linear_t, x, turns),
        )
        flops, size = 2 * tokens * inputs * outputs, inputs * outputs * 4
        yield {
            "name": f"product {tokens} x {inputs} x {outputs}",
            "us": times[0] * 1e6,
            "torch_us": times[1] * 1e6,
            "linear_t_us": times[2] * 1e6,
            "share_of_peak": flops / times[0] / peak,
            "share_of_bandwidth": size / times[0] / bandwidth,
        }


ATTENTION = (
    AttentionCase("64 decodes over 350", ((1, 350),) * 64, num_heads=8, num_kv_heads=4),
    AttentionCase("1 decode over 350", ((1, 350),), num_heads=8, num_kv_heads=4),
    AttentionCase("a prompt of 288", ((288, 288),), num_heads=8, num_kv_heads=4),
    AttentionCase("a chunk of 512 at 2048", ((512, 2048),), num_heads=8, num_kv_heads=4),
    AttentionCase("32 decodes and a chunk of 256", ((1, 350),) * 32 + ((256, 256),), 8, 4),
)


def attention(seconds: float) -> Iterator[dict[str, Any]]:
    for case in ATTENTION:
        plan, num_blocks = plan_of(case, torch.Generator().manual_seed(0))
        kv = torch.randn(num_blocks, case.num_kv_heads, 2, case.block_tokens, case.head_dim)
        q = torch.randn(plan.positions.shape[0], case.num_heads, case.head_dim)
        times = best_of(
            seconds,
            partial(kernels.paged_attention, q, kv, plan, 0.125),
            partial(kernels.paged_attention.reference, q, kv, plan, 0.125),
        )
        read = 2 * sum(context for _, context in case.lengths) * case.num_kv_heads * case.head_dim * 4
        pairs = sum(new * context - new * (new - 1) // 2 for new, context in case.lengths)
        yield {
            "name": f"attention: {case.name}",
            "us": times[0] * 1e6,
            "torch_us": times[1] * 1e6,
            "gbps": read / times[0] / 1e9,
            "gflops": 4 * pairs * case.num_heads * case.head_dim / times[0] / 1e9,
        }


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    for tokens in (1, 64, 512):
        x, residual, weight = torch.randn(tokens, 512), torch.zeros(tokens, 512), torch.randn(512)
        q, k = torch.randn(tokens, 8, 64), torch.randn(tokens, 4, 64)
        kv, slots = torch.zeros(64, 4, 2, 16, 64), torch.randperm(1024)[:tokens]
        positions, cos_sin = torch.arange(tokens), torch.randn(tokens, 64)
        gate, up = torch.randn(tokens, 1408), torch.randn(tokens, 1408)
        calls: dict[str, tuple[Any, ...]] = {
            "add_rms_norm": (x, residual, weight, 1e-5),
            "rotary": (q, k, positions, cos_sin),
            "silu_mul": (gate, up),
            "store_kv": (k, k, kv, slots),
        }
        for name, arguments in calls.items():
            call = getattr(kernels, name)
            times = best_of(seconds, partial(call, *arguments), partial(call.reference, *arguments))
            yield {"name": f"{name}, {tokens} tokens", "us": times[0] * 1e6, "torch_us": times[1] * 1e6}


# --------------------------------------------------------------------------- the card


def line(row: dict[str, Any]) -> str:
    text = f"{row['name']:<42} {row['us']:9.1f} us   torch {row['torch_us']:9.1f} us"
    text += f"   {row['torch_us'] / row['us']:5.2f} x"
    if "unpack_us" in row:
        text += f"   unpack {row['unpack_us']:9.1f} us   torch's packed {row['torch_packed_us']:9.1f} us"
        text += f"   {row['share_of_bandwidth']:4.0%} of bandwidth"
    if "share_of_peak" in row:
        text += f"   {row['share_of_peak']:4.0%} of peak, {row['share_of_bandwidth']:4.0%} of bandwidth"
        text += f"   linear_t {row['linear_t_us']:9.1f} us"
    if "gbps" in row:
        text += f"   {row['gbps']:5.1f} GB/s, {row['gflops']:5.1f} GFLOP/s"
    return text


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=0, help="0: every core")
    options.add_argument("--only", choices=PARTS, help="one part")
    options.add_argument("--seconds", type=float, default=0.1, help="for each side of each row")
    args = options.parse_args()
    threads = kernels.configure(args.threads)
    peak, bandwidth = matrix_peak(args.seconds), read_bandwidth(args.seconds)
    say(f"{threads} threads: matrix peak {peak / 1e9:.0f} GFLOP/s, reads {bandwidth / 1e9:.1f} GB/s")
    card: dict[str, Any] = {"bench": "kernels", "threads": threads}
    card |= {"peak_gflops": peak / 1e9, "read_gbps": bandwidth / 1e9, "rows": []}
    parts = {
        "attention": attention(args.seconds),
        "rows": rows(args.seconds),
        "products": products(args.seconds, peak, bandwidth),
        "quantized": quantized_products(args.seconds, bandwidth),
    }
    for row in itertools.chain(*([parts[args.only]] if args.only else parts.values())):
        say(line(row))
        card["rows"].append(row)
    return conclude(card, is_kept=not args.only)
