"""A prompt whose next token is known before the shape changes, to compare with the new shape's.

It runs in a step like a request of the leader, through every rank and layer, and is published nowhere.
Whatever precision the layers have, the two shapes have the same.
"""

from __future__ import annotations

import numpy as np
import torch

from worker.engine.input_batch import ModelInput
from worker.parallel.local_instance import LocalInstance

TOKENS = 12
# Largest difference of a log-probability between two orders of summing, far below what a wrong layer makes:
# one whose heads or rows belong to another rank is off by whole units.
LIMITS = {torch.float32: 0.02, torch.float16: 0.3, torch.bfloat16: 0.6}


class Canary:
    """The input of a canary, and the blocks it holds until `close`."""

    def __init__(self, local: LocalInstance) -> None:
        """Take blocks. Raises OutOfBlocks where none are free."""
        instance = local.instance
        self._scheduler, block_tokens = instance.scheduler, instance.limits.block_tokens
        self._blocks = self._scheduler.blocks.allocate(-(-TOKENS // block_tokens))
        self._scheduler.num_blocks_aside += len(self._blocks)
        self.input = ModelInput(
            token_ids=(np.arange(TOKENS) * 7 + 3) % instance.vocab_size,
            q_lens=np.array([TOKENS]),
            context_lens=np.array([TOKENS]),
            blocks=np.array([self._blocks], np.int32),
            logit_rows=np.array([TOKENS - 1]),
        )

    def close(self) -> None:
        """Give the blocks back."""
        self._scheduler.blocks.free(self._blocks)
        self._scheduler.num_blocks_aside -= len(self._blocks)


def compare_canaries(heard: torch.Tensor, known: torch.Tensor | None, dtype: torch.dtype) -> str:
    """Return what is wrong with the new shape, or an empty string.

    heard, known: log-probabilities [vocab] of the new and the old shape; known is None if there was no
    block for the canary.
    """
    if not bool(torch.isfinite(heard).all()):
        return "the new shape's numbers are not numbers"
    if known is None:
        return ""
    likely = known > known.max() - 10  # of what hardly ever comes the logarithm tells nothing
    off = float((heard - known)[likely].abs().max())
    if off > LIMITS[dtype]:
        return f"the new shape is off by {off:.2g} in a log-probability (rounding makes {LIMITS[dtype]:g})"
    return ""
