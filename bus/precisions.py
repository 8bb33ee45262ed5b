"""The precisions that a layer can be held in: the one table that every process reads.

Standard library only: kernels on a bare GPU machine import it. CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

# The only other list of the names: type checkers cannot read the table. tests/bus/test_precisions.py holds
# both equal.
QuantizedPrecision = Literal["int8", "int4", "int3"]
Precision = Literal["full", QuantizedPrecision]
# What a KV cache may be held in: the model's dtype, or codes of 8 bits (`kernels.kv_codes`).
KVPrecision = Literal["full", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionEntry:
    """One precision. Colours differ with every kind of colour blindness and stand 3:1 against the ground."""

    name: Precision
    label: str  # name shown to people
    bits: int  # bits of one code, 1 to 8; layout in memory: `kernels.packing`
    group: int  # inputs of an output that share a scale and a zero, where a set of weights does not say
    colour: str  # on a light ground
    dark_colour: str  # on a dark ground
    # Share of the perplexity that a whole model without a profile loses, by group-wise quantisation of its
    # weights alone. What papers measure lies around these: int8 is within noise, int4 loses some per cent.
    assumed_loss: float


# From the most bits to the fewest.
TABLE: Final = (
    PrecisionEntry(
        name="full",
        label="full",
        bits=0,
        group=0,
        colour="#2a6fb0",
        dark_colour="#4f97da",
        assumed_loss=0.0,
    ),
    PrecisionEntry(
        name="int8",
        label="int8",
        bits=8,
        group=64,
        colour="#149070",
        dark_colour="#33b592",
        assumed_loss=0.0005,
    ),
    PrecisionEntry(
        name="int4",
        label="int4",
        bits=4,
        group=64,
        colour="#c98500",
        dark_colour="#e6a62f",
        assumed_loss=0.03,
    ),
    PrecisionEntry(
        name="int3",
        label="int3",
        bits=3,
        group=64,
        colour="#c9471d",
        dark_colour="#f0703f",
        assumed_loss=0.15,
    ),
)

# What layers are swapped to where nothing else is asked for.
DEFAULT_SWAP: Final[QuantizedPrecision] = "int4"

KV_PRECISIONS: Final[tuple[KVPrecision, ...]] = ("full", "int8")
PRECISIONS: Final[tuple[Precision, ...]] = tuple(entry.name for entry in TABLE)
QUANTIZED: Final[tuple[Precision, ...]] = tuple(entry.name for entry in TABLE if entry.bits)
LOWEST: Final[Precision] = PRECISIONS[-1]
# Keys are plain strings, so that names out of files and arguments can be looked up.
ENTRIES: Final[dict[str, PrecisionEntry]] = {entry.name: entry for entry in TABLE}
BITS: Final[dict[str, int]] = {entry.name: entry.bits for entry in TABLE if entry.bits}
ASSUMED_LOSSES: Final[dict[str, float]] = {entry.name: entry.assumed_loss for entry in TABLE}

_RANKS: Final = {name: rank for rank, name in enumerate(PRECISIONS)}


def is_below(precision: Precision, other: Precision) -> bool:
    """Return True if `precision` has fewer bits than `other`."""
    return _RANKS[precision] > _RANKS[other]


def lowest(precisions: Iterable[Precision]) -> Precision:
    """Return the precision with the fewest bits; "full" if there are none."""
    return max(precisions, key=_RANKS.__getitem__, default="full")


def precision_of_bits(bits: int) -> Precision:
    """Return the precision whose codes have so many bits. Raises ValueError if there is none."""
    found = [entry.name for entry in TABLE if entry.bits == bits and bits]
    if not found:
        known = ", ".join(map(str, BITS.values()))
        raise ValueError(f"no precision has codes of {bits} bits; use one of {known}")
    return found[0]
