"""How codes of 8, 4 and 3 bits lie in memory.

Codes are packed in tiles of 64 consecutive inputs of one output. The order inside a tile lets a vector of
sixteen lanes load whole bytes and shift, with no lane crossing another:

====  =====  ===================================================================================
bits  bytes  a tile's codes c[0..63]
====  =====  ===================================================================================
8     64     byte j is c[j]
4     32     byte j is c[j] in its lower half, c[j + 32] in its upper half
3     24     byte j < 16 has the lower two bits of c[j], c[j + 16], c[j + 32], c[j + 48], lowest bits
             first; bit i of byte 16 + j is the upper bit of c[8 j + i]
====  =====  ===================================================================================

So half a tile, 32 inputs, is the finest piece that may have a scale of its own.
"""

from __future__ import annotations

import torch

from bus.precisions import BITS

TILE = 64  # inputs packed together
CODE_BITS = tuple(BITS.values())


def check_bits(bits: int) -> None:
    """Raises ValueError unless codes of this many bits can be packed."""
    if bits not in CODE_BITS:
        raise ValueError(
            f"codes of {bits} bits cannot be packed; use one of {', '.join(map(str, CODE_BITS))}"
        )


def packed_size(inputs: int, bits: int) -> int:
    """Bytes of `inputs` packed codes. Raises ValueError as `pack` does."""
    check_bits(bits)
    if inputs % TILE:
        raise ValueError(f"{inputs} codes do not fill tiles of {TILE}; pad them to a multiple of {TILE}")
    return inputs * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes uint8 [..., K], each below 2^bits, to uint8 [..., K * bits / 8].

    Raises ValueError for other bits than 8, 4 and 3, for K no multiple of 64 and for a code too large.
    """
    size = packed_size(codes.shape[-1], bits)
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bits; the largest is {2**bits - 1}")
    shape = (*codes.shape[:-1], size)
    if bits == 8:
        return codes.contiguous()
    if bits == 4:
        low, high = codes.unflatten(-1, (-1, 2, 32)).unbind(-2)
        return (low | high << 4).reshape(shape)
    lower = sum(part << 2 * i for i, part in enumerate((codes & 3).unflatten(-1, (-1, 4, 16)).unbind(-2)))
    upper = sum(part << i for i, part in enumerate((codes >> 2).unflatten(-1, (-1, 8, 8)).unbind(-1)))
    return torch.cat([torch.as_tensor(lower), torch.as_tensor(upper)], -1).reshape(shape)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 [..., K * bits / 8] to codes uint8 [..., K], any strides.

    Raises ValueError for other bits than 8, 4 and 3 and for bytes that are no whole tiles.
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
    if bits == 4:
        return torch.stack([tiles & 15, tiles >> 4], -2).flatten(-3)
    lower = torch.stack([tiles[..., :16] >> 2 * i & 3 for i in range(4)], -2).flatten(-2)
    upper = torch.stack([tiles[..., 16:] >> i & 1 for i in range(8)], -1).flatten(-2)
    return (lower | upper << 2).flatten(-2)
