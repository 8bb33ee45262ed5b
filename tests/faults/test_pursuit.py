"""The intent stays the target of what serves, on the real service: it moves to workers that became idle where
it would be faster, and makes room for what waits where that costs nothing. Its requests go on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from bench.common.service import wait_for
from bus.messages import Event
from tests.faults.deployments import (
    OF_DEMO_MODELS,
    Asking,
    DeployingService,
    assert_everything_is_given_back,
    assert_no_orphan,
    demo,
    deploying,
    told_of,
    workers_of,
)

WINDOW_S, COOLDOWN_S = 3.0, 6.0
FULL: Final = {"precision": "full", "prompt_tokens": 64, "output_tokens": 24}
FAST: Final = FULL | {"minimise": "latency", "pp": 1}
ALONE: Final = FAST | {"tp": 1}
PAIR: Final = FULL | {"tp": 2, "pp": 1}
# Its KV leaves no room for another model on either worker.
LARGE: Final = PAIR | {"prompt_tokens": 488, "batch_size": 64}
MODELS: Final = ("mine", "other", "third")
SETTINGS: Final = {
    "CONTROLLER__PLACEMENT": "least-loaded",
    "CONTROLLER__LOAD_WINDOW_S": str(WINDOW_S),
    "CONTROLLER__CHANGE_COOLDOWN_S": str(COOLDOWN_S),
    "WORKER__MEMORY_MB": "160",
    "WORKER__MAX_TP": "2",
    "WORKER__MAX_MODEL_LEN": "512",
    "WORKER__MORPH_SHARE": "0.5",
}

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployingService]:
    """Three workers, and three models of which two workers are known to be faster than one."""
    with deploying(3, SETTINGS, tmp_path_factory) as service:
        for name in MODELS:
            service.register(name, demo(service, name))
        yield service


@pytest.fixture
def service(running: DeployingService) -> Iterator[DeployingService]:
    with running.explained():
        yield running
        running.wait_ready()
        assert_no_orphan(running)
        assert_everything_is_given_back(running)


def last_told_of(service: DeployingService, kind: str, name: str) -> tuple[float, Event]:
    """The last such event about this deployment, and when it came."""
    return told_of(service, kind, name)[-1]


def heirs_of(service: DeployingService, name: str, *states: str) -> list[dict[str, Any]]:
    return [one for one in service.deployments(*states) if one["replaces"] == name]


def heir_of(service: DeployingService, name: str, *states: str) -> dict[str, Any]:
    def look() -> list[dict[str, Any]]:
        return heirs_of(service, name, *states)

    (heir,) = wait_for(f"{name} to have an heir that is {' or '.join(states)}", look, 90, 0.1)
    return dict(heir)


def fast_on_one(service: DeployingService) -> tuple[str, str]:
    """Deploy one that is to be fast on one worker, as the two others are in a group; return both."""
    pair = service.deploy("other", PAIR)
    service.reaches(pair, "serving")
    fast = service.deploy("mine", FAST)
    assert service.reaches(fast, "serving")["configuration"]["tp"] == 1
    return fast, pair


def assert_cooled(service: DeployingService, old: str, heir: str, cooldown_s: float = COOLDOWN_S) -> None:
    served_at, _ = last_told_of(service, "deployment_serving", old)
    tried_at, _ = last_told_of(service, "deployment_loading", heir)
    assert tried_at - served_at >= cooldown_s - 0.5


def test_what_is_to_be_fast_moves_to_workers_that_became_idle(service: DeployingService) -> None:
    fast, pair = fast_on_one(service)
    with Asking(service, "mine") as asking:
        service.ask("DELETE", f"deployments/{pair}")
        heir = heir_of(service, fast, "serving")
        old = service.reaches(fast, "retired")
        asking.more()
    assert (heir["configuration"]["tp"], old["heir"]) == (2, heir["id"])
    _, event = last_told_of(service, "deployment_loading", heir["id"])
    assert event.numbers["latency_then"] <= 0.9 * event.numbers["latency_now"]
    assert event.reason.startswith(f"in place of {fast} on {', '.join(workers_of(heir))}: latency is ")
    assert_cooled(service, fast, heir["id"])
    (free,) = {"w0", "w1", "w2"} - set(workers_of(heir))

    def is_free() -> bool:
        pages = service.pages(free)
        return pages is not None and pages["free"] == pages["budget"]

    wait_for(f"the pages of {free}", is_free, 20)
    time.sleep(COOLDOWN_S + 2)  # nothing is better than what it has
    assert service.deployment(heir["id"])["state"] == "serving"
    assert not heirs_of(service, heir["id"])


def test_an_heir_that_dies_while_it_loads_leaves_the_old_one_serving_and_the_next_takes_its_time(
    service: DeployingService,
) -> None:
    fast, pair = fast_on_one(service)
    with Asking(service, "mine") as asking:
        service.ask("DELETE", f"deployments/{pair}")
        first = heir_of(service, fast, "loading")
        victim = workers_of(first)[-1]
        service.processes[victim].kill()
        service.reaches(first["id"], "retired")
        assert service.deployment(fast)["state"] == "serving"
        asking.more()
        service.processes[victim].start()
        service.wait_ready()
        second = heir_of(service, fast, "serving")
        service.reaches(fast, "retired")
        asking.more()
    assert second["configuration"]["tp"] == 2
    given_up_at, _ = last_told_of(service, "deployment_retired", first["id"])
    tried_at, _ = last_told_of(service, "deployment_loading", second["id"])
    assert tried_at - given_up_at >= 2 * COOLDOWN_S - 0.5


def test_what_is_to_cost_little_makes_room_for_what_waits(service: DeployingService) -> None:
    cheap = service.deploy("mine", ALONE | {"minimise": "memory"})
    first = service.reaches(cheap, "serving")
    with Asking(service, "mine") as mine:  # its worker is the most loaded: the other model goes elsewhere
        time.sleep(WINDOW_S + 1)  # loads of what was before are forgotten
        mine.more()
        other = service.deploy("other", ALONE)
        assert workers_of(service.reaches(other, "serving")) != workers_of(first)
    with Asking(service, "mine") as mine, Asking(service, "other") as others:
        waiting = service.deploy("third", LARGE)
        assert service.deployment(waiting)["state"] == "waiting"
        heir = heir_of(service, cheap, "serving")
        assert workers_of(heir) == workers_of(service.deployment(other))
        pair = service.reaches(waiting, "serving")
        assert set(workers_of(pair)) == {"w0", "w1", "w2"} - set(workers_of(heir))
        mine.more()
        others.more()
    _, event = last_told_of(service, "deployment_loading", heir["id"])
    assert event.numbers["memory_then"] <= event.numbers["memory_now"]
    assert event.reason.endswith(f"{waiting} (third) waits for room")
    assert_cooled(service, cheap, heir["id"])
    assert service.deployment(other)["state"] == "serving"
    assert service.complete("third").json()["choices"][0]["text"] == mine.text == others.text
