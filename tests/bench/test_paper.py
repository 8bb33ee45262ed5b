"""The paper's evaluation: what it asks for, what its baselines plan, and what its numbers mean."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.morph.service import Way
from bench.paper import evaluate as paper
from bench.paper import loads as paper_loads
from bench.paper.campaign import expected_s
from bench.paper.kept import Kept
from bench.paper.ladder import is_needed, rates_of, rungs_of
from bench.paper.loads import BUSIEST_S, Window, all_loads, busiest, find_trace, fitted, gamma_load, thinned
from bench.paper.plan import BITS, bits_of, ceiling_bits, in_words, plan
from bench.paper.text import f1, longest_common, mean_and_error, rouge_l, words
from instar.errors import InputError

# ------------------------------------------------------------------------------------- loads

times_of = st.lists(st.floats(0, 30), min_size=1, max_size=40).map(sorted)


@given(times=times_of, rate=st.floats(0.2, 5))
def test_a_load_is_thinned_until_its_burst_asks_for_no_more_than_is_wanted(
    times: list[float], rate: float
) -> None:
    found = fitted(times, rate)
    assert busiest(found, BUSIEST_S) <= max(1, rate * BUSIEST_S)
    assert set(found) <= set(times) and found == sorted(found)


@given(times=times_of, seconds=st.floats(0.1, 10))
def test_the_busiest_part_is_the_one_that_a_search_of_all_finds(times: list[float], seconds: float) -> None:
    assert busiest(times, seconds) == max(sum(a <= b < a + seconds for b in times) for a in times)


def test_thinning_keeps_calm_and_burst_in_proportion() -> None:
    times = [float(i) for i in range(10)] + [10 + i / 10 for i in range(100)]
    half = thinned(times, 55)
    assert sum(at_s < 10 for at_s in half) == 5
    assert thinned(times, len(times)) == times


def test_the_made_up_burst_asks_for_what_is_wanted_and_is_the_same_each_time() -> None:
    load = gamma_load(30.0, rate=6.0)
    assert load == gamma_load(30.0, rate=6.0)
    assert 5.0 <= load.burst_rate <= 6.0 < 2.5 * load.mean_rate
    assert load.times[-1] < 30


def test_a_missing_trace_is_told_with_its_names_its_place_and_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no trace AzureLLM") as told:
        all_loads(tmp_path, 2.0, 5.0)
    assert str(tmp_path) in str(told.value) and "github.com/Azure/AzurePublicDataset" in str(told.value)


def test_a_window_is_read_from_a_trace_and_sent_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window("code", ("trace.csv",), 10.0)
    monkeypatch.setattr(paper_loads, "WINDOWS", (window,))
    rows = [f"2023-11-16 18:{at // 60:02d}:{at % 60:02d}.0000000,100,5" for at in range(100)]
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    assert find_trace(tmp_path, window) == tmp_path / "trace.csv"
    said: list[str] = []
    load, _ = all_loads(tmp_path, 2.0, 6.0, said.append)
    assert load.times == [i / 2 for i in range(72)] and load.seconds == 36
    assert len(said) == 1, "a trace that asks for less than is wanted is told of"
    first, second = load.arrivals([[1] * 128, [2] * 128])[:2]
    assert (first.prompt_tokens, first.output_tokens, first.prompt) == (128, 64, [1] * 128)
    assert second.prompt == [2] * 128


# ------------------------------------------------------------------------------------- plans

losses_of = st.lists(
    st.fixed_dictionaries(
        {"full": st.just(0.0), "int8": st.floats(0, 1), "int4": st.floats(0, 1), "int3": st.floats(0, 1)}
    ),
    min_size=1,
    max_size=4,
)


@given(losses=losses_of, mean_bits=st.floats(3, 32))
def test_a_plan_has_the_least_loss_of_all_that_keep_the_budget(
    losses: list[dict[str, float]], mean_bits: float
) -> None:
    def loss_of(chosen: tuple[str, ...]) -> float:
        return sum(of[precision] for of, precision in zip(losses, chosen, strict=True))

    found = plan(losses, mean_bits)
    every = itertools.product(BITS, repeat=len(losses))
    least = min(loss_of(chosen) for chosen in every if bits_of(chosen) <= mean_bits)
    assert bits_of(found) <= mean_bits and loss_of(found) == pytest.approx(least)


def test_a_plan_may_only_choose_what_it_is_offered_and_prefers_more_bits() -> None:
    losses = [{"full": 0.0, "int4": loss} for loss in (0.3, 0.1, 0.2, 0.0)]
    assert plan(losses, ceiling_bits(4, 2, "int4")) == ("full", "int4", "full", "int4")
    assert plan([{"full": 0.0, "int4": 0.0}], 32) == ("full",)
    assert in_words(("int4", "full", "int8", "int4")) == "int4: 0, 3; int8: 2"
    with pytest.raises(ValueError, match="3 bits a layer are too few: the least is 4"):
        plan(losses, 3)


# ------------------------------------------------------------------------------------- texts


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_rouge_l_finds_the_longest_common_subsequence(a: list[str], b: list[str]) -> None:
    def is_within(found: tuple[str, ...], whole: list[str]) -> bool:
        rest = iter(whole)
        return all(word in rest for word in found)

    every = (part for size in range(len(a) + 1) for part in itertools.combinations(a, size))
    assert longest_common(a, b) == max(len(part) for part in every if is_within(part, b))


def test_texts_are_as_alike_as_their_words() -> None:
    assert words("def f(x):\n    return x_1") == ["def", "f", "(", "x", ")", ":", "return", "x_1"]
    assert f1("a b c d", "a b c d") == rouge_l("a b c d", "a b c d") == 100
    assert f1("d c b a", "a b c d") == 100 and rouge_l("d c b a", "a b c d") == 25
    assert f1("a a", "a b") == 50 and f1("a", "b") == rouge_l("a", "") == 0
    assert f1("", "") == 100


def test_a_mean_comes_with_its_standard_error() -> None:
    assert mean_and_error([1.0, 3.0]) == (2.0, 1.0)


# ------------------------------------------------------------------------------------- the command


def test_the_ladder_climbs_from_below_full_precision_to_above_int4() -> None:
    rates = rates_of(4.0, 8.0, 4)
    assert rates[0] == pytest.approx(2.8) and rates[-1] == pytest.approx(9.2)
    assert rates[1] / rates[0] == pytest.approx(rates[3] / rates[2])


def test_without_its_traces_the_command_ends_at_once_and_says_what_it_wants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["paper", "--traces", str(tmp_path), "--runs", str(tmp_path / "runs")])
    assert paper.main() == 2
    assert "make bench-paper TRACES=" in capsys.readouterr().err


def test_a_way_climbs_until_its_limit_and_all_ways_get_the_same_arrivals(tmp_path: Path) -> None:
    jobs = rungs_of([Way("a"), Way("b")], [1.0, 2.0, 4.0], repeat=1)
    assert [job.way.name for job in jobs] == ["b", "a", "a", "b", "b", "a"], "by turns"
    assert jobs[0].times == jobs[1].times and len(jobs[0].times) == 60
    assert jobs[0].times != rungs_of([Way("a")], [1.0], repeat=0)[0].times
    assert expected_s(jobs) == 6 * 74.0
    kept = Kept(tmp_path / "runs.json", {})
    for job, p95_s in zip(jobs[:3], (1.0, 3.0, 1.0), strict=True):
        kept.add(job, {"ttft_s": {"p95": p95_s}, "served": 1, "requests": 1, "rate": job.rate})
    assert [is_needed(job, kept) for job in jobs] == [True, True, False, True, True, False]
