"""Deployments of the real service, for tests that harm it: orders, what is shown, what must hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from bus.checkpoints import digest_of
from bus.deployments import Configuration
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from tests.empty_service import EmptyService
from tests.faults.load import PROMPT
from tests.faults.morphs import NUM_LAYERS
from tests.known_truths import BITS, Truth, profile_of
from tests.service import wait_for
from worker.fingerprint.stored import profile_path, program_version, write_stored

NUM_TOKENS: Final = 24


@dataclass
class DeployingService(EmptyService):
    """`folders`: of the models."""

    folders: Path = Path()

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, f"{self.url()}/admin/{path}", json=body, timeout=60)

    def register(self, name: str, folder: Path) -> None:
        self.ask("POST", "models", {"name": name, "path": str(folder)})
        wait_for(f"{name} to be measured", lambda: self.state_of(name) == "profiled", 300, 0.2)

    def state_of(self, model: str) -> str:
        return str(self.ask("GET", f"models/{model}").json()["state"])

    def deploy(self, model: str, intent: Any) -> str:
        return str(self.ask("POST", "deployments", {"model": model, "intent": intent}).json()["id"])

    def deployments(self, *states: str) -> list[dict[str, Any]]:
        found = self.ask("GET", "deployments").json()["deployments"]
        return [one for one in found if not states or one["state"] in states]

    def epoch_of(self, worker: str) -> int:
        """0: it does not serve."""
        there = [one for one in self.state()["workers"] if one["id"] == worker and one["state"] == "serving"]
        return int(there[0]["epoch"]) if there else 0

    def complete(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        url = f"{self.url()}/v1/completions"
        return httpx.post(url, json=body | {"ignore_eos": True}, timeout=90)


def workers_of(deployment: dict[str, Any]) -> list[str]:
    return [worker for stage in deployment["stages"] for worker in stage["workers"]]


def pretend_measured(folder: Path) -> None:
    """Of the demo model: a profile beside it, which workers believe. Measuring takes a minute."""
    truth = Truth(layers=NUM_LAYERS, embedding_bytes=8 << 20, layer_bytes=5 << 19)
    known = profile_of(
        truth,
        configurations=[Configuration(precision=name) for name in BITS],
        shapes=[(prompt, batch) for prompt in PROMPT_TOKENS for batch in BATCH_SIZES],
    )
    fewest = Configuration(precision="int3")
    version = program_version()
    profile = replace(
        known,
        digest=digest_of(folder),
        version=version,
        latency=known.latency
        + [
            replace(one, configuration=fewest)
            for one in known.latency
            if one.configuration.precision == "int4"
        ],
        memory=known.memory
        + [
            replace(one, configuration=fewest)
            for one in known.memory
            if one.configuration.precision == "int4"
        ],
    )
    write_stored(profile_path(folder, "cpu", version), profile)


def settled(service: DeployingService) -> bool:
    """Nothing comes or goes."""
    return not service.deployments("loading", "retiring") and all(
        not one["stages"] for one in service.deployments("waiting", "failed", "retired")
    )


def assert_no_orphan(service: DeployingService) -> None:
    """Every instance belongs to a deployment that serves, and the other way round."""

    def is_so() -> bool:
        shown = sorted(one["id"] for one in service.state()["instances"])
        return settled(service) and shown == sorted(one["instance"] for one in service.deployments("serving"))

    with contextlib.suppress(AssertionError):
        wait_for("instances and deployments to agree", is_so, 60, 0.3)
        return
    raise AssertionError((service.state()["instances"], service.deployments()))


def assert_everything_is_given_back(service: DeployingService) -> None:
    for one in service.deployments("waiting", "loading", "serving", "failed"):
        service.ask("DELETE", f"deployments/{one['id']}")
    wait_for("everything to be retired", lambda: settled(service) and not service.deployments("serving"), 120)

    def is_empty() -> bool:
        pages = [one["pages"] for one in service.state()["workers"]]
        return all(one is not None and one["free"] == one["budget"] for one in pages)

    with contextlib.suppress(AssertionError):
        wait_for("every page to be free", is_empty, 30)
        return
    raise AssertionError(service.state()["workers"])
