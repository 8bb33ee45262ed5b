"""The configuration of a model, read from its folder's config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub.errors
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bus.families import (
    FAMILIES,
    LLAMA,
    BiasRule,
    BlockKind,
    Family,
    FfnKind,
    NormKind,
    TensorNames,
    architecture_of,
)
from bus.precisions import KVPrecision, Precision
from bus.variants import sparsity_of
from kernels.kv_codes import cache_format
from worker.model.cut import Cut, CutSizes
from worker.model.ready_format import ReadyFormat, check_mxfp4, has_mxfp4, is_packed, parse_format
from worker.model.shard import Shard

# What newer versions of transformers raise for a field of a config.
_Strict = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)

# clamped silu: (up + 1) * gate * sigmoid(slope * gate), of what is clamped first (GPT-OSS).
Activation = Literal["silu", "gelu", "gelu of tanh", "clamped silu"]
# The activations by Hugging Face's names, and those that each kind of FFN has.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu of tanh",
    "gelu_pytorch_tanh": "gelu of tanh",
}
_HAS: dict[FfnKind, tuple[Activation, ...]] = {
    "gated": ("silu", "gelu of tanh"),
    "plain": ("gelu", "gelu of tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and options of a model, or of some of its layers.

    `intermediate_size` is the width of a layer's FFN, or of one expert of its `mixture`.
    `sliding_windows[i]` is the tokens that layer i sees, 0 for all of them. `dtype` is the checkpoint's.
    `max_position_embeddings` is the longest context that the model may serve. A softcap c > 0 makes c *
    tanh(x / c) of x. What follows `rope` is what a Llama has not, or has otherwise.
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
    norm_eps: float
    max_position_embeddings: int
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int, ...]
    rope: Rope
    local_rope: Rope | None = None  # of the layers with a window, where they have their own
    names: TensorNames = LLAMA
    norm: NormKind = "rms"
    block: BlockKind = "sequential"
    ffn: FfnKind = "gated"
    activation: Activation = "silu"
    has_ffn_bias: bool = False
    has_head_bias: bool = False
    has_sinks: bool = False
    has_rotary_pairs: bool = False  # the checkpoint's order; the loaded one has halves
    has_qkv_groups: bool = False  # so does the checkpoint's fused tensor
    attention_scale: float = 0.0  # 0: the usual one
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    mixture: Mixture | None = None
    first_layer: int = 0  # number in the model of layer 0 of this part
    has_ends: bool = True  # embedding, final norm and head
    ready: ReadyFormat | None = None  # of a checkpoint that others quantised
    has_mxfp4_experts: bool = False  # in the checkpoint; they become dense when they are loaded
    has_packed_zeros: bool = False  # a 2:4 sparse checkpoint without its zeros; it is loaded with them
    # Of a rank of a fixed degree: what it has of the whole. Heads and FFN are counted as it has them.
    cut: Cut | None = None

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

    def of_rank(self, rank: Shard) -> ModelConfig:
        """Return the config of what one rank of a fixed degree has of every layer, and of both ends.

        Raises ModelError for a degree that cannot be, with those that can.
        """
        if rank.size == 1:
            return self
        sizes = self.cut_sizes
        if why := sizes.why_not(rank.size):
            raise ModelError(
                f"{self.folder}: a fixed degree of {rank.size} cannot be: {why}; these can be:"
                f" {', '.join(map(str, sizes.degrees()))}"
            )
        cut = Cut.of(sizes, rank)
        return replace(
            self,
            num_heads=len(cut.heads),
            num_kv_heads=len(cut.kv_heads),
            intermediate_size=len(cut.ffn_rows),
            cut=cut,
        )

    @property
    def cut_sizes(self) -> CutSizes:
        """The numbers of the whole model that ranks of a fixed degree divide."""
        if self.cut:
            return self.cut.sizes
        return CutSizes(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            ffn_rows=self.intermediate_size,
            experts=self.mixture.num_units if self.mixture else 0,
            vocab=self.vocab_size,
        )

    @property
    def whole(self) -> ModelConfig:
        """The config of all ranks together, which the tensors of the checkpoint have the sizes of."""
        if self.cut is None:
            return self
        sizes = self.cut.sizes
        return replace(
            self,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            intermediate_size=sizes.ffn_rows,
            cut=None,
        )

    @property
    def own(self) -> Cut:
        """The part of the whole that is here: a rank's, or everything."""
        return self.cut or Cut.of(self.cut_sizes, Shard())

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

    @property
    def scale(self) -> float:
        """The factor of the products of queries and keys."""
        return self.attention_scale or float(self.head_dim**-0.5)

    @property
    def num_ffn_matrices(self) -> int:
        """The matrices that read the FFN's input."""
        return 2 if self.ffn == "gated" else 1

    @property
    def short_context(self) -> int:
        """The most tokens of a sequence that turns by the short frequencies of two (longrope); 0: of one."""
        short = self.rope.short_context
        return short if self.max_position_embeddings > short else 0

    def up_to(self, context: int) -> ModelConfig:
        """Return the config for sequences of at most `context` tokens; 0, or more than it has: this one."""
        if not 0 < context < self.max_position_embeddings:
            return self
        return replace(self, max_position_embeddings=context)

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
    try:
        hf = _with_defaults(raw, family)
        config = _convert(folder, architecture, family, hf)
        quantization = raw.get("quantization_config")
        if (sparsity := sparsity_of(raw)) is not None:
            return replace(config, has_packed_zeros=is_packed(sparsity, raw))
        if has_mxfp4(quantization) and config.names.experts_gate_up:
            if not (raw.get("dtype") or raw.get("torch_dtype")):
                config = replace(config, dtype=torch.bfloat16)  # as transformers makes the experts dense
            return _with_mxfp4(config, quantization)
        if quantization:
            if config.names != LLAMA:
                raise ValueError(
                    f"quantised weights of {architecture} are not supported; serve the model in full"
                    " precision, whose layers a worker itself rounds to fewer bits"
                )
            return replace(config, ready=parse_format(quantization))
        return config
    except (TypeError, ValueError, KeyError, AttributeError, _Strict) as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error


