"""The table of the policy's fields: what the admin API, the command line and the dashboard read of it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import get_args

import pytest

from bus.policy import FIELDS, Mode, Policy, describe
from bus.precisions import QUANTIZED
from instar.commands.morph import policy_fields
from tests.support.paths import ROOT


def test_every_field_but_the_revision_is_declared_with_its_default() -> None:
    defaults = asdict(Policy())
    assert [one.name for one in FIELDS] == [one.name for one in fields(Policy) if one.name != "revision"]
    assert {one.name: one.default for one in FIELDS} == {one.name: defaults[one.name] for one in FIELDS}


def test_defaults_lie_within_their_limits() -> None:
    for one in FIELDS:
        if one.choices:
            assert one.type == "choice" and one.default in one.choices
            continue
        assert one.minimum is not None and one.maximum is not None
        if one.default is None:
            assert one.unset and one.type == "number"
            continue
        assert isinstance(one.default, int | float)
        assert one.minimum <= one.default <= one.maximum and (one.type == "integer") == isinstance(
            one.default, int
        )
        if one.below:
            assert one.default < getattr(Policy(), one.below)


def test_choices_are_those_of_the_types() -> None:
    choices = {one.name: tuple(one.choices) for one in FIELDS if one.choices}
    assert choices == {"mode": get_args(Mode), "precision": QUANTIZED}


def test_the_description_is_json_and_has_every_effect_of_a_mode_in_words() -> None:
    told = json.loads(json.dumps(describe()))
    assert [one["name"] for one in told] == [one.name for one in FIELDS]
    loss = next(one for one in told if one["name"] == "loss_budget")
    assert loss["by_mode"] == {"accuracy": "0.001", "default": "0.0025", "performance": "0.05"}
    assert (loss["type"], loss["limits"], loss["unset"]) == ("number", "0 to 1", "mode")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "accuracy",
            {"kv_usage_high": 0.925, "kv_usage_low": 0.675, "queue_delay_high_s": 0.2, "loss_budget": 0.001},
        ),
        ("default", {"kv_usage_high": 0.85, "kv_usage_low": 0.5, "loss_budget": 0.0025}),
        ("performance", {"windows": 1, "loss_budget": 0.05}),
    ],
)
def test_a_mode_changes_what_its_effects_say(mode: Mode, expected: dict[str, float]) -> None:
    in_force = Policy(mode=mode).in_force()
    assert in_force is not None
    found = asdict(in_force)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_budget_of_no_loss_is_not_that_of_the_mode() -> None:
    in_force = Policy(mode="performance", loss_budget=0.0).in_force()
    assert in_force is not None and in_force.most_loss == 0.0 == Policy(mode="manual").most_loss


def test_manual_decides_nothing() -> None:
    assert Policy(mode="manual").in_force() is None


def test_the_command_line_explains_every_field() -> None:
    told = policy_fields()
    for one in FIELDS:
        assert one.name in told and one.summary in told and one.limits in told


def test_the_page_of_morphs_has_a_row_for_every_field_with_its_default_and_limits() -> None:
    rows = (ROOT / "docs" / "morphs.md").read_text()
    for one in FIELDS:
        default = one.unset if one.default is None else one.default
        default = f"{default:g}" if isinstance(default, float) else default
        assert f"| `{one.name}` | {default} | {one.limits} |" in rows
