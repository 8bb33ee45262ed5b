"""Time to first token and per output token of a whole model, from its fingerprints (iServe §5.3). Pure.

docs/deploy.md says how each number is estimated, and what is assumed where it was not measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from bus.deployments import Basis, Configuration, Intent, LinkKind, LinkSample, Profile
from bus.policy import Slowdown
from bus.precisions import PRECISIONS, Precision
from controller.planning.surfaces import Cells, Surface, Timing, at, cells_of, filled_like, ratio
from controller.planning.uncertainty import Uncertain, averaged, between, combine, exactly, line_at, within

ASSUMED_SERIAL = 0.5  # share of a step if only degree 1 was measured; the spread is from 0 to 1
# A group of one stage in the worker: messages before each step (a rank is ready, the leader calls it), tokens
# of a step that are reserved for a canary, and the part of its share that a rank without prompts keeps.
CALLS, CANARY_TOKENS, KEPT_SHARE = 2, 12, 8

Chunks = list[tuple[int, int]]  # steps, and tokens in each


def num_steps(chunks: Chunks) -> int:
    """Return the number of steps of a prompt's chunks."""
    return sum(times for times, _ in chunks)


class LatencyModel:
    """Latencies of configurations, from the latency and link samples of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._cells = profile, cells_of(profile.latency)
        self._links = LinkTimes(profile.links if profile.row_bytes else [])
        self._works: dict[int, RankModel] = {}

    def precisions(self) -> list[Precision]:
        """Return those that were measured on a single device: the rest of the map starts there."""
        return self.work(self._profile.num_layers).precisions()

    def work(self, num_layers: int) -> RankModel:
        """Return the model of one worker, or one rank, with so many layers."""
        return self._works.setdefault(num_layers, RankModel(self._cells, num_layers))

    def timing(self, configuration: Configuration, intent: Intent) -> Timing:
        """Return TTFT and TPOT. Raises KeyError for a precision that is not one of `precisions`.

        Those of another form of KV than was measured are taken to be the same.
        """
        if configuration.kv_dtype != "full":
            same = self.timing(replace(configuration, kv_dtype="full"), intent)
            if configuration.kv_dtype == self._profile.kv_dtype:
                return same
            return Timing(
                same.ttft.weakened("extrapolated"), same.tpot.weakened("extrapolated"), same.context
            )
        if configuration.pp > 1:
            return self._staged(configuration, intent)
        return self._stage(configuration, intent, self._profile.num_layers)

    def _stage(self, configuration: Configuration, intent: Intent, num_layers: int) -> Timing:
        """Return the timing of so many layers with both ends on one worker, or on the ranks of a group."""
        alone = self.work(num_layers).timing(replace(configuration, pp=1), intent)
        if configuration.tp == 1:
            return alone
        chunks, batch = self._chunks(configuration, intent), intent.batch_size
        said = [(times, self._said(rows, batch, num_layers, configuration)) for times, rows in chunks]
        more = num_steps(chunks) - num_steps(self._chunks(Configuration(), intent))
        return Timing(  # a step more takes what a decode does at least
            alone.ttft + max(0, more) * alone.tpot + combine(said),
            alone.tpot + self._said(batch, batch, num_layers, configuration),
            alone.context,
        )

    def _said(self, rows: int, last_rows: int, num_layers: int, configuration: Configuration) -> Uncertain:
        """Return the communication of ranks in a step: two all-reduces in each layer.

        Those of the last layer have only the rows whose logits are wanted (`worker.model.transformer`). In a
        pipeline no message calls a step: the leader sends its rows to the other ranks of the first stage.
        """
        row_bytes, tp = self._profile.row_bytes, configuration.tp
        sums, last = (self._links.all_reduce(n * row_bytes, tp) for n in (rows, min(rows, last_rows)))
        before = self._links.hop(rows * row_bytes) if configuration.pp > 1 else CALLS * self._links.hop(0)
        return 2 * (num_layers - 1) * sums + 2 * last + before

    def _chunks(self, configuration: Configuration, intent: Intent) -> Chunks:
        """Return the chunks of the batch's prompts.

        In a group of one stage each rank plans its own requests and its part of a step; ranks without any
        leave theirs to others from the second step on.
        """
        tokens = intent.prompt_tokens * intent.batch_size
        most = first = self._profile.max_num_batched_tokens or tokens
        if configuration.tp > 1 and configuration.pp == 1 and self._profile.max_num_batched_tokens:
            ranks = min(configuration.tp, intent.batch_size)
            part = max(1, (most - CANARY_TOKENS) // configuration.tp)
            first = ranks * part
            most = configuration.tp * part - (configuration.tp - ranks) * (part // KEPT_SHARE)
        times, rest = divmod(max(0, tokens - first), most)
        return [(n, rows) for n, rows in ((1, min(first, tokens)), (times, most), (1, rest)) if n and rows]

    def _staged(self, configuration: Configuration, intent: Intent) -> Timing:
        """Return the timing of stages that are all alike, the first with both ends."""
        layers, pp = self._profile.num_layers, configuration.pp
        decodes = math.ceil(intent.batch_size / pp)  # sequences of each batch on its way
        batches = math.ceil(intent.batch_size / decodes)
        first_layers, one_batch = math.ceil(layers / pp), replace(intent, batch_size=decodes)
        whole, first = (self._stage(configuration, intent, n) for n in (layers, first_layers))
        through, lead = (self._stage(configuration, one_batch, n) for n in (layers, first_layers))
        chunks = self._chunks(configuration, intent)
        steps, last_rows = num_steps(chunks), chunks[-1][1]
        follow = (steps - 1) / steps  # only the first stage's part of them counts
        ttft = (1 - follow) * whole.ttft + follow * first.ttft + self._hops(pp, last_rows, intent.batch_size)
        trip, busy = through.tpot + self._hops(pp, decodes, decodes), batches * lead.tpot
        slower = busy if busy.value > trip.value else trip
        last_begins = (batches - 1) / max(1, intent.output_tokens - 1)  # behind the others, once
        tpot = slower + last_begins * lead.tpot
        return Timing(ttft.weakened("extrapolated"), tpot.weakened("extrapolated"), whole.context)

    def _hops(self, pp: int, rows: int, last_rows: int) -> Uncertain:
        row_bytes = self._profile.row_bytes
        back = self._links.hop(min(rows, last_rows) * row_bytes)
        return (pp - 1) * self._links.hop(rows * row_bytes) + back


def slowdowns_of(profile: Profile) -> dict[Precision, Slowdown]:
    """Return how much longer steps take in each precision than in full, on one device.

    Prompts by the time to the first token, the rest by the time per token, in the largest batches that were
    measured. Nothing of a profile without full precision.
    """
    model = LatencyModel(profile)
    if "full" not in (precisions := model.precisions()):
        return {}
    intent = Intent(batch_size=max(one.batch_size for one in profile.latency))
    full, found = model.timing(Configuration(), intent), dict[Precision, Slowdown]()
    for precision in precisions:
        one = model.timing(Configuration(precision=precision), intent)
        factors = ratio(one.ttft, full.ttft), ratio(one.tpot, full.tpot)
        if precision != "full" and min(factors) > 0:
            found[precision] = Slowdown(*factors)
    return found


class RankModel:
    """Latencies of one device, or of one rank of a group, for a model of so many layers."""

    def __init__(self, cells: Cells, num_layers: int) -> None:
        self._cells, self._num_layers = cells, num_layers
        self._surfaces: dict[Configuration, Surface] = {}

    def precisions(self) -> list[Precision]:
        """Return the precisions that were measured on a single device."""
        return [one for one in PRECISIONS if self._surface(Configuration(precision=one))]

    def timing(self, configuration: Configuration, intent: Intent) -> Timing:
        """Return TTFT and TPOT of one stage. Raises KeyError as LatencyModel.timing does."""
        degrees = self._degrees(configuration.precision)
        if 1 not in degrees:
            raise KeyError(f"{configuration.precision} was not measured on a single device")
        if configuration.tp in degrees:
            return at(self._surface(configuration), intent)
        if len(degrees) > 1:  # serial + parallel / tp is a straight line in 1/tp
            timings = {1 / tp: self.timing(replace(configuration, tp=tp), intent) for tp in degrees}
            return _on_line(timings, 1 / configuration.tp, intent.prompt_tokens)
        single = self.timing(replace(configuration, tp=1), intent)
        if others := self._as_others(single, configuration, intent):
            return others
        ttft, tpot = (_assumed_share(one, configuration.tp) for one in (single.ttft, single.tpot))
        return Timing(ttft, tpot, single.context)

    def _surface(self, configuration: Configuration) -> Surface:
        """Return the surface of all layers; shapes of a rank that were not measured are as on one worker."""
        if configuration not in self._surfaces:
            cells = self._cells.get(configuration, {})
            surface = {shape: found for shape, one in cells.items() if (found := self._at_layers(one))}
            if configuration.tp > 1:
                surface = filled_like(surface, self._surface(replace(configuration, tp=1)))
            self._surfaces[configuration] = surface
        return self._surfaces[configuration]

    def _at_layers(self, by_layers: Mapping[int, Timing]) -> Timing | None:
        """Return the timing of all layers; None for one size of fingerprint, which shows no layer's part."""
        if self._num_layers in by_layers:
            return by_layers[self._num_layers]
        if len(by_layers) < 2:
            return None
        return _on_line(by_layers, self._num_layers, next(iter(by_layers.values())).context)

    def _degrees(self, precision: Precision) -> list[int]:
        measured = {one.tp for one in self._cells if one.precision == precision and one.pp == 1}
        return sorted(tp for tp in measured if self._surface(Configuration(tp=tp, precision=precision)))

    def _as_others(self, single: Timing, configuration: Configuration, intent: Intent) -> Timing | None:
        """Return the timing with the speed-up of the first precision that has more degrees."""
        for precision in self.precisions():
            if len(self._degrees(precision)) > 1:
                one = self.timing(Configuration(precision=precision), intent)
                many = self.timing(replace(configuration, precision=precision), intent)
                return single.scaled(ratio(many.ttft, one.ttft), ratio(many.tpot, one.tpot))
        return None


