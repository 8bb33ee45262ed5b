"""Offline throughput against transformers, on the CPU in float32.

    python -m bench.engine offline [--quick] [--threads 2]

64 requests of 64 to 512 tokens in and 128 out, greedy, through the engine; the same through transformers'
`generate` in static batches of 8 (sorted by length, which is its best case) and through its continuous
batching, `generate_batch` (with its cache sized and its concurrency capped where that makes it faster). One
set of weights, one process, the engine measured before, between and after its baselines.

The matrix peak is what the machine's own matrix product, at these shapes and in this run, would need for the
workload's floating-point operations and nothing else.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench.common.own_cores  # noqa: F401 before torch, as the next
import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import Bar, bar, conclude, parser, say, say_bars

# isort: split
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.common.dummy_model import CONFIGS, generate, load_transformers, num_matrix_weights, saved_model
from bench.common.engines import EngineShape, best_of, load_engine, run_prompts, silence
from worker.engine.engine import Engine

SIZE = "30M"
BARS = {"generate": 2.5, "generate_batch": 5.0}
STATIC_BATCH = 8
CONCURRENT = 6  # requests of generate_batch: the fastest of 4, 6, 8, 16, 32, see bench/LOG.md
PAGE_SIZE = 256

Prompts = list[list[int]]


def workload(count: int) -> Prompts:
    rng = random.Random(0)
    vocab = CONFIGS[SIZE]["vocab_size"]
    return [[rng.randrange(vocab) for _ in range(rng.randint(64, 512))] for _ in range(count)]


# ------------------------------------------------------------------------------------- the three ways


def run_generate(model: Any, prompts: Prompts, num_out: int) -> tuple[float, Prompts]:
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: Prompts = [[] for _ in prompts]
    began = time.perf_counter()
    for first in range(0, len(order), STATIC_BATCH):
        batch = order[first : first + STATIC_BATCH]
        for i, generated in zip(batch, generate(model, [prompts[i] for i in batch], num_out), strict=True):
            outputs[i] = generated
    return time.perf_counter() - began, outputs


def run_generate_batch(model: Any, prompts: Prompts, num_out: int) -> tuple[float, Prompts]:
    pages_each = -(-(max(map(len, prompts)) + num_out) // PAGE_SIZE)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=CONCURRENT * pages_each + 1,
        max_batch_tokens=512,
        max_requests_per_batch=CONCURRENT,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    results = model.generate_batch(prompts, generation, continuous_batching_config=config)
    seconds = time.perf_counter() - began
    return seconds, [list(result.generated_tokens) for result in results.values()]


# ------------------------------------------------------------------------------------- the peak


def matrix_gflops(tokens: int, seconds: float) -> float:
    """Return the GFLOP/s of torch's float32 product at the model's largest shape."""
    hidden, inner = CONFIGS[SIZE]["hidden_size"], CONFIGS[SIZE]["intermediate_size"]
    x, w = torch.randn(tokens, hidden), torch.randn(2 * inner, hidden)
    best = best_of(seconds, lambda: torch.nn.functional.linear(x, w))[0]
    return float(2 * x.numel() * w.shape[0] / best / 1e9)


def workload_gflop(prompts: Prompts, num_out: int) -> float:
    """Return the billions of operations of all products and attention, with logits only where sampled."""
    c = CONFIGS[SIZE]
    head = c["hidden_size"] * c["vocab_size"]
    body = num_matrix_weights(SIZE) - head
    total = 0.0
    for prompt in prompts:
        tokens = len(prompt) + num_out - 1
        attention = 2 * c["num_hidden_layers"] * c["hidden_size"] * tokens * (tokens + 1) / 2
        total += 2.0 * (body * tokens + head * num_out + attention)
    return total / 1e9


# ------------------------------------------------------------------------------------- the run


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="16 requests of 32 tokens out: a minute")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--engine-only", action="store_true", help="no baselines: for profiling")
    args = options.parse_args()
    silence()
    kernels.configure(args.threads)
    count, num_out = (16, 32) if args.quick else (64, 128)
    prompts = workload(count)
    with saved_model(SIZE) as folder:
        total_in = sum(map(len, prompts))
        say(f"{count} requests, {total_in} tokens in, {num_out} out each, {args.threads} threads")
        engine = load_engine(folder, EngineShape(max_num_seqs=64, max_num_batched_tokens=512), 1024)
        run_prompts(engine, prompts[:4], 4)
        if args.engine_only:
            seconds, _ = run_prompts(engine, prompts, num_out)
            say(f"engine {count * num_out / seconds:.1f} tok/s")
            return 0
        result, bars = compare(engine, load_transformers(folder), prompts, num_out)
    result |= {"quick": args.quick, "threads": args.threads, "requests": count, "tokens_out": num_out}
    return conclude(result, is_kept=not args.quick, bars=bars)


def compare(
    engine: Engine, model: Any, prompts: Prompts, num_out: int
) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Return the result and its bars."""
    total = len(prompts) * num_out
    rates: dict[str, list[float]] = {"engine": [], "generate": [], "generate_batch": []}
    texts: dict[str, Prompts] = {}
    gflops: list[float] = []
    runs: dict[str, Callable[[], tuple[float, Prompts]]] = {
        "engine": lambda: run_prompts(engine, prompts, num_out),
        "generate": lambda: run_generate(model, prompts, num_out),
        "generate_batch": lambda: run_generate_batch(model, prompts, num_out),
    }
    for name in ("engine", "generate", "engine", "generate_batch", "engine"):
        seconds, texts[name] = runs[name]()
        rates[name].append(total / seconds)
        say(f"{name:>15}: {total / seconds:7.1f} output tok/s  ({seconds:.1f} s)")
        gflops.append(matrix_gflops(512, 1.0))
    rate = {name: statistics.median(values) for name, values in rates.items()}
    peak = total / workload_gflop(prompts, num_out) * statistics.median(gflops)
    same = {name: share_equal(texts["engine"], texts[name]) for name in BARS}
    say(f"{'matrix peak':>15}: {peak:7.1f} output tok/s  ({statistics.median(gflops):.0f} GFLOP/s)")
    ratios = {name: rate["engine"] / rate[name] for name in BARS}
    bars = {f"engine / {name}": bar(BARS[name], ratio, ratio >= BARS[name]) for name, ratio in ratios.items()}
    say_bars(bars)
    say(", ".join(f"same tokens as {name}: {share:.1%}" for name, share in same.items()))
    say(f"share of the matrix peak: {rate['engine'] / peak:.1%}")
    result = {
        "bench": "offline",
        "engine_tok_s": round(rate["engine"], 1),
        **{f"{name}_tok_s": round(rate[name], 1) for name in BARS},
        **{f"ratio_{name}": round(ratio, 2) for name, ratio in ratios.items()},
        **{f"same_tokens_{name}": round(same[name], 4) for name in BARS},
        "peak_tok_s": round(peak, 1),
        "share_of_peak": round(rate["engine"] / peak, 3),
        "gflops": round(statistics.median(gflops), 1),
    }
    return result, bars


def share_equal(ours: Prompts, theirs: Prompts) -> float:
    """Return the share of requests with the same text.

    Random weights make near ties, and one of them changes all that follows, so this is evidence that the work
    was the same, not an oracle.
    """
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
