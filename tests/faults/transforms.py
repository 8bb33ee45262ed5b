"""Changes of tensor parallelism of real workers, met on their way: orders, their progress, and what must hold
whatever happens to them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.service import Service, wait_for
from bus.codec import decode
from bus.morphs import MorphReport
from bus.names import Names
from tests.faults.conftest import heal
from tests.faults.morphs import NUM_LAYERS, Hand, ShapedStream, assert_complete, settings, stream

TOKENS = 800  # they outlast what is done to a group
PROMPTS = (
    "def read_lines(path):\n    ",
    "class Queue:\n    def __init__(self",
    "import os\n\n\ndef main():\n",
    "for name in sorted(names):\n    ",
)
# Room for all the streams in one worker, and clearly more for each in a group.
ROOMY = {"WORKER__MEMORY_MB": "56", "WORKER__LAYERS_PER_STEP": "1"}
# Where no layer is swapped: workers begin sooner.
ONLY_FULL = {"WORKER__VARIANTS": "[]"}
LEADER, FOLLOWER = "w1", "w0"  # of the pairs here: not in the order of their names
MEMBERS = pytest.mark.parametrize("victim", [LEADER, FOLLOWER], ids=["leader", "follower"])
RECOMPUTED = "instar_recomputed_tokens_total"
EVENTS = Names("instar:").events


def role(worker: str) -> str:
    return "leader" if worker == LEADER else "follower"


def other(worker: str) -> str:
    return FOLLOWER if worker == LEADER else LEADER


@dataclass
class Shapes:
    """An operator who groups workers and parts them again."""

    service: Service
    gateway: int = 0
    oracle: dict[str, list[str]] = field(default_factory=dict)  # by prompt
    pages: dict[str, dict[str, int]] = field(default_factory=dict)  # by worker, alone and idle
    blocks: dict[str, int] = field(default_factory=dict)

    def learn(self) -> Shapes:
        """Return what the service gives and has where nothing changes, and nothing else morphs."""
        Hand(self.service, gateway=self.gateway).manual()
        streams = {prompt: stream(self.service, TOKENS, self.gateway, prompt=prompt) for prompt in PROMPTS}
        for prompt, one in streams.items():
            assert_complete(one.finished(300), TOKENS)
            self.oracle[prompt] = one.tokens
        self.hand("w0").wait_idle()
        self.pages = {name: self.hand(name).pages() for name in self.workers}
        self.blocks = {name: self.hand(name).look()["kv"]["blocks"] for name in self.workers}
        return self

    @property
    def workers(self) -> list[str]:
        return sorted(name for name in self.service.processes if name.startswith("w"))

    def hand(self, worker: str) -> Hand:
        return Hand(self.service, f"demo@{worker}", self.gateway)

    # ---------------------------------------------------------------- orders

    def order(self, tp: int, *workers: str, **more: Any) -> Order:
        """Begun, or refused: then AssertionError.

        The members publish their cards one after the other: between them an order is to come again.
        """
        [last] = _events(self.service, count=1) or [(b"0", None)]
        url = f"{self.service.url(self.gateway)}/admin/instances/transform"

        def answer() -> dict[str, Any] | None:
            body = httpx.post(url, json={"workers": list(workers), "tp": tp} | more, timeout=20).json()
            return None if body.get("error", {}).get("code") == "shape_changing" else dict(body)

        given = wait_for("the members to show one shape", answer, 20)
        assert "id" in given, given
        return Order(self, str(given["id"]), last[0])

    def upwards(self, *workers: str, layers: int = 2) -> Order:
        """Wait until they become one, and so many layers have come to it."""
        return self.order(len(workers), *workers).met(layers)

    def apply(self, tp: int, *workers: str, within_s: float = 60.0) -> dict[str, Any]:
        """Until it is applied; a worker that has just come back may still be strange to the others."""
        deadline = time.monotonic() + within_s
        while True:
            end: dict[str, Any] = {}
            with suppress(AssertionError):
                end = self.order(tp, *workers).end()
            if end.get("state") == "applied":
                return end
            assert time.monotonic() < deadline, (end, self.shape())
            time.sleep(0.3)

    # ---------------------------------------------------------------- looking at it

    def shape(self) -> list[list[str]]:
        """The workers of every instance."""
        return sorted(list(one["workers"]) for one in self.service.state(self.gateway)["instances"])

    def wait_shape(self, *instances: list[str], within_s: float = 30.0) -> None:
        wanted = sorted(instances)
        wait_for(f"the instances {wanted}", lambda: self.shape() == wanted, within_s)

    def recomputed(self) -> float:
        return self.service.metric(RECOMPUTED, self.gateway)

    def streams(self, tokens: int = TOKENS, gateway: int | None = None) -> list[ShapedStream]:
        """Running, one for each prompt, shared out among all instances."""
        where = self.gateway if gateway is None else gateway
        started = [stream(self.service, tokens, where, prompt=prompt) for prompt in PROMPTS]
        return [one.wait_chunks(5) for one in started]

    # ---------------------------------------------------------------- what must hold

    def assert_exact(self, streams: list[ShapedStream], tokens: int = TOKENS) -> None:
        """Each is whole, ended once, and the oracle's to the token."""
        for one in streams:
            assert_complete(one.finished(120), tokens)
            assert one.tokens == self.oracle[one.prompt][:tokens]

    def assert_whole(self) -> None:
        """Everybody serves alone with the pages of before, all blocks free, at full weights."""
        self.wait_shape(*[[name] for name in self.workers])
        wait_for("every block to be free", lambda: self.service.blocks_used(self.gateway) == 0, 30)
        for name in self.workers:
            hand, pages = self.hand(name), self.pages[name]
            wait_for(f"the pages of before in {name}", lambda h=hand, p=pages: h.pages() == p, 20)  # type: ignore[misc]

    def mend(self) -> None:
        """After a test, however it ended: everybody runs, and alone."""
        for process in self.service.processes.values():
            if process.is_alive:
                process.signal(signal.SIGCONT)
        heal(self.service)
        for workers in self.shape():
            self.apply(1, *workers)

    def assert_whole_again(self) -> None:
        """After what was done to them: all are back, are right, and can change their degree as before."""
        heal(self.service)
        self.assert_whole()
        before = self.recomputed()
        streams = self.streams(tokens=120)
        self.apply(len(self.workers), *self.workers)
        self.apply(1, *self.workers)
        self.assert_exact(streams, 120)
        self.assert_whole()
        assert self.recomputed() == before


