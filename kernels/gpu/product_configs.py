"""The shapes of programs of `kernels.gpu.quantized_tiles`, by bits and tokens: data, and pure choices.

The rows are in force as `python -m bench.gpu sweep` measured them; it takes CANDIDATES beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_SPLITS = 32
STEPS_PER_SPLIT = 2  # fewer are not worth adding up
TILE = 64


@dataclass(frozen=True, slots=True, order=True)
class ProductConfig:
    """A program's share: block_n outputs of block_t tokens, `tiles` of 64 inputs a step."""

    block_t: int
    block_n: int
    tiles: int
    num_warps: int
    num_stages: int
    waves: int  # programs for each processor, where inputs are split to fill it

    def shared_bytes(self, bits: int) -> int:
        """Return the shared memory that the steps under way take, but for scales and zeros."""
        step = self.tiles * (2 * TILE * self.block_t + 8 * bits * self.block_n)
        return self.num_stages * step

    def fitted(self, bits: int, limit: int) -> ProductConfig:
        """Return this with fewer stages, then fewer tiles, until it takes at most `limit` bytes."""
        fitting = self
        while fitting.shared_bytes(bits) > limit and (fitting.num_stages > 2 or fitting.tiles > 1):
            if fitting.num_stages > 2:
                fitting = replace(fitting, num_stages=fitting.num_stages - 1)
            else:
                fitting = replace(fitting, tiles=fitting.tiles // 2)
        return fitting


# By bits: the most tokens of a row, a power of two, and its config. With more than the last row has, weights
# are decoded to memory.
TABLE: dict[int, tuple[tuple[int, ProductConfig], ...]] = {
    bits: (
        (16, ProductConfig(16, 64, 4, 4, 3, 4)),
        (32, ProductConfig(32, 64, 4, 4, 3, 4)),
        (64, ProductConfig(64, 128, 4, 8, 2, 2)),
        (128, ProductConfig(128, 128, 4, 8, 2, 1)),
        (1024, ProductConfig(256, 128, 1, 8, 4, 1)),
    )
    for bits in (8, 4, 3)
}

# Of capability 8, whose sums are in registers.
OLDER = (
    (16, ProductConfig(16, 64, 4, 4, 3, 4)),
    (32, ProductConfig(32, 64, 4, 4, 3, 4)),
    (64, ProductConfig(64, 128, 4, 8, 2, 2)),
    (512, ProductConfig(64, 128, 1, 8, 4, 2)),
)

# What a sweep measures for up to so many tokens.
CANDIDATES: dict[int, tuple[ProductConfig, ...]] = {
    16: (
        ProductConfig(16, 64, 4, 4, 3, 2),
        ProductConfig(16, 64, 4, 4, 3, 4),
        ProductConfig(16, 64, 4, 4, 4, 3),
        ProductConfig(16, 64, 4, 4, 2, 6),
        ProductConfig(16, 128, 4, 4, 3, 3),
        ProductConfig(16, 128, 4, 8, 3, 2),
        ProductConfig(16, 128, 4, 8, 2, 4),
        ProductConfig(16, 64, 1, 4, 4, 4),
    ),
    64: (
        ProductConfig(64, 128, 4, 8, 2, 2),
        ProductConfig(64, 128, 1, 8, 4, 3),
        ProductConfig(64, 64, 4, 4, 2, 2),
        ProductConfig(64, 128, 2, 8, 3, 2),
        ProductConfig(64, 128, 4, 4, 2, 2),
        ProductConfig(64, 256, 1, 8, 4, 1),
    ),
    128: (
        ProductConfig(128, 128, 1, 8, 4, 2),
        ProductConfig(128, 128, 4, 8, 2, 1),
        ProductConfig(64, 128, 4, 8, 2, 2),
        ProductConfig(128, 128, 2, 8, 3, 1),
        ProductConfig(128, 64, 4, 4, 2, 1),
        ProductConfig(128, 256, 1, 8, 3, 1),
    ),
    1024: (
        ProductConfig(256, 128, 1, 8, 4, 1),
        ProductConfig(128, 128, 1, 8, 4, 2),
        ProductConfig(256, 128, 2, 8, 2, 1),
        ProductConfig(128, 256, 1, 8, 4, 1),
        ProductConfig(128, 128, 2, 8, 3, 1),
    ),
}


def product_config(bits: int, tokens: int, arch: int = 90) -> ProductConfig | None:
    """Return the config of a product on a GPU; None if decoding to memory first takes less time."""
    rows = TABLE[bits] if arch // 10 == 9 else OLDER
    return next((config for most, config in rows if tokens <= most), None)


def num_splits(programs: int, steps: int, processors: int, waves: int) -> int:
    """Return the programs for each block of results that give each processor `waves`, if inputs suffice."""
    return max(1, min(processors * waves // programs, steps // STEPS_PER_SPLIT, MOST_SPLITS))
