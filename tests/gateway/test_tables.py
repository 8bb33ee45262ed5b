"""The tables of precisions, morphs, the policy and charts that the gateway gives to programs."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import get_args

from bus.messages import InstanceMoment
from bus.morphs import KIND_OF, MORPH_KINDS, MORPHS, Morph, MorphKind, progress_of
from bus.policy import FIELDS
from bus.precisions import PRECISIONS
from gateway.app import ROUTERS
from gateway.operations.tables import CHARTS, COMPARED, tables
from tests.support.gateway_harness import Gate
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.gateway_fixtures"]


DASHBOARD = sorted((ROOT / "gateway" / "dashboard").glob("*.*s"))


def test_every_kind_of_morph_has_one_entry() -> None:
    assert get_args(MorphKind) == MORPH_KINDS
    assert set(KIND_OF) == set(get_args(Morph))


def test_every_field_of_an_order_is_a_field_of_its_command() -> None:
    """Only `model` is not: it says which instance the order is for."""
    for entry in MORPHS:
        names = {one.name for one in fields(entry.command)}
        assert {one.name for one in entry.fields} - {"model"} <= names, entry.name
        assert entry.target or not entry.fields


def test_every_kind_that_is_ordered_by_hand_has_its_path() -> None:
    paths = {getattr(route, "path", "") for router in ROUTERS for route in router.routes}
    for entry in MORPHS:
        if entry.target == "instance":
            assert f"/admin/instances/{{instance:path}}/{entry.name}" in paths


def test_how_far_a_morph_is_is_read_from_the_numbers_of_its_kind() -> None:
    assert progress_of("swap", {"halves": 4, "halves_applied": 1}) == 0.25
    assert progress_of("transform", {"layers": 8, "layers_done": 2, "tp_after": 2}) == 0.25
    assert progress_of("transform", {"steps": 2, "steps_done": 1}) == 0.5
    assert progress_of("resize", {"blocks_before": 1}) is None
    assert progress_of("unheard-of", {}) is None


def test_charts_draw_what_moments_have() -> None:
    names = {one.name for one in fields(InstanceMoment)}
    assert {series.field for chart in CHARTS for series in chart.series} <= names


def test_the_dashboard_has_no_list_of_its_own() -> None:
    """No precision, morph by hand or policy field is named in its scripts and style sheets."""
    names = [*PRECISIONS[1:], *(one.name for one in FIELDS if one.name not in ("mode", "precision"))]
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    found = {
        f"{path.name}: {match[0]}"
        for path in DASHBOARD
        for match in pattern.finditer(path.read_text("utf-8"))
    }
    assert not found


async def test_programs_get_the_tables_from_the_gateway(gate: Gate) -> None:
    async with gate.http() as http:
        found = (await http.get("/admin/tables")).json()
    assert found == json.loads(json.dumps(tables()))
    assert [one["name"] for one in found["precisions"]] == list(PRECISIONS)
    assert [one["name"] for one in found["policy"]] == [one.name for one in FIELDS]
    (swap,) = [one for one in found["morphs"] if one["name"] == "swap"]
    assert [one["name"] for one in swap["fields"]] == ["layers", "count", "precision", "parts", "wait_s"]


def test_numbers_that_are_compared_are_those_of_the_reflex() -> None:
    """A name that no decision has would never be drawn."""
    source = (ROOT / "worker" / "morph" / "sizing.py").read_text("utf-8")
    names = [name for group in COMPARED for name, _ in group.numbers]
    assert [name for name in names if f'"{name}"' not in source] == []
