"""Sums by which bytes in a device's pages are known to be those of the host's image.

A product of a known input is a sum of thousands of weights: it hides a lost bit of one of them. These do not.
"""

from __future__ import annotations

import numpy as np
import torch

ROW_BYTES = 4096


def num_rows(nbytes: int) -> int:
    return -(-nbytes // ROW_BYTES)


def row_sums(data: torch.Tensor) -> torch.Tensor:
    """int64 [rows] on the host, of uint8 [n] anywhere: each row of 4096 bytes as words of eight, added modulo
    2^64; the last row is filled up with zeros. A changed bit changes a sum, and rows in other places show."""
    sums = RowSums(data)
    sums.take(0, len(data))
    return sums.found


class RowSums:
    """The sums of uint8 [n] anywhere, taken bit by bit: on the CPU by the calling thread, with no lock of the
    interpreter's, and quicker (27 GB/s) while the bytes are in its caches."""

    def __init__(self, data: torch.Tensor) -> None:
        self.found = torch.zeros(num_rows(len(data)), dtype=torch.int64)  # row_sums, as far as taken
        self._data = data
        whole = data[: len(data) // ROW_BYTES * ROW_BYTES].view(torch.int64).view(-1, ROW_BYTES // 8)
        self._whole = whole.numpy() if data.device.type == "cpu" else whole
        self._rows = self.found.numpy()

    def take(self, first: int, end: int) -> None:
        """Of bytes first <= i < end; first begins a row, end ends one or all."""
        rows = slice(first // ROW_BYTES, end // ROW_BYTES)
        if isinstance(self._whole, np.ndarray):
            np.sum(self._whole[rows], axis=1, out=self._rows[rows])
        else:
            self.found[rows] = self._whole[rows].sum(1).cpu()
        if end % ROW_BYTES:
            rest = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=self._data.device)
            rest[: end % ROW_BYTES] = self._data[rows.stop * ROW_BYTES : end]
            self.found[rows.stop] = rest.view(torch.int64).sum().cpu()
