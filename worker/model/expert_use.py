"""The use of each layer's experts, measured by their routers.

The kernel of a router adds the pairs of each expert to a counter on the device (`kernels.route`). No step
waits for that: `ExpertUse.look`, called now and then between steps, brings what was counted into numbers on
the host, in which older use counts less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.model.config import Mixture

HALF_TOKENS: Final = 20_000  # use counts half after so many tokens: some hundred requests
SHARES: Final = (0.25, 0.5, 0.75)

Use = npt.NDArray[np.float64]  # [layers, experts]


class ExpertUse:
    """The pairs of a token and an expert in each layer, in one thread.

    The slices of a shared expert count as experts. On a GPU the rows that fill a recorded step are counted,
    too, and a look sees the counts of the one before.
    """

    def __init__(self, mixture: Mixture, num_layers: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_layers, mixture.num_units, dtype=torch.int64, device=device)
        self._pairs = mixture.top_k + mixture.num_shared  # of a token
        self.recent: Use = np.zeros(self.counts.shape)
        self._seen = np.zeros(self.counts.shape, dtype=np.int64)
        self._shares: list[list[float]] = []
        self._copied: torch.Tensor | None = None  # of a GPU: in pinned memory, when `_copy` has ended
        self._copy: torch.cuda.Event | None = None

    def look(self) -> list[list[float]]:
        """Take in what was counted. Return `shares_of` of it; empty until every layer has run.

        It waits for nothing: on a GPU counts are copied beside what is launched.
        """
        counted = self._counted()
        if counted is not None and np.any(counted != self._seen):
            self.recent = decayed(self.recent, counted - self._seen, self._pairs)
            self._seen = counted
            self._shares = shares_of(self.recent)
        return self._shares

    def least_used(self, layer: int, count: int) -> list[int]:
        """Return so many experts of a layer, those with the least use; of equals the first."""
        return least_used(self.recent[layer].tolist(), count)

    def _counted(self) -> npt.NDArray[np.int64] | None:
        """Return the counts now, or as they were at the last look; None: not known yet."""
        found: npt.NDArray[np.int64] | None
        if self.counts.device.type == "cpu":
            found = self.counts.numpy().copy()
            return found
        if self._copy is not None and not self._copy.query():
            return None
        found = None if self._copied is None else self._copied.numpy().copy()
        if self._copied is None:
            self._copied = torch.empty(self.counts.shape, dtype=torch.int64, pin_memory=True)
        self._copied.copy_(self.counts, non_blocking=True)
        self._copy = torch.cuda.Event()
        self._copy.record()
        return found


def decayed(recent: Use, new: npt.NDArray[np.int64], pairs: int) -> Use:
    """Return the use with `new` pairs, int64 [layers, experts], added; HALF_TOKENS of a layer halve the rest.

    pairs: of a token.
    """
    tokens = new.sum(axis=1, keepdims=True) / pairs
    return np.asarray(recent * np.exp2(-tokens / HALF_TOKENS) + new)


def shares_of(recent: Use) -> list[list[float]]:
    """Return, for each layer, the shares of its use that the less used SHARES of its experts have.

    Empty if a layer has not been used.
    """
    so_far = np.sort(recent, axis=1).cumsum(axis=1)
    if not np.all(so_far[:, -1] > 0):
        return []
    behind = [round(share * recent.shape[1]) for share in SHARES]
    parts = np.concatenate([np.zeros((len(so_far), 1)), so_far], axis=1)[:, behind] / so_far[:, -1:]
    return [[round(float(share), 4) for share in layer] for layer in parts]


def least_used(use: Sequence[float], count: int) -> list[int]:
    """Return the numbers of `count` experts, those with the least use first; of equals the first. Pure."""
    return sorted(range(len(use)), key=lambda expert: (use[expert], expert))[:count]
