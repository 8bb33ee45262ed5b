"""Masks of the tokens that grammars allow next, as bits that the library writes on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor

from worker.grammars.matcher import GuidanceMatcher


class GuidanceMasks:
    """`TokenMasks` of one model. Only the engine's thread calls them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._executor: LLExecutor | None = None  # has threads, so it is made when it is needed
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def forbidden(self, matchers: Sequence[GuidanceMatcher]) -> torch.Tensor:
        """Return bool [N, V] for N matchers: True for a token that cannot come next."""
        num_words = -(-matchers[0].num_tokens // 32)
        bits = np.zeros((len(matchers), num_words), np.int32)
        self._fill(matchers, bits)
        if self._device.type == "cpu":
            allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
            return torch.from_numpy(allowed == 0)
        packed = torch.from_numpy(bits.view(np.uint8)).to(self._device)  # [N, 4 * words]
        allowed = (packed.unsqueeze(2) >> self._shifts) & 1  # [N, 4 * words, 8], the lowest bit first
        return allowed.view(len(matchers), -1)[:, : self._vocab_size] == 0

    def _fill(self, matchers: Sequence[GuidanceMatcher], bits: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that each matcher allows; side by side, without the GIL."""
        if self._executor is None:
            self._executor = LLExecutor(torch.get_num_threads())
        row_bytes = bits.shape[1] * bits.itemsize
        pairs = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, row_bytes, len(matchers))
