"""A model in stages on workers of one core each, against one worker of one core, on the CPU in float32.

    python -m bench.engine pipeline_stages [--size 100M] [--stages 2] [--turns 3]

Stages are processes of their own, with real sockets between them, as workers are; the baseline is the same
model whole, in the leader's process. Both take turns. Batch: 16 requests of 128 tokens in and 48 out, greedy,
all at once: tokens per second, and the CPU seconds of the busiest process, which say what the rate would be
bound by where each stage has a core to itself. Single: one request, the time to its first token and per token
after it. At best, batches of two stages are done in half the time, and a single one in the same.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench.common.own_cores  # noqa: F401 before torch, as the next
import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import conclude, parser, say

# isort: split
import torch

from bench.common.dummy_model import CONFIGS, saved_model
from bench.common.engines import INSTANCE, EngineShape, greedy, load_engine, silence, take_turns
from bench.engine.stage_processes import PIPELINE, LocalStage, StageProcesses, Staging, lead
from worker.engine.engine import Engine

BUDGET_MIB = 1024
SHAPE = EngineShape(max_num_seqs=16)
BATCH, NUM_IN, NUM_OUT, SINGLE_OUT = 16, 128, 48, 64
NAMES = ("tokens_per_s", "busiest_cpu_s", "ttft_s", "tpot_s")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", choices=CONFIGS, default="100M")
    options.add_argument("--stages", type=int, default=2)
    options.add_argument("--turns", type=int, default=3)
    args = options.parse_args()
    silence()
    kernels.configure(1)
    layers = CONFIGS[args.size]["num_hidden_layers"]
    bounds = [round(i * layers / args.stages) for i in range(args.stages + 1)]
    with saved_model(args.size) as folder, torch.inference_mode():
        result = _measure(folder, bounds, args.turns)
    result |= {"bench": "pipeline_stages", "size": args.size, "bounds": bounds}
    return conclude(result, is_kept=True)


def _measure(folder: Path, bounds: list[int], turns: int) -> dict[str, object]:
    woken = threading.Event()
    whole, staged = load_engine(folder, SHAPE, BUDGET_MIB), Engine()
    staging = Staging(folder=folder, bounds=bounds, shape=SHAPE, budget_mib=BUDGET_MIB)
    with StageProcesses(staging) as processes:
        staged.add_instance(lead(LocalStage(staging, 0), processes.wait(), woken))
        runs = {"one": _runner(whole, INSTANCE, woken), "stages": _runner(staged, PIPELINE, woken)}
        turn = {name: partial(_turn, name, run, processes) for name, run in runs.items()}
        taken = take_turns(turn, turns)
        staged.close()
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in taken.items()
    }
    result: dict[str, object] = {
        f"{key}_{name}": round(value, 5)
        for name, row in medians.items()
        for key, value in zip(NAMES, row, strict=True)
    }
    one, stages = medians["one"], medians["stages"]
    return result | {
        "speedup": round(stages[0] / one[0], 3),
        "speedup_by_cpu_seconds": round(one[1] / stages[1], 3),
    }


Runner = Callable[
    [int, int], tuple[float, float]
]  # requests, tokens -> seconds to the end, to the first token


def _turn(name: str, run: Runner, processes: StageProcesses) -> tuple[float, ...]:
    """Run a batch and a single request; return the values of NAMES."""
    before = processes.cpu_seconds()
    batch_s, _ = run(BATCH, NUM_OUT)
    busiest_s = max(b - a for a, b in zip(before, processes.cpu_seconds(), strict=True))
    last_s, ttft_s = run(1, SINGLE_OUT)
    rate, tpot_s = BATCH * NUM_OUT / batch_s, (last_s - ttft_s) / (SINGLE_OUT - 1)
    say(
        f"{name}: {rate:.1f} tok/s, {busiest_s:.2f} CPU s of the busiest, first token {ttft_s:.3f} s, "
        f"then {tpot_s * 1e3:.2f} ms"
    )
    return rate, busiest_s, ttft_s, tpot_s


def _runner(engine: Engine, instance: str, woken: threading.Event) -> Runner:
    def run(num: int, tokens: int) -> tuple[float, float]:
        began, first = time.perf_counter(), 0.0
        for i in range(num):
            prompt = [(i * 31 + j * 37) % 4000 for j in range(NUM_IN)]
            engine.submit(instance, greedy(str(i), prompt, tokens))
        while engine.has_work:
            if not engine.can_step():
                woken.wait(1.0)
                woken.clear()
                continue
            results = engine.step()
            if not first and any(out.delta.token_ids for result in results for out in result.outputs):
                first = time.perf_counter() - began
        return time.perf_counter() - began, first

    return run
