"""Optimisers: Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

import torch
from torch.optim import AdamW, Muon, Optimizer

from recipe.network import Llama

MUON_LR = 6e-3  # in AdamW's scale (match_rms_adamw)
ADAM_LR = 3e-3
WEIGHT_DECAY = 0.05


def make_optimizers(model: Llama) -> list[Optimizer]:
    """Every parameter is in exactly one of them; `initial_lr` of each group is its full rate."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    in_matrices = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in in_matrices]
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (g for o in optimizers for g in o.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


def step(model: Llama, optimizers: list[Optimizer], lr_factor: float) -> None:
    """Clip, apply the gradients at `lr_factor` of the full rates, clear them."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
