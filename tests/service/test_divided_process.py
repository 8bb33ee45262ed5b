"""A model of three times what a worker has serves on four of them, each with as much as the plan says."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.common.service import wait_for
from tests.faults.deployments import OF_DEMO_MODELS, DeployingService
from tests.support.greedy import generate
from tests.support.paths import DEMO_MODEL

pytestmark = [*OF_DEMO_MODELS, pytest.mark.timeout(600)]  # four workers start, and one measures a large model

NAMES = ["w0", "w1", "w2", "w3"]
LAYERS, BUDGET_MIB, PAGE_KIB = 25, 24, 8  # the system has memory only for what is touched of a page
MIB = 1 << 20
PROMPT_TOKENS, OUTPUT_TOKENS = 208, 24
# The KV of a layer takes 15 blocks of 4 KiB at each of four ranks: seven and a half pages.
INTENT: dict[str, Any] = {"tp": 4, "pp": 1, "batch_size": 1, "prompt_tokens": 208, "output_tokens": 32}
SETTINGS = {
    "WORKER__MEMORY_MB": str(BUDGET_MIB),
    "WORKER__PAGE_KIB": str(PAGE_KIB),
    "WORKER__VARIANTS": "[]",
    "WORKER__MAX_NUM_SEQS": "1",
    "WORKER__MAX_MODEL_LEN": "240",
    "WORKER__LEASE_S": "10",
    "WORKER__GROUP_HOST": "127.0.0.1",
    "GATEWAY__QUEUE_TIMEOUT_S": "200",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a deeper demo model with random weights."""
    folder = tmp_path_factory.mktemp("models") / "large"
    not_its_own = shutil.ignore_patterns("instar", "*.safetensors", "config.json")
    shutil.copytree(DEMO_MODEL, folder, ignore=not_its_own)
    config = LlamaConfig.from_pretrained(DEMO_MODEL, num_hidden_layers=LAYERS, initializer_range=0.06)
    torch.manual_seed(5)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size >= 3 * BUDGET_MIB * MIB
    return folder


@pytest.fixture(scope="module")
def running(large: Path) -> Iterator[DeployingService]:
    service = DeployingService(num_workers=len(NAMES), settings=SETTINGS)
    with service, service.explained():
        service.ask("PUT", "policy", {"mode": "manual"})  # else the KV cache grows with its use
        service.register("large", large)
        wait_for("what measuring took", lambda: all(is_free(service, name) for name in NAMES), 30)
        yield service


@dataclass(frozen=True)
class Deployed:
    """The deployment once it has answered, its answer, and the most memory of each worker until then."""

    service: DeployingService
    record: dict[str, Any]
    text: str
    peaks: dict[str, int]


@pytest.fixture(scope="module")
def deployed(running: DeployingService, large: Path) -> Deployed:
    with Watch({name: running.processes[name].pid for name in NAMES}) as watch:
        record = running.reaches(running.deploy("large", INTENT), "serving")
        answer = ask(running, prompt_of(large))
    assert answer.status_code == 200, answer.text
    return Deployed(running, record, text_of(answer), watch.peaks)


class Watch:
    """The most memory that each process has mapped of the pages since this began, by the system."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.peaks = dict.fromkeys(pids, 0)
        self._pids, self._is_over = pids, threading.Event()
        self._before = {name: shared_bytes(pid) for name, pid in pids.items()}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            for name, pid in self._pids.items():
                grown = shared_bytes(pid) - self._before[name]
                self.peaks[name] = max(self.peaks[name], grown)


def shared_bytes(pid: int) -> int:
    """Return the bytes of memory files that a process has mapped and touched (RssShmem)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))


def prompt_of(folder: Path) -> list[int]:
    """Return the tokens of a prompt that fills the KV cache as the intent says."""
    text = "def read_lines(path):\n    with open(path) as file:\n        return list(file)\n\n\n" * 20
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text).input_ids[:PROMPT_TOKENS]
    assert len(ids) == PROMPT_TOKENS
    return ids


def body_of(prompt: list[int]) -> dict[str, Any]:
    numbers = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": "large", "prompt": prompt} | numbers


def ask(service: DeployingService, prompt: list[int]) -> httpx.Response:
    return httpx.post(f"{service.url()}/v1/completions", json=body_of(prompt), timeout=240)


def stream(service: DeployingService, prompt: list[int], pieces: list[str]) -> None:
    """Add the pieces of an answer as they come."""
    url, body = f"{service.url()}/v1/completions", body_of(prompt) | {"stream": True}
    with httpx.stream("POST", url, json=body, timeout=240) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def expected_text(folder: Path, prompt: list[int]) -> str:
    """Return what transformers makes of the same prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = generate(model, prompt, OUTPUT_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: str = tokenizer.decode(made, skip_special_tokens=True)
    return text


def is_free(service: DeployingService, worker: str) -> bool:
    pages = service.pages(worker)
    return pages is not None and pages["free"] == pages["budget"]


def test_it_serves_on_four_workers_with_the_pages_that_were_planned(deployed: Deployed, large: Path) -> None:
    expected = deployed.record["expected"]
    assert deployed.record["is_fixed"] and expected["is_fixed"]
    planned = expected["fixed_worker_bytes"]
    assert expected["group_worker_bytes"] > BUDGET_MIB * MIB > planned
    assert deployed.text == expected_text(large, prompt_of(large))
    with deployed.service.explained():
        for name in NAMES:
            pages = deployed.service.pages(name)
            assert pages
            assert (pages["budget"] - pages["free"]) * PAGE_KIB * 1024 == planned, name
            assert deployed.peaks[name] == pytest.approx(planned, rel=0.03), name


def test_without_one_of_them_it_waits_and_its_request_continues_once_a_worker_comes(
    deployed: Deployed, large: Path
) -> None:
    service, name, prompt, pieces = deployed.service, deployed.record["id"], prompt_of(large), list[str]()
    with service.explained():
        asking = threading.Thread(target=stream, args=(service, prompt, pieces), daemon=True)
        asking.start()
        wait_for("its first token", lambda: pieces, 60, 0.005)
        service.processes["w2"].kill()
        lacking = "needs 1 group of 4 devices of one host that are in no other group; 0 can be formed"
        wait_for("it to wait", lambda: lacking in service.deployment(name)["reason"], 60, 0.2)
        refused = ask(service, prompt)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["message"].startswith("large is being deployed: waiting: ")
        others = [one for one in NAMES if one != "w2"]
        wait_for("every page", lambda: all(is_free(service, one) for one in others), 30, 0.2)
        assert asking.is_alive()
        service.processes["w2"].start()
        service.reaches(name, "serving", 120)
        asking.join(60)
        assert "".join(pieces) == deployed.text == text_of(ask(service, prompt))
