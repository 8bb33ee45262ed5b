"""`instar morph`, against a gateway that answers by a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bus.precisions import PRECISIONS
from instar.cli import main
from instar.commands.morph import in_words, layer_numbers, progress_text
from instar.output.morph_numbers import numbers_text
from tests.support.cli_gateway import APPLIED, DEFERRED, RUNNING, Script, be_watched, cluster, instance

pytest_plugins = ["tests.support.cli_fixtures"]


def test_a_swap_is_followed_to_its_end(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(202, RUNNING), (200, RUNNING), (200, APPLIED)]
    assert gateway.run("swap", "--count", "2", "--precision", "int4", "--wait", "1.5") == 0
    order = {"wait_s": 1.5, "precision": "int4", "count": 2}
    wait = ("GET", "/admin/morphs/a1?wait=true", None)
    assert gateway.asked == [("POST", "/admin/instances/demo@w0/swap", order), wait, wait]
    out = capsys.readouterr().out
    assert out == "swap a1 of demo@w0: applied in 0.25 s\n  2 layers\n  pages 12, s 0.5\n"


def test_layers_and_parts_are_named_and_the_end_not_waited_for(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(202, RUNNING)]
    argv = ["swap", "org/m@w1", "--layers", "0,4-6", "--part", "ffn", "--precision", "full"]
    assert gateway.run(*argv, "--detach", "--json") == 0
    order = {"wait_s": 0.0, "precision": "full", "layers": [0, 4, 5, 6], "parts": ["ffn"]}
    assert gateway.asked == [("POST", "/admin/instances/org%2Fm@w1/swap", order)]
    assert json.loads(capsys.readouterr().out) == RUNNING


def test_a_morph_that_was_not_applied_is_exit_status_1(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(200, DEFERRED)]
    assert gateway.run("resize", "demo@w0", "40") == 1
    assert gateway.asked[0][2] == {"wait_s": 0.0, "blocks": 40}
    assert "deferred in 1.00 s\n  no pages\n" in capsys.readouterr().out
    assert gateway.run("show", "a1") == 0  # it was shown


def test_what_the_gateway_refuses_is_told_in_its_words(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(404, {"error": {"message": "no instance 'x'; there are: demo@w0"}})]
    assert gateway.run("resize", "x", "40") == 1
    assert "instar morph resize: /admin/instances/x/resize: 404: no instance 'x'" in capsys.readouterr().err
    gateway.instances = ["a@w0", "b@w0"]
    assert gateway.run("resize", "40") == 2
    told = capsys.readouterr().err
    assert "say which instance, as in `instar morph resize a@w0 ...`; there are: a@w0, b@w0" in told


@pytest.mark.parametrize(
    "argv",
    [
        ("b@w0", "40"),
        ("--instance", "b@w0", "40"),
        ("40", "--instance", "b@w0"),
        ("b@w0", "40", "--instance", "b@w0"),
    ],
    ids=" ".join,
)
def test_an_instance_is_named_by_its_place_or_by_a_flag(gateway: Script, argv: tuple[str, ...]) -> None:
    gateway.instances, gateway.answers = ["a@w0", "b@w0"], [(200, APPLIED)]
    assert gateway.run("resize", *argv) == 0
    assert gateway.asked == [("POST", "/admin/instances/b@w0/resize", {"wait_s": 0.0, "blocks": 40})]


def test_a_kv_cache_is_ordered_into_what_it_can_be(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.instances, gateway.answers = ["a@w0"], [(200, APPLIED)]
    assert gateway.run("kv", "int8") == 0
    assert gateway.asked == [("POST", "/admin/instances/a@w0/kv", {"wait_s": 0.0, "kv_dtype": "int8"})]
    assert "may undo this" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gateway.run("kv", "int4")
    assert "choose from 'full', 'int8'" in capsys.readouterr().err


def test_two_names_of_instances_are_one_too_many(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert gateway.run("resize", "a@w0", "40", "--instance", "b@w0") == 2
    assert "a@w0 and --instance b@w0 differ; name one instance" in capsys.readouterr().err
    assert gateway.asked == []


def test_who_orders_by_hand_learns_that_the_policy_may_undo_it(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    swap = ("swap", "--count", "2", "--precision", "int4")
    for mode, answer, is_told in (
        ("default", APPLIED, True),
        ("manual", APPLIED, False),
        ("default", DEFERRED, False),
    ):
        gateway.state = cluster(instance("w0")) | {"policy": {"mode": mode}}
        gateway.answers = [(200, answer)]
        gateway.run(*swap)
        told = "the policy (mode default) may undo this; `instar morph policy mode=manual` keeps it"
        assert (told in capsys.readouterr().out) == is_told
    gateway.answers = [(200, APPLIED)]
    assert gateway.run(*swap, "--json") == 0
    assert json.loads(capsys.readouterr().out) == APPLIED


def test_a_cancelled_morph_is_waited_for(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [
        (202, RUNNING),
        (200, RUNNING | {"state": "failed", "reason": "cancelled", "ended": 101}),
    ]
    assert gateway.run("cancel", "a1") == 0
    assert gateway.asked[0][:2] == ("DELETE", "/admin/morphs/a1")
    assert "failed in 1.00 s\n  cancelled" in capsys.readouterr().out


def transforming(done: int, **fields: Any) -> dict[str, Any]:
    numbers = {"layers_done": done, "layers": 8, "tp_before": 1, "tp_after": 2}
    return RUNNING | {"kind": "transform", "reason": f"{done} of 8 layers", "numbers": numbers} | fields


def test_a_terminal_shows_how_far_a_change_of_degree_is_to_its_last_layer(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_watched(monkeypatch)
    gateway.answers = [
        (202, RUNNING | {"kind": "transform"}),
        *((200, transforming(done)) for done in (1, 1, 5)),
    ]
    gateway.answers += [(200, transforming(8, state="applied", reason="", ended=100.5))]
    argv = ["tp", "2", "--workers", "w1,w0", "--layers-per-step", "2", "--wait", "1"]
    assert gateway.run(*argv) == 0
    order = {"workers": ["w1", "w0"], "tp": 2, "layers_per_step": 2, "wait_s": 1.0}
    assert gateway.asked[0] == ("POST", "/admin/instances/transform", order)
    assert set(gateway.asked[1:]) == {("GET", "/admin/morphs/a1", None)}
    told = capsys.readouterr()
    shown = ["running", *(f"{done} of 8 layers at tp 2" for done in (1, 5, 8))]
    assert told.err == "".join(f"\r\033[K  {text}" for text in shown) + "\n"
    assert told.out.startswith("transform a1 of demo@w0: applied in 0.50 s\n  tp1 to tp2, 8 of 8 layers\n")


def test_a_terminal_shows_how_far_a_swap_is_and_how_long_it_takes(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_watched(monkeypatch)
    gateway.answers = [(202, RUNNING), (200, RUNNING | {"reason": "3 of 8 halves of layers"}), (200, APPLIED)]
    assert gateway.run("swap", "--count", "4", "--precision", "int4") == 0
    assert capsys.readouterr().err == "\r\033[K  running\r\033[K  3 of 8 halves of layers\n"
    assert progress_text(RUNNING | {"kind": "resize", "reason": "begun"}, 3.2) == "begun, 3 s"


def test_where_nobody_watches_only_the_end_is_told(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [
        (202, transforming(1)),
        (200, transforming(3)),
        (200, transforming(8, state="applied")),
    ]
    assert gateway.run("tp", "2", "--workers", "w1,w0") == 0
    assert gateway.asked[1:] == [("GET", "/admin/morphs/a1?wait=true", None)] * 2
    assert capsys.readouterr().err == ""


def test_numbers_that_the_reason_tells_are_not_told_again() -> None:
    numbers = {"blocks_asked": 9000, "min_blocks": 64, "max_blocks": 2100, "seconds": 0.5}
    reason = "this instance can have at most 2100 KV blocks: the device's budget less the weights"
    found = RUNNING | {
        "kind": "resize",
        "state": "failed",
        "reason": reason,
        "numbers": numbers,
        "ended": 100.0,
    }
    assert in_words(found).splitlines()[1:] == [
        f"  {reason}",
        "  KV blocks asked 9000, min blocks 64",
    ]


def test_numbers_are_told_with_their_units() -> None:
    swapped = {"halves": 4, "halves_applied": 4, "bytes_copied": 3 << 20, "copy_seconds": 0.51234}
    swapped |= {"wait_seconds": 0.0, "pages_mapped": 12, "blocks_before": 500, "blocks_after": 620}
    words = "4 of 4 halves of layers, 3 MiB copied in 0.512 s, {} mapped, KV blocks 500 to 620"
    assert numbers_text(swapped, 1 << 20) == words.format("12 MiB")
    assert numbers_text(swapped) == words.format("12 pages")
    rows = {"tp_before": 2, "tp_after": 1, "rows_missing_bytes": 1 << 19, "rows_host_bytes_per_s": 5e8}
    rows |= {"bytes_exchanged": 0, "layers_per_step": 2, "peak_bytes": 8 << 20, "seconds": 0.1}
    told = "tp2 to tp1, 2 a step, rows missing 0.5 MiB, rows host 477 MiB/s, peak 8 MiB"
    assert numbers_text(rows) == told
    assert numbers_text({"steps": 2, "steps_done": 1, "tp_before": 2, "tp_after": 2}) == "1 of 2 steps"


def test_workers_that_are_not_named_are_left_to_the_gateway(gateway: Script) -> None:
    gateway.answers = [(202, RUNNING | {"kind": "transform"})]
    assert gateway.run("tp", "2", "--detach") == 0
    assert gateway.run("tp", "1", "--instance", "demo@w2", "--detach") == 0
    assert [asked[2] for asked in gateway.asked] == [
        {"tp": 2, "wait_s": 0.0},
        {"tp": 1, "instance": "demo@w2", "wait_s": 0.0},
    ]


def test_the_policy_is_shown_and_changed(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(200, {"revision": 1, "mode": "manual", "cooldown_s": 5.0})]
    assert gateway.run("policy") == 0
    assert gateway.asked.pop()[:2] == ("GET", "/admin/policy")
    assert capsys.readouterr().out == "revision = 1\nmode = manual\ncooldown_s = 5\n"
    assert gateway.run("policy", "mode=manual", "windows=3", "kv_usage_high=0.9") == 0
    assert gateway.asked == [("PUT", "/admin/policy", {"mode": "manual", "windows": 3, "kv_usage_high": 0.9})]
    assert gateway.run("policy", "windows") == 2
    assert "write it as windows=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["swp"], "instar morph: there is no command 'swp'; did you mean swap?"),
        (["--count", "3"], "as in `instar morph swap --count`"),
        (["swap", "--count", "0", "--precision", "int4"], "'0' must be a whole number, 1 or more"),
        (["swap", "--layers", "6-4", "--precision", "int4"], "'6-4' is not a range of layers"),
        (["swap", "--layers", "a", "--precision", "int4"], "'a' is not a list of layers; write 0,4-6"),
        (["swap", "--precision", "int4"], "one of the arguments --layers --count is required"),
        (
            ["swap", "--count", "1", "--precision", "int5"],
            f"'int5' is none of {', '.join(PRECISIONS)}; did you mean int",
        ),
        (["swap", "--count", "1", "--part", "fnn"], "'fnn' is none of attention, ffn; did you mean ffn?"),
        (["tp", "two"], "'two' must be a whole number, 1 or more"),
        (["tp", "2", "--workers", "w0,,w1"], "'w0,,w1' is not a list of workers; write w0,w1"),
        (["tp", "2", "--wrokers", "w0"], "there is no flag --wrokers; did you mean --workers?"),
        (
            ["resize", "400", "demo@w0"],
            "'demo@w0' must be a whole number, 1 or more; the instance comes before it, as in resize demo@",
        ),
        (
            ["resize", "9", "--wait"],
            "--wait: expected one argument, S; write --wait=-... for a value that begins with a dash",
        ),
        (
            ["resize", "9", "--waite", "3"],
            "instar morph resize: there is no flag --waite; did you mean --wait?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_answered_with_what_was_meant(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["morph", *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_without_a_verb_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["morph"]) == 0
    assert "instar morph swap --count 2" in capsys.readouterr().out


def test_lists_of_layers_are_read_as_they_are_written() -> None:
    assert layer_numbers("0,4-6") == [0, 4, 5, 6]
