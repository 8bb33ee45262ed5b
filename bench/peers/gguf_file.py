"""A model in float32 as a GGUF file, the format that llama.cpp reads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

ARCHITECTURE: Final = "llama"
GGUF: Final = "model.gguf"  # the file in a model's folder


def missing_package() -> str:
    """Return what to do if the package that writes GGUF files is not installed, "" if it is."""
    if importlib.util.find_spec("gguf") is not None:
        return ""
    return (
        "llama-server reads GGUF files, and the package gguf, which writes them, is not installed: "
        "`pip install gguf`, or leave out --llama-server"
    )


def write_gguf(folder: Path) -> Path:
    """Write the Llama of a Hugging Face folder to model.gguf in it, with a byte-level BPE tokenizer.

    Raises ValueError for a tensor that llama.cpp's Llama does not have.
    """
    import gguf

    path = folder / GGUF
    config = LlamaConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_config(writer, config)
    _add_tokenizer(writer, gguf.TokenType, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"{folder}: tensor {name} has no name in GGUF")
        writer.add_tensor(theirs, arranged(name, tensor.float(), config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def arranged(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Return a tensor as llama.cpp has it: the rows of queries and keys in pairs.

    Hugging Face's rotation turns row i of a head with row i + half the head; llama.cpp's turns row 2i with
    row 2i + 1.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num in heads.items():
        if f".{part}." in name:
            return tensor.unflatten(0, (num, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _add_config(writer: Any, config: LlamaConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(0)  # all float32


def _add_tokenizer(writer: Any, types: Any, folder: Path) -> None:
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
    writer.add_add_bos_token(False)
