"""A mixture of experts on four workers changes its degree at random while workers are killed and come back:
faults 11 and 13 of docs/faults.md. STORM_S says how many seconds the storm lasts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from bench.common.service import Process, Service, wait_for
from tests.faults.load import Load
from tests.faults.morph_storm import PROMPTS, REFUSALS, STATES, STREAM_TOKENS
from tests.faults.morphs import NUM_LAYERS, assert_complete, stream
from tests.faults.storm import Job
from tests.faults.test_transform_storms import STORM_S, ShapeStorm
from tests.faults.transforms import ONLY_FULL, Shapes, serving
from tests.support.paths import DEMO_MODEL
from tests.support.random_models import write_random

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(STORM_S + 1500),
]
Report = Callable[[dict[str, Any]], None]

# Sixteen experts of 24 KiB: the four of a rank of degree 4 are six pages, without padding.
MIXTURE: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS, "head_dim": 16}
DEADLY = ONLY_FULL | {
    "WORKER__PAGE_KIB": "16",
    "WORKER__LEASE_S": "10",  # longer than a busy machine keeps a worker waiting that is not dead
    "WORKER__MORPH_SHARE": "0.5",
    "GATEWAY__MAX_ATTEMPTS": "20",  # whoever is met by several deaths is no request that kills
    "GATEWAY__QUEUE_TIMEOUT_S": "180",
}
# A worker returns after some seconds, or a minute on a busy machine: deaths are counted, not timed.
FEWEST_DEATHS, DEATHS_WITHIN_S, STREAM_S = 3, 400.0, 180.0


class PatientService(Service):
    """Four workers compile the kernels of experts at the same time where nobody has done so yet."""

    start_s: ClassVar[float] = 600.0


@dataclass
class DeadlyStorm(ShapeStorm):
    """Workers change their degree, and one after the other is killed and comes back.

    deaths: by what the victim was in: a change of degree, a group, or any shape. degrees: how often an
    instance of each was seen.
    """

    kinds: tuple[str, ...] = ("transform", "transform", "transform", "cancel")
    # An order may find its worker gone, loading, or in its next epoch.
    states: frozenset[str] = STATES | {"stale"}
    refusals: frozenset[str] = REFUSALS | {"worker_not_found", "worker_loading"}
    hands: int = 1
    readers: int = 3
    patience_s: float = field(default=400.0, kw_only=True)
    deaths: Counter[str] = field(default_factory=Counter)
    degrees: Counter[int] = field(default_factory=Counter)
    _victim: Process | None = field(default=None, init=False)

    def jobs(self) -> list[Job]:
        return [*super().jobs(), self._kill]

    def rage(self, seconds: float) -> None:
        """Last until there were enough deaths, too."""
        super().rage(seconds)
        deadline = time.monotonic() + DEATHS_WITHIN_S
        while self.deaths.total() < FEWEST_DEATHS and time.monotonic() < deadline and not self._problems:
            time.sleep(0.1)

    def told(self) -> str:
        return f"{dict(self.deaths)} killed; degrees {dict(self.degrees)}; {super().told()}"

    def _kill(self, rng: random.Random) -> None:
        """One at a time, so that three are left; the next one when all four serve."""
        self.pause(rng.uniform(0.2, 2.0))
        moment = ("in a change", "in a group", "anywhere")[self.deaths.total() % 3]
        victim = ""
        while not victim and not self.is_ending:
            victim = self._found(moment, rng)
            self.pause(0.0 if victim else 0.02)
        if self.is_ending:
            return
        self._victim = process = self.service.processes[victim]
        process.kill()
        time.sleep(rng.uniform(0.0, 1.0))
        # The lease of the dead one may be there still.
        before = self._epoch(victim)
        process.start()
        wait_for(f"{victim} to come back", lambda: self._epoch(victim) not in (0, before), Service.start_s)
        self._victim = None
        self.service.wait_ready(Service.start_s)
        self.deaths[moment] += 1

    def _found(self, moment: str, rng: random.Random) -> str:
        """Return a worker that is there now; "" if none is."""
        state = self.service.state()
        if moment == "in a change":
            changes = [one for one in state["morphs"] if one["state"] == "running" and not one.get("steps")]
            found = [one["workers"] for one in changes if one["kind"] == "transform"]
        else:
            least = 2 if moment == "in a group" else 1
            found = [one["workers"] for one in state["instances"] if len(one["workers"]) >= least]
        return str(rng.choice(sorted({name for names in found for name in names}) or [""]))

    def _epoch(self, worker: str) -> int:
        """Return the epoch that its card has; 0 without a card."""
        return next((int(one["epoch"]) for one in self.service.state()["workers"] if one["id"] == worker), 0)

    def _read(self, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        one = stream(self.service, STREAM_TOKENS, prompt=prompt).finished(STREAM_S)
        assert_complete(one, STREAM_TOKENS)
        assert one.tokens == self.oracles[prompt]
        self.streams += 1

    def _observe(self, rng: random.Random) -> None:
        """Hold that only who is killed dies: a worker ends where it finds that a page or a block is lost."""
        victims = [self._victim]
        dead = [one for one in self.service.processes.values() if not one.is_alive]
        victims.append(self._victim)  # it may have been killed, or have come back, since the line above
        assert all(one in victims for one in dead), [one.name for one in dead]
        state = self.service.state()
        self.degrees.update(one["tp"] for one in state["instances"])
        for worker in state["workers"]:
            if pages := worker["pages"]:
                assert pages["weights"] + pages["kv"] + pages["free"] == pages["budget"], worker
        self.pause(0.5)

    def _transform(self, rng: random.Random) -> dict[str, Any]:
        if not self.service.state()["instances"]:
            return {"error": {"code": "instance_not_found"}}
        if rng.random() < 0.4:  # two groups of two seldom meet between two deaths
            return self._to_degree(rng, Shapes(self.service).workers, rng.choice((4, 4, 2, 1)))
        return super()._transform(rng)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    folder = tmp_path_factory.mktemp("experts") / "demo"
    write_random(folder, "qwen3 moe", **MIXTURE)
    host = tmp_path_factory.mktemp("host")
    with serving(host, DEADLY, kind=PatientService, model=folder, num_workers=4) as found:
        yield found


def test_experts_survive_a_storm_of_changes_and_deaths(experts: Shapes, report: Report) -> None:
    service = experts.service
    with service.explained():
        with Load(service, clients=1, timeout=STREAM_S) as load:
            load.warm(3)
            with DeadlyStorm(service) as storm:
                load.mark()
                storm.rage(STORM_S)
            load.recover(3)
        assert load.failed == []
        assert storm.streams > 0 and storm.answers["applied"] > 0, storm.told()
        assert storm.deaths.total() >= FEWEST_DEATHS, storm.told()
        assert not [why for why in storm.reasons if "the new shape is off" in why], storm.told()
        experts.mend()
        experts.assert_whole_again()
    deaths, changes = storm.deaths.total(), sum(storm.answers.values())
    row = load.row(f"11 {deaths} workers killed in {changes} changes of experts")
    report(row | {"told": storm.told()})
