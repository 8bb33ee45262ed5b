"""A run of the paper's evaluation: a load sent as `instar bench replay` sends it, and its outcome."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from bench.common.load import MODEL, play
from bench.common.service import OtherPrograms
from bench.morph.service import MorphService, Sample, Way
from bus.messages import WorkerTelemetry
from bus.morphs import MorphReport
from instar.replay.files import RunFile
from instar.replay.observer import facts_of, work_done
from instar.replay.schemas import Arrival
from instar.replay.statistics import Slo

SLO: Final = Slo(ttft_s=2.0, tpot_s=0.1)  # the paper's for the first token (§2.2); replay's own for the rest


@dataclass(frozen=True, slots=True)
class PaperRun:
    """A run; `file` is what `instar bench plot` shows, `others_cores` what other programs kept busy."""

    load: str
    way: str
    file: RunFile
    texts: dict[int, str] = field(repr=False)
    blocks_before: int
    others_cores: float

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples of the one instance, with `at_s`."""
        return [
            {"at_s": one["at_s"], **shape}
            for one in self.file.observed["samples"]
            for shape in one["instances"].values()
        ]

    def served(self, what: str) -> list[float]:
        """Return `ttft_s`, `tpot_s` or `queue_s` of all requests that were served."""
        found = [getattr(one, what) for one in self.file.outcomes if one.is_served]
        return [value for value in found if value is not None]


def run_one(
    service: MorphService,
    way: Way,
    name: str,
    source: str,
    arrivals: Sequence[Arrival],
    drain_s: float,
    cool_s: float = 0.0,
) -> PaperRun:
    """Send the load to a service that serves in one way, and return what came of it.

    The service rests for `cool_s` after the last order, and is idle at the first request.
    """
    blocks = service.use(way)
    time.sleep(cool_s)
    service.wait_at_rest(blocks)
    facts = facts_of(service.state())
    ordered_s, others = time.time(), OtherPrograms(service)
    recorder = play(service.url(), arrivals, drain_s=drain_s)
    run, others_cores = recorder.run, others.cores()
    about = {
        "name": way.name,
        "source": f"{name}: {source}",
        "format": "",
        "url": service.url(),
        "model": MODEL,
        "arrivals_sha256": digest(arrivals),
        "began_at": round(run.began_at, 3),
        "was_interrupted": False,
        "notes": [],
    }
    file = RunFile(
        about,
        SLO,
        [one.rounded() for one in run.outcomes],
        observed(service, ordered_s, run.began_at) | {"instances": facts},
        [run.events_in[second] for second in range(max(run.events_in, default=-1) + 1)],
    )
    return PaperRun(name, way.name, file, recorder.texts, blocks, others_cores)


def digest(arrivals: Sequence[Arrival]) -> str:
    """Return a hash of times and prompts, the same for the same load."""
    text = json.dumps([(one.at_s, one.prompt, one.output_tokens) for one in arrivals])
    return hashlib.sha256(text.encode()).hexdigest()


def observed(service: MorphService, since_s: float, began_s: float) -> dict[str, Any]:
    """Read what happened from the bus, after the run, so that the service was not disturbed meanwhile."""
    return {
        "samples": [_sample(one, service.id, began_s) for one in service.reports(since_s)],
        "missed": 0,
        "morphs": [_morph(report) for report in service.morphs(since_s)],
        "counted": {},
    }


def _sample(report: WorkerTelemetry, instance: str, began_s: float) -> dict[str, Any]:
    one = Sample.of(report.at_ms, report.instances[0])
    shape = {
        "kv_blocks": one.kv_blocks,
        "kv_used": one.kv_used,
        "running": one.running,
        "waiting": one.waiting,
        "layers_below_full": one.layers_below_full,
        "tp": 1,
        "queue_delay_s": one.waited_s,
        "preemptions": one.preemptions,
        **work_done(msgspec.to_builtins(report.instances[0])),
    }
    return {"at_s": round(one.at_s - began_s, 3), "instances": {instance: shape}}


def _morph(report: MorphReport) -> dict[str, Any]:
    return {
        "id": report.id,
        "kind": report.kind,
        "state": report.state,
        "started": report.started_ms / 1e3,
        "numbers": dict(report.numbers),
    }
