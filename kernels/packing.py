"""The layout of codes of few bits in memory.

Codes are packed in tiles of 64 consecutive inputs of one output. A tile has one plane for each binary digit
of the number of bits, the widest plane first: codes of 8 bits have one plane of 8, codes of 3 bits a plane of
2 and one of 1. The first plane has the lowest bits of all codes, the next plane the bits above them. A plane
of w bits has 8 w bytes:

====  ======================================================================================
w     the pieces q[0..63] of a tile's codes in the plane
====  ======================================================================================
8     byte j is q[j]
4     byte j is q[j] in its lower half, q[j + 32] in its upper half
2     byte j is q[j], q[j + 16], q[j + 32], q[j + 48], lowest bits first
1     bit i of byte j is q[8 j + i]
====  ======================================================================================

So a vector of sixteen lanes loads whole bytes and shifts, with no lane crossing another, or loads a mask of
sixteen bits. Half a tile, 32 inputs, is the finest piece that may have a scale of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bus.precisions import BITS

TILE = 64  # inputs packed together
CODE_BITS = tuple(BITS.values())


def planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (width, lowest bit) of each plane of a tile; the plane begins at byte 8 * lowest bit."""
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, bits & ~(2 * width - 1)


def check_bits(bits: int) -> None:
    """Raise ValueError unless codes of this many bits can be packed."""
    if bits not in CODE_BITS:
        raise ValueError(
            f"codes of {bits} bits cannot be packed; use one of {', '.join(map(str, CODE_BITS))}"
        )


def packed_size(inputs: int, bits: int) -> int:
    """Return the number of bytes of `inputs` packed codes. Raises ValueError as `pack` does."""
    check_bits(bits)
    if inputs % TILE:
        raise ValueError(f"{inputs} codes do not fill tiles of {TILE}; pad them to a multiple of {TILE}")
    return inputs * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes uint8 [..., K], each below 2^bits, into uint8 [..., K * bits / 8].

    Raises ValueError for bits that no precision has, for K no multiple of 64 and for a code too large.
    """
    size = packed_size(codes.shape[-1], bits)
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bits; the largest is {2**bits - 1}")
    if bits == 8:
        return codes.contiguous()
    packed = []
    for width, lowest in planes(bits):
        pieces = codes >> lowest & 2**width - 1
        if width == 1:
            in_bytes = pieces.unflatten(-1, (-1, 8, 8)).unbind(-1)
        else:
            in_bytes = pieces.unflatten(-1, (-1, 8 // width, 8 * width)).unbind(-2)
        plane = torch.zeros_like(in_bytes[0])  # [..., tiles, bytes of the plane]
        for place, piece in enumerate(in_bytes):
            plane |= piece << place * width
        packed.append(plane)
    return torch.cat(packed, -1).reshape(*codes.shape[:-1], size)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack uint8 [..., K * bits / 8] of any strides into codes uint8 [..., K]: the inverse of `pack`.

    Raises ValueError for bits that no precision has and for bytes that are no whole tiles.
    """
    check_bits(bits)
    tile_bytes = TILE * bits // 8
    if packed.shape[-1] % tile_bytes:
        raise ValueError(
            f"{packed.shape[-1]} bytes are no whole tiles of {bits}-bit codes, which have {tile_bytes} bytes"
        )
    if bits == 8:
        return packed
    tiles = packed.unflatten(-1, (-1, tile_bytes))
    codes = torch.zeros(*tiles.shape[:-1], TILE, dtype=torch.uint8, device=packed.device)
    for width, lowest in planes(bits):
        plane = tiles[..., 8 * lowest : 8 * (lowest + width)]
        pieces = [plane >> place * width & 2**width - 1 for place in range(8 // width)]
        codes |= torch.stack(pieces, -1 if width == 1 else -2).flatten(-2) << lowest
    return codes.flatten(-2)
