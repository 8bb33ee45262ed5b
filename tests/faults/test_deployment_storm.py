"""Models that are registered, deployed, retired and morphed at random while workers are killed. STORM_S says
how many seconds the storm lasts.

Two deployments of one model stay all the time, and every request for it must get its text; the others come
and go, and their requests are answered whole or refused.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest

from bench.common.service import wait_for
from tests.faults.deployments import (
    NUM_TOKENS,
    OF_DEMO_MODELS,
    DeployingService,
    assert_everything_is_given_back,
    assert_no_orphan,
    demo,
    deploying,
    workers_of,
)
from tests.faults.load import p99
from tests.faults.storm import Job, Storm

STORM_S = float(os.environ.get("STORM_S", "40"))
KEPT, OTHERS = "kept", ("one", "two")
PLAIN: Final = {"tp": 1, "pp": 1, "precision": "full", "prompt_tokens": 64, "output_tokens": 24}
INTENTS: Final[tuple[Any, ...]] = (
    "cost", "latency", "memory", {"pp": 2}, {"pp": 3, "precision": "full"}, {"tp": 2}, {"precision": "int8"},
    {"max_latency_s": 1e-6}, {"minimise": "fame"}, {"tp": 2, "pp": 2},
)  # fmt: skip
Report = Callable[[dict[str, Any]], None]
MAX_LOADS = 3  # in a row; a deployment that was hit so often fails
REFUSALS = {400, 404, 409, 503}
SETTINGS = {
    "WORKER__MEMORY_MB": "160",
    "WORKER__MAX_TP": "2",
    "WORKER__MAX_MODEL_LEN": "512",
    "WORKER__MORPH_SHARE": "0.5",
    "GATEWAY__QUEUE_TIMEOUT_S": "60",
}

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(STORM_S + 600)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployingService]:
    """Start a service with three models, which are not measured again when they are registered again."""
    with deploying(4, SETTINGS, tmp_path_factory) as running:
        folder = demo(running, KEPT)
        running.register(KEPT, folder)
        for name in OTHERS:  # weights and their times are alike, and so is what holds for them
            shutil.copytree(folder, running.folders / name)
            running.register(name, running.folders / name)
        running.ask("PUT", "policy", {"mode": "manual"})
        yield running


@dataclass
class DeploymentStorm(Storm):
    """Hands, readers and one who kills. `kept`: the deployments that stay, which answer with `text`."""

    service: DeployingService
    kept: list[str]
    text: str
    answers: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of the requests to the model that stays
    kills: int = 0

    def jobs(self) -> list[Job]:
        return [self._read_kept, self._read_others, self._order, self._order, self._kill, self._observe]

    def told(self) -> str:
        return f"{len(self.seconds)} requests, {self.kills} kills; {dict(sorted(self.answers.items()))}"

    # ---------------------------------------------------------------- who takes part

    def _read_kept(self, rng: random.Random) -> None:
        began = time.monotonic()
        answer = self.service.complete(KEPT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == self.text
        self.seconds.append(time.monotonic() - began)

    def _read_others(self, rng: random.Random) -> None:
        answer = self.service.complete(rng.choice(OTHERS))
        self._note("ask", answer)
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS, answer.text
        self.pause(0.1)

    def _observe(self, rng: random.Random) -> None:
        for worker in self.service.state()["workers"]:
            if pages := worker["pages"]:
                assert pages["weights"] + pages["kv"] + pages["free"] == pages["budget"], worker
        self.pause(0.3)

    def _order(self, rng: random.Random) -> None:
        orders = (self._deploy, self._deploy, self._retire, self._morph, self._register, self._remove)
        order = rng.choice(orders)
        if (answer := order(rng)) is not None:
            self._note(order.__name__.lstrip("_"), answer)
        self.pause(rng.random() * 0.5)

    def _note(self, what: str, answer: httpx.Response) -> None:
        assert answer.status_code < 300 or answer.status_code in REFUSALS, (what, answer.text)
        self.answers[f"{what} {answer.status_code}"] += 1

    def _kill(self, rng: random.Random) -> None:
        """One at a time, and only when both that stay are there: one of them always is."""
        self.pause(1 + 3 * rng.random())
        if self.is_ending:
            return
        kept = self._kept()
        tired = {worker for one in kept if one["attempts"] >= MAX_LOADS for worker in workers_of(one)}
        victim = rng.choice(sorted({f"w{i}" for i in range(self.service.num_workers)} - tired))
        before = self.service.epoch_of(victim)
        self.service.processes[victim].kill()
        self.kills += 1
        time.sleep(rng.random())
        self.service.processes[victim].start()
        wait_for(f"{victim} to come back", lambda: self.service.epoch_of(victim) > before, 90)
        wait_for("both that stay", self._is_whole, 120, 0.2)

    def _kept(self) -> list[dict[str, Any]]:
        return [one for one in self.service.deployments() if one["id"] in self.kept]

    def _is_whole(self) -> bool:
        kept = self._kept()
        assert not [one for one in kept if one["state"] == "failed"], kept
        shown = {one["id"] for one in self.service.state()["instances"]}
        return all(one["state"] == "serving" and one["instance"] in shown for one in kept)

    # ---------------------------------------------------------------- what they order

    def _deploy(self, rng: random.Random) -> httpx.Response | None:
        if len([one for one in self.service.deployments() if one["state"] not in ("retired", "failed")]) > 5:
            return self._retire(rng)
        body = {"model": rng.choice((*OTHERS, "none")), "intent": rng.choice(INTENTS)}
        return self.service.ask("POST", "deployments", body)

    def _retire(self, rng: random.Random) -> httpx.Response:
        there = [one["id"] for one in self.service.deployments() if one["id"] not in self.kept]
        return self.service.ask("DELETE", f"deployments/{rng.choice([*there, 'none'])}")

    def _register(self, rng: random.Random) -> httpx.Response:
        name = rng.choice(OTHERS)
        return self.service.ask("POST", "models", {"name": name, "path": str(self.service.folders / name)})

    def _remove(self, rng: random.Random) -> httpx.Response:
        return self.service.ask("DELETE", f"models/{rng.choice(OTHERS)}")

    def _morph(self, rng: random.Random) -> httpx.Response | None:
        instances = [one for one in self.service.state()["instances"] if one["model"] != KEPT]
        if not instances:
            return None
        one = rng.choice(instances)
        kind, body = rng.choice(
            (
                ("swap", {"precision": rng.choice(("full", "int8", "int4")), "count": rng.randint(1, 8)}),
                ("resize", {"blocks": rng.randint(one["min_blocks"], 2 * one["min_blocks"])}),
            )
        )
        return self.service.ask("POST", f"instances/{one['id']}/{kind}", body)


@pytest.fixture
def kept(service: DeployingService) -> list[str]:
    """Two deployments that serve, on workers of their own."""
    made = [service.deploy(KEPT, PLAIN) for _ in range(2)]
    wait_for("two deployments", lambda: len(service.deployments("serving")) == 2, 60)
    wait_for("their answer", lambda: service.complete(KEPT).status_code == 200)
    return made


def test_a_storm_of_deployments_and_deaths_leaves_no_orphan_and_no_page(
    service: DeployingService, kept: list[str], report: Report
) -> None:
    with service.explained():
        text = service.complete(KEPT).json()["choices"][0]["text"]
        with DeploymentStorm(service, kept, text, patience_s=240) as storm:
            storm.rage(STORM_S)
        assert storm.seconds and storm.kills > 0, storm.told()
        made = storm.answers["deploy 202"]
        assert made > 0 and storm.answers["ask 200"] > 0, storm.told()
        service.wait_ready()
        assert_no_orphan(service)
        assert service.complete(KEPT).json()["choices"][0]["text"] == text
        assert_everything_is_given_back(service)
    report(
        {
            "fault": f"24 {made} deployments and {storm.kills} kills in {STORM_S:.0f} s",
            "succeeded": len(storm.seconds),
            "failed": 0,
            "p99_before_s": None,
            "p99_after_s": p99(storm.seconds),
            "recovery_s": None,
            "told": storm.told(),
        }
    )
