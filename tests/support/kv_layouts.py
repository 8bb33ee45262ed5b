"""The orders in which a KV cache is stored; kernels see every order the same (Gyges §4.1, Table 2).

Kernels take [block, head, K/V, token, dim] with any strides, so a layout is a permutation of the storage:

=================  ===============================  ======================================================
layout             stored as                        costs
=================  ===============================  ======================================================
raw                [K/V, block, token, head, dim]   one more page shifts all values; a shard's heads are
                                                    2 * block_tokens pieces of each block
page-friendly      [block, K/V, token, head, dim]   no shift; as many pieces
header-centric     [block, head, K/V, token, dim]   no shift; one piece: what is left of a block is a block
=================  ===============================  ======================================================

The engine's cache is header-centric (`KVCache`). The others are what it is measured against.
"""

from __future__ import annotations

from enum import StrEnum

import torch


class Layout(StrEnum):
    RAW = "raw"
    PAGE_FRIENDLY = "page-friendly"
    HEADER_CENTRIC = "header-centric"


# Of each layout, where in the storage the kernels' dimensions are.
_ORDERS = {
    Layout.RAW: (1, 3, 0, 2, 4),
    Layout.PAGE_FRIENDLY: (0, 3, 1, 2, 4),
    Layout.HEADER_CENTRIC: (0, 1, 2, 3, 4),
}


def kv_stride_order(layout: Layout) -> tuple[int, int, int, int, int]:
    """`storage.permute(*kv_stride_order(layout))` is [block, head, K/V, token, dim], what kernels take."""
    return _ORDERS[layout]


def storage_shape(
    layout: Layout, num_blocks: int, num_heads: int, block_tokens: int, head_dim: int
) -> tuple[int, ...]:
    """The shape of a contiguous cache in this layout."""
    seen = (num_blocks, num_heads, 2, block_tokens, head_dim)
    order = kv_stride_order(layout)
    return tuple(seen[order.index(stored)] for stored in range(len(order)))


def as_kernels_see(storage: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view of `storage` as [block, head, K/V, token, dim]."""
    return storage.permute(*kv_stride_order(layout))


def pieces_per_shard(layout: Layout, block_tokens: int) -> int:
    """Runs of addresses that the heads of one shard of a block lie in: what a trim must copy one by one."""
    return 1 if layout is Layout.HEADER_CENTRIC else 2 * block_tokens
