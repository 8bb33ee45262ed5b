"""How well one and two layers tell the memory and latency of a whole model, on the CPU in float32.

    python -m bench.estimate [--quick] [--threads 2] [--minutes 10] [--cpu-time] [--no-sweep]

The demo model and dummies of 30M to 300M parameters with 8 to 32 layers, in every precision, on one device.
Their fingerprints are profiled as a worker does it when a model is registered; from that the controller
estimates requests of sizes beyond those measured, and chooses. The whole models then really run these
requests. Fingerprints and whole models take turns of half a second, so that what disturbs the machine
disturbs both. On a machine that others use a clock tells nothing: --cpu-time takes the process's time on one
core instead.

Bars: mean error of memory under 5 %, of latency under 10 %; the precision chosen for each intent is truly
best or within 5 % of it in 9 of 10; profiling is 6 times cheaper than every configuration of the whole model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.estimate_models import DEMO, SIZES, Size, config_folder, num_parameters
from bench.estimate_report import Measured, report, say_card
from bench.estimate_truth import Truth
from bench.offline import say, silence
from bus.deployments import Intent
from bus.messages import PRECISIONS
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from worker.engine.build import MIB, Shape, make_pool
from worker.fingerprint.cut import CutPlan
from worker.fingerprint.grid import MAX_ROUNDS, ROUNDS, Grid, Point
from worker.fingerprint.profiler import Profiler
from worker.model import read_config

INTENTS = [
    Intent(prompt_tokens=tokens, output_tokens=outputs, batch_size=size)
    for tokens, outputs, size in ((64, 32, 1), (384, 32, 1), (96, 32, 2), (200, 16, 8))
]
LEAST_ROUNDS = 2
TURN_S = 0.5
BUDGET_MIB = 5120
RESULT = Path(__file__).with_name("results") / "estimate.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the demo and the smallest dummy, a minute")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0, help="for the runs of whole models")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; with one thread")
    parser.add_argument("--no-sweep", action="store_true", help="fingerprints find their caches warm")
    args = parser.parse_args()
    silence()
    kernels.configure(1 if args.cpu_time else args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    sizes: list[Size | None] = [None, *(SIZES[:1] if args.quick else SIZES)]
    seconds = 60.0 * (0.5 if args.quick else args.minutes) / len(sizes)
    rounds = ROUNDS if args.quick else MAX_ROUNDS
    found = report([measure(size, seconds, rounds, clock, sweeps=not args.no_sweep) for size in sizes])
    say_card(found)
    result: dict[str, Any] = {"bench": "estimate", **found, "quick": args.quick}
    result |= {"threads": args.threads, "cpu_time": args.cpu_time, "sweeps": not args.no_sweep}
    if not args.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result) + "\n")
    say(json.dumps(result))
    return 0 if all(bar["is_met"] for bar in found["bars"].values()) else 1


def measure(
    size: Size | None, seconds: float, max_rounds: int, clock: Callable[[], float], *, sweeps: bool
) -> Measured:
    """None: the demo model. seconds: for the whole model."""
    with nullcontext(DEMO) if size is None else config_folder(size) as folder:
        config, shape = read_config(folder), Shape()
        name = size.name if size else "demo"
        say(f"--- {name}: {num_parameters(config) / 1e6:.0f}M parameters in {config.num_layers} layers")
        pool = make_pool(torch.device("cpu"), BUDGET_MIB * MIB)

        def plan(**depths: Any) -> CutPlan:
            return CutPlan(
                config,
                PRECISIONS,
                dtype=torch.float32,
                page_bytes=pool.page_bytes,
                load_format="dummy" if size else "safetensors",
                **depths,
            )

        points = [Point(p, n, b) for p in PRECISIONS for n in PROMPT_TOKENS for b in BATCH_SIZES]
        grid = Grid(
            points=points,
            block_tokens=shape.block_tokens,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_rounds=max_rounds,
        )
        profiler = Profiler(plan(), grid, pool, sweeps=sweeps, clock=clock)
        truth = Truth(plan(depths=[config.num_layers]), pool, INTENTS, shape=shape, clock=clock)
        try:
            whole_bytes = (pool.num_pages - pool.num_free) * pool.page_bytes
            take_turns(profiler, truth, seconds)
            pool.check_integrity()
            profile = profiler.profile(model=name, digest="", device="cpu", version="")
            say(
                f"profiled in {profile.device_seconds:.1f} s, ran the whole {truth.num_rounds} times in"
                f" {truth.seconds:.1f} s"
            )
            return Measured(name, profile, truth.found(), whole_bytes)
        finally:
            truth.release()
            pool.close()


def take_turns(profiler: Profiler, truth: Truth, seconds: float) -> None:
    """Until the one is done and the other has had its time and its least number of rounds."""
    profiling, running = profiler.steps(), truth.steps()
    is_profiled = is_run = False
    while not (is_profiled and is_run):
        until = time.perf_counter() + TURN_S
        while not is_profiled and time.perf_counter() < until:
            is_profiled = next(profiling, None) is None
        until = time.perf_counter() + TURN_S
        while not is_run and time.perf_counter() < until:
            next(running)
        is_run = truth.num_rounds >= LEAST_ROUNDS and truth.seconds >= seconds
    running.close()


if __name__ == "__main__":
    sys.exit(main())
