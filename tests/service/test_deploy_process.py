"""The real service: a second model comes to workers that serve, is asked over HTTP, and goes; and a worker is
killed while it loads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.service import Service, wait_for
from bus.codec import encode
from bus.messages import Stage
from bus.morphs import Deploy, MorphReport, Retire
from tests.support.paths import DEMO_MODEL

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    host_dir = tmp_path_factory.mktemp("images")
    with Service(settings={"WORKER__HOST_DIR": str(host_dir), "WORKER__GROUP_HOST": ""}) as running:
        yield running


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in a folder of its own, with its config written otherwise: other host images."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("instar"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1.1e-05'))
    return folder


def order(service: Service, kind: Any, name: str, instance: str = "other@w0", **fields: Any) -> None:
    (worker,) = service.state()["workers"]
    command = kind(id=name, epoch=worker["epoch"], instance=instance, **fields)
    with service.redis as redis:
        redis.xadd("instar:control:w0", {"m": encode(command)})


def deploy(service: Service, name: str, path: Path, **fields: Any) -> None:
    stages = [Stage(workers=["w0"], first=0, end=8)]
    order(service, Deploy, name, model="other", path=str(path), stages=stages, **fields)


def end_of(service: Service, name: str) -> MorphReport:
    def ended() -> MorphReport | None:
        reports = service.messages("instar:events", MorphReport)
        return next((one for one in reports if one.id == name and one.state != "running"), None)

    report: MorphReport = wait_for(f"the end of {name}", ended, 90)
    return report


def complete(service: Service, model: str, prompt: str = "Once upon a time", max_tokens: int = 24) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return httpx.post(service.url() + "/v1/completions", json=body, timeout=60)


def models(service: Service) -> list[str]:
    return [one["id"] for one in service.get("/v1/models").json()["data"]]


def test_a_model_comes_is_asked_beside_the_first_and_goes(service: Service, other: Path) -> None:
    with service.explained():
        alone = complete(service, "demo").json()["choices"][0]["text"]
        before = service.state()["workers"][0]["pages"]
        assert complete(service, "other").status_code == 404
        answers: list[str] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                answers.append(complete(service, "demo").json()["choices"][0]["text"])

        busy = threading.Thread(target=ask)
        busy.start()
        deploy(service, "d1", other, wait_s=5.0)
        wait_for("503 while it loads", lambda: complete(service, "other").status_code != 404, 20)
        report = end_of(service, "d1")
        assert report.state == "applied", report
        wait_for("the model in the list", lambda: models(service) == ["demo", "other"], 10)
        both = [complete(service, model) for model in ("demo", "other")]
        assert [answer.status_code for answer in both] == [200, 200]
        order(service, Retire, "r1", wait_s=10.0)
        assert end_of(service, "r1").state == "applied"
        is_over.set()
        busy.join()
        assert set(answers) == {alone}, "the first model's answers are the same all the time"
        gone = wait_for("404", lambda: (a := complete(service, "other")).status_code == 404 and a, 10)
        assert "served are: demo" in gone.json()["error"]["message"]
        wait_for("its pages", lambda: service.state()["workers"][0]["pages"] == before, 10)


def test_a_worker_that_is_killed_while_it_loads_leaves_nothing(service: Service, other: Path) -> None:
    with service.explained():
        host_dir = Path(service.settings["WORKER__HOST_DIR"])
        config = other / "config.json"
        config.write_text(config.read_text().replace("1.1e-05", "1.2e-05"))  # images that nobody has made
        deploy(service, "d2", other)
        wait_for("its images to be made", lambda: len(list(host_dir.iterdir())) > 1, 30, 0.01)
        (before,) = service.state()["workers"]
        service.processes["w0"].kill()
        service.add_worker("w0")
        wait_for(
            "the next worker",
            lambda: any(
                one["state"] == "serving" and one["epoch"] > before["epoch"]
                for one in service.state()["workers"]
            ),
            100,
        )
        assert models(service) == ["demo"]
        assert len(list(host_dir.iterdir())) == 1, "only the images of the model that it serves"
        deploy(service, "d3", other)
        assert end_of(service, "d3").state == "applied"
