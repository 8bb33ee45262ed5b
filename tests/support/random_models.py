"""Random models of other families that real processes serve in the demo's place, with its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from bench.common.oracles import make_oracle
from tests.support.mxfp4_models import write_mxfp4
from tests.support.paths import DEMO_MODEL

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SIZES: dict[str, Any] = {"vocab_size": 4096, "max_position_embeddings": 2048}  # of the demo


def write_random(folder: Path, family: str, **changes: Any) -> Any:
    """Write a folder with a random model of the family (`bench.common.oracles`); return transformers' model.

    "gpt-oss in MXFP4" is one, too.
    """
    if family == "gpt-oss in MXFP4":
        oracle = write_mxfp4(folder, **SIZES | changes)
    else:
        oracle = make_oracle(family, **SIZES | changes)
        oracle.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(DEMO_MODEL / name, folder / name)
    return oracle


def greedy(oracle: Any, prompt: list[int], n: int) -> list[int]:
    """Return the n tokens that the likeliest ones make, each computed from all tokens before it."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            tokens.append(int(oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
