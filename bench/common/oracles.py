"""Tiny random transformers models of every family, to compare the engine with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from kernels import kv_codes

TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}

# Every family, with the options in which it differs from the others.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama with wide heads": ("Llama", {"head_dim": 24}),
    "llama with rows that fit no page": ("Llama", {"hidden_size": 80, "head_dim": 10}),
    "llama, multi-head, tied": ("Llama", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "mistral with a sliding window": ("Mistral", {"sliding_window": 13}),
    "mistral without a window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied, window in the last layers": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


def make_oracle(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a transformers model in float32 whose biases and norms are random too."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(TINY | options | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.08)
    return oracle


class RoundedCache(transformers.DynamicCache):  # type: ignore[misc]  # transformers leaves it untyped
    """The keys and values of transformers, rounded as a KV cache in 8 bits rounds them.

    spans[i]: layer i is in 8 bits while tokens [first, end) are computed, with all that it holds by then.
    Without it all layers always are.
    """

    def __init__(self, config: Any, spans: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__(config=config)
        self._spans = list(spans) or [(0, math.inf)] * config.num_hidden_layers
        self._has_begun = [first == 0 for first, _ in self._spans]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        first, end = self._spans[layer]
        position = self.get_seq_length(layer)
        if position >= first and not self._has_begun[layer]:
            self._has_begun[layer], stored = True, self.layers[layer]
            stored.keys, stored.values = rounded(stored.keys), rounded(stored.values)
        if first <= position < end:
            keys, values = rounded(keys), rounded(values)
        return super().update(keys, values, layer, *args, **kwargs)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return what a KV cache in 8 bits holds of keys or values [..., D]."""
    return kv_codes.dequantize(*kv_codes.quantize(x))
