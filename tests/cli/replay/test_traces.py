"""Traces: what is read, how it is cut and scaled, and what is said of files that are none."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
from pathlib import Path

import pytest

from instar.cli import main
from instar.commands.bench import token_ids, window
from instar.errors import InputError, TraceError
from instar.replay.schemas import read_rows
from instar.replay.traces import Shaping, Workload, load
from tests.support.paths import TRACES

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def of(name: str, **shaping: float | bool | None) -> Workload:
    return load(str(TRACES / name), "auto", Shaping(**shaping))  # type: ignore[arg-type]


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def own(**fields: object) -> str:
    """Two lines of Instar's own log, the second with these fields."""
    line = {"at": 1.0, "prompt_tokens": 2, "output_tokens": 1}
    return f"{json.dumps(line)}\n{json.dumps(line | fields)}\n"


def told_of(rest: str, reason: str) -> str:
    """Return the second of these lines, from its prompt_tokens on."""
    return f'line 2: \'{{"at": 1.0, "prompt_tokens": {rest}\': {reason}'


@pytest.mark.parametrize(
    ("name", "known_as", "count"),
    [
        ("azure-2023.csv", "azure-2023", 36),
        ("azure-2024.csv", "azure-2024", 35),
        ("burstgpt.csv", "burstgpt", 33),
        ("instar.jsonl", "instar", 29),
    ],
)
def test_each_schema_is_told_by_itself(name: str, known_as: str, count: int) -> None:
    trace = of(name)
    assert (trace.format, len(trace.arrivals)) == (known_as, count)
    times = [one.at_s for one in trace.arrivals]
    assert times == sorted(times) and times[0] == 0.0
    assert load(str(TRACES / name), known_as, Shaping()).digest == trace.digest


def test_flags_name_the_formats_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "replay", "trace.csv", "--format", "azure"])
    told = "'azure' is none of auto, azure-2023, azure-2024, burstgpt, instar; did you mean azure-202"
    assert told in capsys.readouterr().err


def test_the_digits_of_both_azure_schemas_count() -> None:
    assert of("azure-2023.csv").arrivals[1].at_s == pytest.approx(0.370369, abs=2e-6)
    assert of("azure-2024.csv").arrivals[1].at_s == pytest.approx(1.796858, abs=2e-6)


def test_a_later_burstgpt_file_has_more_columns(tmp_path: Path) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path = written(tmp_path, head + "5.5,a,1.2,GPT-4,12,3,15,API log\n7,b,2,GPT-4,4.0,5,9,API log\n")
    trace = load(str(path), "auto", Shaping())
    assert [(one.at_s, one.prompt_tokens, one.output_tokens) for one in trace.arrivals] == [
        (0.0, 12, 3),
        (1.5, 4, 5),
    ]


def test_our_own_log_is_put_in_the_order_of_arrivals_and_keeps_its_prompts() -> None:
    trace = of("instar.jsonl")
    assert [one.prompt is not None for one in trace.arrivals] == [True] * 3 + [False] * 26
    assert len(trace.arrivals[1].prompt or []) == trace.arrivals[1].prompt_tokens
    assert of("instar.jsonl", lengths=0.5).arrivals[0].prompt is None


def test_a_window_is_cut_before_its_rate_is_scaled() -> None:
    whole, cut = of("azure-2023.csv"), of("azure-2023.csv", start_s=2.0, length_s=5.0, rate=2.0)
    inside = [one for one in whole.arrivals if 2.0 <= one.at_s < 7.0]
    assert [one.at_s for one in cut.arrivals] == [
        pytest.approx((one.at_s - 2.0) / 2, abs=1e-6) for one in inside
    ]
    assert cut.seconds == 2.5 and cut.notes == []
    assert len(of("azure-2023.csv", start_s=2.0).arrivals) == sum(one.at_s >= 2 for one in whole.arrivals)
    assert "the trace ends" in of("azure-2023.csv", length_s=60.0).notes[0]


def test_lengths_are_scaled_to_at_least_one_token() -> None:
    whole, small = of("azure-2023.csv"), of("azure-2023.csv", lengths=0.01)
    assert [one.prompt_tokens for one in small.arrivals] == [
        max(1, round(one.prompt_tokens / 100)) for one in whole.arrivals
    ]
    assert min(one.output_tokens for one in small.arrivals) == 1


