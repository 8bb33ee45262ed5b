"""Numbers, figures and the page from runs: all of it from the JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.load import text_of
from bench.morph.service import Way
from bench.paper import campaign as paper_campaign
from bench.paper.campaign import Campaign, Clock
from bench.paper.headline import replayed, static_weights
from bench.paper.ladder import Climbs, highest_rates, middle, times_full
from bench.paper.loads import Load
from bench.paper.page import BLOCKS, COMMANDS, PAGE, README, Block, read_results, regenerated
from bench.paper.plot import draw_all
from bench.paper.report import headlines, load_numbers, premises, quality, row
from bench.paper.run import SLO, PaperRun
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE, PLAN, PLAN_ANY, ways
from bench.paper.tables import judged, merged, middles, number, spread
from instar.errors import InputError
from instar.replay.files import RunFile
from instar.replay.outcomes import RequestOutcome

PLANS = {PLAN: ("full", "int4"), PLAN_ANY: ("int8", "int4")}
# P95 TTFT of each way; what is not here has 1 s.
TTFT_S = {FULL: 6.0, DEFAULT: 1.5, PERFORMANCE: 0.5, INT4: 0.1}


def run_of(load: str, way: str, ttft_s: float, blocks: tuple[int, int] = (47, 47)) -> PaperRun:
    """Four requests a second apart, each with the same wait."""
    outcomes = [
        RequestOutcome(
            number=i,
            due_s=float(i),
            prompt_asked=128,
            output_asked=64,
            sent_s=i + 0.001,
            opened_s=i + ttft_s / 2,
            first_s=i + ttft_s,
            last_s=i + ttft_s + 0.63,
            ended_s=i + ttft_s + 0.64,
            status=200,
            finish="length",
            events=64,
            output_tokens=64,
            spans=[(32, 0), (32, 0 if way == FULL else 2)],
        )
        for i in range(4)
    ]
    samples = [
        {
            "at_s": at_s,
            "instances": {
                "demo@w0": {
                    "kv_blocks": blocks[at_s > 1],
                    "kv_used": blocks[0],
                    "running": 2,
                    "waiting": int(way == FULL),
                    "layers_below_full": 2 * (at_s > 1),
                    "tp": 1,
                    "queue_delay_s": 0.0,
                    "preemptions": 0,
                }
            },
        }
        for at_s in (-0.5, 0.5, 1.5, 2.5)
    ]
    morph = {"id": "m", "kind": "swap", "state": "applied", "started": 101.5, "numbers": {}}
    about = {
        "name": way,
        "source": load,
        "url": "http://x",
        "model": "demo",
        "began_at": 100.0,
        "arrivals_sha256": "",
    }
    file = RunFile(about, SLO, outcomes, {"samples": samples, "morphs": [morph]}, [10] * 5)
    return PaperRun(load, way, file, dict.fromkeys(range(4), "x"), blocks[0], 0.1)


def results_of(found: dict[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    return dict.fromkeys(COMMANDS) | {"paper": found}


def result() -> dict[str, Any]:
    rows = []
    for load in ("Azure code", "Gamma burst"):
        for way in ways(8, PLANS):
            blocks = (47, 123) if way.name == DEFAULT else (47, 47)
            f1 = {FULL: 100.0, INT4: 90.0}.get(way.name, 98.0)
            likeness = {"f1": f1, "f1_error": 1.0, "rouge_l": f1, "rouge_l_error": 1.0, "texts": 4, "same": 2}
            quality = {
                "perplexity": 30.0 + (100 - f1) / 100,
                "nats_above_full": 0.0,
                "nats_error": 0.001,
                "against_full": likeness,
                "against_text": likeness,
            }
            found = row(run_of(load, way.name, TTFT_S.get(way.name, 1.0), blocks))
            rows.append(found | {"quality": quality})
    return made_of(rows)


def made_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ladder = [
        {"rate": rate, "way": way, "tokens_per_s": 100 * rate, **_ends(p95)}
        for rate in (2.0, 3.0, 4.0)
        for way, p95 in ((FULL, rate - 0.5), (INT4, 0.1), (DEFAULT, rate / 2), (PERFORMANCE, 0.2))
    ]
    loads = [
        load_numbers(Load(name, "x", 30.0, [0.0, 1.0, 2.0, 3.0], 9), 2.0)
        for name in ("Azure code", "Gamma burst")
    ]
    plan = {"layers": ["full", "int4"], "in_words": "int4: 1", "mean_bits": 18.0}
    made: dict[str, Any] = {
        "quick": True,
        "settings": {
            "speed": 2.4,
            "prompt_tokens": 128,
            "output_tokens": 64,
            "busiest_s": 8.0,
            "ttft_limit_s": 2.0,
            "num_layers": 8,
            "kv_blocks": {"full": 47, "pyramid": 94},
            "capacity_requests_per_s": {FULL: 2.0, INT4: 4.0},
            "burst_share_of_int4": 0.85,
            "least_overload_of_full": 1.25,
        },
        "loads": loads,
        "offline": {
            "scored_tokens": 32768,
            "plans": {PLAN: plan, PLAN_ANY: plan},
            "pyramid": {"kept_of_prompt": [55, 9], "memory_share": 0.5},
        },
        "runs": rows,
        "ladder": ladder,
        "headlines": headlines(rows, ladder, 4.0),
        "premises": premises(rows),
    }
    return dict(json.loads(json.dumps(made)))


def _ends(p95: float) -> dict[str, Any]:
    return {"ttft_s": {"p95": p95}, "served": 9, "requests": 9}


def test_a_run_is_told_in_numbers_and_series_that_the_figures_need() -> None:
    found = row(run_of("code", DEFAULT, 1.5, (47, 123)))
    assert found["violations"] == 0 and found["ttft_s"]["p95"] == pytest.approx(1.5)
    assert found["tpot_s"]["mean"] == pytest.approx(0.01)
    assert (found["kv_blocks_before"], found["kv_blocks_peak"], found["kv_used_peak"]) == (47, 123, 47)
    assert found["series"]["at_s"] == [0.5, 1.5, 2.5], "what was before the first request is not drawn"
    assert found["tokens_by_layers_below_full"] == {"0": 128, "2": 128}
    assert found["morphs"] == [{"kind": "swap", "state": "applied", "at_s": 1.5}]


def test_ratios_are_to_full_precision_on_the_same_load() -> None:
    found = result()["headlines"]["ways"][DEFAULT]
    assert found["times_lower_ttft_p95"] == [4.0, 4.0]
    assert found["fewer_violations"] == 1.0 and found["requests"] == 8
    assert found["times_kv_peak"] == [2.617, 2.617]
    assert found["loss_percent"]["f1_against_full"] == [2.0, 2.0]


def test_the_highest_rate_is_where_the_limit_is_crossed_first() -> None:
    def at(rate: float, p95: float, served: int = 9) -> dict[str, Any]:
        return {"way": "w", "rate": rate} | _ends(p95) | {"served": served}

    assert highest_rates([at(1, 1.0), at(2, 4.0), at(3, 0.2)]) == {"w": {"0": 1.5}}
    assert highest_rates([at(1, 0.1), at(2, 0.2, served=8)]) == {"w": {"0": 1}}
    assert highest_rates([at(1, 0.1), at(2, 0.2)]) == {"w": {"0": 2}}
    assert highest_rates([at(1, 3.0)]) == {"w": {"0": None}}
    assert highest_rates([at(1, 0.1), at(2, 0.2)], top=3) == {"w": {}}, "the climb is not over"


def test_rates_are_compared_within_a_repeat_and_their_median_counts_none_as_the_least() -> None:
    climbs: Climbs = {"full": {"0": 2.0, "1": 4.0, "2": None}, "w": {"0": 3.0, "1": 8.0, "2": 9.0, "3": 9.0}}
    assert times_full(climbs, "w", "full") == [1.5, 2.0]
    assert middle([3.0, None, 2.0]) == 2.0 and middle([None, None, 2.0]) is None and middle([]) is None


def test_repeats_are_merged_into_medians_and_told_with_their_spread() -> None:
    rows: list[dict[str, Any]] = [
        {"way": "a", "repeat": 1, "n": 5, "of": {"p95": 1.0, "none": None}},
        {"way": "b", "repeat": 0, "n": 1, "of": None},
        {"way": "a", "repeat": 0, "n": 1, "of": {"p95": 3.0, "none": None}, "series": [1, 2]},
        {"way": "a", "repeat": 2, "n": 2, "of": None},
    ]
    a, b = merged(rows, "way")
    assert (a["n"], a["of"], a["series"]) == (2, {"p95": 2.0, "none": None}, [1, 2])
    assert [one["repeat"] for one in a["repeats"]] == [0, 1, 2] and b["of"] is None
    assert middles([True, False]) is True
    assert [spread(values) for values in ([], [1.5], [3.0, 1.0, 2.0])] == ["", "1.50", "2.00 (1.00 to 3.00)"]


def test_the_page_tells_of_repeats(tmp_path: Path) -> None:
    rows = result()["runs"]
    again = json.loads(json.dumps([one | {"repeat": 1} for one in rows]))
    for one in again:
        del one["series"]
        one["ttft_s"]["p95"] += 2.0
        if one["quality"]["perplexity"] == 30.02:
            one["quality"]["nats_error"] = None
    found = made_of([one | {"repeat": 0} for one in rows] + again)
    page = regenerated(PAGE.read_text(), BLOCKS[PAGE], results_of(found))
    assert "| 7.00 (6.00 to 8.00) | 4 of 4 |" in page
    assert draw_all(found, tmp_path)


def test_the_perplexity_of_a_mode_is_that_which_its_profile_predicts() -> None:
    full: Any = ("full", "full")
    offline: Any = SimpleNamespace(perplexity_of={full: 30.0}.__getitem__, references=["x"], truths=["y"])
    way = Way(DEFAULT, mode="default")
    found = quality(run_of("a", DEFAULT, 1.0), way, offline, [1, 0], predicted_loss=0.02)
    assert (found["perplexity"], found["nats_error"]) == (30.6, None)
    assert found["against_full"]["f1"] == 100 and found["against_text"]["f1"] == 0


def test_a_premise_that_failed_is_told() -> None:
    rows = [row(run_of("code", FULL, 6.0, (47, 47))), row(run_of("code", PERFORMANCE, 6.0))]
    found = {one["what"]: one["holds"] for one in premises(rows)}
    assert found["full precision saturates: code"] is True
    assert found["performance mode holds the load: code"] is False
    assert premises(rows, [{"full_requests_per_s": rate} for rate in (2.0, 2.5)])[2]["holds"] is False


def test_the_page_holds_what_the_result_in_the_repository_says() -> None:
    for path, blocks in BLOCKS.items():
        page = path.read_text()
        assert page == regenerated(page, blocks, read_results()), "run python -m bench.paper page"


def test_every_block_and_figure_comes_from_the_json_alone(tmp_path: Path) -> None:
    found = result()
    page = regenerated(PAGE.read_text(), BLOCKS[PAGE], results_of(found))
    assert COMMANDS["paper"] + "`" not in page
    assert page == regenerated(page, BLOCKS[PAGE], results_of(found))
    assert "A pilot" in page and "| 6.00 | 4 of 4 |" in page
    assert COMMANDS["paper"] + "` writes this" in regenerated(page, BLOCKS[PAGE], results_of(None))
    paths = draw_all(found, tmp_path)
    assert [path.name for path in paths] == [f"paper-figure{i}.png" for i in (4, 5, 6, 7)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_page_that_lost_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="'headline' once"):
        regenerated(PAGE.read_text().replace("numbers: headline", ""), BLOCKS[PAGE], results_of(None))
    assert len(BLOCKS[PAGE]) == PAGE.read_text().count("<!-- end -->")


def test_a_block_within_a_line_stays_in_its_line() -> None:
    blocks = {"a": Block("paper", lambda result: str(result["b"]))}
    page = "| x | <!-- numbers: a -->old<!-- end --> |\n| y | <!-- end --> |\n"
    assert regenerated(page, blocks, {"paper": {"b": "new"}}) == page.replace("old", "new")


def test_the_readme_tells_of_the_same_result() -> None:
    found = result()
    assert replayed(found) == (
        "0 of 8 requests over 2 s TTFT instead of 8; P95 TTFT 4.0 and 4.0 times lower on 2 loads. "
        "MorphServe's paper has -92 % where this is -100 %"
    )
    assert "no request was over 2 s, with F1 against full precision at 90 to 90 %" in static_weights(found)
    assert "<!-- numbers: replayed -->" in README.read_text()


def test_a_larger_model_is_told_of_without_quality() -> None:
    found = result() | {"offline": None}
    for one in found["runs"]:
        del one["quality"]
    found["settings"] |= {"size": "100M", "losses_by": "assumed"}
    found["headlines"] = headlines(found["runs"], found["ladder"], 4.0)
    page = regenerated(PAGE.read_text(), BLOCKS[PAGE], results_of(None) | {"paper-100M": found})
    assert "The model has random weights, 100M parameters" in page
    assert "| full precision saturates: Azure code |" in page
    assert "| full precision | 6.00 s, 6.00 s | 4 of 4, 4 of 4 |" in page


def test_numbers_are_told_with_three_digits_and_verdicts_count_loads() -> None:
    assert [number(value) for value in (None, 0.123, 12.34, 123.4)] == ["-", "0.12", "12.3", "123"]
    verdicts = [judged(values, lambda x: x >= 2) for values in ([2.0, 3.0], [1.0, 3.0], [1.0, None])]
    assert verdicts == ["reached", "in 1 of 2", "missed"]


def test_the_text_of_a_stream_is_that_of_all_its_events() -> None:
    events = [{"choices": [{"text": "def"}]}, {"choices": [{"text": " f"}]}, {"choices": [], "usage": {}}]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    assert text_of(stream.encode()) == "def f"


def test_a_run_of_which_nothing_was_served_ends_the_evaluation_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("Azure code", FULL, 1.0)
    for one in run.file.outcomes:
        one.error = "503 server_overloaded"
    monkeypatch.setattr(paper_campaign, "run_one", lambda *_: run)
    none: Any = None
    campaign = Campaign(none, [[1]], none, tmp_path, Clock())
    with pytest.raises(InputError, match=r"Azure code full precision: no request was served \(4 x 503"):
        campaign.send(Way(FULL), "Azure code full precision", [0.0], 1.0)
    assert (tmp_path / "azure-code-full-precision" / "run.json").exists()
