"""Models of given sizes with random weights, to measure speed and memory with."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.common.results import DEMO

STANDARD_DEVIATION = 0.06  # at transformers' 0.02 greedy output repeats one token


def _config(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int = 4096
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict[str, int]] = {
    "4M": _config(256, 2, 8, 4, 1408),  # the FFN is to the KV of a token as that of 30M
    "30M": _config(512, 8, 8, 4, 1408),
    "50M": _config(512, 14, 8, 8, 1408),  # layers of 30M with a KV head for every head, and more of them
    "60M": _config(512, 18, 8, 4, 1408),  # more of the layers of 30M
    "110M": _config(768, 12, 12, 12, 2048),
    "100M": _config(768, 12, 12, 4, 2432, 8192),
    "100M, 32 layers": _config(512, 32, 8, 4, 1408),
    "300M, 24 layers": _config(1024, 24, 16, 4, 2816, 8192),
    "wide": _config(2048, 4, 16, 4, 5632),  # 200M in four layers, as wide as those of models of 1B to 2B
}


@contextlib.contextmanager
def config_folder(size: str, max_len: int = 2048) -> Iterator[Path]:
    """Make a model folder that holds nothing but a config; weights are drawn when they are loaded."""
    config = LlamaConfig(
        **CONFIGS[size],
        max_position_embeddings=max_len,
        initializer_range=STANDARD_DEVIATION,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        config.save_pretrained(folder)
        yield Path(folder)


@contextlib.contextmanager
def saved_model(size: str, max_len: int = 2048) -> Iterator[Path]:
    """Make a Hugging Face folder of a model in float32, with a context of `max_len` tokens."""
    with config_folder(size, max_len) as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)
        yield folder


@contextlib.contextmanager
def model_folder(size: str, max_len: int = 2048) -> Iterator[Path]:
    """Like `saved_model`, with the demo model's tokenizer, so that the service can serve it."""
    with saved_model(size, max_len) as folder:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(DEMO / name, folder)
        yield folder


def load_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(model: Any, prompts: Sequence[list[int]], num_out: int, **options: Any) -> list[list[int]]:
    """Return `num_out` greedy tokens for each prompt, all as one static batch of transformers' `generate`."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    outputs = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_out,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    generated: list[list[int]] = outputs[:, longest:].tolist()
    return generated


def num_matrix_weights(size: str) -> int:
    """Return the number of weights that each token is multiplied with: all but the embedding."""
    c = CONFIGS[size]
    hidden, head = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * c["num_key_value_heads"] * head
    layer = attention + 3 * hidden * c["intermediate_size"]
    return c["num_hidden_layers"] * layer + hidden * c["vocab_size"]
