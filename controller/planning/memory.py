"""Memory of a configuration, from fingerprints (iServe §5.2, Figure 8). Pure.

All devices together:   base + (tp - 1) x per_rank + (pp x per_stage, with more than one)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bus.deployments import Configuration, Intent, MemorySample, Profile
from bus.pages import kv_pages_per_layer
from bus.precisions import PRECISIONS, Precision
from controller.planning.uncertainty import Uncertain, line_at, slope_of, within
from controller.planning.uncertainty import exactly as known

NOTHING = known(0.0)
# Share of a layer's weights on each further rank, if only one device was measured: attention, which is a
# third of a layer of Llama-2 7B (4 of 12 h^2) and, with grouped heads, 19 % of one of Llama-3 8B.
ASSUMED_REPEATED = 0.25


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes: `other`, and `layer` for each layer."""

    other: Uncertain
    layer: Uncertain

    def at(self, num_layers: int) -> Uncertain:
        """Return the bytes of so many layers."""
        return self.other + num_layers * self.layer


@dataclass(frozen=True, slots=True)
class SizeModel:
    """The three unknowns of weights or activations, each a straight line in the number of layers.

    `per_rank` is what every further rank repeats: activations in the paper, here also the weights that ranks
    duplicate. They are solved from samples of (tp, pp) = (1, 1), (2, 1) and (1, 2). Without measured stages
    `per_stage` is None, and every device of a further stage is assumed to have `per_further`. `has_ends`:
    beside the layers are embedding and head, which only a single stage's ranks repeat.
    """

    base: Line
    per_rank: Line
    per_stage: Line | None
    per_further: Line
    has_ends: bool

    def at(self, configuration: Configuration, num_layers: int) -> Uncertain:
        """Return the bytes on all devices together."""
        tp, pp = configuration.tp, configuration.pp
        per_rank = replace(self.per_rank, other=NOTHING) if self.has_ends and pp > 1 else self.per_rank
        total = self.base.at(num_layers) + (tp - 1) * per_rank.at(num_layers)
        if pp == 1:
            return total
        if self.per_stage:
            return total + pp * self.per_stage.at(num_layers)
        return total + tp * (pp - 1) * self.per_further.at(num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of pages on each device of a stage: `device_bytes`, and `layer_bytes` for each layer.

    The leader has `lead_bytes` more for embedding and head, as do all ranks of the first stage if
    `every_rank_leads`. `layer_bytes` alone is the paper's memory block, mem_base / (tp x layers). `is_fixed`:
    ranks have parts that they keep, so that other models may be beside; else they form a group of empty
    workers.
    """

    layer_bytes: int
    lead_bytes: int = 0
    device_bytes: int = 0
    every_rank_leads: bool = False
    is_fixed: bool = False

    def of(self, num_layers: int, *, leads: bool = False) -> int:
        """Return the bytes of a device with so many layers."""
        return self.device_bytes + num_layers * self.layer_bytes + leads * self.lead_bytes


class MemoryModel:
    """Memory of configurations, from the memory samples of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        by_precision: dict[Precision, list[MemorySample]] = defaultdict(list)
        for sample in profile.memory:
            by_precision[sample.configuration.precision].append(sample)
        self._parts: dict[Precision, tuple[SizeModel, SizeModel]] = {
            precision: _solved(samples)
            for precision, samples in by_precision.items()
            if any(one.configuration.num_devices == 1 for one in samples)
        }
        self._ranks = {(one.tp, one.precision): one for one in profile.ranks}

    @property
    def knows_ranks(self) -> bool:
        """True if it is known which degrees that stay the weights can be cut for."""
        return bool(self._ranks)

    def precisions(self) -> list[Precision]:
        """Return the precisions that were measured on a single device."""
        return [one for one in PRECISIONS if one in self._parts]

    def total(self, configuration: Configuration, intent: Intent, *, is_fixed: bool = False) -> Uncertain:
        """Return the memory of all devices together, the KV of the intent's batch included.

        is_fixed: the ranks of a single stage stay together, as those of several do.
        """
        weights, activations = self._parts[configuration.precision]
        tp, num_layers = configuration.tp, self._profile.num_layers
        active = activations.at(configuration, num_layers)
        if (is_fixed or configuration.pp > 1) and (need := self.fixed_need(configuration, intent)):
            return active + known(tp * need.of(num_layers, leads=True))
        kv_bytes = tp * num_layers * self._kv_bytes(configuration, intent, degree=tp)
        found = weights.at(configuration, num_layers) + active
        is_whole = any(
            one.num_layers == num_layers and one.configuration == configuration
            for one in self._profile.memory
        )
        return (found + known(kv_bytes)).weakened("measured" if is_whole else "extrapolated")

    def fixed_need(self, configuration: Configuration, intent: Intent) -> Footprint | None:
        """Return what each rank needs of its pages if the degree stays; None where that cannot be."""
        if (size := self._ranks.get((configuration.tp, configuration.precision))) is None:
            return None
        return Footprint(
            layer_bytes=size.layer_bytes + self._kv_bytes(configuration, intent, is_fixed=True),
            lead_bytes=size.lead_bytes,
            every_rank_leads=True,
            is_fixed=True,
        )

    def need(self, configuration: Configuration, intent: Intent, *, whole_first: bool = True) -> Footprint:
        """Return what each device needs of its pages where ranks keep what they need to part again.

        Activations have their own reserve. `whole_first`: workers of a single stage each load all of it
        before they form a group, so that is the most a device needs; else, and in a pipeline, it is a rank's
        shard.
        """
        weights, _ = self._parts[configuration.precision]
        is_one_stage = configuration.pp == 1
        tp = 1 if whole_first and is_one_stage else configuration.tp
        ranks = 1 / tp * weights.base.layer + (tp - 1) / tp * weights.per_rank.layer
        ends = 1 / tp * weights.base.other + (tp - 1) / tp * weights.per_rank.other
        lead = ends if is_one_stage else weights.base.other
        return Footprint(
            layer_bytes=math.ceil(ranks.value) + self._kv_bytes(configuration, intent, degree=tp),
            lead_bytes=math.ceil(lead.value),
            every_rank_leads=is_one_stage,
        )

    def _kv_bytes(
        self, configuration: Configuration, intent: Intent, *, degree: int = 1, is_fixed: bool = False
    ) -> int:
        """Return the bytes of the pages that the KV of the batch takes in a layer on one device.

        degree: of the group that it is in. is_fixed: it is a rank of a degree that stays instead.
        """
        profile, ranks = self._profile, configuration.tp if is_fixed else degree
        block_bytes = profile.rank_block_bytes(ranks, configuration.kv_dtype)
        page_bytes = profile.page_bytes
        return page_bytes * kv_pages_per_layer(kv_blocks(profile, intent), block_bytes, page_bytes)


def kv_blocks(profile: Profile, intent: Intent) -> int:
    """Return the KV blocks of the whole batch, to the end of its outputs."""
    tokens = intent.prompt_tokens + intent.output_tokens
    return intent.batch_size * math.ceil(tokens / profile.block_tokens)


def _solved(samples: Sequence[MemorySample]) -> tuple[SizeModel, SizeModel]:
    """Return the models of weights and activations of one precision."""
    weights = _table((one.num_layers, one.configuration, one.weight_bytes) for one in samples)
    activations = _table(
        (one.num_layers, one.configuration, one.activation_bytes)
        for one in samples
        if one.activation_bytes is not None
    )
    weight, activation = _base(weights), _base(activations)
    repeated = Line(
        within(0.0, weight.other.value, weight.other.value),  # embeddings and head are whole on every rank
        within(0.0, ASSUMED_REPEATED * weight.layer.value, 2 * ASSUMED_REPEATED * weight.layer.value),
    )
    again = _at_most(activation)
    weight_rank, activation_rank = _per_rank(weights), _per_rank(activations)
    weight_stage, activation_stage = (
        _per_stage(weights, weight_rank),
        _per_stage(activations, activation_rank),
    )
    return (
        SizeModel(weight, weight_rank or repeated, weight_stage, Line(NOTHING, NOTHING), True),
        SizeModel(activation, activation_rank or again, activation_stage, again, False),
    )


Table = Mapping[tuple[int, int, int], float]  # (layers, tp, pp) -> bytes


def _table(rows: Iterable[tuple[int, Configuration, int]]) -> Table:
    """Return the largest size of each."""
    table: dict[tuple[int, int, int], float] = {}
    for num_layers, configuration, size in rows:
        key = (num_layers, configuration.tp, configuration.pp)
        table[key] = max(table.get(key, 0), size)
    return table


def _base(table: Table) -> Line:
    single = {layers: size for (layers, tp, pp), size in table.items() if tp == pp == 1}
    if len(single) == 1:  # one size does not show a layer's part
        ((num_layers, size),) = single.items()
        return Line(NOTHING, known(size / num_layers))
    return _line(single)


def _per_rank(table: Table) -> Line | None:
    extra = [
        (layers, tp - 1, size - table[layers, 1, 1])
        for (layers, tp, pp), size in table.items()
        if tp > 1 and pp == 1 and (layers, 1, 1) in table
    ]
    return _line_of_slopes(extra)


def _per_stage(table: Table, per_rank: Line | None) -> Line | None:
    extra = [
        (layers, pp, size - table[layers, 1, 1] - (tp - 1) * (per_rank.at(layers).value if per_rank else 0.0))
        for (layers, tp, pp), size in table.items()
        if pp > 1 and (layers, 1, 1) in table and (tp == 1 or per_rank)
    ]
    return _line_of_slopes(extra)


def _line_of_slopes(extra: Iterable[tuple[int, int, float]]) -> Line | None:
    """Fit a line to the slopes of y over x, by least squares through the origin, of each number of layers."""
    points: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for layers, x, y in extra:
        points[layers].append((x, y))
    slopes = {n: sum(x * y for x, y in at) / sum(x * x for x, _ in at) for n, at in points.items()}
    return _line(slopes) if slopes else None


def _line(by_layers: Mapping[int, float]) -> Line:
    points = [(float(layers), known(size)) for layers, size in by_layers.items()]
    return Line(line_at(points, 0.0), slope_of(points))


def _at_most(line: Line) -> Line:
    """Return the line as an assumption: all of it, and perhaps nothing."""
    other, layer = (within(min(0.0, v), v, max(0.0, v)) for v in (line.other.value, line.layer.value))
    return Line(other, layer)
