"""The shapes of programs of paged attention: data, and pure choices.

The rows are in force as `python -m bench.gpu sweep` measured them; it takes CANDIDATES beside them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class AttentionConfig:
    """A program's share: block_rows queries times heads of a group, block_n keys of an iteration."""

    block_rows: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: int = 2  # programs of a decode for each processor, where a context is split to fill it
    is_one_loop: bool = False  # of a decode: all tiles of keys have masks, and none waits for a second loop

    def shared_bytes(self, head_dim: int) -> int:
        """Return the shared memory of queries, and of keys and values under way, of 2 bytes each."""
        return 2 * head_dim * (self.block_rows + 2 * self.num_stages * self.block_n)


# The first that fits is taken. Exact float32 products run on no tensor core: their tiles are unrolled into
# registers, and 64 x 64 takes 12 s to compile.
CHUNKS = (
    AttentionConfig(64, 64, 4, 3),
    AttentionConfig(64, 64, 4, 2),
    AttentionConfig(64, 32, 4, 2),
)
CODE_CHUNKS = CHUNKS[1:]  # of caches in 8 bits, which are decoded in registers: three stages spilled
# Of GPUs whose tensor cores take operands and sums from registers: four warps had too few for 64 x 64, and
# Triton 3.6 and 3.7 spilled for 8.0.
OLDER_CHUNKS = (AttentionConfig(64, 64, 8, 2), AttentionConfig(64, 32, 8, 2))
DECODES = (
    AttentionConfig(16, 64, 4, 2),
    AttentionConfig(16, 32, 4, 2),
)
EXACT = AttentionConfig(32, 32, 4, 2)

CHUNK_CANDIDATES = (
    AttentionConfig(64, 64, 4, 3),
    AttentionConfig(64, 64, 4, 4),
    AttentionConfig(64, 32, 4, 4),
    AttentionConfig(128, 64, 8, 4),
    AttentionConfig(128, 128, 8, 3),
)
DECODE_CANDIDATES = (
    AttentionConfig(16, 64, 4, 2, 2),
    AttentionConfig(16, 64, 4, 2, 2, True),
    AttentionConfig(16, 64, 4, 2, 4, True),
    AttentionConfig(16, 64, 4, 2, 8, True),
    AttentionConfig(16, 64, 4, 3, 2, True),
    AttentionConfig(16, 32, 4, 3, 2, True),
    AttentionConfig(16, 32, 4, 4, 4, True),
    AttentionConfig(16, 128, 8, 2, 2, True),
)


def fitting(configs: tuple[AttentionConfig, ...], head_dim: int, limit: int) -> AttentionConfig:
    """Return the first config that takes at most `limit` bytes of shared memory, else the last."""
    return next((config for config in configs if config.shared_bytes(head_dim) <= limit), configs[-1])
