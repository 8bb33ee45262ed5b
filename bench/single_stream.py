"""Time per token of one sequence against the memory's speed, on the CPU in float32.

    python -m bench.single_stream [--quick] [--threads 2]

One stream reads every weight once per token and can go no faster than the memory gives them. The floor is
the bytes of a 100M-parameter model's matrices over the bandwidth of the same run: all threads sum as many
bytes, in turns with the generation. Bar: under 1.6 times the floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.dummy_model import load_engine, load_transformers, num_matrix_weights, saved_model
from bench.offline import run_engine, run_generate, say, silence
from worker.engine.build import Shape

SIZE = "100M"
BAR = 1.6
PROMPT = [(i * 37) % 8000 for i in range(16)]
RESULT = Path(__file__).with_name("results") / "single_stream.json"


def best_seconds(call: Callable[[], Any], seconds: float) -> float:
    best, ends = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 16 tokens instead of 6 of 64")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    silence()
    kernels.configure(args.threads)
    rounds, num_out = (2, 16) if args.quick else (6, 64)
    with saved_model(SIZE) as folder:
        engine = load_engine(folder, Shape(max_num_seqs=4), 768)
        model = load_transformers(folder)
        result = measure(engine, model, rounds, num_out)
    result |= {"quick": args.quick, "threads": args.threads}
    RESULT.parent.mkdir(exist_ok=True)
    if not args.quick:
        RESULT.write_text(json.dumps(result) + "\n")
    say(json.dumps(result))
    return 0 if result["ratio"] < BAR else 1


def measure(engine: Any, model: Any, rounds: int, num_out: int) -> dict[str, Any]:
    """Rounds of bandwidth, engine, transformers; the medians. A round's ratio uses its own bandwidth."""
    weight_bytes = 4 * num_matrix_weights(SIZE)
    data = torch.ones(num_matrix_weights(SIZE))  # as large as the weights: neither fits a cache better
    run_engine(engine, [PROMPT], 4)
    seen: dict[str, list[float]] = {"gb_s": [], "engine": [], "transformers": [], "ratio": []}
    for i in range(rounds):
        gb_s = weight_bytes / best_seconds(data.sum, 0.5) / 1e9
        token_s = seconds_per_token(lambda n: run_engine(engine, [PROMPT], n)[0], num_out)
        other_s = seconds_per_token(lambda n: run_generate(model, [PROMPT], n)[0], num_out)
        floor_s = weight_bytes / gb_s / 1e9
        for name, value in zip(seen, (gb_s, token_s, other_s, token_s / floor_s), strict=True):
            seen[name].append(value)
        say(f"round {i + 1}, {gb_s:.1f} GB/s, a token takes (ms, times the floor):")
        for name, token in (("floor", floor_s), ("engine", token_s), ("transformers", other_s)):
            say(f"{name:>15}: {token * 1e3:6.1f} {token / floor_s:6.2f}")
    median = {name: statistics.median(values) for name, values in seen.items()}
    floor_s = weight_bytes / median["gb_s"] / 1e9
    ratio_transformers = median["transformers"] / floor_s
    say(f"engine: {median['ratio']:.2f} times the floor (bar {BAR}); transformers {ratio_transformers:.2f}")
    return {
        "bench": "single_stream",
        "ratio": round(median["ratio"], 3),
        "ratio_transformers": round(ratio_transformers, 3),
        "token_ms": round(median["engine"] * 1e3, 2),
        "floor_ms": round(floor_s * 1e3, 2),
        "bandwidth_gb_s": round(median["gb_s"], 2),
        "weight_mb": round(weight_bytes / 1e6, 1),
    }


def seconds_per_token(run: Callable[[int], float], num_out: int) -> float:
    """Of decoding alone: a run to the end minus one to the first token."""
    return (run(num_out) - run(1)) / (num_out - 1)


if __name__ == "__main__":
    sys.exit(main())
