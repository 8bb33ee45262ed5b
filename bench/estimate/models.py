"""Models for `bench.estimate`: the demo and dummies of 30M to 300M parameters with 8 to 32 layers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig

from worker.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a dummy. Its weights are drawn when it is loaded; none are on disk."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int


SIZES = (  # what can be measured in four shapes within a quarter of an hour
    Size("30M, 8 layers", 512, 8, 8, 4, 1408, 4096),
    Size("100M, 32 layers", 512, 32, 8, 4, 1408, 4096),
    Size("300M, 24 layers", 1024, 24, 16, 4, 2816, 8192),
)


@contextlib.contextmanager
def config_folder(size: Size, context: int = 2048) -> Iterator[Path]:
    """Make a model folder that holds nothing but a config."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        config.save_pretrained(folder)
        yield Path(folder)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters in all matrices."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    ends = (1 if config.has_tied_embeddings else 2) * config.vocab_size * config.hidden_size
    return config.num_layers * layer + ends