def test_rows_of_zero_tokens_are_dropped_or_kept_and_counted() -> None:
    assert (of("burstgpt.csv").zero_rows, len(of("burstgpt.csv").arrivals)) == (3, 33)
    kept = of("burstgpt.csv", keeps_zero=True)
    assert (kept.zero_rows, len(kept.arrivals)) == (3, 36)
    assert kept.arrivals[5].output_tokens == 1


def test_a_limit_takes_the_first() -> None:
    assert of("azure-2023.csv", limit=4).arrivals == of("azure-2023.csv").arrivals[:4]


def test_a_made_up_burst_has_the_rate_and_variation_asked_for() -> None:
    trace = load("gamma:50:2:200:100:10", "auto", Shaping(), seed=3)
    gaps = [b.at_s - a.at_s for a, b in zip(trace.arrivals, trace.arrivals[1:], strict=False)]
    mean = statistics.mean(gaps)
    assert 1 / mean == pytest.approx(50, rel=0.1)
    assert statistics.stdev(gaps) / mean == pytest.approx(2, rel=0.1)
    assert statistics.mean(one.prompt_tokens for one in trace.arrivals) == pytest.approx(100, rel=0.1)
    assert trace.digest == load("gamma:50:2:200:100:10", "auto", Shaping(), seed=3).digest
    assert trace.digest != load("gamma:50:2:200:100:10", "auto", Shaping(), seed=4).digest


@pytest.mark.parametrize("text", ["gamma:", "gamma:4:2", "gamma:4:0:60", "gamma:a:2:60", "gamma:4:2:60:9"])
def test_a_slip_in_a_made_up_burst_is_answered_with_its_form(text: str) -> None:
    with pytest.raises(InputError, match=r"write it as gamma:RATE:CV:SECONDS"):
        load(text, "auto", Shaping())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gama:1:2:3", "gama:1:2:3: there is no such file; did you mean gamma:1:2:3?"),
        ("Gamma:1:2:3", "did you mean gamma:1:2:3?"),
        ("poisson:4:60", "there is no such file; a synthetic burst is written as gamma:RATE:CV:SECONDS"),
    ],
)
def test_what_is_neither_a_file_nor_a_burst_is_answered_with_what_was_meant(text: str, told: str) -> None:
    with pytest.raises(InputError) as problem:
        load(text, "auto", Shaping())
    assert told in str(problem.value)


