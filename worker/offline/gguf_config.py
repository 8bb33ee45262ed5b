"""The config.json of a GGUF file, of what its metadata and its tensors say.

A key that may change results, and that is not read here, is refused by name: a model that is computed without
it gives other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from worker.model.config import ModelConfig, ModelError
from worker.offline.bin_shard import shown
from worker.offline.gguf_header import GgufArray, GgufHeader

EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
# Frequencies of rotary embeddings are divided by these, as those of Llama 3.1 are.
ROPE_FACTORS: Final = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """A model family as the files of one of llama.cpp's architectures have it."""

    architecture: str  # in config.json
    model_type: str
    may_have_biases: bool = False  # of q, k, v and o, where the config says so
    has_paired_rows: bool = False  # rows 2i and 2i + 1 of a head's q and k are rows i of its halves here
    norm_offset: float = 0.0  # in the file's norms, and not in ours
    own: Callable[[_Options, dict[str, Any]], dict[str, Any]] = lambda options, config: {}  # of its config


def _qwen3_moe(options: _Options, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": options.number("expert_count"),
        "num_experts_per_tok": options.number("expert_used_count"),
        "moe_intermediate_size": options.number("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes it
    }


def _gemma2(options: _Options, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
        "sliding_window": options.number("attention.sliding_window"),
        "attn_logit_softcapping": options.number("attn_logit_softcapping", is_whole=False),
        "final_logit_softcapping": options.number("final_logit_softcapping", is_whole=False),
    }


def _gemma3(options: _Options, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
        "sliding_window": options.number("attention.sliding_window"),
        "rope_local_base_freq": options.number("rope.freq_base_swa", 10000.0, is_whole=False),
    }


def _query_scalar(config: dict[str, Any], *, layers_of_27b: int) -> int:
    """Return the number whose root divides the scores. No key has it; the 27B is known by its layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


# By the `general.architecture` of a file. A Mistral has the architecture of a Llama.
FAMILIES: Final[dict[str, GgufFamily]] = {
    "llama": GgufFamily(
        architecture="LlamaForCausalLM", model_type="llama", may_have_biases=True, has_paired_rows=True
    ),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": GgufFamily(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", own=_qwen3_moe),
    "gemma2": GgufFamily(architecture="Gemma2ForCausalLM", model_type="gemma2", norm_offset=1.0, own=_gemma2),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM", model_type="gemma3_text", norm_offset=1.0, own=_gemma3
    ),
}

# Keys that change nothing.
_DESCRIBES: Final = (
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)
# Those of the scaling of Llama 3.1 to 3.3, whose files hold only what comes of it. The factor is in them.
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Options:
    """The keys of the file's architecture. What nobody asks for is refused at the end."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._path, self._prefix = header.path, f"{architecture}."
        self._left = {
            key.removeprefix(self._prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self._prefix)
        }

    def number(self, key: str, default: float | None = None, *, is_whole: bool = True) -> Any:
        """Return a number of at least 0. Raises ModelError: it is missing, or no number."""
        value = self._left.pop(key, default)
        if isinstance(value, GgufArray):
            raise self.refused(
                key, f"has {value.length} values, one for each layer; one for all is supported"
            )
        if value is None:
            raise self.refused(key, "is missing")
        if not isinstance(value, int if is_whole else int | float) or isinstance(value, bool) or value < 0:
            raise self.refused(
                key, f"is {value!r}, which is not a {'whole ' if is_whole else ''}number from 0"
            )
        return value

    def word(self, key: str, default: str) -> str:
        return str(self._left.pop(key, default))

    def end(self) -> None:
        """Refuse the keys that were not read, unless they are off. Raises ModelError."""
        for key, value in self._left.items():
            if value and key not in _DESCRIBES:
                raise self.refused(key, f"is {shown(value)}, which is not supported")

    def refused(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._path}: {self._prefix}{key} {why}")


def family_of(header: GgufHeader) -> GgufFamily:
    """Return the family of a file. Raises ModelError: no supported one."""
    name = header.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ModelError(
            f"{header.path}: architecture {shown(name)} is not supported in a GGUF file; these are: "
            f"{', '.join(FAMILIES)}. The model's own folder in safetensors may be (docs/models.md)"
        )
    return FAMILIES[name]


def config_of(header: GgufHeader, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json. `dtype`: the one to serve in. Raises ModelError."""
    family = family_of(header)
    options = _Options(header, header.metadata["general.architecture"])
    hidden, heads = options.number("embedding_length"), options.number("attention.head_count")
    head_dim = options.number("attention.key_length", hidden // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (given := options.number(key, head_dim)) != head_dim:
            raise options.refused(key, f"is {given}; only that of the keys is supported, which is {head_dim}")
    if EMBEDDING not in header.tensors:
        raise ModelError(f"{header.path}: no tensor {EMBEDDING} in it, so it is not a language model")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": options.number("feed_forward_length"),
        "num_hidden_layers": options.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": options.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": options.number("context_length"),
        "rms_norm_eps": options.number("attention.layer_norm_rms_epsilon", is_whole=False),
        "rope_theta": options.number("rope.freq_base", 10000.0, is_whole=False),
        "tie_word_embeddings": HEAD not in header.tensors,
    }
    if family.may_have_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config |= family.own(options, config)
    if scaling := _scaling(header, options, config):
        config["rope_scaling"] = scaling
    options.end()
    return config | _special_tokens(header)


def generation_config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the content of generation_config.json: the tokens that end an answer."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))  # of text, turn and call
    stops = {value for key in keys if isinstance(value := header.metadata.get(key), int)}
    return {"eos_token_id": sorted(stops)} if stops else {}


def _special_tokens(header: GgufHeader) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    found = {
        f"{ours}_token_id": header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for key, ours in names.items()
    }
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _scaling(header: GgufHeader, options: _Options, config: dict[str, Any]) -> dict[str, Any]:
    """Return how the rotary frequencies are scaled; {}: not at all."""
    kind = options.word("rope.scaling.type", "linear")
    factor = options.number("rope.scaling.factor", 1.0, is_whole=False)
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{header.path}: rope scaling {kind!r} is not supported in a GGUF file; these are: none, linear, "
            "and that of Llama 3"
        )
    is_linear = kind == "linear" and factor not in (0, 1)
    if ROPE_FACTORS not in header.tensors:
        return {"rope_type": "linear", "factor": float(factor)} if is_linear else {}
    if is_linear:
        raise ModelError(
            f"{header.path}: both {ROPE_FACTORS} and a linear rope scaling; one of them is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": float(_rope_factors(header, config["head_dim"]).max()),
        **_LLAMA3,
    }


def check_rope_factors(header: GgufHeader, config: ModelConfig, theta: float) -> None:
    """Check that the frequencies of the config are those of the file's factors. Raises ModelError."""
    if ROPE_FACTORS not in header.tensors:
        return
    exponents = torch.arange(0, config.rope.dim, 2, dtype=torch.float32) / config.rope.dim
    factors = theta**-exponents / torch.tensor(config.rope.inv_freq)
    if not torch.allclose(factors, _rope_factors(header, config.head_dim), rtol=1e-4):
        raise ModelError(
            f"{header.path}: the factors in {ROPE_FACTORS} are not those of Llama 3.1 to 3.3, and others "
            "are not supported"
        )


def _rope_factors(header: GgufHeader, head_dim: int) -> torch.Tensor:
    """Read the factors [head_dim / 2] of a file. Raises ModelError."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.kind_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{header.path}: {ROPE_FACTORS} is {list(tensor.shape)} of {tensor.kind_name}; it must be "
            f"[{head_dim // 2}] of F32"
        )
    return torch.from_numpy(np.fromfile(header.path, np.float32, tensor.numel, offset=tensor.first))
