"""The Hugging Face folder: configuration and weights, and reading them back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from recipe.network import Llama, Shape
from recipe.tokenizer import BOS, END, EOS, SPECIAL_TOKENS

WEIGHTS = "model.safetensors"


def export_model(model: Llama, folder: Path) -> None:
    """Write configuration and bfloat16 weights; the weights appear whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", hf_config(model.shape))
    _write_json(folder / "generation_config.json", _generation_config())
    weights = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    partial = folder / (WEIGHTS + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for its owner alone
    partial.replace(folder / WEIGHTS)


def load_model(folder: Path) -> Llama:
    """Load the saved bfloat16 checkpoint to compute in float32."""
    model = Llama(shape_of(json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / WEIGHTS)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    model.eval()
    return model


def hf_config(shape: Shape) -> dict[str, object]:
    """config.json's content; the rotary base stands in both places where versions of transformers look."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": shape.init_std,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pretraining_tp": 1,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(EOS),
        "dtype": "bfloat16",
    }


def shape_of(config: dict[str, object]) -> Shape:
    """Invert `hf_config`."""
    values = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_size": config["intermediate_size"],
        "context_len": config["max_position_embeddings"],
        "rope_theta": config["rope_theta"],
        "norm_eps": config["rms_norm_eps"],
        "init_std": config["initializer_range"],
    }
    return Shape(**values)  # type: ignore[arg-type]  # JSON values; Hugging Face's field types are these


def _generation_config() -> dict[str, object]:
    """Return the generation config: a reply ends at <|end|>, a file at <|eos|>."""
    stops = [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(END)]
    return {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": stops,
        "pad_token_id": SPECIAL_TOKENS.index(EOS),
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