def _on_line(timings: Mapping[float, Timing] | Mapping[int, Timing], x: float, context: float) -> Timing:
    """Return TTFT and TPOT at `x`, each on the line of least squares."""
    ttft = line_at([(at, one.ttft) for at, one in timings.items()], x)
    tpot = line_at([(at, one.tpot) for at, one in timings.items()], x)
    weaker: Basis = "extrapolated"
    return Timing(ttft.weakened(weaker).at_least(0.0), tpot.weakened(weaker).at_least(0.0), context)


def _assumed_share(alone: Uncertain, tp: int) -> Uncertain:
    share = ASSUMED_SERIAL + (1 - ASSUMED_SERIAL) / tp
    unknown = within(1 / tp * alone.value, share * alone.value, alone.value)
    return share * replace(alone, value=0.0) + unknown


class LinkTimes:
    """Seconds of messages between ranks and stages, by their bytes, on straight lines between means.

    Means, since a token of a group takes dozens of all-reduces, which meet every thread that wakes late now
    and then. Without measurements they are assumed to take nothing.
    """

    def __init__(self, samples: Iterable[LinkSample]) -> None:
        measured: dict[tuple[LinkKind, int], list[float]] = defaultdict(list)
        for one in samples:
            measured[one.kind, one.nbytes] += one.seconds
        self._points: dict[LinkKind, list[tuple[float, Uncertain]]] = defaultdict(list)
        for (kind, nbytes), seconds in sorted(measured.items()):
            if seconds:
                self._points[kind].append((nbytes, averaged(seconds)))

    def hop(self, nbytes: float) -> Uncertain:
        """Return the time from one stage to the next; for 0 bytes that of the smallest message."""
        return self._seconds("hop", nbytes)

    def all_reduce(self, nbytes: float, tp: int) -> Uncertain:
        """Return the time of a sum over `tp` ranks.

        A ring moves 2 (tp - 1) / tp times the bytes of each rank. More than two were not measured: their time
        lies between that of two and that of two for each further rank.
        """
        pair = self._seconds("all_reduce", nbytes)
        if tp == 2:
            return pair
        more = within(pair.value, 2 * (tp - 1) / tp * pair.value, (tp - 1) * pair.value)
        return Uncertain(more.value, more.down + pair.down, more.up + (tp - 1) * pair.up, "assumed")

    def _seconds(self, kind: LinkKind, nbytes: float) -> Uncertain:
        points = self._points[kind]
        if not points:
            return exactly(0.0, "assumed")
        least, seconds = points[0]  # every message takes that at least
        return seconds if nbytes <= least else between(points, nbytes).at_least(seconds.value)