def _with_mxfp4(config: ModelConfig, said: Any) -> ModelConfig:
    names = config.names
    module = names.experts_gate_up.rpartition(".")[0]
    experts = [f"{names.layer}.{layer}.{module}" for layer in range(config.num_layers)]
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    check_mxfp4(said, experts, sizes)
    return replace(config, has_mxfp4_experts=True)


def _with_defaults(raw: dict[str, Any], family: Family) -> Any:
    """Return the options of a config.json, those that it leaves out by transformers.

    It refuses heads that do not fill the hidden size, though its models compute with them: a model whose
    heads were pruned has such, with `head_dim`. They are put in behind its back.
    """
    kinds = {name: family.option(name) for name in ("num_heads", "num_kv_heads")}
    heads, hidden = raw.get(kinds["num_heads"]), raw.get("hidden_size")
    given = raw | {"model_type": family.model_type}
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0):
        return AutoConfig.for_model(**given)
    if not raw.get("head_dim") or hidden % heads == 0:
        return AutoConfig.for_model(**given)
    hf = AutoConfig.for_model(**given | dict.fromkeys(kinds.values(), 1))
    setattr(hf, kinds["num_heads"], heads)
    setattr(hf, kinds["num_kv_heads"], raw.get(kinds["num_kv_heads"]) or heads)
    return hf


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if folder.is_file():
        raise ModelError(
            f"{folder}: a file; a model is a folder, and `instar convert` makes one of a GGUF file"
        )
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


def _convert(folder: Path, architecture: str, family: Family, hf: Any) -> ModelConfig:
    def option(name: str, default: Any = None) -> Any:
        """Return an option; the default where this family, or this config, has none."""
        value = getattr(hf, key, None) if (key := family.option(name)) else None
        return default if value is None else value

    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // option("num_heads")
    if option("ffn_bias") and family.ffn_bias == "never":
        raise ValueError(f"{family.option('ffn_bias')} is not supported")
    if getattr(hf, "use_bidirectional_attention", None):
        raise ValueError("use_bidirectional_attention is not supported; a served model sees what came before")
    rope, local_rope = read_ropes(hf, head_dim, family)
    config = ModelConfig(
        folder=folder,
        architecture=architecture,
        dtype=(hf.dtype if hasattr(hf, "dtype") else hf.torch_dtype) or torch.float32,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=option("intermediate_size", 4 * hf.hidden_size),
        num_layers=option("num_layers"),
        num_heads=option("num_heads"),
        num_kv_heads=option("num_kv_heads"),
        head_dim=head_dim,
        norm_eps=option("norm_eps"),
        max_position_embeddings=option("context"),
        has_tied_embeddings=bool(hf.tie_word_embeddings),
        has_qkv_bias=_has_bias(family.qkv_bias, option("bias")),
        has_o_bias=_has_bias(family.o_bias, option("bias")),
        has_qk_norm=family.has_qk_norm,
        sliding_windows=_sliding_windows(family, hf, option("num_layers")),
        rope=rope,
        local_rope=local_rope,
        names=family.names,
        norm=family.norm,
        block=family.block,
        ffn=family.ffn,
        activation=_activation(family, option("activation")),
        has_ffn_bias=_has_bias(family.ffn_bias, option("ffn_bias")),
        has_head_bias=family.head_bias == "always",
        has_sinks=bool(family.names.sinks),
        has_rotary_pairs=family.rotary == "pairs",
        has_qkv_groups=family.qkv_order == "groups",
        attention_scale=option("attention_scalar", 0.0) and float(option("attention_scalar") ** -0.5),
        attention_softcap=option("attention_softcap", 0.0),
        logit_softcap=option("logit_softcap", 0.0),
        embedding_scale=hf.hidden_size**0.5 if family.scales_embedding else 1.0,
        mixture=_mixture(option, hf, family) if family.names.router else None,
    )
    if adapt := _DEPENDENT.get(architecture):
        config = adapt(config, hf)
    _check_sizes(config)
    return config


