"""What other people's tools read: counters of precision, and the files for Prometheus and Grafana."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bus.messages import LayerShape
from gateway.delivery.precision import lowest_named
from gateway.operations.metrics import exposition
from tests.gateway_core import Core
from tests.metrics_samples import metrics_of

SHAPE = [LayerShape(), LayerShape(ffn="int4"), LayerShape(attention="int8", ffn="int4")]


@pytest.fixture(scope="module")
def core() -> Core:
    """A gateway that delivered tokens of two shapes, with one worker's report."""
    core = Core()
    core.worker("w0")
    core.poll()
    core.report(metrics_of("m@w0", layers=SHAPE))
    (flight,) = core.submit("a")
    for core.fingerprint, token_ids in (("tp1-full", [1, 2]), ("tp2-int8x0.5-int4x1", [3]), ("", [4])):
        core.deliver(flight, token_ids)
    core.delivery.endings.end(flight, "stop")
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
    assert layers == {"full": 1.5, "int8": 0.5, "int4": 1, "int3": 0}


def test_morphs_count_from_zero_so_that_the_first_is_seen(core: Core) -> None:
    counted = samples(core)["instar_morphs_total"]
    assert len(counted) == 15 and {value for _, value in counted} == {0}