@pytest.mark.parametrize(
    ("text", "wanted", "told"),
    [
        ("", "auto", "trace.csv: is empty"),
        (AZURE, "auto", "has no request, only a header"),
        (
            "TIMESTAMP,ContextTokens,Tokens\n1,2,3\n",
            "auto",
            "line 1: as azure-2023 it needs the column GeneratedTokens; found are: TIMESTAMP, ContextT",
        ),
        (
            AZURE,
            "burstgpt",
            "needs the columns Timestamp and Request tokens and Response tokens; found are: T",
        ),
        (
            "hello\n",
            "auto",
            "line 1: its columns fit no format: hello. The formats are azure-2023 and "
            "azure-2024 (TIMESTAMP, ContextTokens, GeneratedTokens), burstgpt (Timestamp, Request tokens, "
            "Response tokens), instar (JSON lines of at, prompt_tokens, output_tokens)",
        ),
        ("when,in,out\n1,2,3\n", "auto", "no format: when, in, out. The formats are azure-2023 and"),
        (
            AZURE + "2023-11-16 18:00:01,1,1\n2023-11-16 18:00:00,1,1\n",
            "auto",
            "line 3: 2023-11-16 18:00:00 is before 2023-11-16 18:00:01, the line above: sort the trace",
        ),
        (AZURE + "yesterday,1,1\n", "auto", "line 2: TIMESTAMP is 'yesterday', not a date like"),
        (AZURE + "2023-11-16 18:00:01,1\n", "auto", "line 2: has 2 columns, the header 3"),
        (
            AZURE + "2023-11-16 18:00:01,-4,1\n",
            "auto",
            "line 2: ContextTokens is '-4', not a whole",
        ),
        (AZURE + "2023-11-16 18:00:01,4,many\n", "auto", "line 2: GeneratedTokens is 'many', not a whole"),
        (
            AZURE + "2023-11-16 18:00:01,4,0\n",
            "auto",
            "all 1 requests from 0 s on have zero tokens; --keep-z",
        ),
        (
            '{"at": 1, "prompt_tokens": 2}\n',
            "auto",
            'line 1: \'{"at": 1, "prompt_tokens": 2}\': Object missing required field `output_tokens`',
        ),
        (own(prompt_tokens=-2), "instar", told_of('-2, "output_tokens": 1}', "Expected `int` >= 0")),
        (own(output_tokens=1.5), "auto", told_of('2, "output_tokens": 1.5}', "Expected `int`, got `float`")),
        (own(output_tokens=True), "auto", told_of('2, "output_tokens": true}', "Expected `int`, got `bool`")),
        (
            own(at=None),
            "auto",
            'line 2: \'{"at": null, "prompt_tokens": 2, "output_tokens": 1}\': Expected `float`',
        ),
        (
            own(prompt_token_ids="a"),
            "auto",
            told_of(
                '2, "output_tokens": 1, "prompt_token_ids": "a"}',
                "Expected `array | null`, got `str` - at `$.",
            ),
        ),
        (
            own(prompt_token_ids=[1, -2]),
            "auto",
            told_of(
                '2, "output_tokens": 1, "prompt_token_ids": [1, -2]}', "Expected `int` >= 0 - at `$.prompt_to"
            ),
        ),
        (own(prompt_token_ids=[1]), "auto", "line 2: prompt_tokens is 2, prompt_token_ids holds 1"),
        (own() + "{broken\n", "auto", "line 3: '{broken': JSON is malformed: "),
        (own() + "[1]\n", "auto", "line 3: '[1]': Expected `object`, got `array`; a line is an object such"),
        ("a,b\n", "instar", "line 1: 'a,b': JSON is malformed: "),
        ("a" * 200_000, "auto", "line 1: cannot be read as CSV: field larger than field limit"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_line(
    tmp_path: Path, text: str, wanted: str, told: str
) -> None:
    with pytest.raises(InputError) as problem:
        load(str(written(tmp_path, text)), wanted, Shaping())
    assert told in str(problem.value)


def test_a_window_outside_the_trace_is_refused_with_the_trace_s_length() -> None:
    with pytest.raises(InputError, match=r"begins at 500 s, and the trace has 13\.4 s \(36 requests\)"):
        of("azure-2023.csv", start_s=500.0, length_s=10.0)
    gap = of("azure-2023.csv").arrivals
    begins = max(range(len(gap) - 1), key=lambda i: gap[i + 1].at_s - gap[i].at_s)
    with pytest.raises(InputError, match=r"there is no request between .* s; the next is at [\d.]+ s"):
        of("azure-2023.csv", start_s=gap[begins].at_s + 0.01, length_s=0.02)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.csv")
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe\xff")
    with pytest.raises(TraceError, match="is not text; unpack it"):
        read_rows(packed)


def test_a_trace_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "trace"
    os.mkfifo(pipe)
    text = (TRACES / "azure-2023.csv").read_text()
    writer = threading.Thread(target=lambda: pipe.write_text(text), daemon=True)
    writer.start()
    found = load(str(pipe), "auto", Shaping())
    writer.join(5)
    assert (found.format, found.arrivals) == ("azure-2023", of("azure-2023.csv").arrivals)


def test_a_long_trace_is_read_no_further_than_its_window(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE + "".join(f"2023-11-16 18:00:{s:02d},1,1\n" for s in range(9)) + "broken")
    assert len(load(str(path), "auto", Shaping(1.0, 3.0)).arrivals) == 3


def test_windows_and_ranges_are_read_as_they_are_written() -> None:
    assert window("792:72") == (792.0, 72.0) and window("60:") == (60.0, None) and window(":5") == (0.0, 5.0)
    assert token_ids("16:1000") == range(16, 1000)
    for slip in ("792", "a:b", "-1:4", "4:0"):
        with pytest.raises(argparse.ArgumentTypeError, match="as 792:72"):
            window(slip)
    for slip, told in (("-1:4", "must be 0 or more"), ("4:0", "must be above 0")):
        with pytest.raises(argparse.ArgumentTypeError, match=told):
            window(slip)
    for slip in ("16", "9:3", "a:b"):
        with pytest.raises(argparse.ArgumentTypeError, match="as 16:1000"):
            token_ids(slip)