@contextmanager
def serving(
    host: Path, *more: dict[str, str], kind: type[Service] = Service, **service: Any
) -> Iterator[Shapes]:
    """Two workers, unless `service` says otherwise, that have told what they give and have alone.

    host: for their variants. more: settings, above those of `ROOMY`.
    """
    with kind(**{"num_workers": 2} | service, settings=settings(host, ROOMY, *more)) as running:
        with running.explained():
            shapes = Shapes(running).learn()
        yield shapes


@dataclass
class Order:
    """One transform on its way; `since`: the entry of the stream of events before it."""

    shapes: Shapes
    id: str
    since: bytes

    def reports(self) -> list[MorphReport]:
        """All that its leader told."""
        told = _events(self.shapes.service, first=self.since)
        return [one for _, one in told if isinstance(one, MorphReport) and one.id == self.id]

    @property
    def layers_done(self) -> int:
        return max((int(one.numbers.get("layers_done", 0)) for one in self.reports()), default=0)

    def met(self, layers: int, within_s: float = 30.0) -> Order:
        """Wait until it has begun (0), or so many layers have their new degree, within milliseconds."""
        with self.shapes.service.redis as client:
            last, deadline = self.since, time.monotonic() + within_s
            while time.monotonic() < deadline:
                for _, entries in client.xread({EVENTS: last}, block=1000) or []:
                    for entry_id, fields in entries:
                        last, report = entry_id, decode(fields[b"m"])
                        if not isinstance(report, MorphReport) or report.id != self.id:
                            continue
                        if report.numbers.get("layers_done", 0) >= layers or report.state != "running":
                            return self
        raise AssertionError(f"{self.id} did not come to {layers} of {NUM_LAYERS} layers: {self.reports()}")

    def end(self, within_s: float = 60.0) -> dict[str, Any]:
        return Hand(self.shapes.service, gateway=self.shapes.gateway).ended(self.id, within_s)


def _events(service: Service, first: bytes = b"", count: int | None = None) -> list[tuple[bytes, Any]]:
    """Since the entry `first`; with a count the last ones."""
    with service.redis as client:
        entries: Any = client.xrevrange(EVENTS, count=count) if count else client.xrange(EVENTS, min=first)
    return [(entry_id, decode(fields[b"m"])) for entry_id, fields in entries]