def _mixture(option: Callable[[str], Any], hf: Any, family: Family) -> Mixture:
    width = option("intermediate_size")
    if width < 1:
        raise ValueError(f"{family.option('intermediate_size')} is {width}; it must be positive")
    shared_width = hf.shared_expert_intermediate_size if family.names.shared_expert else 0
    if shared_width % width:
        raise ValueError(
            f"shared_expert_intermediate_size is {shared_width}; a multiple of"
            f" {family.option('intermediate_size')} {width} is supported"
        )
    mixture = Mixture(
        num_experts=option("num_experts"),
        top_k=option("experts_per_token"),
        is_normalised=getattr(hf, "norm_topk_prob", True),
        num_shared=shared_width // width,
    )
    if not 1 <= mixture.top_k <= mixture.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {mixture.top_k}; the model has {mixture.num_experts} experts"
        )
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers or decoder_sparse_step gives some layers no experts; that is not supported"
        )
    return mixture


def _falcon(config: ModelConfig, hf: Any) -> ModelConfig:
    """Apply what the options of a Falcon decide: Falcon 7B and 40B differ in their norms and KV heads."""
    if hf.alibi:
        raise ValueError("alibi is not supported; a Falcon with rotary embeddings is")
    is_new, names = bool(hf.new_decoder_architecture), config.names
    if is_new and (hf.num_ln_in_parallel_attn or 2) == 2:
        names = replace(names, input_norm="ln_attn", ffn_norm="ln_mlp")
    elif is_new or hf.parallel_attn:
        names = replace(names, ffn_norm="")
    return replace(
        config,
        names=names,
        block="parallel" if is_new or hf.parallel_attn else "sequential",
        num_kv_heads=config.num_kv_heads if is_new else 1 if hf.multi_query else config.num_heads,
    )


def _gpt_oss(config: ModelConfig, hf: Any) -> ModelConfig:
    """Apply the activation, whose name in the config is that of its sigmoid.

    transformers 5.17 has no fields for its two numbers, which no checkpoint changes.
    """
    assert config.mixture
    limit, slope = getattr(hf, "swiglu_limit", 7.0), getattr(hf, "swiglu_alpha", 1.702)
    mixture = replace(config.mixture, limit=limit, slope=slope)
    return replace(config, activation="clamped silu", mixture=mixture)


# Families whose config decides which parts a layer has.
_DEPENDENT: dict[str, Callable[[ModelConfig, Any], ModelConfig]] = {
    "FalconForCausalLM": _falcon,
    "GptOssForCausalLM": _gpt_oss,
}


def _activation(family: Family, named: Any) -> Activation:
    activation = ACTIVATIONS.get(named) if isinstance(named, str) else None
    if activation is None or activation not in _HAS[family.ffn]:
        supported = ", ".join(name for name, each in ACTIVATIONS.items() if each in _HAS[family.ffn])
        raise ValueError(f"{family.option('activation')} {named!r} is not supported; these are: {supported}")
    return activation


def _has_bias(where: BiasRule, said: Any) -> bool:
    return where == "always" or (where == "as the config says" and bool(said))


