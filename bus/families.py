"""The differences between model families, as data. One transformer serves them all.

A family says which parts a layer has, where in a config its options are, and how a checkpoint names its
tensors. What no family has is no part of the transformer: `worker.model.config` turns an entry and a config
into a `ModelConfig`, and the rest of the worker reads that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BiasRule = Literal["never", "always", "as the config says"]
WindowRule = Literal["never", "every layer", "layers of the config"]
# rms: x / rms(x) * w. rms of 1 + w: x / rms(x) * (1 + w), multiplied in float32. layer: with mean and bias.
NormKind = Literal["rms", "rms of 1 + w", "layer"]
# sequential: the FFN reads the residual with the attention added. parallel: both read the one before.
BlockKind = Literal["sequential", "parallel"]
# gated: down(act(gate(x)) * up(x)). plain: down(act(up(x))).
FfnKind = Literal["gated", "plain"]
# halves: dimension i of a head turns with i + R / 2. pairs: 2 i with 2 i + 1.
RotaryKind = Literal["halves", "pairs"]
# parts: all queries, all keys, all values. groups: the queries of a KV head, its key, its value, and so on.
QkvOrder = Literal["parts", "groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The modules of a checkpoint, whose tensors end in .weight and .bias.

    Those of a layer follow `layer` and its number. A fused tensor, if it is named, stands for its parts.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""  # q, k and v in one tensor
    o: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""  # gate above up in one tensor
    down: str = "mlp.down_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    input_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"  # before the FFN; "": a parallel one reads the attention's
    attention_out_norm: str = ""  # of what the attention gives, before it is added; "": none
    ffn_out_norm: str = ""
    sinks: str = ""  # a logit of each head that no token has; the tensor has no ending
    router: str = ""  # of a mixture of experts; "": a layer has one FFN
    experts: str = ""  # their numbers follow, and then gate, up and down
    experts_gate_up: str = ""  # [experts, inputs, 2 * width], gate and up in turn, in place of theirs
    experts_down: str = ""  # [experts, width, outputs]
    shared_expert: str = ""  # which every token uses; gate, up and down follow
    shared_gate: str = ""  # one output, whose sigmoid is the weight of the shared expert


LLAMA = TensorNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. `model_type` is Hugging Face's name; rules say where biases and windows may occur.

    `options` has the name in the config of each option that is not named as a Llama's; one that a Llama has
    not is read only if it is there.
    """

    model_type: str
    names: TensorNames = LLAMA
    options: Mapping[str, str] = field(default_factory=dict)
    norm: NormKind = "rms"
    block: BlockKind = "sequential"
    ffn: FfnKind = "gated"
    rotary: RotaryKind = "halves"
    is_partly_rotary: bool = False  # the config may say that only the first dimensions of a head turn
    qkv_order: QkvOrder = "parts"
    qkv_bias: BiasRule = "never"
    o_bias: BiasRule = "never"
    ffn_bias: BiasRule = "never"
    head_bias: BiasRule = "never"
    has_qk_norm: bool = False
    sliding_window: WindowRule = "never"
    scales_embedding: bool = False  # by the root of the hidden size

    def option(self, name: str) -> str:
        """Return the config's name of an option."""
        return self.options.get(name, OPTIONS.get(name, ""))


# The options that every family has, by their names in a Llama's config.
OPTIONS = {
    "num_layers": "num_hidden_layers",
    "context": "max_position_embeddings",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "bias": "attention_bias",
    "ffn_bias": "mlp_bias",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}

_GEMMA = TensorNames(
    attention_out_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_out_norm="post_feedforward_layernorm",
)
_GEMMA_OPTIONS = {
    "activation": "hidden_activation",
    "attention_scalar": "query_pre_attn_scalar",
    "logit_softcap": "final_logit_softcapping",
}

