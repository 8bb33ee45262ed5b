"""The table of precisions: complete, in order, and equal to what type checkers see."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from bus.precisions import (
    BITS,
    DEFAULT_SWAP,
    LOWEST,
    PRECISIONS,
    QUANTIZED,
    TABLE,
    Precision,
    PrecisionEntry,
    QuantizedPrecision,
    is_below,
    lowest,
    precision_of_bits,
)
from bus.settings import Settings


def test_the_types_name_what_the_table_has_in_its_order() -> None:
    assert get_args(Precision) == PRECISIONS
    assert get_args(QuantizedPrecision) == QUANTIZED


def test_full_precision_comes_first_and_bits_fall() -> None:
    assert PRECISIONS[0] == "full" and PRECISIONS[-1] == LOWEST
    bits = [BITS[name] for name in QUANTIZED]
    assert bits == sorted(set(bits), reverse=True)


def test_fewer_bits_are_assumed_to_lose_more() -> None:
    losses = [entry.assumed_loss for entry in TABLE]
    assert losses[0] == 0 and losses == sorted(set(losses))


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_an_entry_is_whole(entry: PrecisionEntry) -> None:
    assert entry.label
    assert re.fullmatch(r"#[0-9a-f]{6}", entry.colour) and re.fullmatch(r"#[0-9a-f]{6}", entry.dark_colour)
    assert 0 <= entry.bits <= 8
    assert entry.group % 32 == 0 and bool(entry.group) == bool(entry.bits) == (entry.name != "full")


def test_precisions_compare_by_their_bits() -> None:
    assert is_below("int4", "int8") and is_below("int8", "full")
    assert not is_below("int8", "int8") and not is_below("full", "int3")
    assert lowest(["int8", "full", "int3", "int4"]) == "int3" and lowest([]) == "full"


def test_a_precision_is_found_by_its_bits() -> None:
    assert [precision_of_bits(bits) for bits in BITS.values()] == list(QUANTIZED)
    with pytest.raises(ValueError, match=r"no precision has codes of 99 bits; use one of 8, "):
        precision_of_bits(99)


def test_settings_and_defaults_come_from_the_table() -> None:
    assert DEFAULT_SWAP in QUANTIZED
    assert Settings().worker.variants == list(QUANTIZED)
