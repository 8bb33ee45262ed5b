"""The whole pages that memory takes, counted alike where it is planned and where it is mapped.

Standard library only.
"""

from __future__ import annotations


def pages_for(nbytes: int, page_bytes: int) -> int:
    """Return the whole pages that hold `nbytes`."""
    return -(-nbytes // page_bytes)


def kv_pages_per_layer(num_blocks: int, block_bytes: int, page_bytes: int, degree: int = 1) -> int:
    """Return the pages that KV blocks take in one layer: they follow each other, and may straddle two pages.

    degree: the blocks are those of a group of so many workers, each of which holds its share of the heads.
    """
    return pages_for(-(-num_blocks * block_bytes // degree), page_bytes)
