"""Greedy output of tiny random models of every family against transformers, token for token.

    python -m bench.gpu engine [--shard 0/4] [--device cpu]

A chunk of 24 tokens splits the longest prompt and mixes prefills with decodes. `--device cpu` takes the first
family alone.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import EngineShape, close, load_engine, run_prompts, silence
from bench.common.oracles import FAMILIES, make_oracle
from bench.gpu.common import Found, run_alone

PROMPTS = [[(7 * i + 3 * n) % 200 for i in range(n)] for n in (1, 5, 40, 17)]
NUM_OUT = 24


def measure(device: torch.device, found: Found) -> None:
    silence()
    found.put(families=[])
    for family in found.own(itertools.islice(FAMILIES, None if device.type == "cuda" else 1)):
        try:
            for problem in _against_oracle(family, device):
                found.problem(f"{family}: {problem}")
        except Exception as error:
            found.problem(f"{family}: {type(error).__name__}: {str(error)[:400]}")
            if "CUDA error" in str(error):
                raise  # it poisons every later call of this process
        found.add("families", family)


def _against_oracle(family: str, device: torch.device) -> Iterator[str]:
    oracle = make_oracle(family).to(device)
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        oracle.save_pretrained(folder)
        shape = EngineShape(max_num_batched_tokens=24)
        engine = load_engine(Path(folder), shape, 1024, device, torch.float32)
    _, outputs = run_prompts(engine, PROMPTS, NUM_OUT)
    close(engine)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt], device=device)
        made = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_OUT,
            min_new_tokens=NUM_OUT,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        expected = made[0, len(prompt) :].tolist()
        if output != expected:
            yield f"prompt of {len(prompt)} tokens: {output} instead of {expected}"


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"engine: {len(found['families'])} families, {len(found['problems'])} problems"


def main() -> int:
    return run_alone(__doc__, "engine", measure, lines, is_sharded=True)
