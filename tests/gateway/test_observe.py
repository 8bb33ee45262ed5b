"""The interface for other tools: counters of precision, and the files for Prometheus and Grafana."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bus.messages import Event, GpuTelemetry, LayerShape
from bus.morphs import KIND_OF, MORPHS, MorphReport
from bus.precisions import PRECISIONS
from gateway import stats
from gateway.controller_failures import SHOWN_S
from gateway.delivery.candidates import lowest_named
from gateway.morphs import KEPT, WITHHELD_S
from gateway.operations.metrics import exposition
from tests.support.gateway_core import Core
from tests.support.metrics_samples import metrics_of
from tests.support.paths import ROOT

OBSERVE: Final = ROOT / "docker" / "observe"
NAME: Final = re.compile(r"\b(?:\w+:)?instar_\w+(?::\w+)?|\bup\b")
SHAPE = [LayerShape(), LayerShape(ffn="int4"), LayerShape(attention="int8", ffn="int4")]


@pytest.fixture(scope="module")
def core() -> Core:
    """A gateway that delivered tokens of two shapes, with one worker's report."""
    core = Core()
    core.worker("w0")
    core.poll()
    core.report(metrics_of("m@w0", layers=SHAPE))
    (state,) = core.submit("a")
    for core.fingerprint, token_ids in (("tp1-full", [1, 2]), ("tp2-int8x0.5-int4x1", [3]), ("", [4])):
        core.deliver(state, token_ids)
    core.delivery.endings.end(state, "stop")
    return core


def samples(core: Core) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(exposition(core.gateway).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_lowest_precision_of_a_shape_is_read_from_its_name() -> None:
    assert [lowest_named(name) for name in ("tp1-full", "tp4-int8x1-int4x2.5", "tp2-int3x0.5")] == [
        *("full", "int4", "int3")
    ]
    assert lowest_named("") == "unknown"


def test_tokens_are_counted_by_the_lowest_precision_of_the_step_that_made_them(core: Core) -> None:
    counted = samples(core)["instar_generation_tokens_by_precision_total"]
    by_precision = {labels["precision"]: value for labels, value in counted}
    assert by_precision == {"full": 2, "int4": 1, "unknown": 1}
    assert {labels["model_name"] for labels, _ in counted} == {"m"}


def test_layers_are_told_by_precision_each_half_for_itself(core: Core) -> None:
    layers = {labels["precision"]: value for labels, value in samples(core)["instar_layers"]}
    assert layers == dict.fromkeys(PRECISIONS, 0) | {"full": 1.5, "int8": 0.5, "int4": 1}


def test_the_use_of_experts_is_told_of_models_that_have_some() -> None:
    core, metrics = Core(), metrics_of("m@w0")
    core.worker("w0")
    core.poll()
    core.report(metrics)
    assert "instar_expert_use_less_used_half" not in samples(core)
    (one,) = metrics.instances
    last = replace(one.last, expert_use=[[0.0, 0.1, 0.4], [0.1, 0.3, 0.6]])
    core.report(replace(metrics, instances=[replace(one, last=last)]))
    ((_, value),) = samples(core)["instar_expert_use_less_used_half"]
    assert value == pytest.approx(0.2)


def test_a_gpu_is_told_by_worker_and_what_it_does_not_tell_is_absent() -> None:
    core, metrics = Core(), metrics_of("m@w0")
    core.worker("w0")
    core.poll()
    gpu = GpuTelemetry(
        utilization=0.87,
        power_watts=612.0,
        memory_used_bytes=5,
        throttling={"thermal": 0.5, "power_cap": 0.0},
        ecc_corrected_errors=3,
        xid_errors={"13": 2},
    )
    assert not [name for name in samples(core) if name.startswith("instar_gpu_")], "no GPU, no metric"
    core.report(replace(metrics, workers=[replace(metrics.workers[0], gpu=gpu)]))
    found = {name: values for name, values in samples(core).items() if name.startswith("instar_gpu_")}
    assert found == {
        "instar_gpu_utilization": [({"worker": "w0"}, 0.87)],
        "instar_gpu_power_watts": [({"worker": "w0"}, 612.0)],
        "instar_gpu_memory_used_bytes": [({"worker": "w0"}, 5)],
        "instar_gpu_throttling": [
            ({"worker": "w0", "reason": "thermal"}, 0.5),
            ({"worker": "w0", "reason": "power_cap"}, 0.0),
        ],
        "instar_gpu_ecc_corrected_errors_total": [({"worker": "w0"}, 3)],
        "instar_gpu_xid_errors_total": [({"worker": "w0", "xid": "13"}, 2)],
    }


def test_every_number_of_a_gpu_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "observe.md").read_text()
    entries = [one.metadata["metric"] for one in fields(GpuTelemetry) if one.metadata]
    missing = [one.name for one in entries if f"`instar_{one.name}{'_total' * one.is_counter}`" not in text]
    assert not missing


