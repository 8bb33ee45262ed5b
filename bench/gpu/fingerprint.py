"""Estimates from two layers of a model on a GPU, for `bench.gpu`: a dummy of Llama 3 8B's shape in bfloat16.

    python -m bench.gpu fingerprint [--device cpu]

Its fingerprint is profiled as a worker does it, in every precision; from that the requests of
`bench.estimate` are estimated for one device. Then the whole model runs them, in one precision after the
other. Each precision is made from full precision, so both are in memory, and the next one gets the pages of
the last. A precision for which the device has too few pages is left out.

`--device cpu` does the same with a tiny model on a machine without a GPU; nothing is written.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import EngineShape
from bench.estimate.measure import INTENTS
from bench.estimate.truth import Case, Found, OneDevice, Truth, limits_for
from bench.gpu.common import Found as Results
from bench.gpu.common import device_clock, run_alone
from bench.gpu.decode import LLAMA_8B
from bus.deployments import Intent, Profile
from bus.precisions import PRECISIONS, Precision
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from controller.planning.estimates import estimate_all
from worker.engine.build import make_pool
from worker.memory import PagePool
from worker.model import ModelConfig, read_config
from worker.profiler.fingerprint import CutPlan
from worker.profiler.grid import LEAST_ROUNDS, MAX_ROUNDS, ROUNDS, Grid, Point
from worker.profiler.profiler import Profiler

POOL_SHARE = 0.85  # share of the free memory; the rest is for activations and libraries
WAIT_S = 0.01  # interval while another thread compiles kernels


@dataclass(frozen=True, slots=True)
class FingerprintSizes:
    """The amount of work: rounds of the profile, and runs of the whole model, of which the first warms up."""

    config: Mapping[str, Any]
    dtype: torch.dtype
    prompt_tokens: Sequence[int]
    batch_sizes: Sequence[int]
    intents: Sequence[Intent]
    rounds: int
    max_rounds: int
    runs: int
    precisions: Sequence[Precision] = PRECISIONS
    pool_bytes: int = 0  # 0: POOL_SHARE of what is free


GPU = FingerprintSizes(
    config=LLAMA_8B,
    dtype=torch.bfloat16,
    prompt_tokens=PROMPT_TOKENS,
    batch_sizes=BATCH_SIZES,
    intents=INTENTS,
    rounds=ROUNDS,
    max_rounds=MAX_ROUNDS,
    runs=6,
)
CPU = FingerprintSizes(
    config=LLAMA_8B
    | {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 256,
    },
    dtype=torch.float32,
    prompt_tokens=(8, 24),
    batch_sizes=(1,),
    intents=(Intent(prompt_tokens=16, output_tokens=6), Intent(prompt_tokens=30, output_tokens=4)),
    rounds=LEAST_ROUNDS,
    max_rounds=LEAST_ROUNDS,
    runs=2,
    pool_bytes=64 << 20,
)


def measure(device: torch.device, sizes: FingerprintSizes) -> dict[str, Any]:
    """Return `rows` by precision and request, `errors` by precision, and why precisions were `left_out`."""
    _give_back()  # free what was measured before
    budget = sizes.pool_bytes or int(torch.cuda.mem_get_info(device)[0] * POOL_SHARE)
    config, pool = config_of(sizes), make_pool(device, budget)
    try:
        profile = profiled(config, pool, sizes)
        truth: dict[Case, Found] = {}
        left_out: dict[str, str] = {}
        for precision in sizes.precisions:
            plan = _plan(config, pool, sizes, [precision], [config.num_layers])
            if why := no_room(plan, pool, sizes):
                left_out[precision] = why
            else:
                truth |= whole(plan, pool, sizes)
    finally:
        pool.close()
    rows = list(compared(profile, truth, sizes.intents))
    return {
        "device": str(device),
        "layers": config.num_layers,
        "profiling_s": profile.device_seconds,
        "profiling_peak_mib": round(profile.peak_bytes / 2**20, 1),
        "rows": rows,
        "errors": errors(rows),
        "left_out": left_out,
    }


def config_of(sizes: FingerprintSizes) -> ModelConfig:
    """Return the config of a model whose weights are random; its folder is deleted."""
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(sizes.config)))
        return read_config(Path(folder))


# --------------------------------------------------------------------------- the fingerprint


def profiled(config: ModelConfig, pool: PagePool, sizes: FingerprintSizes) -> Profile:
    """Return the profile as a worker measures it; all pages are free afterwards."""
    points = [
        Point(precision, tokens, size)
        for precision in sizes.precisions
        for tokens in sizes.prompt_tokens
        for size in sizes.batch_sizes
    ]
    grid = Grid(
        points=points,
        block_tokens=EngineShape().block_tokens,
        max_num_batched_tokens=EngineShape().max_num_batched_tokens,
        rounds=sizes.rounds,
        max_rounds=sizes.max_rounds,
    )
    profiler = Profiler(_plan(config, pool, sizes, sizes.precisions, (1, 2)), grid, pool)
    for can_go_on in profiler.steps():
        if not can_go_on:
            time.sleep(WAIT_S)
    pool.check_integrity()
    _give_back()
    return profiler.profile(model="8B", digest="", device=str(pool.backend.device), version="")


def _plan(
    config: ModelConfig,
    pool: PagePool,
    sizes: FingerprintSizes,
    precisions: Sequence[Precision],
    depths: Sequence[int],
) -> CutPlan:
    return CutPlan(
        config,
        precisions,
        dtype=sizes.dtype,
        page_bytes=pool.page_bytes,
        load_format="dummy",
        depths=depths,
    )


# --------------------------------------------------------------------------- the whole


def no_room(plan: CutPlan, pool: PagePool, sizes: FingerprintSizes) -> str:
    """Return why the model does not fit into the pool, or "". Each layer's KV begins on a new page."""
    config, limits = plan.config, limits_for(sizes.intents, EngineShape())
    blocks = limits.max_num_seqs * (1 + -(-limits.max_model_len // limits.block_tokens))
    block_bytes = config.kv_block_bytes(limits.block_tokens, plan.model.dtype) // config.num_layers
    needed = plan.num_pages + config.num_layers * pool.pages_for(blocks * block_bytes)
    if needed <= pool.num_free:
        return ""
    mib = pool.page_bytes / 2**20
    return f"with full precision it takes {needed * mib:.0f} MiB of pages, {pool.num_free * mib:.0f} are free"


def whole(plan: CutPlan, pool: PagePool, sizes: FingerprintSizes) -> dict[Case, Found]:
    """Measure the whole model, of which `plan` has all layers; all pages are free afterwards."""
    clock = device_clock(pool.backend.device)  # a step that samples nothing does not wait for the device
    model = OneDevice(plan, pool, sizes.intents, shape=EngineShape(), clock=clock)
    fullest = max(sizes.intents, key=lambda one: one.prompt_tokens * one.batch_size)
    truth = Truth(
        model, plan.all_precisions, sizes.intents, fullest=fullest, block_tokens=EngineShape().block_tokens
    )
    steps = truth.steps()
    try:
        while truth.num_rounds < sizes.runs:
            next(steps)
        return truth.found()
    finally:
        steps.close()
        model.release()
        pool.check_integrity()
        del model, truth, steps
        _give_back()


def _give_back() -> None:
    """Return what torch keeps for the next tensors of the same size, of which no pages can be made."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------- the numbers


def compared(
    profile: Profile, truth: Mapping[Case, Found], intents: Sequence[Intent]
) -> Iterator[dict[str, Any]]:
    """Yield errors as shares of the truth; above 0 the estimate was too high."""
    for intent in intents:
        for estimate in estimate_all(profile, intent):
            if (found := truth.get((estimate.configuration, intent))) is None:
                continue
            seconds, nbytes = estimate.latency_s.value, estimate.memory_bytes.value
            yield {
                "precision": estimate.configuration.precision,
                "request": f"{intent.prompt_tokens}+{intent.output_tokens} x{intent.batch_size}",
                "latency_ms": round(1e3 * found.latency_s, 3),
                "estimated_ms": round(1e3 * seconds, 3),
                "latency_error": round(seconds / found.latency_s - 1, 4),
                "memory_mib": round(found.memory_bytes / 2**20, 1),
                "estimated_mib": round(nbytes / 2**20, 1),
                "memory_error": round(nbytes / found.memory_bytes - 1, 4),
            }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean and largest errors, by precision."""
    found: dict[str, dict[str, float]] = {}
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of = [row for row in rows if row["precision"] == precision]
        found[precision] = {}
        for what in ("latency", "memory"):
            off = [abs(row[f"{what}_error"]) for row in of]
            found[precision] |= {f"{what}_mean": round(statistics.fmean(off), 4), f"{what}_worst": max(off)}
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"fingerprint of {found['layers']} layers: profiled in {found['profiling_s']:.1f} s and"
        f" {found['profiling_peak_mib']:.0f} MiB"
    )
    for row in found["rows"]:
        yield (
            f"{row['precision']:<5}{row['request']:<11}{row['latency_ms']:9.1f} ms, estimated"
            f" {row['estimated_ms']:9.1f} ({row['latency_error']:+.1%}); {row['memory_mib']:8.0f} MiB,"
            f" estimated {row['estimated_mib']:8.0f} ({row['memory_error']:+.1%})"
        )
    for precision, off in found["errors"].items():
        yield (
            f"estimates in {precision}: latency off by {off['latency_mean']:.1%} (at most"
            f" {off['latency_worst']:.1%}), memory by {off['memory_mean']:.1%} ({off['memory_worst']:.1%})"
        )
    for precision, why in found["left_out"].items():
        yield f"estimates in {precision}: left out, {why}"


def main() -> int:
    def run(device: torch.device, found: Results) -> None:
        found.put(**measure(device, GPU if device.type == "cuda" else CPU))

    return run_alone(__doc__, "fingerprint", run, lines)
