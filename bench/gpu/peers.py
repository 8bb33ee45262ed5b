"""Offline throughput at Llama 3 8B's shape beside transformers' continuous batching on the same GPU.

    python -m bench.gpu peers [--device cpu]

As many requests as the batch takes, all at once, greedy, each with as many tokens out as the others; random
weights. Both are warmed up by a run of the same load. transformers chooses its own attention and CUDA graphs.
`--device cpu` takes a tiny model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench.common.engines import close, run_prompts, silence
from bench.gpu import decode
from bench.gpu.common import Found, run_alone

BAR = 2.0
PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(200) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


def measure(device: torch.device, found: Found) -> None:
    silence()
    is_gpu = device.type == "cuda"
    sizes = decode.GPU if is_gpu else decode.CPU
    loads = (Load(64, 512, 128), Load(8, 512, 64)) if is_gpu else (Load(2, 16, 4),)
    engine = decode.random_engine(device, sizes)
    for load in loads:
        run_prompts(engine, load.prompts(0), load.output_tokens)
        seconds, outputs = run_prompts(engine, load.prompts(1), load.output_tokens)
        found.add("ours", _row(load, seconds, outputs))
    close(engine)
    del engine
    if is_gpu:
        torch.cuda.empty_cache()
    config = LlamaConfig(**{name: value for name, value in sizes.config.items() if name != "torch_dtype"})
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(sizes.dtype)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(before)
    for load in loads:
        _theirs(model, load, 0)
        seconds, outputs = _theirs(model, load, 1)
        found.add("theirs", _row(load, seconds, outputs))
    pairs = zip(found.values["ours"], found.values["theirs"], strict=True)
    found.put(ratios=[round(a["tokens_per_second"] / b["tokens_per_second"], 2) for a, b in pairs], bar=BAR)


def _theirs(model: Any, load: Load, seed: int) -> tuple[float, list[list[int]]]:
    tokens = load.prompt_tokens + load.output_tokens
    fields = ContinuousBatchingConfig.__dataclass_fields__
    page_size = "page_size" if "page_size" in fields else "block_size"  # its name until transformers 5.17
    config = ContinuousBatchingConfig(
        **{page_size: PAGE_TOKENS},
        num_blocks=load.requests * -(-tokens // PAGE_TOKENS) + 1,  # without it a CPU gets none
        max_requests_per_batch=load.requests,
        max_batch_tokens=8192,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(
        max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    began = time.perf_counter()
    # The manager of the first load stays: its cache and graphs are made once, as ours are.
    results = model.generate_batch(
        load.prompts(seed), generation, continuous_batching_config=config, persistent_manager=True
    )
    seconds = time.perf_counter() - began
    return seconds, [list(result.generated_tokens) for result in results.values()]


def _row(load: Load, seconds: float, outputs: list[list[int]]) -> dict[str, float]:
    tokens = sum(map(len, outputs))
    if tokens != load.requests * load.output_tokens:
        raise RuntimeError(f"{tokens} tokens came of {load.requests} requests of {load.output_tokens}")
    return {
        "requests": load.requests,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    ours, theirs = found.get("ours", []), found.get("theirs", [])
    for row in ours:
        other = next((one for one in theirs if one["requests"] == row["requests"]), None)
        text = f"{other['tokens_per_second']:.0f}, ratio {_ratio(row, other):.2f}" if other else "not run"
        yield (
            f"{row['requests']} requests of {row['prompt_tokens']} + {row['output_tokens']}:"
            f" {row['tokens_per_second']:.0f} tokens/s; transformers' continuous batching {text} (bar {BAR})"
        )


def _ratio(ours: dict[str, float], theirs: dict[str, float]) -> float:
    return ours["tokens_per_second"] / theirs["tokens_per_second"]


def main() -> int:
    return run_alone(__doc__, "peers", measure, lines)