# To add a family whose layers are made of these parts, add its entry, under the name that its config.json has
# in `architectures`, and its options to FAMILIES in bench/common/oracles.py.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama", qkv_bias="as the config says", o_bias="as the config says"
    ),
    "MistralForCausalLM": Family(model_type="mistral", sliding_window="every layer"),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        names=TensorNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
        ),
        options={"num_experts": "num_local_experts"},
        sliding_window="every layer",
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        names=TensorNames(
            sinks="self_attn.sinks",
            router="mlp.router",
            experts_gate_up="mlp.experts.gate_up_proj",
            experts_down="mlp.experts.down_proj",
        ),
        options={"num_experts": "num_local_experts"},
        qkv_bias="as the config says",
        o_bias="as the config says",
        ffn_bias="always",
        sliding_window="layers of the config",
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        names=TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        is_partly_rotary=True,
        sliding_window="every layer",
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        names=_GEMMA,
        options=_GEMMA_OPTIONS | {"attention_softcap": "attn_logit_softcapping"},
        norm="rms of 1 + w",
        qkv_bias="as the config says",
        o_bias="as the config says",
        sliding_window="layers of the config",
        scales_embedding=True,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        names=_GEMMA,
        options=_GEMMA_OPTIONS,
        norm="rms of 1 + w",
        qkv_bias="as the config says",
        o_bias="as the config says",
        has_qk_norm=True,
        sliding_window="layers of the config",
        scales_embedding=True,
    ),
    "GPTJForCausalLM": Family(
        model_type="gptj",
        names=TensorNames(
            embedding="transformer.wte",
            norm="transformer.ln_f",
            layer="transformer.h",
            q="attn.q_proj",
            k="attn.k_proj",
            v="attn.v_proj",
            o="attn.out_proj",
            up="mlp.fc_in",
            down="mlp.fc_out",
            input_norm="ln_1",
            ffn_norm="",
        ),
        options={
            "num_layers": "n_layer",
            "context": "n_positions",
            "num_kv_heads": "n_head",
            "intermediate_size": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
        },
        norm="layer",
        block="parallel",
        ffn="plain",
        rotary="pairs",
        is_partly_rotary=True,
        ffn_bias="always",
        head_bias="always",
    ),
    "FalconForCausalLM": Family(
        model_type="falcon",
        names=TensorNames(
            embedding="transformer.word_embeddings",
            norm="transformer.ln_f",
            layer="transformer.h",
            qkv="self_attention.query_key_value",
            o="self_attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        options={
            "intermediate_size": "ffn_hidden_size",
            "num_kv_heads": "num_kv_heads",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation",
            "bias": "bias",
            "ffn_bias": "bias",
        },
        norm="layer",
        ffn="plain",
        qkv_order="groups",
        qkv_bias="as the config says",
        o_bias="as the config says",
        ffn_bias="as the config says",
    ),
    "Qwen2ForCausalLM": Family(model_type="qwen2", qkv_bias="always", sliding_window="layers of the config"),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        names=TensorNames(
            router="mlp.gate",
            experts="mlp.experts",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
            shared_expert="mlp.shared_expert",
            shared_gate="mlp.shared_expert_gate",
        ),
        options={"intermediate_size": "moe_intermediate_size", "bias": "qkv_bias"},
        qkv_bias="as the config says",
        sliding_window="layers of the config",
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qkv_bias="as the config says",
        o_bias="as the config says",
        has_qk_norm=True,
        sliding_window="layers of the config",
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        names=TensorNames(
            router="mlp.gate", experts="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"
        ),
        options={"intermediate_size": "moe_intermediate_size"},
        qkv_bias="as the config says",
        o_bias="as the config says",
        has_qk_norm=True,
        sliding_window="every layer",
    ),
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the supported architecture that a config names; "": none. Raises ValueError with both lists."""
    named, model_type = config.get("architectures"), config.get("model_type")
    if not isinstance(named, list) or not named:
        named = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    for architecture in named:
        if architecture in FAMILIES:
            return str(architecture)
    shown = ", ".join(map(str, named)) or model_type
    if not shown:
        return ""
    needs = (
        "; it needs code of its own (auto_map), and code is never loaded" if config.get("auto_map") else ""
    )
    raise ValueError(f"architecture {shown} is not supported; these are: {', '.join(FAMILIES)}{needs}")


def option_of(config: Mapping[str, Any], name: str) -> Any:
    """Return an option of a config.json by our name for it; None if it is left out.

    Hugging Face renames some options of some families; their files have either name.
    """
    family = FAMILIES.get(architecture_of(config))
    for key in (family.option(name) if family else "", OPTIONS[name]):
        if key and config.get(key) is not None:
            return config[key]
    return None
