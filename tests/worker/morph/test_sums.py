"""Sums that tell whether bytes are the ones that were made."""

from __future__ import annotations

import pytest
import torch

from worker.shape.checks import ROW_BYTES, RowSums, num_rows, row_sums


def naive(data: torch.Tensor) -> list[int]:
    raw = bytes(data.tolist()) + bytes(-len(data) % ROW_BYTES)
    rows = [raw[at : at + ROW_BYTES] for at in range(0, len(raw), ROW_BYTES)]
    words = [[int.from_bytes(row[i : i + 8], "little") for i in range(0, ROW_BYTES, 8)] for row in rows]
    return [(sum(row) + 2**63) % 2**64 - 2**63 for row in words]


@pytest.mark.parametrize("nbytes", [1, 4095, ROW_BYTES, 3 * ROW_BYTES, 3 * ROW_BYTES + 13])
def test_each_row_is_the_sum_of_its_words(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert row_sums(data).tolist() == naive(data)
    assert len(row_sums(data)) == num_rows(nbytes)


def test_what_is_taken_in_pieces_is_what_is_taken_at_once() -> None:
    data = torch.randint(0, 256, (9 * ROW_BYTES + 77,), dtype=torch.uint8)
    sums = RowSums(data)
    for first, end in ((4, 7), (0, 4), (7, 8)):
        sums.take(first * ROW_BYTES, end * ROW_BYTES)
    sums.take(8 * ROW_BYTES, len(data))
    assert sums.found.equal(row_sums(data))


def test_a_bit_changes_its_row_alone_and_rows_that_changed_places_show() -> None:
    data = torch.randint(0, 256, (4 * ROW_BYTES,), dtype=torch.uint8)
    before = row_sums(data)
    data[2 * ROW_BYTES + 1234] ^= 1
    assert (row_sums(data) != before).tolist() == [False, False, True, False]
    swapped = data.view(4, -1)[[1, 0, 2, 3]].flatten()
    assert (row_sums(swapped) != before).tolist() == [True, True, True, False]
