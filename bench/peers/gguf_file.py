"""A model folder as a GGUF file, the format that llama.cpp reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

PAIRED: Final = "llama"  # the architecture whose rows of queries and keys are in pairs
GGUF: Final = "model.gguf"  # the file in a model's folder
EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write_gguf(
    folder: Path,
    kind: str = "F32",
    *,
    architecture: str = "",
    has_bos: bool = False,
    add_tokenizer: Callable[[Any], object] | None = None,
    add: Callable[[Any], object] = lambda _: None,
) -> Path:
    """Write the Llama, Qwen2 or Qwen3 of a Hugging Face folder to model.gguf in it, with its byte-level BPE.

    kind: the type of the matrices, as gguf names it; norms and biases are in float32. architecture:
    llama.cpp's name [the model type]. has_bos: texts begin with the beginning-of-text token. add_tokenizer:
    writes another than the folder's. add: called with the writer before it writes. Raises ValueError for a
    tensor that llama.cpp's model does not have.
    """
    path = folder / GGUF
    config = AutoConfig.from_pretrained(folder)
    architecture = architecture or config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _add_config(writer, config)
    if add_tokenizer:
        add_tokenizer(writer)
    else:
        _add_tokenizer(writer, gguf.TokenType, folder, has_bos)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in stacked(load_file(folder / "model.safetensors")).items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ValueError(f"{folder}: tensor {name} has no name in GGUF")
        values = arranged(name, tensor.float(), config).contiguous().numpy()
        stored = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        writer.add_tensor(theirs, gguf.quantize(values, stored), raw_dtype=stored)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of a layer's experts in one, as llama.cpp has them."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if of := EXPERT.fullmatch(name):
            experts.setdefault(f"{of[1]}.{of[3]}", {})[int(of[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([of[i] for i in sorted(of)]) for name, of in experts.items()}


def arranged(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a tensor as llama.cpp has it: the rows of a Llama's queries and keys in pairs.

    Hugging Face's rotation turns row i of a head with row i + half the head; llama.cpp's turns row 2i with
    row 2i + 1.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num in heads.items():
        if config.model_type == PAIRED and f".{part}." in name:
            return tensor.unflatten(0, (num, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _add_config(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: Any, types: Any, folder: Path, has_bos: bool) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in found["added_tokens"]}
    ids = found["model"]["vocab"] | {token["content"]: token["id"] for token in found["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([types.CONTROL if token in special else types.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in found["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(has_bos)
    template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    if template:
        writer.add_chat_template(template)
