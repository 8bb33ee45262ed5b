"""A model of a given size with random weights, for whom speed is all that matters."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from worker.engine.build import MIB, Shape, fill_caches, make_cache, make_instance, make_pool
from worker.engine.engine import Engine
from worker.model import load_model

STANDARD_DEVIATION = 0.06  # at transformers' 0.02 greedy output repeats one token

CONFIGS: dict[str, dict[str, int]] = {
    "4M": {  # two layers; its FFN is to its KV of a token as that of 30M
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "vocab_size": 4096,
    },
    "30M": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "vocab_size": 4096,
    },
    "50M": {  # layers of 30M with a KV head for every head, and more of them
        "hidden_size": 512,
        "num_hidden_layers": 14,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "vocab_size": 4096,
    },
    "60M": {  # more of the layers of 30M
        "hidden_size": 512,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "vocab_size": 4096,
    },
    "100M": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2432,
        "vocab_size": 8192,
    },
    "wide": {  # 200M in four layers, whose size is that of models of 1B to 2B
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 4096,
    },
}


@contextlib.contextmanager
def saved_model(size: str, max_len: int = 2048) -> Iterator[Path]:
    """A Hugging Face folder of the config, float32, gone afterwards. max_len: of the context, in tokens."""
    config = LlamaConfig(
        **CONFIGS[size],
        max_position_embeddings=max_len,
        initializer_range=STANDARD_DEVIATION,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        yield Path(folder)


def load_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_engine(folder: Path, shape: Shape, budget_mib: int) -> Engine:
    """An engine serving the folder as instance "bench" in float32 on the CPU."""
    pool = make_pool(torch.device("cpu"), budget_mib * MIB)
    model = load_model(folder, pool, dtype=torch.float32)
    limits = shape.limits(model)
    cache = make_cache(pool, model, limits, "bench")
    fill_caches(pool, [(cache, model, limits)])
    engine = Engine()
    engine.add_instance(make_instance("bench", model, cache, limits))
    return engine


def num_matrix_weights(size: str) -> int:
    """Weights that each token is multiplied with: all but the embedding."""
    c = CONFIGS[size]
    hidden, head = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * c["num_key_value_heads"] * head
    layer = attention + 3 * hidden * c["intermediate_size"]
    return c["num_hidden_layers"] * layer + hidden * c["vocab_size"]
