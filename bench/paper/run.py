"""One run of the paper's evaluation: a load sent as `instar bench replay` sends it, and what came of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from bench.morph.service import Sample
from bench.paper.service import PaperService, Way
from bus.messages import MorphReport
from instar.replay.files import RunFile
from instar.replay.generator import Generator
from instar.replay.outcomes import Outcome, outcome_of
from instar.replay.requests import Dialect, bodies
from instar.replay.statistics import Slo
from instar.replay.traces import Arrival
from instar.replay.wire import Exchange, Server

SLO: Final = Slo(ttft_s=2.0, tpot_s=0.1)  # the paper's for the first token (§2.2); replay's own for the rest
MODEL: Final = "demo"


class TextKeeper(Generator):
    """Keeps what each request was answered, by its number."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.texts: dict[int, str] = {}

    def _conclude(self, outcome: Outcome, exchange: Exchange, problem: str) -> None:
        super()._conclude(outcome, exchange, problem)
        if outcome.is_served:
            self.texts[outcome.number] = text_of(bytes(exchange.tail))


def text_of(stream: bytes) -> str:
    """Of all events of a stream of completions."""
    found = []
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            event = msgspec.json.decode(line[6:])
            found += [choice.get("text", "") for choice in event.get("choices", ())]
    return "".join(found)


@dataclass(frozen=True, slots=True)
class PaperRun:
    """`file` is what `instar bench plot` shows. `others_cores`: that other programs kept busy meanwhile."""

    load: str
    way: str
    file: RunFile
    texts: dict[int, str] = field(repr=False)
    blocks_before: int
    others_cores: float

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Of the one instance, with `at_s`."""
        return [
            {"at_s": one["at_s"], **shape}
            for one in self.file.observed["samples"]
            for shape in one["instances"].values()
        ]

    def served(self, what: str) -> list[float]:
        """`ttft_s`, `tpot_s` or `queue_s` of all that were served."""
        found = [getattr(one, what) for one in self.file.outcomes if one.is_served]
        return [value for value in found if value is not None]


def run_one(
    service: PaperService, way: Way, name: str, source: str, arrivals: Sequence[Arrival], drain_s: float
) -> PaperRun:
    """Raises RuntimeError where a request was served and its text is not there."""
    blocks = service.take(way)
    ordered_s, before = time.time(), service.cpu_seconds()
    keeper = TextKeeper(
        Server.at(f"http://127.0.0.1:{service.port}", None),
        arrivals,
        bodies(arrivals, MODEL, Dialect(), seed=0),
        drain_s=drain_s,
        name=f"paper-{int(ordered_s)}",
    )
    asyncio.run(keeper.replay())
    after, took_s = service.cpu_seconds(), time.time() - ordered_s
    run = keeper.run
    if missing := sum(one.is_served for one in run.outcomes) - len(keeper.texts):
        raise RuntimeError(f"{missing} served requests have no text")
    about = {
        "name": way.name,
        "source": f"{name}: {source}",
        "format": "",
        "url": f"http://127.0.0.1:{service.port}",
        "model": MODEL,
        "arrivals_sha256": digest(arrivals),
        "began_at": round(run.began_at, 3),
        "was_interrupted": False,
        "notes": [],
    }
    file = RunFile(
        about,
        SLO,
        [outcome_of(one.as_json()) for one in run.outcomes],
        observed(service, ordered_s, run.began_at),
        [run.events_in[second] for second in range(max(run.events_in, default=-1) + 1)],
    )
    return PaperRun(name, way.name, file, keeper.texts, blocks, (after.others - before.others) / took_s)


def digest(arrivals: Sequence[Arrival]) -> str:
    """Of times and prompts: the same for the same load."""
    told = json.dumps([(one.at_s, one.prompt, one.output_tokens) for one in arrivals])
    return hashlib.sha256(told.encode()).hexdigest()


def observed(service: PaperService, since_s: float, began_s: float) -> dict[str, Any]:
    """From the bus, after the run: nobody asked the service anything while it was measured."""
    return {
        "samples": [_sample(one, service.id, began_s) for one in service.samples(since_s)],
        "missed": 0,
        "morphs": [_morph(report) for report in service.morphs(since_s)],
        "counted": {},
    }


def _sample(one: Sample, instance: str, began_s: float) -> dict[str, Any]:
    shape = {
        "kv_blocks": one.kv_blocks,
        "kv_used": one.kv_used,
        "running": one.running,
        "waiting": one.waiting,
        "layers_below_full": one.layers_below_full,
        "tp": 1,
        "queue_delay_s": one.waited_s,
        "preemptions": one.preemptions,
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