def test_morphs_count_from_zero_so_that_the_first_is_seen(core: Core) -> None:
    counted = samples(core)["instar_morphs_total"]
    assert len(counted) == 5 * len(KIND_OF) and {value for _, value in counted} == {0}


def test_forecasts_are_counted_by_whether_they_came_from_zero_on() -> None:
    core, told = (
        Core(),
        Event(kind="forecast_scored", source="controller", subject="m@w0", reason="", at_ms=0),
    )

    def counted() -> dict[str, float]:
        return {labels["outcome"]: value for labels, value in samples(core)["instar_forecasts_total"]}

    assert counted() == {"right": 0, "wrong": 0}
    for is_right in (1, 1, 0):
        core.gateway.morphs.on_event(replace(told, numbers={"is_right": is_right}))
    core.gateway.morphs.on_event(replace(told, numbers={"is_right": 1}), is_history=True)
    assert counted() == {"right": 2, "wrong": 1}


def test_what_the_controller_failed_at_is_counted_by_its_work_and_shown_for_a_while() -> None:
    core = Core()
    failures, now_ms = core.gateway.controller_failures, int(time.time() * 1000)
    told = Event(
        kind="controller_failed",
        source="controller",
        subject="orders",
        reason="TypeError: no number",
        at_ms=now_ms,
        numbers={"failures": 3},
    )

    def counted() -> dict[str, float]:
        found = samples(core)["instar_controller_failures_total"]
        return {labels["work"]: value for labels, value in found if value}

    assert len(samples(core)["instar_controller_failures_total"]) == 5 and counted() == {}
    assert failures.last() is None
    failures.on_event(replace(told, at_ms=now_ms - 1000 * (int(SHOWN_S) + 5)), is_history=True)
    assert failures.last() is None and counted() == {}
    failures.on_event(told)
    failures.on_event(replace(told, kind="worker_lost", reason="another kind"))
    assert counted() == {"orders": 3}
    assert failures.last() == {"work": "orders", "reason": told.reason, "at": now_ms / 1000}


def test_why_nothing_was_morphed_is_told_of_its_instance_for_a_while() -> None:
    morphs, now_ms = Core().gateway.morphs, int(time.time() * 1000)
    told = Event(
        kind="relief_withheld",
        source="w0",
        subject="m@w0",
        reason="requests wait for compute, not for KV blocks",
        at_ms=now_ms - 1000 * (int(WITHHELD_S) + 5),
    )
    morphs.on_event(told, is_history=True)
    assert morphs.withheld("m@w0") is None  # too long ago
    for number in range(KEPT + 1):
        morphs.on_event(replace(told, subject=f"m@w{number}", at_ms=now_ms))
    assert morphs.withheld("m@w0") is None  # more than are kept
    assert morphs.withheld("m@w1") == {"reason": told.reason, "at": now_ms / 1000}
    assert morphs.withheld("other@w1") is None


