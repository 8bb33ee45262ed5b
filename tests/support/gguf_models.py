"""Tiny models as GGUF files, and as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.common.oracles import make_oracle
from tests.support.tiny_model import byte_level

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def make_folder(folder: Path, family: str = "llama", **options: Any) -> Any:
    """Write a model folder whose matrices have whole blocks of every type. Returns its model."""
    oracle = make_oracle(family, **(SIZES | options))
    oracle.save_pretrained(folder)
    byte_level(folder)
    return oracle


def transformers_reading(path: Path, *, is_quantised: bool) -> Any:
    """The model that transformers' own reader makes of a file, in float32.

    is_quantised: its matrices are rounded to float16, as the converter stores what it dequantises.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    if is_quantised:
        read = {name: tensor.half().float() if tensor.dim() > 1 else tensor for name, tensor in read.items()}
    found = model.load_state_dict(read, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
