"""GPT-OSS as it is released: the experts in MXFP4, beside a transformers model of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import dequantize_convertops

from bench.common.oracles import make_oracle

# As the config.json of GPT-OSS 20B has it.
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_mxfp4(folder: Path, **changes: Any) -> Any:
    """Write a tiny checkpoint; return transformers' model, whose experts transformers dequantised."""
    oracle = make_oracle("gpt-oss", intermediate_size=96, **changes)
    random = torch.Generator().manual_seed(5)
    packed: dict[str, torch.Tensor] = {}
    for name, parameter in oracle.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random).to(torch.uint8)
        scales = torch.randint(119, 124, blocks.shape[:3], generator=random).to(torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data = dequantize_convertops(blocks, scales, torch.float32).contiguous()
        assert parameter.shape == (experts, inputs, outputs)
    oracle.save_pretrained(folder)
    dense = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in dense.items() if f"{name}_blocks" not in packed}
    assert len(dense) - len(kept) == len(packed) // 2
    save_file(kept | packed, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=QUANTIZATION)
    return oracle


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
