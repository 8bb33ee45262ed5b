"""Time to first token and per output token of a whole model, from its fingerprints (iServe §5.3). Pure.

=========================  ==========================================================================
outputs of two lengths     seconds = TTFT + (length - 1) x TPOT, solved for both (equation 1; the first
                           token is TTFT's, so the latency is the same and TTFT what a client sees)
one and two hidden layers  TTFT and TPOT = other + layers x layer (equations 2 and 3)
prompts and batches        straight lines between what was measured; beyond the longest prompt TTFT
                           keeps its curve, if the samples show one; TPOT is a line in the mean context
                           of its steps
degrees                    serial + parallel / tp, of two measured degrees; else the speed-up another
                           precision was measured to have; else half of it is taken to be parallel
stages                     as one stage, and a hop for each stage, if one was measured (§5.3: in
                           batches of one that is nearly nothing)
=========================  ==========================================================================
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bus.deployments import Configuration, Intent, LatencySample, Profile
from bus.messages import PRECISIONS, Precision
from controller.intents.uncertain import (
    Points,
    Uncertain,
    between,
    combine,
    exactly,
    line_at,
    repeated,
    slope_of,
    within,
)

ASSUMED_SERIAL = 0.5  # of a step, where no degree beside 1 was measured; the spread is from 0 to 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch of equal requests is. Tokens."""

    prompt: int
    batch: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `context`: tokens before the step, in the mean of those steps that `tpot` is of."""

    ttft: Uncertain
    tpot: Uncertain
    context: float


Surface = Mapping[Shape, Timing]


class LatencyModel:
    """What the latency samples of a profile tell."""

    def __init__(self, profile: Profile) -> None:
        self._num_layers = profile.num_layers
        self._cells = _cells(profile.latency)

    def precisions(self) -> list[Precision]:
        """Those whose single device was measured: the rest of the map starts there."""
        return [one for one in PRECISIONS if self._surface(Configuration(precision=one))]

    def timing(self, configuration: Configuration, intent: Intent) -> Timing:
        """KeyError: the precision is not one of `precisions`."""
        if surface := self._surface(configuration):
            return _at(surface, intent)
        if configuration.pp > 1:
            return self._with_hops(configuration, intent)
        degrees = self._degrees(configuration.precision)
        if 1 not in degrees:
            raise KeyError(f"{configuration.precision} was not measured on a single device")
        if len(degrees) > 1:
            return self._by_degree(configuration, degrees, intent)
        single = self.timing(replace(configuration, tp=1), intent)
        return self._as_others(single, configuration, intent) or _assumed_at_degree(single, configuration.tp)

    # ------------------------------------------------------------------ from layers to the model

    def _surface(self, configuration: Configuration) -> Surface:
        """Of the whole model, where this very configuration was measured."""
        found = {
            shape: self._at_layers(by_layers, self._num_layers)
            for shape, by_layers in self._cells.get(configuration, {}).items()
        }
        return {shape: timing for shape, timing in found.items() if timing}

    def _at_layers(self, by_layers: Mapping[int, Timing], num_layers: int) -> Timing | None:
        """None: one size of a fingerprint does not tell a layer from the rest."""
        if num_layers in by_layers:
            return by_layers[num_layers]
        if len(by_layers) < 2:
            return None
        ttfts = [(float(layers), one.ttft) for layers, one in by_layers.items()]
        tpots = [(float(layers), one.tpot) for layers, one in by_layers.items()]
        return Timing(
            line_at(ttfts, num_layers).weakened("extrapolated").at_least(0.0),
            line_at(tpots, num_layers).weakened("extrapolated").at_least(0.0),
            next(iter(by_layers.values())).context,
        )

    # ------------------------------------------------------------------ degrees

    def _degrees(self, precision: Precision) -> list[int]:
        measured = {one.tp for one in self._cells if one.precision == precision and one.pp == 1}
        return sorted(tp for tp in measured if self._surface(Configuration(tp=tp, precision=precision)))

    def _by_degree(self, configuration: Configuration, degrees: Iterable[int], intent: Intent) -> Timing:
        timings = {tp: self.timing(replace(configuration, tp=tp), intent) for tp in degrees}
        return Timing(
            _amdahl([(1 / tp, one.ttft) for tp, one in timings.items()], configuration.tp),
            _amdahl([(1 / tp, one.tpot) for tp, one in timings.items()], configuration.tp),
            intent.prompt_tokens,
        )

    def _as_others(self, single: Timing, configuration: Configuration, intent: Intent) -> Timing | None:
        """With the speed-up that the first precision with more degrees has from them."""
        for precision in self.precisions():
            if len(self._degrees(precision)) > 1:
                one = self.timing(Configuration(precision=precision), intent)
                many = self.timing(replace(configuration, precision=precision), intent)
                return Timing(
                    single.ttft.times(_ratio(many.ttft, one.ttft)).weakened("extrapolated"),
                    single.tpot.times(_ratio(many.tpot, one.tpot)).weakened("extrapolated"),
                    single.context,
                )
        return None

    # ------------------------------------------------------------------ stages

    def _with_hops(self, configuration: Configuration, intent: Intent) -> Timing:
        """As one stage, and a hop for every stage: the last stage's goes back to the first."""
        alone = self.timing(replace(configuration, pp=1), intent)
        hops = self._hops()
        hop = _at(hops, intent) if hops else Timing(exactly(0.0, "assumed"), exactly(0.0, "assumed"), 0.0)
        return Timing(
            combine([(1.0, alone.ttft), (configuration.pp, hop.ttft)]).weakened("extrapolated"),
            combine([(1.0, alone.tpot), (configuration.pp, hop.tpot)]).weakened("extrapolated"),
            alone.context,
        )

    def _hops(self) -> Surface:
        """What a hop costs: what stages take beyond one device of the same layers, by their number."""
        found: dict[Shape, list[Timing]] = defaultdict(list)
        for configuration, by_shape in self._cells.items():
            if configuration.pp > 1:
                alone = self._cells.get(replace(configuration, pp=1), {})
                for shape, by_layers in by_shape.items():
                    found[shape] += [
                        _hop(staged, base, configuration.pp)
                        for layers, staged in by_layers.items()
                        if (base := self._at_layers(alone.get(shape, {}), layers))
                    ]
        return {shape: _mean(hops) for shape, hops in found.items() if hops}


