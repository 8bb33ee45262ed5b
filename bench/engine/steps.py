"""The time of a decode step by part, on the CPU.

    python -m bench.engine steps [--model FOLDER] [--sequences 1] [--dtype float32] [--seconds 5]

The engine decodes greedily without a service around it. Parts inside the recorded step are told by the
processor's cycle counter behind each kernel; `launch` is to wake the team, to run the first kernel and to
take the interpreter's lock again. With --beside a second thread runs Python all the time, as the threads of a
busy worker that read and publish may, so that waiting for the lock shows. The floor is a sum of as many bytes
as the weights that a step reads; the rows are medians and the best of all steps, in milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import bench.common.own_cores  # noqa: F401 before torch, as the next
import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import conclude, parser, say

# isort: split
import torch

from bench.common.dummy_model import saved_model
from bench.common.engines import INSTANCE, Shape, greedy, load_engine, silence
from kernels.cpu.program import KernelProgram
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.model import Model

PROMPT = [(i * 37) % 4000 for i in range(16)]
PARTS_OF_KERNELS = {
    "_dot": "products",
    "_add_up": "products",
    "_reduce": "products",
    "_multiply_few": "products",
    "_multiply_many": "products",
    "_multiply": "products",
    "_attend": "attention",
}
INSIDE = ("products", "attention", "rows")  # of the recorded step
ORDER = ("schedule", "prepare", "launch", *INSIDE, "sample", "publish", "rest", "step")

Samples = dict[str, list[float]]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a model folder; without one, 30M random weights")
    options.add_argument("--sequences", type=int, default=1, help="that decode together")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--beside", action="store_true", help="a second thread runs Python")
    args = options.parse_args()
    silence()
    kernels.configure(args.threads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        folder = args.model or stack.enter_context(saved_model("30M"))
        dtype = getattr(torch, args.dtype)
        engine = load_engine(folder, Shape(max_num_seqs=args.sequences), 1536, dtype=dtype)
        core = engine.instances[INSTANCE]
        assert isinstance(core.model, Model)
        for line in kernels.choose_products(core.model.dense_weights(), str(folder)):
            say(line)
        if args.beside:
            stack.enter_context(python_beside())
        weight_bytes = sum(weight.nbytes for _, weight in core.model.dense_weights())
        samples = measure(engine, args.sequences, args.seconds, weight_bytes)
    result = report(samples, weight_bytes)
    return conclude(result | {"sequences": args.sequences, "dtype": args.dtype}, is_kept=False)


@contextlib.contextmanager
def python_beside() -> Iterator[None]:
    """Run Python in another thread meanwhile."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(2000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measure(engine: Engine, sequences: int, seconds: float, weight_bytes: int) -> Samples:
    """Return the seconds of each part in each step, and those of the floor."""
    samples: Samples = defaultdict(list)
    step_parts: dict[str, float] = defaultdict(float)
    cycles: list[list[tuple[str, int]]] = []
    run_ended: list[float] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            step_parts[name] += time.perf_counter() - began
            if name == "run":
                run_ended.append(time.perf_counter())
                cycles.append(args[0].cycles)
            return result

        return call

    watched = {
        (EngineCore, "_schedule"): "schedule",
        (Model, "forward"): "forward",
        (KernelProgram, "run"): "run",
        (EngineCore, "_sample"): "sample",
        (EngineCore, "_publish"): "publish",
    }
    for i in range(sequences):
        engine.submit(INSTANCE, greedy(str(i), [*PROMPT, i], 1900))
    for _ in range(sequences + 4):
        engine.step()
    data = torch.ones(weight_bytes // 4)
    with contextlib.ExitStack() as stack:
        for (owner, attribute), name in watched.items():
            stack.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and engine.has_work:
            step_parts.clear()
            began = time.perf_counter()
            engine.step()
            step_parts["step"] = time.perf_counter() - began
            if "run" not in step_parts:
                raise SystemExit("this step is not recorded: some product of it is torch's")
            for name, value in step_parts.items():
                samples[name].append(value)
            if len(run_ended) % 8 == 0:
                began = time.perf_counter()
                data.sum()
                samples["floor"].append(time.perf_counter() - began)
    per_second = (cycles[-1][-1][1] - cycles[0][-1][1]) / (run_ended[-1] - run_ended[0])
    for ran in cycles:
        for name, value in inside(ran, per_second).items():
            samples[name].append(value)
    derive(samples)
    return samples


def inside(ran: list[tuple[str, int]], per_second: float) -> dict[str, float]:
    """Return the seconds of each part of one recorded step behind its first kernel."""
    found = dict.fromkeys(INSIDE, 0.0)
    for (_, before), (name, after) in itertools.pairwise(ran):
        found[PARTS_OF_KERNELS.get(name, "rows")] += (after - before) / per_second
    return found


def derive(samples: Samples) -> None:
    """Add the parts that are what others leave."""
    columns = {name: samples[name] for name in ("step", "schedule", "forward", "run", "sample", "publish")}
    kernels_s = [sum(parts) for parts in zip(*(samples[name] for name in INSIDE), strict=True)]
    rows = zip(*columns.values(), kernels_s, strict=True)
    for step, schedule, forward, run, sample, publish, inner in rows:
        samples["prepare"].append(forward - run)
        samples["launch"].append(run - inner)
        samples["rest"].append(step - schedule - forward - sample - publish)


def report(samples: Samples, weight_bytes: int) -> dict[str, Any]:
    say(f"{'part':>10}   median    best   ms of a step")
    rows = {}
    for name in (*ORDER, "floor"):
        median, best = statistics.median(samples[name]) * 1e3, min(samples[name]) * 1e3
        say(f"{name:>10} {median:8.3f} {best:7.3f}")
        rows[name] = {"median_ms": round(median, 4), "best_ms": round(best, 4)}
    floor = min(samples["floor"])
    speed = weight_bytes / floor / 1e9
    say(f"floor: {weight_bytes / 1e6:.0f} MB at {speed:.1f} GB/s; {len(samples['step'])} steps")
    return {"bench": "steps", "parts": rows, "weight_mb": round(weight_bytes / 1e6, 1)}
