"""A prompt whose next token is known before the shape changes: the new one must say the same of it.

It runs in a step like a request of the leader, through every rank and layer, and is nobody's answer. Whatever
precision the layers have, the two shapes have the same.
"""

from __future__ import annotations

import numpy as np
import torch

from worker.engine.input_batch import ModelInput
from worker.parallel.place import Place

TOKENS = 12
# Largest difference of a log-probability between two orders of summing, far below what a wrong layer makes:
# one whose heads or rows belong to another rank is off by whole units.
LIMITS = {torch.float32: 0.02, torch.float16: 0.3, torch.bfloat16: 0.6}


class Canary:
    """Holds blocks from the start on; `close` gives them back."""

    def __init__(self, place: Place) -> None:
        """Raises OutOfBlocks where none are free."""
        instance = place.instance
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
        self._scheduler.blocks.free(self._blocks)
        self._scheduler.num_blocks_aside -= len(self._blocks)


def what_is_wrong(heard: torch.Tensor, known: torch.Tensor | None, dtype: torch.dtype) -> str:
    """Empty where the two say the same. heard, known: log-probabilities [vocab]; None: there was no block for
    it."""
    if not bool(torch.isfinite(heard).all()):
        return "the new shape's numbers are not numbers"
    if known is None:
        return ""
    likely = known > known.max() - 10  # of what hardly ever comes the logarithm tells nothing
    off = float((heard - known)[likely].abs().max())
    if off > LIMITS[dtype]:
        return f"the new shape is off by {off:.2g} in a log-probability (rounding makes {LIMITS[dtype]:g})"
    return ""
