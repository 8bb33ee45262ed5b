"""The real service: workers without a model become one instance of degree 2, or of two stages of degree 2, as
the intent wants it. It answers as one worker does, stays what it is at rest, and gives everything back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.checkpoints import digest_of
from bus.deployments import Configuration
from bus.messages import PRECISIONS
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from tests.known_truths import Truth, profile_of
from tests.service import DEMO_MODEL, Process, Service, wait_for
from worker.fingerprint.stored import profile_path, program_version, write_stored

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
]
REST_S = 5.0  # the policy that morphs parts groups that rest within a second or two


class Empty(Service):
    """Workers that start without a model."""

    def add_worker(self, worker: str) -> Process:
        env = {"INSTAR_WORKER__ID": worker, "INSTAR_WORKER__MODELS": "[]"}
        return self.add(worker, "worker", INSTAR_WORKER__MAY_BE_EMPTY="true", **env)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return httpx.request(method, f"{self.url()}/admin/{path}", json=body, timeout=60).json()

    def deploy(self, intent: dict[str, Any]) -> dict[str, Any]:
        """Until it serves."""
        name = self.ask("POST", "deployments", {"model": "demo", "intent": intent})["id"]
        return self.reaches(f"deployments/{name}", "serving")

    def retire(self, deployment: dict[str, Any]) -> None:
        """Until every page is free."""
        self.ask("DELETE", f"deployments/{deployment['id']}")
        self.reaches(f"deployments/{deployment['id']}", "retired")
        wait_for("every page to be free", self._is_empty, 30, 0.2)

    def _is_empty(self) -> bool:
        pages = [one["pages"] for one in self.state()["workers"]]
        return all(one is not None and one["free"] == one["budget"] for one in pages)

    def reaches(self, path: str, state: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            shown: dict[str, Any] = self.ask("GET", path)
            return shown if shown["state"] == state else None

        found: dict[str, Any] = wait_for(f"{path} to be {state}", reached, 120, 0.2)
        return found

    def text(self) -> str:
        body = {"model": "demo", "prompt": "def ", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url()}/v1/completions", json=body, timeout=60)
        return str(answer.json()["choices"][0]["text"])


def pretend_measured(folder: Path) -> None:
    """Measuring takes a minute."""
    known = profile_of(
        Truth(layers=8), shapes=[(prompt, batch) for prompt in PROMPT_TOKENS for batch in BATCH_SIZES]
    )
    kinds = [Configuration(precision=name) for name in PRECISIONS]
    ranks = [replace(kind, tp=2) for kind in kinds]
    profile = replace(
        known,
        digest=digest_of(folder),
        version=program_version(),
        latency=[replace(one, configuration=kind) for kind in kinds + ranks for one in known.latency],
        memory=[replace(one, configuration=kind) for kind in kinds for one in known.memory],
    )
    write_stored(profile_path(folder, "cpu", program_version()), profile)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Empty]:
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    pretend_measured(folder)
    settings = {
        "WORKER__MAX_TP": "2",
        "WORKER__MAX_MODEL_LEN": "512",
        "WORKER__HOST_DIR": str(tmp_path_factory.mktemp("images")),
    }
    empty = Empty(num_workers=4, settings=settings)
    with empty:
        empty.ask("POST", "models", {"name": "demo", "path": str(folder)})
        empty.reaches("models/demo", "profiled")
        yield empty


def test_a_group_is_deployed_of_empty_workers_answers_and_goes(service: Empty) -> None:
    with service.explained():
        alone = service.deploy({"tp": 1, "pp": 1, "precision": "full"})
        expected = service.text()
        service.retire(alone)
        both = service.deploy({"tp": 2, "pp": 1, "precision": "full"})
        assert [stage["workers"] for stage in both["stages"]] == [["w0", "w1"]]
        assert service.text() == expected
        time.sleep(REST_S)
        (shown,) = service.state()["instances"]
        assert (shown["id"], shown["tp"]) == ("demo@w0", 2)
        service.retire(both)


def test_stages_of_two_ranks_are_deployed_answer_and_go(service: Empty) -> None:
    with service.explained():
        alone = service.deploy({"tp": 1, "pp": 1, "precision": "full"})
        expected = service.text()
        service.retire(alone)
        deployed = service.deploy({"tp": 2, "pp": 2, "precision": "full"})
        stages = [stage["workers"] for stage in deployed["stages"]]
        assert [len(workers) for workers in stages] == [2, 2]
        assert service.text() == expected
        time.sleep(REST_S)
        (shown,) = service.state()["instances"]
        assert (shown["tp"], shown["pp"], shown["stages"]) == (2, 2, deployed["stages"])
        assert service.text() == expected
        service.retire(deployed)