def _sliding_windows(family: Family, hf: Any, num_layers: int) -> tuple[int, ...]:
    window = int(getattr(hf, "sliding_window", None) or 0)
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
    if config.rope.dim > config.head_dim:
        raise ValueError(f"{config.rope.dim} dimensions of a head turn, and it has {config.head_dim}")
    if len(config.sliding_windows) != config.num_layers:
        raise ValueError(
            f"layer_types has {len(config.sliding_windows)} entries for {config.num_layers} layers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of each layer, of which every token uses `top_k` (`kernels.route`).

    A shared expert, which all tokens use, is cut into `num_shared` slices as wide as an expert. limit, slope:
    of a clamped silu.
    """

    num_experts: int
    top_k: int
    is_normalised: bool
    limit: float = 0.0
    slope: float = 0.0
    num_shared: int = field(default=0, repr=False)  # so that other digests stay

    @property
    def num_units(self) -> int:
        """Experts and slices of the shared one: what ranks divide."""
        return self.num_experts + self.num_shared


class ModelError(Exception):
    """A model folder cannot be served: names the file, tensor or number, what was expected, the remedy."""


# Ways to stretch frequencies past the context of pre-training. `dynamic` (NTK) changes them only for contexts
# longer than max_position_embeddings, which are not served.
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings: dimension i turns by p * inv_freq[i] at position p.

    Cosines and sines are multiplied by `factor`. longrope has other frequencies for sequences of more than
    `short_context` tokens (LongRoPE, Ding et al. 2024, as Phi-3 uses it).
    """

    scaling: str
    inv_freq: tuple[float, ...]  # R / 2 float32 values; the other D - R dimensions of a head do not turn
    factor: float  # attention factor of YaRN and longrope, else 1
    # Left out of the text that digests of checkpoints are made of where there are none.
    long_inv_freq: tuple[float, ...] = field(default=(), repr=False)
    short_context: int = field(default=0, repr=False)

    @property
    def dim(self) -> int:
        return 2 * len(self.inv_freq)

    def table(self, max_positions: int, short_context: int, device: torch.device) -> torch.Tensor:
        """Return float32 [max_positions + short_context, R]: cosines in the first half, sines in the second.

        The first rows are those of sequences of any length, or with a short_context of longer ones; those of
        sequences up to it follow (`ModelConfig.short_context`).
        """
        any_length = self.long_inv_freq if short_context and self.long_inv_freq else self.inv_freq
        angles = []
        for frequencies, rows in ((any_length, max_positions), (self.inv_freq, short_context)):
            inv_freq = torch.tensor(frequencies, dtype=torch.float32, device=device)
            positions = torch.arange(rows, dtype=torch.float32, device=device)
            angles.append(torch.outer(positions, inv_freq))
        whole = torch.cat(angles)
        return torch.cat([whole.cos(), whole.sin()], dim=-1).mul_(self.factor)


def read_ropes(hf: Any, head_dim: int, family: Family) -> tuple[Rope, Rope | None]:
    """Read the rotary frequencies by transformers' own functions for each scaling.

    The second ones are those of the layers with a window, if they differ. Raises ValueError for a scaling
    that is not supported.
    """
    parameters = _parameters(hf)
    if "full_attention" not in parameters:
        return _read_rope(hf, head_dim, family, parameters), None
    full, local = (
        _read_rope(hf, head_dim, family, parameters[kind], kind)
        for kind in ("full_attention", "sliding_attention")
    )
    return full, local


def _read_rope(
    hf: Any, head_dim: int, family: Family, parameters: dict[str, Any], layer_type: str | None = None
) -> Rope:
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in SCALINGS:
        raise ValueError(f"rope scaling {scaling!r} is not supported; these are: {', '.join(SCALINGS)}")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not family.is_partly_rotary:
        raise ValueError(f"partial_rotary_factor {share} is not supported for {family.model_type}")
    if scaling == "default":
        dim = getattr(hf, "rotary_dim", None) or int(head_dim * share)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        inv_freq = 1.0 / parameters["rope_theta"] ** exponents
        return Rope(scaling, tuple(inv_freq.tolist()), 1.0)
    stretch, cpu = ROPE_INIT_FUNCTIONS[scaling], torch.device("cpu")
    of_layers = {"layer_type": layer_type} if layer_type else {}
    inv_freq, factor = stretch(hf, cpu, **of_layers)
    if scaling != "longrope":
        return Rope(scaling, tuple(inv_freq.tolist()), float(factor))
    short = int(parameters["original_max_position_embeddings"])
    long_inv_freq, _ = stretch(hf, cpu, seq_len=short + 1, **of_layers)
    return Rope(scaling, tuple(inv_freq.tolist()), float(factor), tuple(long_inv_freq.tolist()), short)


def _parameters(hf: Any) -> dict[str, Any]:
    """Return the rope parameters: one dict in transformers 5, two attributes before."""
    found: dict[str, Any] | None = getattr(hf, "rope_parameters", None)
    return found or {
        "rope_theta": getattr(hf, "rope_theta", 10000.0),
        **(getattr(hf, "rope_scaling", None) or {}),
    }
