"""The parameters of a quantised weight, as the kernels read them."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

from typing import NamedTuple

from kernels.cpu.compiled import compiled
from kernels.cpu.simd import LANES
from kernels.packing import TILE
from kernels.quantized import GROUP_STEP, QuantizedWeight


class Weight(NamedTuple):
    """A quantised weight, with addresses and strides in bytes.

    Outputs are in out_units pieces of `rows` each, inputs in in_units pieces of `tiles` tiles each; one of
    the two is 1. `unit` counts pieces of either.
    """

    codes: int
    codes_unit: int
    codes_row: int
    scales: int
    scales_unit: int
    scales_row: int
    zeros: int
    zeros_unit: int
    zeros_row: int
    out_units: int
    in_units: int
    rows: int
    tiles: int
    groups: int  # groups of one row of one unit
    group_halves: int  # half tiles to a group
    bits: int
    is_halved: int  # groups may end inside a tile


WORDS = len(Weight._fields)


def words_of(weight: QuantizedWeight) -> Weight:
    found: Weight | None = weight.derived.get("cpu")
    if found is None:
        found = weight.derived["cpu"] = _words_of(weight)
    return found


def _words_of(weight: QuantizedWeight) -> Weight:
    codes, scales, zeros = weight.codes, weight.scales, weight.zeros
    units = weight.num_units
    return Weight(
        *(codes.data_ptr(), codes.stride(0), codes.stride(1)),
        *(scales.data_ptr(), scales.stride(0) * 2, scales.stride(1) * 2),
        *(zeros.data_ptr(), zeros.stride(0), zeros.stride(1)),
        *((units, 1) if weight.split == "outputs" else (1, units)),
        *(weight.unit_outputs, weight.unit_inputs // TILE, scales.shape[2]),
        *(weight.group // GROUP_STEP, weight.bits, int(weight.group % TILE != 0)),
    )


@compiled
def levels_row(w):
    """Return the bytes of the levels of one row of one unit: scales, then offsets, in whole vectors."""
    return 2 * ((w.groups + LANES - 1) // LANES * LANES * 4)
