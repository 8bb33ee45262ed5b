"""The configuration of a model, read from its folder's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bus.families import FAMILIES, BiasRule, Family, architecture_of
from bus.precisions import KVPrecision, Precision
from kernels.kv_codes import cache_format
from worker.model.ready_format import ReadyFormat, parse_format

# What newer versions of transformers raise for a field of a config.
_Strict = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and options of a model, or of some of its layers.

    `sliding_windows[i]` is the tokens that layer i sees, 0 for all of them. `dtype` is the checkpoint's.
    `max_position_embeddings` is the longest context that the model may serve.
    """

    folder: Path
    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int, ...]
    rope: Rope
    first_layer: int = 0  # number in the model of layer 0 of this part
    has_ends: bool = True  # embedding, final norm and head
    ready: ReadyFormat | None = None  # of a checkpoint that others quantised

    def part(self, first: int, end: int) -> ModelConfig:
        """Return the config of layers [first, end): a pipeline stage, of which the first has the ends.

        Raises ModelError if the model has no such layers.
        """
        if not 0 <= first < end <= self.num_layers:
            raise ModelError(f"{self.folder}: no layers [{first}, {end}); the model has {self.num_layers}")
        return replace(
            self,
            num_layers=end - first,
            sliding_windows=self.sliding_windows[first:end],
            first_layer=self.first_layer + first,
            has_ends=self.has_ends and first == 0,
        )

    @property
    def fixed_precision(self) -> Precision | None:
        """The only precision that the layers of a quantised checkpoint have; None: full, and any below."""
        return self.ready.precision if self.ready else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_block_bytes(self, block_tokens: int, dtype: torch.dtype, precision: KVPrecision = "full") -> int:
        """Return the bytes of one KV block in all layers together."""
        stored, token_size = cache_format(precision, self.head_dim, dtype)
        return int(2 * self.num_kv_heads * token_size * block_tokens * stored.itemsize * self.num_layers)


def read_config(folder: Path) -> ModelConfig:
    """Read the config of a model folder.

    Raises ModelError: no folder, no or malformed config.json, an unsupported architecture, quantisation,
    activation or rope scaling, sizes that do not fit together.
    """
    raw = _read_json(folder)
    architecture = _architecture(folder, raw)
    family = FAMILIES[architecture]
    _refuse_unsupported(folder, raw)
    try:
        hf = AutoConfig.for_model(**(raw | {"model_type": family.model_type}))
        config = _convert(folder, architecture, family, hf)
        if quantization := raw.get("quantization_config"):
            return replace(config, ready=parse_format(quantization))
        return config
    except (TypeError, ValueError, KeyError, AttributeError, _Strict) as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such model folder")
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json in it; a model folder has Hugging Face's format")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds a {type(raw).__name__}, not an object")
    return raw


def _architecture(folder: Path, raw: dict[str, Any]) -> str:
    try:
        if architecture := architecture_of(raw):
            return architecture
    except ValueError as error:
        raise ModelError(f"{folder}: {error}") from error
    raise ModelError(f"{folder}: config.json names no architecture; supported are: {', '.join(FAMILIES)}")


def _refuse_unsupported(folder: Path, raw: dict[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{folder}: hidden_act {activation!r} is not supported; silu is")
    if raw.get("mlp_bias"):
        raise ModelError(f"{folder}: mlp_bias is not supported")


def _convert(folder: Path, architecture: str, family: Family, hf: Any) -> ModelConfig:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    config = ModelConfig(
        folder=folder,
        architecture=architecture,
        dtype=(hf.dtype if hasattr(hf, "dtype") else hf.torch_dtype) or torch.float32,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        has_tied_embeddings=bool(hf.tie_word_embeddings),
        has_qkv_bias=_has_bias(family.qkv_bias, hf),
        has_o_bias=_has_bias(family.o_bias, hf),
        has_qk_norm=family.has_qk_norm,
        sliding_windows=_sliding_windows(family, hf),
        rope=read_rope(hf, head_dim),
    )
    _check_sizes(config)
    return config


def _has_bias(where: BiasRule, hf: Any) -> bool:
    return where == "always" or (where == "as the config says" and bool(hf.attention_bias))


def _sliding_windows(family: Family, hf: Any) -> tuple[int, ...]:
    window, num_layers = int(getattr(hf, "sliding_window", None) or 0), int(hf.num_hidden_layers)
    if family.sliding_window == "never":
        return (0,) * num_layers
    if family.sliding_window == "every layer":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in hf.layer_types)


def _check_sizes(config: ModelConfig) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be positive")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads are not a multiple of {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotary embeddings need an even one")
    if len(config.sliding_windows) != config.num_layers:
        raise ValueError(
            f"layer_types has {len(config.sliding_windows)} entries for {config.num_layers} layers"
        )


class ModelError(Exception):
    """A model folder cannot be served: names the file, tensor or number, what was expected, the remedy."""


# Ways to stretch frequencies past the context of pre-training. `dynamic` (NTK) changes them only for contexts
# longer than max_position_embeddings, which are not served.
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings: dimension i turns by p * inv_freq[i] at position p.

    Cosines and sines are multiplied by `factor`.
    """

    scaling: str
    inv_freq: tuple[float, ...]  # D / 2 float32 values
    factor: float  # YaRN's attention factor, else 1

    def table(self, max_positions: int, device: torch.device) -> torch.Tensor:
        """Return float32 [max_positions, D]: cosines in the first half, sines in the second."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inv_freq)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self.factor)


def read_rope(hf: Any, head_dim: int) -> Rope:
    """Read the rotary frequencies by transformers' own functions for each scaling.

    Raises ValueError for a scaling that is not supported.
    """
    parameters = _parameters(hf)
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in SCALINGS:
        raise ValueError(f"rope scaling {scaling!r} is not supported; these are: {', '.join(SCALINGS)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    if scaling == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling](hf, torch.device("cpu"))
    return Rope(scaling, tuple(inv_freq.tolist()), float(factor))


def _parameters(hf: Any) -> dict[str, Any]:
    """Return the rope parameters: one dict in transformers 5, two attributes before."""
    found: dict[str, Any] | None = getattr(hf, "rope_parameters", None)
    return found or {
        "rope_theta": getattr(hf, "rope_theta", 10000.0),
        **(getattr(hf, "rope_scaling", None) or {}),
    }
