"""The service under `bench.deploy`: workers that start without a model, models deployed by the admin API."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import httpx

from bench.common.load import VOCABULARY
from bench.common.service import STEADY, EmptyService, wait_for
from bench.deploy.report import MAX_TP
from bus.deployments import Configuration, Intent

SETTINGS: Final = STEADY | {
    "WORKER__PAGE_KIB": "64",
    "WORKER__MAX_TP": str(MAX_TP),
    "WORKER__MAX_MODEL_LEN": "1024",
    "WORKER__MEMORY_MB": "640",
    "WORKER__QUANTIZATION": "rtn",  # dummies have nothing to calibrate
    "CONTROLLER__PLACEMENT": "least-loaded",
    "CONTROLLER__CHANGE_COOLDOWN_S": "3600",  # compared deployments stay where they are
}
MEASURE_S: Final = 300.0  # most for a model: a minute of steps, and its cuts
LOAD_S: Final = 120.0
REQUEST_S: Final = 300.0
REPORT_S: Final = 1.2  # after which an idle worker has reported its pages


@dataclass(frozen=True, slots=True)
class Placed:
    """A deployment that serves."""

    id: str
    model: str
    configuration: Configuration
    workers: tuple[str, ...]


class DeployService(EmptyService):
    """A service on which nothing is deployed at first. The policy may morph, as by default."""

    def __init__(self, num_workers: int, host_dir: str) -> None:
        """Configure the service; `host_dir` holds the variants of the models."""
        super().__init__(num_workers=num_workers, settings=SETTINGS | {"WORKER__HOST_DIR": host_dir})

    # ------------------------------------------------------------------------------------- orders

    def register(self, name: str, path: str) -> float:
        """Register a model, wait until it is measured, and return the seconds.

        Raises RuntimeError if it fails.
        """
        began = time.perf_counter()
        self._ask("POST", "/admin/models", json={"name": name, "path": path})
        card = self._until(f"/admin/models/{name}", ("profiled", "failed"), MEASURE_S)
        if card["state"] != "profiled":
            raise RuntimeError(f"{name} was not measured: {card['reason']}")
        return time.perf_counter() - began

    def plan(self, name: str, intent: Intent) -> list[dict[str, Any]]:
        """Return the estimates, the best first."""
        asked = {field: value for field, value in asdict(intent).items() if value is not None}
        return list(self._ask("GET", f"/admin/models/{name}/plan", params=asked)["estimates"])

    def deploy(self, model: str, intent: Intent) -> Placed:
        """Deploy a model and wait until it serves. Raises RuntimeError if it does not."""
        asked = {field: value for field, value in asdict(intent).items() if value is not None}
        found = self._ask("POST", "/admin/deployments", json={"model": model, "intent": asked})
        found = self._until(f"/admin/deployments/{found['id']}", ("serving", "failed"), LOAD_S)
        if found["state"] != "serving":
            raise RuntimeError(f"{model} for {asked}: {found['state']}: {found['reason']}")
        workers = tuple(worker for stage in found["stages"] for worker in stage["workers"])
        return Placed(found["id"], model, Configuration(**found["configuration"]), workers)

    def retire(self, deployment: str) -> None:
        """Retire a deployment and wait until its pages are free."""
        self._ask("DELETE", f"/admin/deployments/{deployment}")
        self._until(f"/admin/deployments/{deployment}", ("retired", "failed"), LOAD_S)

    def _until(self, path: str, states: Sequence[str], within_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while (found := self._ask("GET", path))["state"] not in states:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{path} is {found['state']} after {within_s:.0f} s: {found['reason']}")
            time.sleep(0.1)
        return found

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = httpx.request(method, self.url() + path, timeout=60, **more)
        if answer.status_code >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    # ------------------------------------------------------------------------------------- measuring

    def request(self, model: str, intent: Intent, seed: int) -> float:
        """Return the seconds to the last token of one request of the intent's lengths.

        The same seed gives the same prompt. Raises RuntimeError if the request does not end.
        """
        prompt = random.Random(seed).choices(VOCABULARY, k=intent.prompt_tokens)
        body = {"model": model, "prompt": prompt, "max_tokens": intent.output_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = httpx.post(f"{self.url()}/v1/completions", json=body, timeout=REQUEST_S)
        took = time.perf_counter() - began
        if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != intent.output_tokens:
            raise RuntimeError(f"{model}: {answer.status_code} {answer.text}")
        return took

    def warm_up(self, model: str, intent: Intent) -> None:
        """Wait until the gateway knows the model, and let it make its first steps."""

        def is_there() -> bool:
            body = {"model": model, "prompt": [17], "max_tokens": 1}
            return httpx.post(f"{self.url()}/v1/completions", json=body, timeout=60).status_code == 200

        wait_for(f"{model} to answer", is_there)
        self.request(model, replace(intent, output_tokens=2), seed=-1)

    def wait_empty(self) -> None:
        """Wait until no worker reports weights."""
        wait_for("all pages to be back", lambda: self._page_bytes("weights") == 0)

    def weight_bytes(self) -> int:
        """Return the bytes of whole pages on all workers, once they report the same twice."""
        reported = [-1]

        def is_stable() -> bool:
            reported.append(self._page_bytes("weights"))
            return reported[-1] == reported[-2] >= 0

        wait_for("all workers to report the same pages twice", is_stable, every_s=REPORT_S)
        return reported[-1]

    def kv_bytes(self, intent: Intent) -> int:
        """Return the KV bytes of the intent's batch at its end. All deployments must be of one model."""
        caches = [one["kv"] for one in self.state()["instances"]]
        tokens = intent.prompt_tokens + intent.output_tokens
        blocks = intent.batch_size * math.ceil(tokens / int(caches[0]["block_tokens"]))
        return blocks * self._page_bytes("kv") // sum(int(one["blocks"]) for one in caches)

    def _page_bytes(self, kind: str) -> int:
        workers = self.state()["workers"]
        if any(one["pages"] is None for one in workers):
            return -1  # not reported yet
        return sum(int(one["pages"][kind]) * int(one["page_bytes"]) for one in workers)
