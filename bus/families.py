"""The differences between model families, as data. One transformer serves them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

BiasRule = Literal["never", "always", "as the config says"]
WindowRule = Literal["never", "every layer", "layers of the config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`model_type` is Hugging Face's name of the family; biases and windows say where they may occur."""

    model_type: str
    qkv_bias: BiasRule = "never"
    o_bias: BiasRule = "never"
    has_qk_norm: bool = False
    sliding_window: WindowRule = "never"


# To add a family whose layers are made of these parts, add its entry, under the name that its config.json has
# in `architectures`, and its options to FAMILIES in bench/common/oracles.py.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama", qkv_bias="as the config says", o_bias="as the config says"
    ),
    "MistralForCausalLM": Family(model_type="mistral", sliding_window="every layer"),
    "Qwen2ForCausalLM": Family(model_type="qwen2", qkv_bias="always", sliding_window="layers of the config"),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qkv_bias="as the config says",
        o_bias="as the config says",
        has_qk_norm=True,
        sliding_window="layers of the config",
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
    raise ValueError(f"architecture {shown} is not supported; these are: {', '.join(FAMILIES)}")
