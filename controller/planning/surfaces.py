"""Time to first token and per output token over prompts and batches, from latency samples. Pure.

A cell is one configuration, batch of equal requests and number of layers; a surface has the cells of one
configuration for a whole model, read by straight lines.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bus.deployments import Basis, Configuration, Intent, LatencySample
from controller.planning.uncertainty import Points, Uncertain, between, exactly, line_at, repeated, slope_of


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch of equal requests; `prompt` in tokens."""

    prompt: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.prompt * self.batch


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `context`: mean number of tokens before the steps that `tpot` is of."""

    ttft: Uncertain
    tpot: Uncertain
    context: float

    def scaled(self, ttft: float, tpot: float) -> Timing:
        """Return it with both times multiplied, as an extrapolation."""
        weaker: Basis = "extrapolated"
        return Timing((ttft * self.ttft).weakened(weaker), (tpot * self.tpot).weakened(weaker), self.context)


Surface = Mapping[BatchShape, Timing]
Cells = Mapping[Configuration, Mapping[BatchShape, Mapping[int, Timing]]]  # the last by number of layers


def ratio(one: Uncertain, other: Uncertain) -> float:
    """Return the ratio of the values; 1 if `other` is 0."""
    return one.value / other.value if other.value else 1.0


def cells_of(samples: Iterable[LatencySample]) -> Cells:
    """Solve equation 1 for each cell."""
    seconds: dict[tuple[Configuration, BatchShape, int], dict[int, list[float]]] = defaultdict(dict)
    for one in samples:
        key = (one.configuration, BatchShape(one.prompt_tokens, one.batch_size), one.num_layers)
        seconds[key].setdefault(one.output_tokens, []).extend(one.seconds)
    cells: dict[Configuration, dict[BatchShape, dict[int, Timing]]] = defaultdict(lambda: defaultdict(dict))
    for (configuration, shape, num_layers), by_length in seconds.items():
        lengths = sorted(length for length, repetitions in by_length.items() if repetitions)
        if len(lengths) > 1:
            ttft, tpot = _solved([(length - 1.0, by_length[length]) for length in lengths])
            context = shape.prompt + (lengths[0] + lengths[-1] - 1) / 2
            cells[configuration][shape][num_layers] = Timing(ttft.at_least(0.0), tpot.at_least(0.0), context)
    return cells


def _solved(by_steps: Sequence[tuple[float, Sequence[float]]]) -> tuple[Uncertain, Uncertain]:
    """Return TTFT and TPOT from (steps behind the first token, seconds of each repetition).

    If there are as many repetitions of each length, each is solved alone: a disturbance of a run's prompts is
    in all its lengths, and would else count as decodes.
    """
    if len({len(seconds) for _, seconds in by_steps}) > 1:
        points = [(steps, repeated(seconds)) for steps, seconds in by_steps]
        return line_at(points, 0.0), slope_of(points)
    runs = [
        [(steps, exactly(one)) for (steps, _), one in zip(by_steps, run, strict=True)]
        for run in zip(*(seconds for _, seconds in by_steps), strict=True)
    ]
    return (
        repeated([line_at(run, 0.0).value for run in runs]),
        repeated([slope_of(run).value for run in runs]),
    )


def at(surface: Surface, intent: Intent) -> Timing:
    """Return the timing of the intent's requests."""
    context = intent.prompt_tokens + intent.output_tokens / 2
    full = _filled(surface)
    ttfts, tpots = [], []
    for batch in sorted({shape.batch for shape in full}):
        row = {
            shape.prompt: full[shape]
            for shape in sorted(full, key=lambda one: one.prompt)
            if shape.batch == batch
        }
        by_prompt = [(prompt, one.ttft) for prompt, one in row.items()]
        ttfts.append((batch, between(by_prompt, intent.prompt_tokens, is_convex=True)))
        tpot = _by_context([(one.context, one.tpot) for one in row.values()], context)
        tpots.append((batch, tpot if intent.prompt_tokens in row else tpot.weakened("extrapolated")))
    return Timing(
        between(ttfts, intent.batch_size).at_least(0.0),
        between(tpots, intent.batch_size).at_least(0.0),
        context,
    )


def _by_context(points: Points, context: float) -> Uncertain:
    """Return TPOT on a line in the context; a slope within the spread is left out as noise."""
    slope = slope_of(points)
    is_clear = slope.value - slope.down > 0
    return line_at(points, context if is_clear else statistics.fmean(x for x, _ in points))


def _filled(surface: Surface) -> dict[BatchShape, Timing]:
    """Complete prompts x batches: batches are in proportion as at a prompt where both were measured."""
    full = dict(surface)
    batches = sorted({shape.batch for shape in surface})
    prompts = sorted({shape.prompt for shape in surface})
    for missing in (BatchShape(prompt, batch) for prompt in prompts for batch in batches):
        if missing not in surface and (corner := _corner(surface, missing)):
            along, across, shared = corner
            full[missing] = along.scaled(ratio(across.ttft, shared.ttft), ratio(across.tpot, shared.tpot))
    return full


def _corner(surface: Surface, missing: BatchShape) -> tuple[Timing, Timing, Timing] | None:
    """Return the same prompt in another batch, another prompt in the same batch, and what they share."""
    for shared, timing in surface.items():
        along = surface.get(BatchShape(missing.prompt, shared.batch))
        across = surface.get(BatchShape(shared.prompt, missing.batch))
        if along and across:
            return along, across, timing
    return None


def filled_like(surface: Surface, model: Surface) -> dict[BatchShape, Timing]:
    """Complete a surface from `model`: TTFT by like numbers of tokens, TPOT by like prompts in the batch."""
    full, shared = dict(surface), [shape for shape in surface if shape in model]
    for missing in model.keys() - surface.keys():
        batches = [shape for shape in shared if shape.batch == missing.batch]
        if batches:
            along = min(shared, key=lambda shape: abs(math.log(shape.tokens / missing.tokens)))
            across = min(batches, key=lambda shape: abs(shape.prompt - missing.prompt))
            full[missing] = model[missing].scaled(
                ratio(surface[along].ttft, model[along].ttft), ratio(surface[across].tpot, model[across].tpot)
            )
    return full
