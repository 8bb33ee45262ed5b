"""Checkpoints made smaller or sparse out of a full one: FFN rows removed, or two of four weights.

Sparse matrices are packed by numpy, with no code of what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Named = dict[str, torch.Tensor]
SPARSITY = {"sparsity_structure": "2:4", "global_sparsity": 0.5, "targets": ["Linear"], "ignore": ["lm_head"]}


def without_ffn_rows(source: Path, target: Path, rows: int) -> Path:
    """Write the model with the `rows` of each layer's FFN whose weights are largest."""

    def pruned(tensors: Named) -> Named:
        for name in [name for name in tensors if name.endswith("gate_proj.weight")]:
            up, down = (name.replace("gate_proj", other) for other in ("up_proj", "down_proj"))
            sizes = tensors[name].float().norm(dim=1) * tensors[up].float().norm(dim=1)
            kept = (sizes * tensors[down].float().norm(dim=0)).topk(rows).indices.sort().values
            for rows_of in (name, up):
                tensors[rows_of] = tensors[rows_of][kept].contiguous()
            tensors[down] = tensors[down][:, kept].contiguous()
        return tensors

    return changed(source, target, pruned, intermediate_size=rows)


def two_of_four(source: Path, target: Path, *, is_packed: bool = False, **config: Any) -> Path:
    """Write the model with the two largest of each four weights in a row; `is_packed`: without the others."""

    def sparse(tensors: Named) -> Named:
        found: Named = {}
        for name, tensor in tensors.items():
            if not name.endswith("_proj.weight"):
                found[name] = tensor
                continue
            fours = tensor.unflatten(1, (-1, 4))
            kept = torch.zeros_like(fours, dtype=torch.bool)
            kept.scatter_(-1, fours.abs().topk(2, dim=-1).indices, True)
            zeroed = torch.where(kept, fours, 0).flatten(1)
            found |= packed(name, zeroed, kept.flatten(1)) if is_packed else {name: zeroed}
        return found

    form = "sparse-24-bitmask" if is_packed else "dense"
    said = {"quant_method": "compressed-tensors", "sparsity_config": SPARSITY | {"format": form}}
    return changed(source, target, sparse, **{"quantization_config": said} | config)


def packed(name: str, weight: torch.Tensor, kept: torch.Tensor) -> Named:
    """Return a matrix as compressed-tensors writes it; `kept` marks two of each four weights."""
    outputs, inputs = weight.shape
    mask = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
    values = weight[kept].view(outputs, inputs // 2)
    module = name.removesuffix(".weight")
    shape = torch.tensor([[outputs], [inputs]])
    return {f"{module}.compressed": values, f"{module}.bitmask": mask, f"{module}.shape": shape}


def changed(source: Path, target: Path, change: Callable[[Named], Named], **config: Any) -> Path:
    """Write the model in a folder of its own with other tensors and options; no quantised sets come along."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("instar"))
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    weights = target / "model.safetensors"
    tensors = change(load_file(weights))
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    return target
