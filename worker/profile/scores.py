"""How near two hidden states or outputs are: the measures behind a layer's importance.

MorphServe, section 4.2, equations 2-5. All are similarities: the nearer to 1 (cosine) or 0 (L2, negative),
the less a swap of the layer should harm.

====  ==============================================================  =============================
name  compares                                                        when
====  ==============================================================  =============================
LTS   a layer's input and its output                                  once, nothing swapped
LRS   a layer's output and that of its quantised weights              once, nothing swapped
MDS   the model's output with Q swapped and with Q and the layer      for every Q of the sequence
====  ==============================================================  =============================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Metric = Literal["cosine", "l2"]


@dataclass(frozen=True, slots=True)
class Weights:
    """LIS = lts * LTS + lrs * LRS + mds * MDS (equation 5; the paper's defaults)."""

    lts: float = 0.25
    lrs: float = 0.25
    mds: float = 0.5

    def score(self, lts: float, lrs: float, mds: float) -> float:
        return self.lts * lts + self.lrs * lrs + self.mds * mds


def similarity(reference: torch.Tensor, other: torch.Tensor, metric: Metric) -> float:
    """Mean over the rows of [..., n]: the cosine of the angle, or minus the distance relative to the
    reference's length (relative, so that hidden states and logits can be weighed against each other)."""
    a, b = reference.flatten(0, -2).float(), other.flatten(0, -2).float()
    if metric == "cosine":
        return float(F.cosine_similarity(a, b, dim=-1).double().mean())
    distances = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-12)
    return float(-distances.double().mean())
