"""How well one and two layers tell the memory and latency of a whole model, on the CPU in float32.

    python -m bench.estimate [--quick] [--threads 1] [--minutes 3] [--cpu-time]

The demo model and dummies of 30M to 300M parameters with 8 to 32 layers, in every precision, on one device,
in a group of two, and in two and four stages. Their fingerprints are profiled as a worker does it when a
model is registered; from that the controller estimates requests of sizes beyond those measured, and chooses.
The whole models then really run these requests: on one device in this process, elsewhere in processes of
their own, a core each, with the sockets between them that workers have. Fingerprints and the whole on one
device take turns of half a second, so that what disturbs the machine disturbs both. On a machine that others
use a clock tells nothing: --cpu-time takes the process's time on one core instead, and then there is one
device only.

A case is left out where the devices that work at once are more than this machine has cores (`fits`).

Bars: mean error of memory under 5 %, of latency under 10 %; the configuration chosen for each intent is truly
best or within 5 % of it in 9 of 10; profiling is 6 times cheaper than every configuration of the whole model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.estimate_group import Group
from bench.estimate_models import DEMO, SIZES, Size, config_folder, num_parameters
from bench.estimate_report import Measured, report, say_card
from bench.estimate_stages import Stages
from bench.estimate_truth import Case, Devices, Found, OneDevice, Truth, limits_for
from bench.offline import say, silence
from bench.stage_processes import Staging
from bus.deployments import Configuration, Intent, Peer, Profile
from bus.messages import PRECISIONS
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from worker.core import Limits
from worker.engine.build import MIB, Shape, make_pool
from worker.fingerprint.caches import cache_bytes
from worker.fingerprint.cut import CutPlan
from worker.fingerprint.grid import MAX_ROUNDS, ROUNDS, Grid, Point
from worker.fingerprint.links import measure_links
from worker.fingerprint.profiler import Profiler
from worker.fingerprint.shapes import with_shapes
from worker.memory import PagePool
from worker.model import ModelConfig, read_config
from worker.model.model import LoadFormat

INTENTS = [
    Intent(prompt_tokens=tokens, output_tokens=outputs, batch_size=size)
    for tokens, outputs, size in ((64, 32, 1), (384, 32, 1), (96, 32, 2), (200, 16, 8))
]
NUM_STAGES = (2, 4)
SHAPE = Shape()
MAX_TP = 2
TURN_S = 0.5
BUDGET_MIB = 5120
RESULT = Path(__file__).with_name("results") / "estimate.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float  # for the runs of a whole model in one shape; once through all cases at least
    max_rounds: int  # of a profile
    threads: int
    uses_cpu_time: bool

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.uses_cpu_time else time.perf_counter


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the demo alone, a minute")
    parser.add_argument("--threads", type=int, default=1, help="of each device")
    parser.add_argument("--minutes", type=float, default=3.0, help="for the runs of whole models")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; with one thread")
    args = parser.parse_args()
    silence()
    sizes: list[Size | None] = [None, *(() if args.quick else SIZES)]
    options = Options(
        seconds=60.0 * (0.6 if args.quick else args.minutes) / len(sizes) / (2 + len(NUM_STAGES)),
        max_rounds=ROUNDS if args.quick else MAX_ROUNDS,
        threads=1 if args.cpu_time else args.threads,
        uses_cpu_time=args.cpu_time,
    )
    kernels.configure(options.threads)
    found = report([measure(size, options) for size in sizes])
    say_card(found)
    result: dict[str, Any] = {"bench": "estimate", **found, "quick": args.quick}
    result |= {"threads": options.threads, "cpu_time": args.cpu_time}
    if not args.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result) + "\n")
    say(json.dumps(result))
    return 0 if all(bar["is_met"] for bar in found["bars"].values()) else 1


def measure(size: Size | None, options: Options) -> Measured:
    """None: the demo model."""
    with nullcontext(DEMO) if size is None else config_folder(size) as folder:
        model = Whole(folder, read_config(folder), "dummy" if size else "safetensors", options)
        name, config = size.name if size else "demo", model.config
        say(f"--- {name}: {num_parameters(config) / 1e6:.0f}M parameters in {config.num_layers} layers")
        profile, truth, whole_bytes = profiled(model, name)
        if not options.uses_cpu_time:
            for num in NUM_STAGES:
                with closing(Stages(model.staging(num))) as stages:
                    if not profile.links:
                        profile = with_links(profile, stages.peer, config)
                    truth |= model.run(stages)
            with closing(Group(folder, config.num_layers, model.limits, **model.settings)) as group:
                truth |= model.run(group)
        return Measured(name, profile, truth, whole_bytes)


@dataclass(frozen=True, slots=True)
class Whole:
    folder: Path
    config: ModelConfig
    load_format: LoadFormat
    options: Options

    @property
    def limits(self) -> Limits:
        return limits_for(INTENTS, SHAPE)

    @property
    def settings(self) -> dict[str, Any]:
        """Of a worker that is to swap."""
        return {
            "load_format": self.load_format,
            "megabytes": BUDGET_MIB,
            "threads": self.options.threads,
            "variants": list(PRECISIONS[1:]),
        }

    def plan(self, pool: PagePool, **fields: Any) -> CutPlan:
        return CutPlan(
            self.config,
            PRECISIONS,
            dtype=torch.float32,
            page_bytes=pool.page_bytes,
            max_tp=MAX_TP,
            load_format=self.load_format,
            **fields,
        )

    def profiler(self, pool: PagePool) -> Profiler:
        grid = Grid(
            points=[Point(p, n, b) for p in PRECISIONS for n in PROMPT_TOKENS for b in BATCH_SIZES],
            block_tokens=SHAPE.block_tokens,
            max_num_batched_tokens=SHAPE.max_num_batched_tokens,
            rounds=min(ROUNDS, self.options.max_rounds),
            max_rounds=self.options.max_rounds,
        )
        plan = self.plan(pool, cache_bytes=cache_bytes(pool.backend.device))
        return Profiler(plan, grid, pool, clock=self.options.clock)

    def staging(self, num_stages: int) -> Staging:
        layers = self.config.num_layers
        limits = self.limits
        return Staging(
            folder=self.folder,
            bounds=[round(i * layers / num_stages) for i in range(num_stages + 1)],
            shape=replace(SHAPE, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len),
            budget_mib=BUDGET_MIB,
            precisions=PRECISIONS[1:],
            load_format=self.load_format,
            max_tp=MAX_TP,
            threads=self.options.threads,
        )

    def truth(self, devices: Devices) -> Truth:
        intents = [intent for intent in INTENTS if fits(devices.shape, intent, self.options.threads)]
        fullest = max(INTENTS, key=lambda one: one.prompt_tokens * one.batch_size)
        return Truth(devices, PRECISIONS, intents, fullest=fullest, block_tokens=SHAPE.block_tokens)

    def run(self, devices: Devices) -> dict[Case, Found]:
        """Until its time is over, and once at least."""
        truth = self.truth(devices)
        steps = truth.steps() if truth.intents else iter(())
        for _ in steps:
            if truth.num_rounds and truth.seconds >= self.options.seconds:
                break
        say(told(truth))
        return truth.found()


def fits(shape: Configuration, intent: Intent, threads: int) -> bool:
    """Whether this machine has a core for each thread that works at once. Of a group's ranks all do, of
    stages no more than there are requests, since a batch on its way has one of them at least. More than there
    are cores would take turns, which devices do not."""
    at_once = shape.tp * min(shape.pp, intent.batch_size)
    return at_once * threads <= len(os.sched_getaffinity(0))


def profiled(model: Whole, name: str) -> tuple[Profile, dict[Case, Found], int]:
    """The profile, what is true on one device, and the bytes that this took at once."""
    pool = make_pool(torch.device("cpu"), BUDGET_MIB * MIB)
    plan, clock = model.plan(pool, depths=[model.config.num_layers]), model.options.clock
    one = OneDevice(plan, pool, INTENTS, shape=SHAPE, clock=clock)
    try:
        whole_bytes = (pool.num_pages - pool.num_free) * pool.page_bytes
        profiler, truth = model.profiler(pool), model.truth(one)
        take_turns(profiler, truth, model.options.seconds)
        pool.check_integrity()
        profile = profiler.profile(model=name, digest="", device="cpu", version="")
        say(f"profiled in {profile.device_seconds:.1f} s")
        say(told(truth))
        return with_shapes(profile, profiler.plan), truth.found(), whole_bytes
    finally:
        one.release()
        pool.close()


def with_links(profile: Profile, peer: Peer, config: ModelConfig) -> Profile:
    """Measured between this process and another's; it takes the time of both."""
    began = time.perf_counter()
    links = measure_links(peer, config.hidden_size, torch.float32, torch.device("cpu"), "127.0.0.1")
    seconds = profile.device_seconds + 2 * (time.perf_counter() - began)
    return replace(profile, links=links, device_seconds=round(seconds, 3))


def take_turns(profiler: Profiler, truth: Truth, seconds: float) -> None:
    """Until the one is done and the other has had its time and a round."""
    profiling, running = profiler.steps(), truth.steps()
    is_profiled = is_run = False
    while not (is_profiled and is_run):
        until = time.perf_counter() + TURN_S
        while not is_profiled and time.perf_counter() < until:
            is_profiled = next(profiling, None) is None
        until = time.perf_counter() + TURN_S
        while not is_run and time.perf_counter() < until:
            next(running)
            is_run = truth.num_rounds > 0 and truth.seconds >= seconds
    running.close()


def told(truth: Truth) -> str:
    shape, left_out = truth.devices.shape, len(INTENTS) - len(truth.intents)
    note = f"; {left_out} of {len(INTENTS)} requests want more cores" if left_out else ""
    return f"tp{shape.tp} pp{shape.pp}: {truth.num_rounds} times in {truth.seconds:.1f} s{note}"


if __name__ == "__main__":
    sys.exit(main())
