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
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
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
    "phi3": ("Phi3", {"sliding_window": 17}),
    "phi3, partly rotary": (
        "Phi3",
        {
            "hidden_size": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 13,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-j": ("GPTJ", {"rotary_dim": 4}),
    "falcon with one KV head": ("Falcon", {"multi_query": True}),
    "falcon, new decoder": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon with biases": (
        "Falcon",
        {"multi_query": False, "num_key_value_heads": 8, "bias": True, "parallel_attn": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "mixtral with a window and experts that fit no page": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 44, "sliding_window": 13},
    ),
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
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen2 moe without biases": (
        "Qwen2Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "head_dim": 16,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3 moe, weights as they are": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32},
    ),
}

# Those whose heads can be split over ranks; of one KV head every rank would need all.
SPLIT = [family for family in FAMILIES if not family.endswith("one KV head")]

# What TINY's options are called in other families.
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "GPTJ": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "Falcon": {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
}


def options_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return the options of a tiny model of the family, as its config names them."""
    name, own = FAMILIES[family]
    names, given = _OTHER_NAMES.get(name, {}), TINY | own | changes
    if "layer_types" in given:  # as many as the layers
        types = given["layer_types"]
        given["layer_types"] = [types[i % len(types)] for i in range(given["num_hidden_layers"])]
    return {names.get(key, key): value for key, value in given.items()}


def make_oracle(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a transformers model in float32 whose biases and norms are random too."""
    name, _ = FAMILIES[family]
    config_name = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{config_name}Config")(**options_of(family, **changes))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            if parameter.dim() == 1 and parameter_name.endswith("weight"):  # of a norm
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

    @property
    def cuts(self) -> set[int]:
        """Numbers of tokens at which a layer takes another form."""
        return {int(cut) for span in self._spans for cut in span if cut < math.inf}

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
