"""Decoding and prefill of a model of Llama 3 8B's shape in bfloat16, beside the floors of the card.

    python -m bench.gpu decode [--device cpu]

The floor of a decode step is the time to read every weight but the embedding, and every cached key and value,
at the bandwidth that copying a gigabyte reaches in the same run. Prefill is told in TFLOP/s of its products
and its attention, beside a large product's. `--device cpu` takes a tiny model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import INSTANCE, EngineShape, close, greedy, load_engine, timed
from bench.gpu.card import bandwidth, peak
from bench.gpu.common import Found, device_clock, profiled, run_alone
from worker.engine.engine import Engine

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model and its loads: sequences and tokens of context of each decode, tokens of each prefill."""

    config: Mapping[str, Any]
    dtype: torch.dtype
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...]
    steps: int
    shape: EngineShape
    budget_mib: int = 0  # 0: most of what is free
    shown: tuple[tuple[int, int], ...] = ()  # decodes whose time is told by kernel


GPU = Sizes(
    config=LLAMA_8B,
    dtype=torch.bfloat16,
    decodes=((1, 512), (4, 512), (16, 512), (64, 512), (64, 2048), (128, 512), (256, 512)),
    prefills=(512, 2048, 8000),
    shown=((1, 512), (64, 512), (64, 2048)),
    steps=32,
    shape=EngineShape(max_num_seqs=256, max_num_batched_tokens=8192),
)
CPU = Sizes(
    config=TINY,
    dtype=torch.float32,
    decodes=((1, 16), (2, 16)),
    prefills=(32,),
    steps=2,
    shape=EngineShape(max_num_seqs=4, max_num_batched_tokens=64),
    budget_mib=32,
)


def measure(device: torch.device, found: Found) -> None:
    sizes = GPU if device.type == "cuda" else CPU
    reads, most = bandwidth(device), peak(device)
    found.put(bandwidth_gb_s=reads / 1e9, peak_tflop_s=most / 1e12)
    engine = random_engine(device, sizes)
    for tokens in sizes.prefills:
        found.add("prefill", prefill_row(engine, tokens, sizes, most, device))
    for num_seqs, context in sizes.decodes[:1]:
        with profiled(found, "decode"):  # its own row, since the profiler slows it
            decode_row(engine, num_seqs, context, sizes, reads, device)
    for num_seqs, context in sizes.shown if device.type == "cuda" else ():
        found.add("device_times", device_times(engine, num_seqs, context, sizes, device))
    for num_seqs, context in sizes.decodes:
        found.add("decode", decode_row(engine, num_seqs, context, sizes, reads, device))
    close(engine)


def random_engine(device: torch.device, sizes: Sizes) -> Engine:
    """Return an engine that serves the shape with random weights."""
    budget = sizes.budget_mib or int(torch.cuda.mem_get_info(device)[0] * 0.85) >> 20
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(sizes.config)))
        return load_engine(Path(folder), sizes.shape, budget, device, sizes.dtype, "dummy")


def weights_of(config: Mapping[str, Any]) -> int:
    """Return the weights that a token is multiplied by: all but the embedding."""
    heads = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    attention = config["hidden_size"] * (heads + config["num_attention_heads"] * config["head_dim"])
    layer = attention + 3 * config["hidden_size"] * config["intermediate_size"]
    return int(config["num_hidden_layers"] * layer + config["hidden_size"] * config["vocab_size"])


def bytes_of_a_step(sizes: Sizes, num_seqs: int, context: float) -> float:
    """Return the bytes that a decode step reads: weights but the embedding, keys, values."""
    c = sizes.config
    cached = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * context * num_seqs
    return float(sizes.dtype.itemsize * (weights_of(c) + cached))