def test_morphs_are_counted_by_their_cause_too_and_pauses_are_told() -> None:
    core = Core()
    told = Event(
        kind="morph_decided",
        source="controller",
        subject="m@w0",
        reason="KV use is high",
        at_ms=0,
        morph_id="one",
        cause="kv_usage",
    )
    core.gateway.morphs.on_event(told)
    core.gateway.morphs.on_report(ended("one", boundary_seconds=0.02))
    core.gateway.morphs.on_report(ended("two", boundary_seconds=0.01, moving_seconds=0.04))
    found = samples(core)
    decisions = found["instar_morph_decisions_total"]
    counted = {(labels["kind"], labels["cause"], labels["outcome"]) for labels, value in decisions if value}
    assert counted == {("swap", "kv_usage", "applied"), ("swap", "unknown", "applied")}
    ordered = sum("order" in entry.causes for entry in MORPHS)
    assert [labels["cause"] for labels, _ in decisions].count("order") == 5 * ordered  # told from 0
    pauses = {labels["kind"]: total for labels, total in found["instar_morph_pause_seconds_sum"]}
    assert pauses.pop("swap") == pytest.approx(0.07) and set(pauses.values()) == {0}


def ended(morph_id: str, **numbers: float) -> MorphReport:
    return MorphReport(
        id=morph_id,
        kind="swap",
        target="m@w0",
        worker="w0",
        epoch=1,
        state="applied",
        reason="",
        started_ms=1000,
        ended_ms=2000,
        numbers=dict(numbers),
    )


# --------------------------------------------------------------------------- the files


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in read(OBSERVE / "rules.yml")["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OBSERVE / "grafana" / "dashboards" / "instar.json").read_text())
    return found


def shown() -> Iterator[str]:
    board = dashboard()
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["expr"] for one in board["annotations"]["list"] if "expr" in one)


def test_every_metric_of_the_rules_and_the_dashboard_is_told_or_recorded(core: Core) -> None:
    text = exposition(core.gateway).decode()
    told = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    told |= {f"{name}_{part}" for name in told for part in ("bucket", "sum", "count")}
    told |= {rule["record"] for rule in rules() if "record" in rule} | {"up"}
    used = [*(rule["expr"] for rule in rules()), *shown()]
    assert {name for expr in used for name in NAME.findall(expr)} - told == set()


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "observe.md").read_text(), re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == headings
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"] == f"docs/observe.md#{rule['alert'].lower()}"


def test_the_dashboard_lets_choose_data_source_and_model_and_its_panels_do_not_overlap() -> None:
    board = dashboard()
    assert [one["name"] for one in board["templating"]["list"]] == ["DS_PROMETHEUS", "model_name"]
    assert board["refresh"] == "10s"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and columns.stop <= 24
        taken |= cells


def test_the_profile_adds_services_for_this_machine_alone_and_away_from_the_bus() -> None:
    services = read(ROOT / "compose.yaml")["services"]
    added = {name: service for name, service in services.items() if "observe" in service.get("profiles", ())}
    assert set(added) == {"prometheus", "grafana", "jaeger"}
    for service in added.values():
        assert service["networks"] == ["front"] and service["read_only"] and service["cap_drop"] == ["ALL"]
        assert re.fullmatch(r"127\.0\.0\.1:\$\{INSTAR_\w+_PORT:-(\d+)\}:\1", *service["ports"])
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        given = service.get("volumes", ())
        assert all((ROOT / one.partition(":")[0]).exists() for one in given if one[0] == ".")


def test_prometheus_and_grafana_find_what_they_are_given() -> None:
    scraped = read(OBSERVE / "prometheus.yml")
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": ["gateway:8000"]}]
    assert scraped["rule_files"] == ["/etc/prometheus/rules.yml"]
    provisioning = OBSERVE / "grafana" / "provisioning"
    (source,) = read(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (traces,) = read(provisioning / "datasources" / "jaeger.yml")["datasources"]
    assert traces["url"] == "http://jaeger:16686"
    (provider,) = read(provisioning / "dashboards" / "instar.yml")["providers"]
    volumes = read(ROOT / "compose.yaml")["services"]["grafana"]["volumes"]
    assert any(volume.endswith(f":{provider['options']['path']}:ro") for volume in volumes)


def test_the_bounds_of_vllm_rise() -> None:
    for bounds in (stats.TTFT, stats.PER_TOKEN, stats.LATENCY, stats.TOKENS, stats.CHOICES):
        assert list(bounds) == sorted(set(bounds))
