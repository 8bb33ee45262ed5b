"""The output of `instar status` about workers, shapes, morphs and the policy."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.padding import Padding

from instar.commands.status import (
    as_of_text,
    instances_table,
    limit_lines,
    morph_lines,
    policy_text,
    product_lines,
    shape_lines,
    show,
    shown_morphs,
    withheld_lines,
)
from instar.output.gpus import gpu_lines
from instar.output.shapes import layers_text, ranges_text
from instar.output.tables import trimmed
from tests.support.cli_gateway import APPLIED, DEFERRED, RUNNING, instance


def test_status_says_which_losses_are_assumed_and_why() -> None:
    reasons = {"int8": "there is no profile", "int4": "made for another model", "int3": "there is no profile"}
    assert shape_lines([instance("w0", losses_assumed=reasons)]) == [
        "demo@w0: the loss of int8, int3 is assumed: there is no profile",
        "demo@w0: the loss of int4 is assumed: made for another model",
    ]


def test_status_says_why_nothing_was_morphed_and_how_long_ago() -> None:
    why = "requests wait for compute, not for KV blocks: 1200 prompt tokens are due at 1000 a second"
    seen = [
        instance("w0", withheld={"reason": why, "at": 100.0}),
        instance("w1", withheld=None),
        instance("w2"),
    ]
    assert withheld_lines(seen, 112.4) == [f"demo@w0: no morph, 12 s ago: {why}"]
    assert withheld_lines(seen, 99.0) == [f"demo@w0: no morph, 0 s ago: {why}"]
    assert withheld_lines(seen, 400.0) == [f"demo@w0: no morph, 5 min ago: {why}"]


def test_status_says_how_little_the_less_used_experts_are_used() -> None:
    use = [[0.05, 0.2, 0.5], [0.1, 0.3, 0.6]]
    assert shape_lines([instance("w0", expert_use=use), instance("w1", expert_use=[])]) == [
        "demo@w0: the less used half of a layer's experts has 25% of their use (20% to 30%)"
    ]


def layer(attention: str = "full", ffn: str = "full") -> dict[str, str]:
    return {"attention": attention, "ffn": ffn}


def test_layers_are_told_in_few_words() -> None:
    assert layers_text([layer()] * 32) == "32 full"
    assert layers_text([layer()] * 3 + [layer("int4", "int4")] * 2) == "3 full, 2 int4 (3-4)"
    mixed = [layer(ffn="int4"), layer(), layer("int8", "int4"), layer(), layer()]
    assert layers_text(mixed) == "3 full, 1 int4 ffn (0), 1 int8 attention + int4 ffn (2)"
    assert layers_text([]) == ""
    assert ranges_text([0, 4, 5, 6]) == "0,4-6" and ranges_text([]) == ""


def test_status_shows_what_is_in_flight_and_the_last_that_ended() -> None:
    old = [DEFERRED | {"id": f"old{i}"} for i in range(5)]
    shown = shown_morphs([*old, RUNNING, APPLIED | {"id": "last"}])
    assert [morph["id"] for morph in shown] == ["a1", "last", "old4", "old3"]
    assert morph_lines(RUNNING) == ["swap a1 of demo@w0: running", "ordered by hand: 2 more to int4"]
    assert morph_lines(DEFERRED | {"decided": "KV use 0.9"}) == [
        "swap a1 of demo@w0: deferred in 1.00 s",
        "KV use 0.9; no pages",
    ]


def test_status_fits_80_columns_and_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    long = "gpu-box-17.rack-4.example.org"
    worker = {"id": f"{long}-w0", "host": long, "device": "cuda:0", "state": "serving", "busy": 0.93}
    worker |= {"pages": {"weights": 99999, "kv": 99999, "free": 9, "budget": 200007}, "page_bytes": 1 << 20}
    one = instance("w0", running=64, layers=[layer()] * 80, kv={"used": 11234, "blocks": 12000})
    morph = DEFERRED | {"target": f"demo@{long}-w0", "reason": "the attention of layer 3 needs 12 pages " * 3}
    state = {"workers": [worker], "instances": [one | {"id": f"demo@{long}-w0"}], "morphs": [morph]}
    show(state | {"policy": {}, "metrics": {}}, Console(width=80))
    out = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out and max(map(len, out.splitlines())) <= 80
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    for told in ("99999", "200007", "11234/12000 94%", "64", "80/80"):
        assert told in out
    assert " ".join(out.split()).count("needs 12 pages") == 3


def test_gpus_are_told_in_words_without_what_they_do_not_tell() -> None:
    gpu: dict[str, Any] = {
        "name": "H100",
        "utilization": 0.87,
        "power_watts": 612.4,
        "power_limit_watts": 700.0,
    }
    gpu |= {"sm_clock_hertz": 1.98e9, "temperature_celsius": None, "ecc_corrected_errors": 0}
    gpu |= {"throttling": {"power_cap": 0.3, "thermal": 0.0}, "xid_errors": {"13": 2}}
    workers: list[dict[str, Any]] = [{"id": "w0", "gpu": gpu}, {"id": "w1", "gpu": None}, {"id": "w2"}]
    assert gpu_lines(workers) == [
        "w0: H100, busy 87%, 612 of 700 W, 1980 MHz, slowed by power cap 30%, XID 13: 2"
    ]


def test_the_limits_of_a_step_are_told_where_they_are_known() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_tp": 1}
    assert limit_lines([instance("w0", **limits), instance("w1")]) == [
        "demo@w0: at most 256 sequences and 8192 tokens a step, weights padded for degree 1"
    ]


def test_blanks_behind_a_line_go_and_its_colours_stay(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=30, force_terminal=True, color_system="standard")
    with trimmed(console):
        console.print(Padding("[red]told[/]", (0, 20, 0, 0), style="bold"))
    out = capsys.readouterr().out
    assert "told" in out and "\x1b[" in out and " \x1b[0m\n" not in out and not out.rstrip("\n").endswith(" ")


def test_status_says_how_old_its_numbers_are() -> None:
    workers = [{"age_seconds": 0.25}, {"age_seconds": 0.75}]
    assert as_of_text({"age_seconds": 1.0, "workers": workers}) == "memory, KV and load: as of 1.8 s ago"
    assert as_of_text({}) == "memory, KV and load: not measured yet"


def test_status_shows_groups_and_layers_between_two_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    group = instance("w2", "w0", layer_tp=[1] * 5 + [2] * 3)
    Console(width=160).print(instances_table([group]))
    assert "tp2" in capsys.readouterr().out
    assert shape_lines([group]) == [
        "demo@w2: shards on w2, w0, in this order",
        "demo@w2: layers 0-4 at tp1, 5-7 at tp2",
    ]
    assert shape_lines([instance("w0", layer_tp=[1] * 8)]) == []
    stages = [
        {"workers": ["w0", "w1"], "first": 0, "end": 3},
        {"workers": ["w2", "w3"], "first": 3, "end": 8},
    ]
    assert shape_lines([instance("w0", "w1", "w2", "w3", stages=stages)]) == [
        "demo@w0: layers 0 to 2 on w0 + w1, then layers 3 to 7 on w2 + w3"
    ]
    stages[1] |= {"end": 4}
    (line,) = shape_lines([instance("w0", "w1", "w2", "w3", stages=stages)])
    assert line.endswith("then layer 3 on w2 + w3")


def test_status_says_who_is_joining_a_group_or_leaving_one(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=160).print(
        instances_table([instance("w0", changing="joining"), instance("w1", changing="")])
    )
    out = capsys.readouterr().out
    assert "joining" in out and "serving" in out


def test_the_policy_is_one_sentence() -> None:
    assert policy_text({"mode": "manual"}) == "policy: manual"
    thresholds = {"kv_usage_high": 0.85, "queue_delay_high_s": 0.1, "kv_usage_low": 0.5}
    policy = thresholds | {"mode": "default", "precision": "int4", "queue_delay_low_s": 0.02}
    assert policy_text(policy) == (
        "policy: default, to int4 above 85% KV use or 0.1 s of waiting, back below 50% and 0.02 s"
    )


def test_verbose_status_shows_the_kernels_of_products() -> None:
    one = instance("a", products=["linear float32 96x64: few to 16, lanes to 96"])
    assert product_lines([one, instance("b")]) == ["demo@a: linear float32 96x64: few to 16, lanes to 96"]
