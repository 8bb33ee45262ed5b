"""Deployments of the real service that go wrong: workers that are killed while they measure or load, models
that are damaged or change on disk, and Redis that loses its data. What goes on, goes on; nothing is left of
what does not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
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
    told_of,
    workers_of,
)

KEPT, ALONE = "kept", {"tp": 1, "pp": 1, "precision": "full", "prompt_tokens": 64, "output_tokens": 24}
SETTINGS: Final = {
    "WORKER__MEMORY_MB": "160",
    "WORKER__MAX_TP": "2",
    "WORKER__MAX_MODEL_LEN": "512",
    "CONTROLLER__PLACEMENT": "least-loaded",
}

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployingService]:
    """Two workers, on one of which a model serves."""
    with deploying(2, SETTINGS, tmp_path_factory) as service:
        service.ask("PUT", "policy", {"mode": "manual"})
        service.register(KEPT, demo(service, KEPT))
        service.reaches(service.deploy(KEPT, ALONE), "serving")
        yield service
        assert_everything_is_given_back(service)


@pytest.fixture
def service(running: DeployingService) -> Iterator[DeployingService]:
    """Ends with the model that serves, and nothing else."""
    with running.explained():
        yield running
        for process in running.processes.values():
            if not process.is_alive:
                process.start()
        running.wait_ready()
        for one in running.deployments("waiting", "loading", "serving"):
            if one["model"] != KEPT:
                running.ask("DELETE", f"deployments/{one['id']}")
        assert_no_orphan(running)
        (kept,) = running.deployments("serving")
        (other,) = {"w0", "w1"} - set(workers_of(kept))
        wait_for(f"the pages of {other}", lambda: is_free(running, other), 30, 0.2)


def other_images(folder: Path, eps: str) -> None:
    """Another config, so that no host images of it are there: it takes longer to load."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', f'"rms_norm_eps": {eps}'))


def is_free(service: DeployingService, worker: str) -> bool:
    pages = service.pages(worker)
    return pages is not None and pages["free"] == pages["budget"]


def model(service: DeployingService, name: str) -> dict[str, Any]:
    return dict(service.ask("GET", f"models/{name}").json())


def is_told(service: DeployingService, kind: str, name: str, reason: str) -> bool:
    """True if an event of this kind about the deployment gave this reason."""
    return any(event.reason == reason for _, event in told_of(service, kind, name))


def has_failed(service: DeployingService, name: str) -> bool:
    return service.state_of(name) == "failed"


def killed(service: DeployingService, worker: str) -> Process:
    process = service.processes[worker]
    process.kill()
    return process


# --------------------------------------------------------------------------- workers that die


def test_a_worker_that_is_killed_while_it_measures_is_followed_by_another_and_requests_go_on(
    service: DeployingService,
) -> None:
    name = "measured"
    service.ask("POST", "models", {"name": name, "path": str(demo(service, name, is_measured=False))})
    with Asking(service, KEPT, clients=1):
        measuring = wait_for(
            "it to be measured", lambda: " of " in (m := model(service, name))["progress"] and m
        )
        first = measuring["worker"]
        killed(service, first).start()
        again = wait_for("another one to measure", lambda: (m := model(service, name))["attempts"] == 2 and m)
        assert again["worker"] in ("w0", "w1")
        service.wait_ready()
        wait_for(f"{KEPT} to serve", lambda: service.deployments("serving"), 60, 0.2)
    wait_for("its profile", lambda: service.state_of(name) == "profiled", 200, 0.5)
    assert service.ask("DELETE", f"models/{name}").status_code == 200


def test_a_worker_that_is_killed_while_it_loads_leaves_nothing_and_another_loads(
    service: DeployingService,
) -> None:
    folder = demo(service, "loaded", is_measured=False)
    other_images(folder, "1.1e-05")
    pretend_measured(folder)
    service.register("loaded", folder)
    (kept,) = service.deployments("serving")
    name = service.deploy("loaded", ALONE)
    loading = wait_for("it to load", lambda: (d := service.deployment(name))["state"] == "loading" and d, 30)
    (first,) = workers_of(loading)
    assert [first] != workers_of(kept), "the least loaded worker is the empty one"
    with Asking(service, KEPT):
        killed(service, first)
        # It may load again before a poll of its state sees that it waits, so read the recorded events.
        reason = f"{first} died while it loaded loaded; it is tried again"
        wait_for(reason, partial(is_told, service, "deployment_waiting", name, reason), 30)
        there = service.reaches(name, "serving")
        assert service.complete("loaded").status_code == 200
    assert workers_of(there) == workers_of(kept)


