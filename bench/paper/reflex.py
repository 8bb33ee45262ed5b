"""Decisions of the reflex in a run, from the bus: the predicted loss, first blocks, the way back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.common.results import DEMO, digits
from bench.morph.service import MorphService
from bench.paper.run import PaperRun
from bus.messages import PARTS, Event, InstanceTelemetry
from bus.morphs import MorphReport
from bus.names import Names
from bus.precisions import DEFAULT_SWAP, QUANTIZED, Precision
from worker.model.config import read_config
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest
from worker.morph.losses import Losses, losses_of
from worker.morph.plan import Half
from worker.shape.layer_order import half_losses, profile_path, read_profile, write_profile

BUSY: Final = 0.85  # of the KV blocks in use: that much is pressure
ASSUMED: Final = "assumed"
LENT: Final = "the profile of models/demo"


@dataclass(frozen=True, slots=True)
class LossTable:
    """The losses that the service decides by, and that its runs are judged by.

    source: "its own profile", LENT, or ASSUMED.
    """

    losses: Losses
    source: str

    @property
    def of_int4(self) -> float:
        """The loss of all layers in INT4."""
        everything: dict[Half, Precision] = dict.fromkeys(self.losses.shares, DEFAULT_SWAP)
        return self.losses.total(everything)


def lend_profiles(folder: Path) -> None:
    """Give a dummy the profiles of models/demo, if it has as many layers.

    Random weights have no quality of their own. With what was measured of the demo model, the service decides
    by the same losses that its runs are judged by.
    """
    demo, dummy = read_config(DEMO), read_config(folder)
    if dummy.num_layers != demo.num_layers:
        return
    of_demo, of_dummy = (checkpoint_digest(one, open_checkpoint(one)) for one in (demo, dummy))
    for precision in QUANTIZED:
        profile = read_profile(profile_path(DEMO, precision), model=of_demo, num_layers=demo.num_layers)
        path = profile_path(folder, precision)
        path.parent.mkdir(exist_ok=True)
        write_profile(path, replace(profile, model=of_dummy, method="rtn"))  # a dummy has no set of weights


def loss_table(model: Path, num_layers: int) -> LossTable:
    """Return the losses of a model's halves."""
    found = losses_of(num_layers, QUANTIZED, half_losses(read_config(model), QUANTIZED))
    if found.assumed:
        return LossTable(found, ASSUMED)
    return LossTable(found, "its own profile" if model.samefile(DEMO) else LENT)


def observed(service: MorphService, run: PaperRun, table: LossTable, since_s: float) -> dict[str, Any]:
    """Return what the reflex did in a run that was sent after `since_s`, and until now."""
    began_s, losses = run.file.about["began_at"], table.losses
    reports = [(report.at_ms / 1e3, report.instances[0]) for report in service.reports(since_s)]
    decided = [
        event
        for event in service.messages(Names().events, Event, since_s)
        if event.kind == "morph_decided" and event.morph_id.startswith("reflex-")
    ]
    pressed = [event.at_ms / 1e3 for event in decided if event.cause != "ease"]
    pressed += [at_s for at_s, one in reports if one.kv_used > BUSY * one.kv_blocks]
    below = [at_s for at_s, one in reports if losses.total(halves_of(one)) > 0]
    shapes = [one for _, one in reports]
    return {
        "loss": digits(mean_loss(shapes, losses)),
        "first_blocks": first_blocks(decided, service.morphs(since_s), reports),
        "back_after_s": round(max(below) - max(pressed), 2) if below and pressed else 0.0,
        "is_back": losses.total(halves_of(shapes[-1])) == 0,
        "decisions": [
            {"at_s": round(event.at_ms / 1e3 - began_s, 2), "cause": event.cause, "reason": event.reason}
            for event in decided
        ],
    }


def mean_loss(reports: Sequence[InstanceTelemetry], losses: Losses) -> float:
    """Return the predicted loss of the shapes, weighted by the tokens that were generated in each."""
    total, tokens = 0.0, 0
    for before, after in itertools.pairwise(reports):
        made = max(0, after.generation_tokens - before.generation_tokens)
        total += made * losses.total(halves_of(after))
        tokens += made
    return total / tokens if tokens else 0.0


def halves_of(one: InstanceTelemetry) -> dict[Half, Precision]:
    return {Half(i, part): layer.of(part) for i, layer in enumerate(one.layers) for part in PARTS}


# --------------------------------------------------------------------------- first blocks


def first_blocks(
    decided: Sequence[Event],
    morphs: Iterable[MorphReport],
    reports: Sequence[tuple[float, InstanceTelemetry]],
) -> dict[str, Any]:
    """Return the seconds from the first request that was queued for blocks to the first block that was added.

    One value for each episode of relief, which begins with a decision and ends when layers go back. It counts
    from the arrival of the request that missed blocks when the first decision fell, or of the one that stood
    before it in the same queue. `unqueued` counts the episodes in which none was queued yet, `without_blocks`
    those that added none.
    """
    by_id = {report.id: report for report in morphs}
    seconds, unqueued, without_blocks = [], 0, 0
    for episode in _episodes(decided):
        added_s = next(filter(None, (_added_s(event, by_id.get(event.morph_id)) for event in episode)), 0.0)
        if not added_s:
            without_blocks += 1
        elif not (queued_s := _queued_s([one for one in episode if one.at_ms / 1e3 <= added_s], reports)):
            unqueued += 1
        else:
            seconds.append(round(added_s - queued_s, 3))
    return {"seconds": seconds, "unqueued": unqueued, "without_blocks": without_blocks}


def _episodes(decided: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield the decisions for relief between those that give layers back."""
    for is_relief, events in itertools.groupby(decided, lambda event: event.cause not in _RETURNS):
        if is_relief:
            yield list(events)


_RETURNS: Final = ("ease", "precision_floor")


def _added_s(event: Event, report: MorphReport | None) -> float:
    """Return when the morph that was decided had added its first blocks; 0.0: it added none."""
    numbers: Mapping[str, Any] = report.numbers if report else {}
    if report is None or numbers.get("blocks_after", 0) <= numbers.get("blocks_before", 0):
        return 0.0
    if took_s := numbers.get("blocks_seconds"):
        return event.at_ms / 1e3 + float(took_s)
    return (report.ended_ms or 0) / 1e3  # of a resize, whose last blocks count


def _queued_s(episode: Sequence[Event], reports: Sequence[tuple[float, InstanceTelemetry]]) -> float:
    """Return when the queue for blocks began; 0.0: nobody was queued when the decisions fell."""
    queued = [one for one in episode if one.numbers["waited_s"]]
    if not queued:
        return 0.0
    first_s = min(one.at_ms / 1e3 - float(one.numbers["waited_s"]) for one in queued)
    for at_s, one in reversed(reports):
        # Whoever was queued before that request had arrived has left a queue that was empty since.
        if first_s <= at_s <= queued[0].at_ms / 1e3 and one.oldest_wait_seconds:
            first_s = min(first_s, at_s - one.oldest_wait_seconds)
    return first_s
