"""The shapes of programs of `kernels.gpu.quantized_tiles`, by bits and tokens: data, and pure choices.

The rows are in force as `python -m bench.gpu sweep` measured them; it takes CANDIDATES beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_SPLITS = 32
STEPS_PER_SPLIT = 2  # fewer are not worth adding up
TILE = 64
WORD_BYTES = 16  # of a row's scales and zeros in a step, and of their places
FEW_TOKENS = 32  # a warp has a tile's half of weights in as many registers as the sums of so many
WARPGROUP = 4  # warps
SCRATCH_BYTES = 128 << 20  # of weights decoded to memory


@dataclass(frozen=True, slots=True, order=True)
class ProductConfig:
    """A program's share: block_n outputs of block_t tokens, `tiles` of 64 inputs a step."""

    block_t: int
    block_n: int
    tiles: int
    num_warps: int
    num_stages: int
    waves: int  # programs for each processor, where inputs are split to fill it
    is_wide: bool = False  # whether tokens are the left operand, and weights reach it in shared memory

    @property
    def most_registers(self) -> int | None:
        """Return the most registers of a thread; None: as many as it takes, where sums are more than 64.

        They let two programs of 8 warps be on a processor, or three of 4.
        """
        sums = self.block_t * self.block_n // (32 * self.num_warps)
        return {4: 168, 8: 128}.get(self.num_warps) if self.is_wide and sums <= 64 else None

    @property
    def scales_sums(self) -> bool:
        """Return whether scales multiply a tile's sums: where they are fewer than weights, with mma.sync.

        Instructions of whole warpgroups (wgmma) would have to end with every tile.
        """
        return self.block_t < FEW_TOKENS and self.num_warps < WARPGROUP and not self.is_wide

    def shared_bytes(self, bits: int) -> int:
        """Return the most shared memory that the steps under way take.

        Tokens are there one step longer than codes, scales and zeros, which go on to registers. Wide programs
        have a tile of weights there too, and in the end their sums.
        """
        tokens, codes = 2 * TILE * self.block_t * self.tiles, 8 * bits * self.block_n * self.tiles
        steps = self.num_stages * tokens + (self.num_stages - 1) * (codes + WORD_BYTES * self.block_n)
        if not self.is_wide:
            return steps
        return max(steps + 2 * TILE * self.block_n, 4 * self.block_t * self.block_n)

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
    8: (
        (8, ProductConfig(8, 32, 4, 2, 3, 6)),
        (16, ProductConfig(16, 32, 4, 2, 2, 12)),
        (32, ProductConfig(32, 64, 4, 2, 2, 6)),
        (64, ProductConfig(64, 128, 2, 4, 3, 1, True)),
        (128, ProductConfig(128, 128, 2, 8, 2, 2, True)),
        (256, ProductConfig(256, 128, 1, 8, 4, 1)),
    ),
    4: (
        (8, ProductConfig(8, 32, 4, 2, 2, 12)),
        (16, ProductConfig(16, 64, 4, 2, 2, 6)),
        (32, ProductConfig(32, 64, 4, 2, 2, 6)),
        (64, ProductConfig(64, 128, 4, 8, 2, 2)),
        (128, ProductConfig(128, 128, 2, 8, 2, 2, True)),
    ),
    3: (
        (8, ProductConfig(8, 32, 4, 2, 2, 12)),
        (16, ProductConfig(16, 64, 4, 4, 3, 2)),
        (64, ProductConfig(64, 64, 2, 4, 2, 3, True)),
        (128, ProductConfig(128, 128, 2, 8, 2, 2, True)),
    ),
}

# Of capability 8, whose sums are in registers: with more tiles a step Triton 3.7 spills 8 bytes for some.
OLDER = (
    (16, ProductConfig(16, 64, 4, 4, 3, 4)),
    (32, ProductConfig(32, 64, 2, 4, 3, 4)),
    (512, ProductConfig(64, 128, 1, 8, 4, 2)),
)

# What a sweep measures for up to so many tokens; of int8 and int3 the first few.
CANDIDATES: dict[int, tuple[ProductConfig, ...]] = {
    8: (
        ProductConfig(8, 32, 4, 2, 2, 12),
        ProductConfig(8, 64, 2, 2, 3, 8),
        ProductConfig(8, 32, 4, 2, 3, 6),
        ProductConfig(8, 32, 2, 2, 3, 12),
        ProductConfig(8, 16, 4, 1, 2, 20),
        ProductConfig(16, 32, 4, 2, 2, 12),
        ProductConfig(8, 32, 4, 1, 2, 12),
    ),
    16: (
        ProductConfig(16, 64, 4, 2, 2, 6),
        ProductConfig(16, 32, 4, 2, 2, 12),
        ProductConfig(16, 64, 2, 2, 3, 6),
        ProductConfig(16, 32, 2, 2, 3, 12),
        ProductConfig(16, 64, 4, 4, 2, 6),
        ProductConfig(16, 32, 4, 1, 2, 8),
    ),
    32: (
        ProductConfig(32, 64, 4, 2, 2, 6),
        ProductConfig(64, 128, 2, 4, 2, 3, True),
        ProductConfig(32, 32, 4, 2, 2, 12),
        ProductConfig(64, 64, 2, 4, 2, 3, True),
        ProductConfig(32, 64, 2, 2, 3, 6),
        ProductConfig(32, 64, 4, 4, 2, 6),
    ),
    64: (
        ProductConfig(64, 128, 2, 4, 2, 3, True),
        ProductConfig(64, 128, 1, 4, 3, 3, True),
        ProductConfig(64, 64, 2, 4, 2, 3, True),
        ProductConfig(64, 128, 2, 4, 3, 1, True),
        ProductConfig(64, 128, 4, 4, 2, 2, True),
        ProductConfig(64, 256, 1, 8, 2, 2, True),
        ProductConfig(64, 128, 4, 8, 2, 2),
        ProductConfig(64, 64, 2, 4, 2, 5),
    ),
    128: (
        ProductConfig(128, 128, 2, 8, 2, 2, True),
        ProductConfig(128, 128, 1, 8, 3, 2, True),
        ProductConfig(128, 256, 1, 8, 3, 1, True),
        ProductConfig(128, 64, 2, 4, 2, 3, True),
        ProductConfig(128, 128, 2, 8, 3, 1, True),
        ProductConfig(64, 256, 1, 8, 2, 2, True),
        ProductConfig(128, 128, 2, 8, 3, 1),
    ),
    1024: (
        ProductConfig(128, 128, 2, 8, 2, 2, True),
        ProductConfig(256, 128, 1, 8, 3, 1, True),
        ProductConfig(128, 256, 1, 8, 3, 1, True),
        ProductConfig(128, 128, 1, 8, 3, 2, True),
        ProductConfig(256, 128, 2, 8, 2, 1, True),
        ProductConfig(256, 128, 1, 8, 4, 1),
    ),
}


def product_config(bits: int, tokens: int, arch: int = 90) -> ProductConfig | None:
    """Return the config of a product on a GPU; None if decoding to memory first takes less time."""
    rows = TABLE[bits] if arch // 10 == 9 else OLDER
    return next((config for most, config in rows if tokens <= most), None)


def num_splits(programs: int, steps: int, processors: int, waves: int) -> int:
    """Return the programs for each block of results that give each processor `waves`, if inputs suffice."""
    return max(1, min(processors * waves // programs, steps // STEPS_PER_SPLIT, MOST_SPLITS))
