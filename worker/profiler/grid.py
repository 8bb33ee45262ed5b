"""The requests that fingerprints are measured with, and what they need. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bus.precisions import KVPrecision, Precision
from worker.engine.sequence import Limits

LEAST_ROUNDS, ROUNDS, MAX_ROUNDS = 3, 5, 15
MAX_SECONDS = 60.0  # time of steps after which no round begins, beyond LEAST_ROUNDS
TOLERANCE = 0.03  # error of the whole model's seconds that ends a point's measurement
DECODES = 8  # steps that the longer output adds to the shorter


@dataclass(frozen=True, slots=True)
class Point:
    """A batch of equal prompts in one precision. `tp` above 1: one rank's share of it."""

    precision: Precision
    prompt_tokens: int
    batch_size: int
    tp: int = 1

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts."""
        return self.prompt_tokens * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The points to measure, and how the worker would serve them."""

    points: Sequence[Point]
    block_tokens: int
    max_num_batched_tokens: int
    kv_dtype: KVPrecision = "full"
    cuda_graphs: Literal["auto", "off"] = "auto"
    rounds: int = ROUNDS
    max_rounds: int = MAX_ROUNDS
    max_seconds: float = MAX_SECONDS

    def is_over(self, num_rounds: int, seconds: float) -> bool:
        """Return True if the measurement must end, however uncertain: on a slow or busy device, too."""
        return num_rounds >= self.max_rounds or (num_rounds >= LEAST_ROUNDS and seconds >= self.max_seconds)

    def fullest(self, precision: Precision, tp: int) -> Point:
        """Return the point whose steps take the most memory.

        For one worker the largest; for a rank the smallest that fills a step as the largest does.
        """
        points = [one for one in self.points if (one.precision, one.tp) == (precision, 1)]
        largest = max(points, key=lambda one: one.num_tokens)
        full = min(largest.num_tokens, self.max_num_batched_tokens)
        filling = [one for one in points if one.num_tokens >= full]
        return largest if tp == 1 else replace(min(filling, key=lambda one: one.num_tokens), tp=tp)

    def lengths(self, point: Point) -> tuple[int, int]:
        """Return two output lengths.

        If prompts take several steps, the first ones of a batch decode beside the last prefills: the shorter
        length lets all decode together before its end.
        """
        prefills = -(-point.num_tokens // self.max_num_batched_tokens)
        shorter = 1 if prefills == 1 else prefills + 1
        return shorter, shorter + DECODES

    def context(self, point: Point) -> int:
        """Return the tokens of one prompt and its longer output."""
        return point.prompt_tokens + self.lengths(point)[1]

    def within(self, context: int) -> Grid:
        """Return the grid without points that are longer than a model's context."""
        return replace(self, points=[one for one in self.points if self.context(one) <= context])

    def with_shares(self, degrees: Sequence[int]) -> Grid:
        """Return the grid with points of one rank of each degree.

        Every prompt in the smallest batch, and every batch of the shortest prompts: other shares are in
        proportion to one worker's.
        """
        alone = [point for point in self.points if point.tp == 1]
        left = [point for point in alone if not _follows_from_others(point, alone)]
        return replace(self, points=[*alone, *(replace(each, tp=tp) for tp in degrees for each in left)])

    @property
    def limits(self) -> Limits:
        return Limits(
            max_num_seqs=max(point.batch_size for point in self.points),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max(map(self.context, self.points)),
            block_tokens=self.block_tokens,
            kv_dtype=self.kv_dtype,
            cuda_graphs=self.cuda_graphs,
        )

    @property
    def num_blocks(self) -> int:
        """The KV blocks of the largest batch, with the spare block of each request that admission keeps."""
        return max(one.batch_size * (-(-self.context(one) // self.block_tokens) + 1) for one in self.points)


def _follows_from_others(point: Point, points: Sequence[Point]) -> bool:
    """Return True if the points have its prompts in smaller batches and its batch of shorter prompts."""
    others = [one for one in points if one.precision == point.precision]
    sizes = [one.batch_size for one in others if one.prompt_tokens == point.prompt_tokens]
    prompts = [one.prompt_tokens for one in others if one.batch_size == point.batch_size]
    return min(sizes) < point.batch_size and min(prompts) < point.prompt_tokens


def is_settled(by_depth: Sequence[Sequence[float]], num_layers: int) -> bool:
    """Return True if repetitions of one layer and of two predict a model of `num_layers` well enough.

    Its seconds are (n - 1) times those of two layers less (n - 2) times those of one, and so is their
    uncertainty.
    """
    if len(by_depth) < 2:
        return True
    one, two = by_depth
    whole = (num_layers - 1) * statistics.median(two) - (num_layers - 2) * statistics.median(one)
    unknown = math.hypot((num_layers - 1) * _standard_error(two), (num_layers - 2) * _standard_error(one))
    return unknown <= TOLERANCE * whole


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, from the median deviation, which ignores a few outliers.

    1.4826 deviations are a standard deviation of normal values, and a median scatters 1.2533 times as much as
    a mean.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))