# --------------------------------------------------------------------------- models that are none


def test_damaged_weights_and_unknown_architectures_are_told_and_leave_nothing(
    service: DeployingService,
) -> None:
    short = demo(service, "short", is_measured=False) / "model.safetensors"
    os.truncate(short, 5000)
    service.ask("POST", "models", {"name": "short", "path": str(short.parent)})
    wait_for("short to be given up", partial(has_failed, service, "short"), 60, 0.2)
    assert f"{short}: " in model(service, "short")["reason"]
    answer = service.ask("POST", "deployments", {"model": "short"})
    assert answer.status_code == 409
    assert "could not be measured: " in answer.json()["error"]["message"]
    assert service.ask("DELETE", "models/short").status_code == 200

    config = demo(service, "foreign", is_measured=False) / "config.json"
    foreign = json.loads(config.read_text()) | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    config.write_text(json.dumps(foreign))
    answer = service.ask("POST", "models", {"name": "foreign", "path": str(config.parent)})
    assert answer.status_code == 400
    words = "architecture MambaForCausalLM is not supported; these are: LlamaForCausalLM"
    assert words in answer.json()["error"]["message"]
    assert service.ask("GET", "models/foreign").status_code == 404
    assert service.ask("POST", "deployments", {"model": "foreign"}).status_code == 404


def test_weights_that_were_damaged_after_they_were_measured_are_not_served(service: DeployingService) -> None:
    """Their size and time tell nothing."""
    folder = demo(service, "broken")
    service.register("broken", folder)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    with weights.open("r+b") as file:
        file.write(b"\xff" * 8)  # the length of the header
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = service.reaches(service.deploy("broken", ALONE), "failed")
    assert found["reason"].startswith("given up after 3 attempts: w")
    assert str(weights) in found["reason"]
    assert service.complete(KEPT).status_code == 200


def test_a_checkpoint_that_changes_while_it_loads_is_not_served(service: DeployingService) -> None:
    folder = demo(service, "changing", is_measured=False)
    other_images(folder, "1.2e-05")
    pretend_measured(folder)
    service.register("changing", folder)
    name = service.deploy("changing", ALONE)
    wait_for("it to load", lambda: service.deployment(name)["state"] == "loading", 30, 0.02)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    found = service.reaches(name, "failed")
    assert "is not the checkpoint that was planned with" in found["reason"]
    answer = service.ask("POST", "deployments", {"model": "changing"})
    assert answer.status_code == 409
    assert service.complete("changing").status_code == 404


# --------------------------------------------------------------------------- Redis that forgets


def test_what_serves_outlives_redis_and_its_data(service: DeployingService) -> None:
    (before,) = service.deployments("serving")
    text = service.complete(KEPT).json()["choices"][0]["text"]
    killed(service, "redis").start()
    wait_for("its deployments", lambda: service.deployments("serving"), 30, 0.2)
    wait_for("its answer", lambda: service.complete(KEPT).status_code == 200, 30, 0.2)
    assert service.complete(KEPT).json()["choices"][0]["text"] == text
    (after,) = service.deployments("serving")
    assert (after["id"], after["loads"]) == (before["id"], before["loads"]), "nothing was loaded again"
    assert after["intent"] == before["intent"]


def test_what_serves_is_found_again_when_the_controller_forgot_it_too(service: DeployingService) -> None:
    (before,) = service.deployments("serving")
    text = service.complete(KEPT).json()["choices"][0]["text"]
    killed(service, "controller")
    killed(service, "redis").start()
    service.processes["controller"].start()
    after = wait_for("its deployment", lambda: service.deployments("serving"), 60, 0.2)[0]
    assert (after["id"], after["instance"]) == (before["id"], before["instance"])
    assert "its record was lost" in after["reason"]
    assert after["intent"]["precision"] == "full"
    assert service.complete(KEPT).json()["choices"][0]["text"] == text
    wait_for("its profile", lambda: service.state_of(KEPT) == "profiled", 30, 0.2)
    assert model(service, KEPT)["digest"]
    service.ask("DELETE", f"deployments/{after['id']}")
    service.reaches(after["id"], "retired")
    wait_for("its pages", lambda: is_free(service, "w0") and is_free(service, "w1"), 30, 0.2)
    service.reaches(service.deploy(KEPT, ALONE), "serving")
