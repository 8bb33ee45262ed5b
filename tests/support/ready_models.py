"""Checkpoints that are quantised themselves, written as AutoAWQ and AutoGPTQ do, each with a dense twin.

The twin is made from codes, scales and zeros before they are packed, input by input, and shares no code with
what reads them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kernels import quantize_rtn

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PRODUCT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
Named = dict[str, torch.Tensor]


def words(codes: torch.Tensor, dim: int, order: tuple[int, ...], bits: int = 4) -> torch.Tensor:
    """Pack codes along `dim` to int32; piece i of a word is the code order[i]."""
    groups = codes.long().unflatten(dim, (-1, 32 // bits))
    word = sum(groups.select(dim + 1, order[i]) << bits * i for i in range(32 // bits))
    assert isinstance(word, torch.Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


@dataclass
class Ready:
    """A quantised checkpoint as it is built from a full one: its tensors and config, and the twin's."""

    full: Path
    method: str = "gptq"
    bits: int = 4
    group: int = 32
    is_ordered: bool = False
    v2: bool = False
    tensors: Named = field(default_factory=dict)
    twin: Named = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # of quantization_config

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        orders: dict[str, torch.Tensor] = {}
        for name, tensor in sorted(load_file(self.full / "model.safetensors").items()):
            if not name.endswith("_proj.weight"):
                self.tensors[name] = self.twin[name] = tensor
                continue
            *_, layer, _, matrix, _ = name.split(".")
            product = f"{layer} {PRODUCT.get(matrix, matrix)}"  # one order for what reads one input
            if product not in orders:
                orders[product] = torch.randperm(tensor.shape[1], generator=random)
            order = orders[product] if self.is_ordered else torch.arange(tensor.shape[1])
            self.add(name.removesuffix(".weight"), tensor, order)

    def add(self, name: str, weight: torch.Tensor, order: torch.Tensor) -> None:
        """Quantise a weight whose inputs, in this order, form the groups."""
        inputs = weight.shape[1]
        group = self.group if self.group > 0 else inputs
        in_order, scales, zeros = quantize_rtn(weight[:, order], self.bits, group)
        offset = 1 if self.method == "gptq" and not self.v2 else 0
        zeros = zeros.clamp(min=offset)
        codes = torch.empty_like(in_order)
        codes[:, order] = in_order
        groups = torch.empty(inputs, dtype=torch.int32)
        groups[order] = torch.arange(inputs, dtype=torch.int32) // group
        dense = torch.empty(weight.shape)
        for k in range(inputs):
            g = int(groups[k])
            dense[:, k] = (codes[:, k].float() - zeros[:, g].float()) * scales[:, g].float()
        self.twin[f"{name}.weight"] = dense
        in_words = AWQ_ORDER if self.method == "awq" else tuple(range(32 // self.bits))
        self.tensors[f"{name}.qweight"] = words(
            codes.T, 1 if self.method == "awq" else 0, in_words, self.bits
        )
        self.tensors[f"{name}.qzeros"] = words(zeros.T.int() - offset, 1, in_words, self.bits)
        self.tensors[f"{name}.scales"] = scales.T
        if self.method == "gptq":
            self.tensors[f"{name}.g_idx"] = groups

    @property
    def said(self) -> dict[str, Any]:
        """The `quantization_config`."""
        found: dict[str, Any] = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            found |= {"version": "gemm", "zero_point": True}
        else:
            found |= {"desc_act": self.is_ordered, "sym": False}
            found |= {"checkpoint_format": "gptq_v2"} if self.v2 else {}
        return found | self.changes

    def write(self, folder: Path) -> Path:
        """Write the quantised checkpoint beside copies of the full one's other files."""
        return self._write(folder, self.tensors, {"quantization_config": self.said})

    def write_twin(self, folder: Path) -> Path:
        """Write the dense twin."""
        return self._write(folder, self.twin, {})

    def _write(self, folder: Path, tensors: Named, more: dict[str, Any]) -> Path:
        shutil.copytree(self.full, folder, ignore=shutil.ignore_patterns("*.safetensors", "instar"))
        config = json.loads((self.full / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        return folder
