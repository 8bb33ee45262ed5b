"""The real service: workers without a model become one instance of degree 2, or of two stages of degree 2, as
the intent wants it. It answers as one worker does, stays what it is at rest, and gives everything back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.common.service import wait_for
from tests.faults.deployments import (
    OF_DEMO_MODELS,
    DeployingService,
    assert_everything_is_given_back,
    pretend_measured,
)
from tests.support.paths import DEMO_MODEL

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(400)]  # the first test starts four workers
REST_S = 5.0  # the policy that morphs parts groups that rest within a second or two


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployingService]:
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("instar"))
    pretend_measured(folder)
    settings = {
        "WORKER__MAX_TP": "2",
        "WORKER__MAX_MODEL_LEN": "512",
        "WORKER__LEASE_S": "6",  # a machine that is busy is not a worker that is dead
        "WORKER__HOST_DIR": str(tmp_path_factory.mktemp("images")),
    }
    service = DeployingService(num_workers=4, settings=settings)
    with service, service.explained():
        service.register("demo", folder)
        yield service


@pytest.fixture
def service(running: DeployingService) -> Iterator[DeployingService]:
    with running.explained():
        yield running
        assert_everything_is_given_back(running)


@pytest.fixture(scope="module")
def text(running: DeployingService) -> str:
    """Return what one worker answers."""
    running.reaches(running.deploy("demo", {"tp": 1, "pp": 1, "precision": "full"}), "serving")
    found = text_of(running)
    assert_everything_is_given_back(running)
    return found


def text_of(service: DeployingService) -> str:
    answer = wait_for("an answer", lambda: (a := service.complete("demo")).status_code == 200 and a, 30, 0.2)
    return str(answer.json()["choices"][0]["text"])


def deployed(service: DeployingService, **shape: int) -> dict[str, Any]:
    """Return the card once it serves."""
    return service.reaches(service.deploy("demo", {"precision": "full"} | shape), "serving")


def test_a_group_is_deployed_of_empty_workers_answers_and_outlives_redis(
    service: DeployingService, text: str
) -> None:
    both = deployed(service, tp=2, pp=1)
    (leader, follower), *others = [stage["workers"] for stage in both["stages"]]
    assert leader != follower and not others
    assert text_of(service) == text
    time.sleep(REST_S)
    (shown,) = service.state()["instances"]
    assert (shown["id"], shown["tp"]) == (f"demo@{leader}", 2)
    service.processes["redis"].kill()  # with its data
    service.processes["redis"].start()
    wait_for("all workers", lambda: len(service.serving_workers()) == 4, 30, 0.2)
    found = wait_for("its deployment", lambda: service.deployments("serving"), 30, 0.2)
    assert text_of(service) == text
    wait_for("a group again", lambda: [one["tp"] for one in service.state()["instances"]] == [2], 60, 0.2)
    assert text_of(service) == text
    assert [(one["id"], one["loads"]) for one in found] == [(both["id"], both["loads"])]


def test_stages_of_two_ranks_are_deployed_and_answer(service: DeployingService, text: str) -> None:
    four = deployed(service, tp=2, pp=2)
    assert [len(stage["workers"]) for stage in four["stages"]] == [2, 2]
    assert text_of(service) == text
    time.sleep(REST_S)
    (shown,) = service.state()["instances"]
    assert (shown["tp"], shown["pp"], shown["stages"]) == (2, 2, four["stages"])
    assert text_of(service) == text
