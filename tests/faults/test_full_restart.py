"""Every process is killed, Redis too, which appends its writes to a file: what was deployed serves again."""

from __future__ import annotations

import pytest

from bench.common.service import wait_for
from tests.faults.deployments import OF_DEMO_MODELS, DeployingService, demo
from tests.faults.morphs import QUICK_NUMBERS
from tests.faults.test_controller_deaths import ALONE, SETTINGS

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(400)]


def test_a_deployment_its_intent_and_the_policy_are_back_after_everything_was_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    host = {"WORKER__HOST_DIR": str(tmp_path_factory.mktemp("host"))}
    service = DeployingService(
        append_only=True,
        settings=QUICK_NUMBERS | SETTINGS | host,
        folders=tmp_path_factory.mktemp("models"),
    )
    with service, service.explained():
        service.register("kept", demo(service, "kept"))
        before = service.reaches(service.deploy("kept", ALONE), "serving")
        text = service.complete("kept").json()["choices"][0]["text"]
        service.set_policy(mode="accuracy")
        for process in reversed(service.processes.values()):
            process.kill()
        redis, *others = service.processes.values()
        redis.start()
        wait_for("Redis to answer", service.redis_answers)
        for process in others:
            process.start()
        service.wait_ready()
        wait_for("the model to answer", lambda: service.complete("kept").status_code == 200, 120, 0.3)
        assert service.complete("kept").json()["choices"][0]["text"] == text
        after = service.reaches(before["id"], "serving")
        assert after["intent"] == before["intent"]
        assert service.state()["policy"]["mode"] == "accuracy"
