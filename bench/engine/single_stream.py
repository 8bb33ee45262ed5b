"""Time per token of one sequence against the memory's speed, on the CPU in float32.

    python -m bench.engine single_stream [--quick] [--threads 2]

One stream reads every weight once per token and can go no faster than the memory gives them. The floor is the
time in which all threads sum as many bytes as the matrices of a 100M-parameter model have. One token of the
engine, one token of transformers and one such sum take turns; the medians are compared. The engine chooses
its products by measurement, as a worker does. Bar: under 1.25.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import bench.common.own_cores  # noqa: F401 before torch, as the next
import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import bar, conclude, parser, say, say_bars

# isort: split
import torch

from bench.common.dummy_model import load_transformers, num_matrix_weights, saved_model
from bench.common.engines import INSTANCE, EngineShape, greedy, load_engine, silence, take_turns, timed
from bench.common.machine import describe_machine
from worker.engine.engine import Engine
from worker.model import Model

SIZE = "100M"
BAR = 1.25
PROMPT = [(i * 37) % 8000 for i in range(16)]
WARM_TOKENS = 4


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="32 tokens instead of 256")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    silence()
    machine = describe_machine()
    kernels.configure(args.threads)
    num_tokens = 32 if args.quick else 256
    with saved_model(SIZE) as folder, torch.inference_mode():
        data = torch.ones(num_matrix_weights(SIZE))
        engine = load_engine(folder, EngineShape(max_num_seqs=4), 768)
        model = engine.instances[INSTANCE].model
        assert isinstance(model, Model)
        for line in kernels.choose_products(model.products(), str(folder)):
            say(line)
        turns = {
            "floor": data.sum,
            "engine": engine_tokens(engine, num_tokens),
            "transformers": transformers_tokens(load_transformers(folder)),
        }
        result = measure(turns, num_tokens)
    result |= {"quick": args.quick, "threads": args.threads} | machine
    bars = {"times the floor": bar(BAR, result["ratio"], result["ratio"] < BAR)}
    say_bars(bars)
    return conclude(result, is_kept=not args.quick, bars=bars)


def engine_tokens(engine: Engine, num_tokens: int) -> Callable[[], object]:
    """Return a call that makes the next token of one stream."""
    engine.submit(INSTANCE, greedy("one", PROMPT, num_tokens + 2 * WARM_TOKENS))
    engine.step()
    return engine.step


def transformers_tokens(model: Any) -> Callable[[], object]:
    """Return the same of transformers over its own cache: the loop of `generate` without its checks."""
    state = model(torch.tensor([PROMPT]), use_cache=True)

    def step() -> object:
        nonlocal state
        token = state.logits[:, -1:].argmax(-1)
        state = model(token, past_key_values=state.past_key_values, use_cache=True)
        return token

    return step


def measure(turns: dict[str, Callable[[], object]], num_tokens: int) -> dict[str, Any]:
    calls = {name: partial(timed, turn) for name, turn in turns.items()}
    seconds = take_turns(calls, num_tokens, warm_up=WARM_TOKENS)
    weight_bytes = 4 * num_matrix_weights(SIZE)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        times, low, high = value / median["floor"], min(seconds[name]) * 1e3, max(seconds[name]) * 1e3
        say(f"{name:>15}: {value * 1e3:6.2f} ms a token, {times:.2f} of the floor ({low:.1f} to {high:.1f})")
    say(f"{weight_bytes / 1e6:.0f} MB at {weight_bytes / median['floor'] / 1e9:.1f} GB/s")
    return {
        "bench": "single_stream",
        "ratio": round(median["engine"] / median["floor"], 3),
        "ratio_of_the_best": round(min(seconds["engine"]) / min(seconds["floor"]), 3),
        "ratio_transformers": round(median["transformers"] / median["floor"], 3),
        "token_ms": round(median["engine"] * 1e3, 2),
        "floor_ms": round(median["floor"] * 1e3, 2),
        "bandwidth_gb_s": round(weight_bytes / median["floor"] / 1e9, 2),
        "weight_mb": round(weight_bytes / 1e6, 1),
    }
