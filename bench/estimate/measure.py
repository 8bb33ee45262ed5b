"""Accuracy of estimates of a whole model's memory and latency from one and two layers, on the CPU in float32.

    python -m bench.estimate [--quick] [--threads 1] [--minutes 3] [--cpu-time]

The demo model and dummies of 30M to 300M parameters with 8 to 32 layers, in every precision, on one device,
in a group of two, and in two and four stages. Their fingerprints are profiled as a worker does it when a
model is registered; from that the controller estimates requests of sizes beyond those measured, and chooses.
The whole models then really run these requests: on one device in this process, elsewhere in processes of
their own, a core each, with the sockets between them that workers have. Fingerprints and the whole in every
shape take turns of a second and less: the memory bandwidth that other programs leave changes by a third from
one minute to the next, and then it changes for all. On a busy machine the clock is useless: --cpu-time takes
the process's CPU time instead, and then there is one device only.

A case is left out where the devices that work at once are more than this machine has cores (`fits`).

Bars: mean error of memory under 5 %, of latency under 10 %; the configuration chosen for each intent is truly
best or within 5 % of it in 9 of 10; profiling is 6 times cheaper than every configuration of the whole model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.dummy_model import config_folder
from bench.common.engines import CPU, EngineShape, silence
from bench.common.loading import LoadFormat
from bench.common.results import DEMO, conclude, parser, say
from bench.engine.stage_processes import Staging
from bench.estimate.group import MeasuredGroup
from bench.estimate.report import MeasuredModel, report, say_card
from bench.estimate.stages import Stages
from bench.estimate.truth import Devices, OneDevice, Truth, limits_for
from bus.deployments import Configuration, Intent, LinkSample, ProbePeer
from bus.precisions import PRECISIONS, QUANTIZED
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from worker.engine.build import MIB, make_pool
from worker.engine.sequence import Limits
from worker.memory import PagePool
from worker.model import ModelConfig, read_config
from worker.profiler.device_memory import cache_bytes
from worker.profiler.fingerprint import CutPlan
from worker.profiler.grid import MAX_ROUNDS, ROUNDS, Grid, Point
from worker.profiler.links import measure_links
from worker.profiler.measurer import with_shapes
from worker.profiler.profiler import Profiler

INTENTS = [
    Intent(prompt_tokens=tokens, output_tokens=outputs, batch_size=size)
    for tokens, outputs, size in ((64, 32, 1), (384, 32, 1), (96, 32, 2), (200, 16, 8))
]
NUM_STAGES = (2, 4)
SIZES = ("30M", "100M, 32 layers", "300M, 24 layers")  # sizes for which a quarter of an hour is enough
SHAPE = EngineShape()
MAX_TP = 2
PROFILE_TURN_S, TURN_S = 1.0, 0.5  # turns of the fingerprints, and of the whole in one shape
BUDGET_MIB = 5120


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float  # time for a whole model in one shape; all cases run once at least
    max_rounds: int  # rounds of a profile
    threads: int
    uses_cpu_time: bool

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.uses_cpu_time else time.perf_counter


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="the demo alone, a minute")
    options.add_argument("--threads", type=int, default=1, help="of each device")
    options.add_argument("--minutes", type=float, default=3.0, help="for the runs of whole models")
    options.add_argument("--cpu-time", action="store_true", help="for a busy machine; with one thread")
    args = options.parse_args()
    silence()
    sizes = [None, *(() if args.quick else SIZES)]
    settings = Options(
        seconds=60.0 * (0.6 if args.quick else args.minutes) / len(sizes) / (2 + len(NUM_STAGES)),
        max_rounds=ROUNDS if args.quick else MAX_ROUNDS,
        threads=1 if args.cpu_time else args.threads,
        uses_cpu_time=args.cpu_time,
    )
    kernels.configure(settings.threads)
    found = report([measure(size, settings) for size in sizes])
    say_card(found)
    result: dict[str, Any] = {"bench": "estimate", **found, "quick": args.quick}
    result |= {"threads": settings.threads, "cpu_time": args.cpu_time}
    return conclude(result, is_kept=not args.quick, bars=found["bars"])


def measure(size: str | None, options: Options) -> MeasuredModel:
    """Measure a dummy of a size, or the demo model (None)."""
    with nullcontext(DEMO) if size is None else config_folder(size) as folder:
        model = Whole(folder, read_config(folder), "dummy" if size else "safetensors", options)
        name, config = size or "demo", model.config
        say(f"--- {name}: {num_parameters(config) / 1e6:.0f}M parameters in {config.num_layers} layers")
        return model.measured(name)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters in all matrices."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    ends = (1 if config.has_tied_embeddings else 2) * config.vocab_size * config.hidden_size
    return config.num_layers * layer + ends


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
        """The settings of a worker that swaps."""
        return {
            "load_format": self.load_format,
            "megabytes": BUDGET_MIB,
            "threads": self.options.threads,
            "variants": list(QUANTIZED),
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
            precisions=QUANTIZED,
            load_format=self.load_format,
            max_tp=MAX_TP,
            threads=self.options.threads,
        )

    def truth(self, devices: Devices) -> Truth:
        intents = [intent for intent in INTENTS if fits(devices.shape, intent, self.options.threads)]
        fullest = max(INTENTS, key=lambda one: one.prompt_tokens * one.batch_size)
        return Truth(devices, PRECISIONS, intents, fullest=fullest, block_tokens=SHAPE.block_tokens)

    def measured(self, name: str) -> MeasuredModel:
        with ExitStack() as stack:
            pool = make_pool(CPU, BUDGET_MIB * MIB)
            stack.callback(pool.close)
            whole = self.plan(pool, depths=[self.config.num_layers])
            one = OneDevice(whole, pool, INTENTS, shape=SHAPE, clock=self.options.clock)
            stack.callback(one.release)
            whole_bytes = (pool.num_pages - pool.num_free) * pool.page_bytes
            devices: list[Devices] = [one]
            links, links_s = list[LinkSample](), 0.0
            if not self.options.uses_cpu_time:
                stages = [stack.enter_context(closing(Stages(self.staging(num)))) for num in NUM_STAGES]
                links, links_s = self.links(stages[0].peer)
                group = MeasuredGroup(self.folder, self.config.num_layers, self.limits, **self.settings)
                devices += [*stages, stack.enter_context(closing(group))]
            truths = [self.truth(each) for each in devices]
            profiler = self.profiler(pool)
            take_turns(profiler, truths, self.options.seconds)
            pool.check_integrity()
            found = profiler.profile(model=name, digest="", device="cpu", version="")
            device_seconds = round(found.device_seconds + links_s, 3)
            profile = with_shapes(
                replace(found, links=links, device_seconds=device_seconds), profiler.plan, profiler.grid
            )
            say(f"profiled in {profile.device_seconds:.1f} s")
            for truth in truths:
                say(in_words(truth))
            cases = {case: each for truth in truths for case, each in truth.found().items()}
            return MeasuredModel(name, profile, cases, whole_bytes)

    def links(self, peer: ProbePeer) -> tuple[list[LinkSample], float]:
        """Measure the links between this process and another, and return the seconds of both together."""
        began, device = time.perf_counter(), CPU
        links = measure_links(peer, self.config.hidden_size, torch.float32, device, "127.0.0.1")
        return links, 2 * (time.perf_counter() - began)


def fits(shape: Configuration, intent: Intent, threads: int) -> bool:
    """Return whether this machine has a core for each thread that works at once.

    All ranks of a group work at once, and no more stages than there are requests, since a batch on its way
    has one of them at least. More threads than cores would take turns, which devices do not.
    """
    at_once = shape.tp * min(shape.pp, intent.batch_size)
    return at_once * threads <= len(os.sched_getaffinity(0))


def take_turns(profiler: Profiler, truths: Sequence[Truth], seconds: float) -> None:
    """Run until the fingerprints are profiled and every shape of the whole has had its time and a round."""
    profiling = profiler.steps()
    running = {truth: truth.steps() for truth in truths if truth.intents}
    is_profiled, open_ = False, set(running)
    while open_ or not is_profiled:
        until = time.perf_counter() + PROFILE_TURN_S
        while not is_profiled and time.perf_counter() < until:
            is_profiled = next(profiling, None) is None
        for truth, steps in running.items():
            until = time.perf_counter() + TURN_S
            while truth in open_ and time.perf_counter() < until:
                next(steps)
                if truth.num_rounds and truth.seconds >= seconds:
                    open_.discard(truth)
    for steps in running.values():
        steps.close()


def in_words(truth: Truth) -> str:
    shape, left_out = truth.devices.shape, len(INTENTS) - len(truth.intents)
    note = f"; {left_out} of {len(INTENTS)} requests want more cores" if left_out else ""
    return f"tp{shape.tp} pp{shape.pp}: {truth.num_rounds} times in {truth.seconds:.1f} s{note}"