def _hop(staged: Timing, alone: Timing, num_stages: int) -> Timing:
    return Timing(
        staged.ttft.minus(alone.ttft).times(1 / num_stages).at_least(0.0),
        staged.tpot.minus(alone.tpot).times(1 / num_stages).at_least(0.0),
        staged.context,
    )


def _mean(timings: list[Timing]) -> Timing:
    share = 1 / len(timings)
    return Timing(
        combine((share, one.ttft) for one in timings),
        combine((share, one.tpot) for one in timings),
        timings[0].context,
    )


def _amdahl(points: Points, tp: int) -> Uncertain:
    """`points` by 1/tp: serial + parallel / tp is a straight line there."""
    return line_at(points, 1 / tp).weakened("extrapolated").at_least(0.0)


def _assumed_at_degree(single: Timing, tp: int) -> Timing:
    return Timing(_assumed_share(single.ttft, tp), _assumed_share(single.tpot, tp), single.context)


def _assumed_share(alone: Uncertain, tp: int) -> Uncertain:
    share = ASSUMED_SERIAL + (1 - ASSUMED_SERIAL) / tp
    unknown = within(1 / tp * alone.value, share * alone.value, alone.value)
    return combine([(share, replace(alone, value=0.0)), (1.0, unknown)])


def _ratio(one: Uncertain, other: Uncertain) -> float:
    return one.value / other.value if other.value else 1.0


# --------------------------------------------------------------------------- samples to cells


def _cells(
    samples: Iterable[LatencySample],
) -> dict[Configuration, dict[Shape, dict[int, Timing]]]:
    """Configuration, batch of requests, number of layers: equation 1 solved for each."""
    seconds: dict[tuple[Configuration, Shape, int], dict[int, list[float]]] = defaultdict(dict)
    for one in samples:
        key = (one.configuration, Shape(one.prompt_tokens, one.batch_size), one.num_layers)
        seconds[key].setdefault(one.output_tokens, []).extend(one.seconds)
    cells: dict[Configuration, dict[Shape, dict[int, Timing]]] = defaultdict(lambda: defaultdict(dict))
    for (configuration, shape, num_layers), by_length in seconds.items():
        lengths = sorted(length for length, repetitions in by_length.items() if repetitions)
        if len(lengths) > 1:
            points = [(length - 1.0, repeated(by_length[length])) for length in lengths]
            context = shape.prompt + (lengths[0] + lengths[-1] - 1) / 2
            cells[configuration][shape][num_layers] = Timing(
                line_at(points, 0.0).at_least(0.0), slope_of(points).at_least(0.0), context
            )
    return cells


# --------------------------------------------------------------------------- to the intent's requests


def _at(surface: Surface, intent: Intent) -> Timing:
    context = intent.prompt_tokens + intent.output_tokens / 2
    full = _filled(surface)
    ttfts, tpots = [], []
    for batch in sorted({shape.batch for shape in full}):
        row = sorted(
            ((shape.prompt, timing) for shape, timing in full.items() if shape.batch == batch),
            key=lambda item: item[0],
        )
        by_prompt = [(float(prompt), one.ttft) for prompt, one in row]
        by_context = [(one.context, one.tpot) for _, one in row]
        ttfts.append((float(batch), between(by_prompt, intent.prompt_tokens, is_convex=True)))
        tpot = _by_context(by_context, context)
        is_measured = any(prompt == intent.prompt_tokens for prompt, _ in row)
        tpots.append((float(batch), tpot if is_measured else tpot.weakened("extrapolated")))
    return Timing(
        between(ttfts, intent.batch_size).at_least(0.0),
        between(tpots, intent.batch_size).at_least(0.0),
        context,
    )


def _by_context(points: Points, context: float) -> Uncertain:
    """A step reads all keys and values before it, so this is a line; a slope that does not stand out of the
    spread would carry noise to long contexts, and is left out."""
    slope = slope_of(points)
    tells = slope.value - slope.down > 0
    return line_at(points, context if tells else statistics.fmean(x for x, _ in points))


def _filled(surface: Surface) -> dict[Shape, Timing]:
    """With what is missing of prompts x batches: a batch is to another one as at the prompt where both were
    measured."""
    full = dict(surface)
    batches = sorted({shape.batch for shape in surface})
    prompts = sorted({shape.prompt for shape in surface})
    for missing in (Shape(prompt, batch) for prompt in prompts for batch in batches):
        if missing not in surface and (corner := _corner(surface, missing)):
            along, across, shared = corner
            full[missing] = Timing(
                along.ttft.times(_ratio(across.ttft, shared.ttft)).weakened("extrapolated"),
                along.tpot.times(_ratio(across.tpot, shared.tpot)).weakened("extrapolated"),
                along.context,
            )
    return full


def _corner(surface: Surface, missing: Shape) -> tuple[Timing, Timing, Timing] | None:
    """The same prompt in another batch, another prompt in the same batch, and both of these together."""
    for shared, timing in surface.items():
        along = surface.get(Shape(missing.prompt, shared.batch))
        across = surface.get(Shape(shared.prompt, missing.batch))
        if along and across:
            return along, across, timing
    return None
