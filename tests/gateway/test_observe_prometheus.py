"""The rules and the dashboard in a real Prometheus that scrapes the real service under a little load."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from bench.common.service import Process, Service, free_port, wait_for
from tests.gateway.test_observe import OBSERVE, rules, shown

PROMETHEUS: Final = shutil.which("prometheus")
LOAD_S: Final = 12.0
# Of what does not happen here: workers that die, answers that fail.
RARE: Final = ("instar_request_replays_total", "instar_request_failures_total")

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH"),
]


class Prometheus:
    def __init__(self, url: str, began: float) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", timeout=10)
        self._began = began

    def get(self, path: str, **params: Any) -> Any:
        answer = self.http.get(path, params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expr: str) -> list[float]:
        """All that it ever was, of all its series."""
        expr = expr.replace("$model_name", ".*").replace("$__rate_interval", "10s")
        found = self.get("query_range", query=expr, start=self._began, end=time.time(), step=1)["result"]
        return [float(value) for series in found for _, value in series["values"] if value != "NaN"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with Service() as service:
        port, began = free_port(), time.time()
        process = Process("prometheus", _command(folder, service, port), {}, folder / "log").start()
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for("Prometheus", lambda: _answers(f"{url}/-/ready"))
            prometheus = Prometheus(url, began)
            wait_for("some looks", lambda: len(prometheus.values("instar_workers")) > 3)  # counters are at 0
            _load(service.url())
            yield prometheus
        finally:
            process.kill()


def _command(folder: Path, service: Service, port: int) -> list[str]:
    """The configuration as it is, but for addresses and for looking every second."""
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(OBSERVE / "rules.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [service.url().removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def _load(url: str) -> None:
    """Calls of all kinds, and morphs that end well and badly."""
    until = time.monotonic() + LOAD_S
    body = {"model": "demo", "prompt": "The fox", "max_tokens": 24}
    orders = iter(
        [
            ("swap", {"count": 1, "precision": "int4"}),
            ("resize", {"blocks": 10**9}),  # fails
            ("swap", {"count": 1, "precision": "full"}),
        ]
    )
    with httpx.Client(base_url=url, timeout=30) as http:
        while time.monotonic() < until:
            for _ in range(3):
                assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/completions", json=body | {"n": 0}).status_code == 400
            if (order := next(orders, None)) is not None:
                answer = http.post(f"/admin/instances/demo@w0/{order[0]}?wait=true", json=order[1])
                assert answer.status_code == 200, answer.text
            time.sleep(0.5)
    time.sleep(3)


def test_the_gateway_is_scraped_and_all_rules_are_evaluated(prometheus: Prometheus) -> None:
    (target,) = prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    loaded = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(loaded) == len(rules())
    assert {(rule["health"], rule.get("lastError", "")) for rule in loaded} == {("ok", "")}
    firing = [rule["name"] for rule in loaded if rule["type"] == "alerting" and rule["state"] == "firing"]
    assert set(firing) <= {"InstarTtftSloViolated", "InstarTpotSloViolated"}  # of a machine that is busy


def test_every_recording_rule_has_a_value(prometheus: Prometheus) -> None:
    assert [
        one["record"] for one in rules() if "record" in one and not prometheus.values(one["record"])
    ] == []


def test_every_panel_and_every_mark_shows_something(prometheus: Prometheus) -> None:
    wanted = [expr for expr in shown() if not any(name in expr for name in RARE)]
    assert [expr for expr in wanted if not prometheus.values(expr)] == []


def test_promtool_finds_nothing_wrong() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool on PATH")
    done = subprocess.run([tool, "check", "rules", OBSERVE / "rules.yml"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