def prefill_row(
    engine: Engine, tokens: int, sizes: Sizes, most: float, device: torch.device
) -> dict[str, float]:
    """Run a prompt alone, three times, and return the best; the head reads one row only."""
    c = sizes.config
    best = float("inf")
    for turn in range(3):
        prompt = [(i * 31 + 7 * turn + tokens) % 200 for i in range(tokens)]
        engine.submit(INSTANCE, greedy(f"p{turn}", prompt, 2))
        best = min(best, timed(engine.step, device_clock(device)))
        while engine.has_work:
            engine.step()
    products = 2 * tokens * (weights_of(c) - c["hidden_size"] * c["vocab_size"])
    attention = 2 * tokens**2 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"]
    reached = (products + attention) / best
    return {
        "tokens": tokens,
        "ms": best * 1e3,
        "tokens_per_second": tokens / best,
        "tflop_s": reached / 1e12,
        "of_peak": reached / most,
    }


def decode_row(
    engine: Engine,
    num_seqs: int,
    context: int,
    sizes: Sizes,
    reads: float,
    device: torch.device,
    *,
    beside: AbstractContextManager[object] = nullcontext(),  # noqa: B008 it holds nothing
) -> dict[str, float]:
    """Time steps in which every sequence decodes, within the context `beside`."""
    for s in range(num_seqs):
        prompt = [(i * 31 + s) % 199 for i in range(context)]
        engine.submit(INSTANCE, greedy(str(s), prompt, sizes.steps + 2 * WARM_STEPS + num_seqs))
    begun: set[str] = set()
    while len(begun) < num_seqs:
        begun |= {
            o.request.request_id for result in engine.step() for o in result.outputs if o.delta.token_ids
        }
    for _ in range(WARM_STEPS):
        engine.step()

    def run_steps() -> None:
        for _ in range(sizes.steps):
            engine.step()

    with beside:
        seconds = timed(run_steps, device_clock(device)) / sizes.steps
    engine.cancel([str(i) for i in range(num_seqs)])
    while engine.has_work:
        engine.step()
    floor = bytes_of_a_step(sizes, num_seqs, context + WARM_STEPS + sizes.steps / 2) / reads
    return {
        "sequences": num_seqs,
        "context": context,
        "step_ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "ratio": seconds / floor,
        "tokens_per_second": num_seqs / seconds,
    }


def device_times(
    engine: Engine, num_seqs: int, context: int, sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """Return the microseconds of a step by the kernel that the device spent them in, and those in none."""
    kinds = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
    row = decode_row(engine, num_seqs, context, sizes, 1.0, device, beside=profile)
    kernels_us = {
        event.key[:80]: event.self_device_time_total / sizes.steps
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }
    longest = sorted(kernels_us.items(), key=lambda one: -one[1])[:16]
    return {
        "sequences": num_seqs,
        "context": context,
        "step_us": 1e3 * row["step_ms"],
        "busy_us": sum(kernels_us.values()),
        "kernels_us": {name: round(us, 1) for name, us in longest},
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found.get("prefill", []):
        yield (
            f"prefill {row['tokens']:5d}: {row['ms']:7.1f} ms, {row['tokens_per_second']:8.0f} tokens/s,"
            f" {row['tflop_s']:6.1f} TFLOP/s, {row['of_peak']:.0%} of a large product's"
        )
    for row in found.get("decode", []):
        yield (
            f"decode {row['sequences']:3d} x {row['context']:5d}: {row['step_ms']:7.2f} ms a step, floor "
            f"{row['floor_ms']:6.2f} ms, ratio {row['ratio']:.2f}, {row['tokens_per_second']:8.0f} tokens/s"
        )
    for row in found.get("device_times", []):
        longest = ", ".join(f"{us:.0f} {name[:36]}" for name, us in list(row["kernels_us"].items())[:7])
        yield (
            f"  of {row['step_us']:.0f} us with a profiler for {row['sequences']} x {row['context']} the"
            f" device was busy for {row['busy_us']:.0f}: {longest}"
        )


def main() -> int:
    return run_alone(__doc__, "decode", measure, lines)
