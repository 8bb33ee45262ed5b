"""The controller that leads is killed or stopped while it deploys, and another one goes on with it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from bench.common.service import Process, wait_for
from tests.faults.deployments import (
    OF_DEMO_MODELS,
    Asking,
    DeployingService,
    assert_everything_is_given_back,
    assert_no_orphan,
    demo,
    deploying,
    pretend_measured,
)

KEPT, ALONE = "kept", {"tp": 1, "pp": 1, "precision": "full", "prompt_tokens": 64, "output_tokens": 24}
SETTINGS: Final = {
    "WORKER__MEMORY_MB": "160",
    "WORKER__MAX_TP": "2",
    "WORKER__MAX_MODEL_LEN": "512",
    "CONTROLLER__PLACEMENT": "least-loaded",
}
LEASE_S = 3.0  # the default
Report = Callable[[dict[str, Any]], None]

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployingService]:
    """Two workers, on one of which a model serves, and two controllers."""
    with deploying(2, SETTINGS, tmp_path_factory) as service:
        service.add("controller-b", "controller")
        service.ask("PUT", "policy", {"mode": "manual"})
        service.register(KEPT, demo(service, KEPT))
        service.reaches(service.deploy(KEPT, ALONE), "serving")
        yield service
        assert_everything_is_given_back(service)


def leader(service: DeployingService, after: int = 0) -> tuple[Process, int]:
    """Return the controller that leads, and its term, which is above `after`."""

    def look() -> tuple[Process, int] | None:
        shown = service.state()["controller"]
        found = [one for one in service.processes.values() if f"-{one.pid}-" in shown["name"]]
        is_next = shown["leads"] and shown["term"] > after
        return (found[0], shown["term"]) if is_next and found else None

    process, term = wait_for("a controller to lead", look, 30, 0.05)
    return process, term


def loading(service: DeployingService, name: str) -> str:
    """Order a deployment of a model of its own, and meet it as it loads."""
    folder = demo(service, name, is_measured=False)
    config = folder / "config.json"  # another config, so that no host images of it are there: it takes longer
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1.3e-05'))
    pretend_measured(folder)
    service.register(name, folder)
    deployment = service.deploy(name, ALONE)
    wait_for("it to load", lambda: service.deployment(deployment)["state"] == "loading", 30)
    return deployment


def terms(service: DeployingService) -> list[int]:
    """Return the terms of all events and commands that have one, in the order of their times."""
    with service.redis as client:
        streams: Any = [client.xrange(f"instar:{name}") for name in ("events", "control:w0", "control:w1")]
    entries = [entry for stream in streams for entry in stream if b"t" in entry[1]]
    found = sorted(entries, key=lambda entry: tuple(map(int, entry[0].split(b"-"))))
    return [int(fields[b"t"]) for _, fields in found]


def test_a_leader_killed_as_it_deploys_is_followed_by_another_that_finishes_it(
    running: DeployingService,
) -> None:
    service = running
    first, term = leader(service)
    with service.explained(), Asking(service, KEPT):
        deployment = loading(service, "killed")
        first.kill()
        second, _ = leader(service, after=term)
        assert second is not first
        service.reaches(deployment, "serving")
        assert service.complete("killed").status_code == 200
        service.ask("DELETE", f"deployments/{deployment}")
        service.reaches(deployment, "retired")
    assert terms(service) == sorted(terms(service))
    first.start()
    assert_no_orphan(service)


def test_a_leader_stopped_as_it_deploys_and_continued_orders_nothing_more(running: DeployingService) -> None:
    service = running
    first, term = leader(service)
    with service.explained(), Asking(service, KEPT):
        deployment = loading(service, "stopped")
        first.signal(signal.SIGSTOP)
        second, next_term = leader(service, after=term)
        assert second is not first
        service.reaches(deployment, "serving")
        first.signal(signal.SIGCONT)
        wait_for("it to wait", lambda: "it waits" in first.tail(), 30)
        assert leader(service) == (second, next_term)
        service.ask("DELETE", f"deployments/{deployment}")
        service.reaches(deployment, "retired")
    assert leader(service) == (second, next_term)
    assert terms(service) == sorted(terms(service))
    assert_no_orphan(service)
