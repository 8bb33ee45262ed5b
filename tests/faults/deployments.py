"""Deployments of the real service, for tests that harm it: orders, what is shown, what must hold."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import httpx
import msgspec
import pytest
import torch

from bench.common.service import EmptyService, wait_for
from bus.checkpoints import folder_digest
from bus.deployments import Configuration, Profile
from bus.messages import Event
from bus.version import program_version
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS
from tests.faults.load import PROMPT
from tests.faults.morphs import NUM_LAYERS, QUICK_NUMBERS, told
from tests.support.known_truths import BITS, BLOCK_TOKENS, Truth, profile_of
from tests.support.paths import DEMO_MODEL
from worker.engine.build import CPU_PAGE_BYTES
from worker.model.config import read_config
from worker.profiler.measurer import profile_path, write_stored

NUM_TOKENS: Final = 24
OF_DEMO_MODELS: Final = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
]


@dataclass
class DeployingService(EmptyService):
    """`folders`: of the models."""

    folders: Path = Path()

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, f"{self.url()}/admin/{path}", json=body, timeout=60)

    def register(self, name: str, folder: Path) -> None:
        """Register a model and wait for its profile, which must be a stored one if there is one."""
        stored = profile_path(folder, "cpu", program_version())
        known = msgspec.json.decode(stored.read_bytes(), type=Profile) if stored.is_file() else None
        self.ask("POST", "models", {"name": name, "path": str(folder)})
        wait_for(f"{name} to be measured", lambda: self.state_of(name) == "profiled", 300, 0.2)
        (shown,) = self.ask("GET", f"models/{name}").json()["profiles"]
        if known is not None:
            seconds = shown["device_seconds"]
            assert seconds == known.device_seconds, (
                f"{stored} was refused, and {name} measured in {seconds} s"
            )

    def state_of(self, model: str) -> str:
        return str(self.ask("GET", f"models/{model}").json()["state"])

    def deploy(self, model: str, intent: Any) -> str:
        return str(self.ask("POST", "deployments", {"model": model, "intent": intent}).json()["id"])

    def deployment(self, name: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"deployments/{name}").json())

    def reaches(self, name: str, state: str, within_s: float = 90.0) -> dict[str, Any]:
        """The deployment, once it is so."""

        def look() -> dict[str, Any] | None:
            found = self.deployment(name)
            return found if found["state"] == state else None

        try:
            return dict(wait_for(f"{name} to be {state}", look, within_s, 0.2))
        except AssertionError as late:
            raise AssertionError(f"{late}; it is {self.deployment(name)}") from None

    def pages(self, worker: str) -> dict[str, int] | None:
        """None: it did not report them."""
        (found,) = [one["pages"] for one in self.state()["workers"] if one["id"] == worker]
        return found and dict(found)

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


@dataclass
class Asking:
    """Clients that ask a model one request after the other, until they are left. Every answer must be the
    first one."""

    service: DeployingService
    model: str
    clients: int = 2
    answers: list[tuple[int, str]] = field(default_factory=list)  # status, text

    def __enter__(self) -> Self:
        wait_for(f"{self.model} to answer", lambda: self._ask()[0] == 200, 30)
        self.text = self._ask()[1]
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive(), f"a client of {self.model} still waits for its answer"
        wrong = [answer for answer in self.answers if answer != (200, self.text)]
        assert not wrong, f"{len(wrong)} of {len(self.answers)} are not {self.text!r}: {wrong[:3]}"

    def more(self, count: int = 10) -> None:
        """Wait for answers to requests, most of which begin from now on."""
        wanted = len(self.answers) + self.clients + count
        wait_for(f"{count} more answers of {self.model}", lambda: len(self.answers) >= wanted, 60)

    def _loop(self) -> None:
        while not self._ending.is_set():
            self.answers.append(self._ask())

    def _ask(self) -> tuple[int, str]:
        answer = self.service.complete(self.model)
        ok = answer.status_code == 200
        return answer.status_code, answer.json()["choices"][0]["text"] if ok else answer.text


def told_of(service: DeployingService, kind: str, name: str) -> list[tuple[float, Event]]:
    """The recorded events of this kind about a deployment, each with its time of arrival in seconds."""
    return [
        (at, one)
        for at, one in told(service)
        if isinstance(one, Event) and (one.kind, one.subject) == (kind, name)
    ]


def workers_of(deployment: dict[str, Any]) -> list[str]:
    return [worker for stage in deployment["stages"] for worker in stage["workers"]]


@contextlib.contextmanager
def deploying(
    num_workers: int, settings: Mapping[str, str], temporary: pytest.TempPathFactory
) -> Iterator[DeployingService]:
    """Start a service without a model, which explains itself where a test fails."""
    host = str(temporary.mktemp("host"))
    service = DeployingService(
        num_workers=num_workers,
        settings=QUICK_NUMBERS | dict(settings) | {"WORKER__HOST_DIR": host},
        folders=temporary.mktemp("models"),
    )
    with service, service.explained():
        yield service


def demo(service: DeployingService, name: str, *, is_measured: bool = True) -> Path:
    """A copy of the demo model in a folder of its own."""
    folder = service.folders / name
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("instar"))
    if is_measured:
        pretend_measured(folder)
    return folder


def pretend_measured(folder: Path, degrees: tuple[int, ...] = (1, 2)) -> None:
    """Write a profile beside the demo model, which workers believe. Measuring takes a minute. degrees: that
    are worth it; at others what ranks say to each other takes too long."""
    truth = Truth(
        layers=NUM_LAYERS,
        embedding_bytes=8 << 20,
        layer_bytes=5 << 19,
        all_reduce=0.0 if 2 in degrees else 1.0,
    )
    known = profile_of(
        truth,
        configurations=[Configuration(tp=tp, precision=name) for tp in (1, 2) for name in BITS],
        shapes=[(prompt, batch) for prompt in PROMPT_TOKENS for batch in BATCH_SIZES],
    )
    version = program_version()
    config = read_config(folder)
    memory = [one for one in known.memory if one.configuration.tp in degrees]
    profile = replace(
        known,
        digest=folder_digest(folder),
        version=version,
        page_bytes=CPU_PAGE_BYTES,
        block_bytes_per_layer=config.kv_block_bytes(BLOCK_TOKENS, torch.float32) // config.num_layers,
        latency=[*known.latency, *_in_fewest_bits(known.latency)],
        memory=[*memory, *_in_fewest_bits(memory)],
    )
    write_stored(profile_path(folder, "cpu", version), profile)


def _in_fewest_bits(samples: list[Any]) -> list[Any]:
    """int3 as int4."""
    return [
        replace(one, configuration=replace(one.configuration, precision="int3"))
        for one in samples
        if one.configuration.precision == "int4"
    ]


def settled(service: DeployingService) -> bool:
    """Return True if nothing comes or goes."""
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
