"""One real worker serves a model of every family over HTTP: each answers as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from bench.common.oracles import FAMILIES
from bench.common.service import Process, Service
from tests.support.paths import DEMO_MODEL
from tests.support.random_models import greedy, write_random
from tests.worker.model.test_oracle import LONGROPE

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # kernels may be compiled first
]

NUM_NEW = 16
PROMPT = [(7 * i * i + 3 * i) % 4000 + 10 for i in range(60)]
# One of each architecture, and what is loaded or computed otherwise.
SERVED: dict[str, dict[str, Any]] = {
    name: {} for name in {key: name for name, (key, _) in FAMILIES.items()}.values()
}
SERVED["gpt-oss in MXFP4"] = {}
SERVED["phi3"] = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}


class EveryFamily(Service):
    """A service whose worker loads all models."""

    folders: dict[str, Path]

    def add_worker(self, worker: str) -> Process:
        models = json.dumps([f"{name}={folder}" for name, folder in self.folders.items()])
        return self.add(worker, "worker", INSTAR_WORKER__ID=worker, INSTAR_WORKER__MODELS=models)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for number, (family, changes) in enumerate(SERVED.items()):
        folder = tmp_path_factory.mktemp(f"family{number}")
        made[family] = folder, write_random(folder, family, num_hidden_layers=2, **changes)
    return made


@pytest.fixture(scope="module")
def service(oracles: dict[str, tuple[Path, Any]]) -> Iterator[Service]:
    own = EveryFamily(settings={"WORKER__DTYPE": "float32", "WORKER__VARIANTS": "[]"})
    own.folders = {served_name(family): folder for family, (folder, _) in oracles.items()}
    with own as service:
        yield service


def served_name(family: str) -> str:
    return family.replace(" ", "-").replace(",", "")


@pytest.mark.parametrize("family", SERVED)
def test_its_answer_is_that_of_transformers(
    family: str, service: Service, oracles: dict[str, tuple[Path, Any]]
) -> None:
    """The answer of the Phi-3 outgrows its short frequencies."""
    body = {"model": served_name(family), "prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0.0}
    answer = httpx.post(service.url() + "/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    wanted = greedy(oracles[family][1], PROMPT, NUM_NEW)
    assert answer.json()["choices"][0]["text"] == tokenizer.decode(wanted)
