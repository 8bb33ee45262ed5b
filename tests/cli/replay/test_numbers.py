"""Numbers, card, files and pictures from the outcomes of requests."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from instar.cli import main
from instar.errors import InputError
from instar.replay import files, plots
from instar.replay.card import (
    card,
    comparison,
    differing_loads,
    lateness_text,
    precision_text,
    tokens_by_precision,
)
from instar.replay.files import RunFile
from instar.replay.observer import Observer, counters
from instar.replay.outcomes import NOT_SENT, RequestOutcome, conclude
from instar.replay.statistics import Slo, distribution, percentile, summary
from instar.replay.wire import ServerAddress
from tests.support.replay_samples import events, failed, outcome, run_file


def text_of(shown: Any, width: int = 110) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def mixed() -> list[RequestOutcome]:
    """Ten: six good, one too late, one too slow, one refused, one never sent."""
    good = [outcome(i, i * 0.5) for i in range(6)]
    late = outcome(6, 3.0, first_s=6.0, last_s=6.5, opened_s=5.8)
    slow = outcome(7, 3.5, last_s=6.5, spans=[(6, 0), (5, 2)])
    return [*good, late, slow, failed(8, 4.0, "503 server_overloaded"), failed(9, 4.5, NOT_SENT)]


def test_percentiles_are_linear_between_ranks() -> None:
    values = [0.0, 1.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (0, 50, 75, 100)] == [0.0, 1.5, 2.25, 3.0]
    assert percentile([7.0], 99) == 7.0
    assert distribution([None, 3.0, 1.0]) == {
        "count": 2,
        "mean": 2.0,
        "p50": 2.0,
        "p95": 2.9,
        "p99": 2.98,
        "max": 3.0,
    }
    assert distribution([None]) is None


def test_a_failed_request_violates_each_slo_and_one_never_sent_counts_for_nothing() -> None:
    found = summary(mixed(), Slo(2.0, 0.1), has_queue_times=True)
    assert (found["requests"], found["served"], found["seconds"]) == (9, 8, 6.5)
    assert [found["violations"][kind]["count"] for kind in ("ttft", "tpot", "either")] == [2, 2, 3]
    assert found["violations"]["either"]["share"] == pytest.approx(1 / 3, abs=1e-6)
    assert found["goodput"]["requests_per_s"] == pytest.approx(6 / 6.5, abs=1e-6)
    assert found["goodput"]["tokens_per_s"] == pytest.approx(66 / 6.5, abs=1e-5)
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx(88 / 6.5, abs=1e-5)
    assert found["errors"] == {"503 server_overloaded": 1, NOT_SENT: 1}
    assert found["tokens_by_layers_below_full"] == {"0": 83, "2": 5}
    assert found["queue_s"]["max"] == 2.8 and found["lateness_s"]["p50"] == 0.001


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = outcome(0, 10.0)
    assert one.ttft_s == pytest.approx(0.5) and one.tpot_s == pytest.approx(0.05)
    assert one.e2e_s == pytest.approx(1.0) and one.queue_s == pytest.approx(0.1)
    assert outcome(0, 0.0, output_tokens=1).tpot_s is None
    assert outcome(0, 0.0, output_tokens=None, events=6).tpot_s == pytest.approx(0.1)


def test_the_end_of_a_stream_tells_usage_precision_and_how_it_ended() -> None:
    spans = [{"start": 0, "end": 3, "layers_below_full": 0}, {"start": 3, "end": 4, "layers_below_full": 2}]
    last = {"choices": [{"text": "", "finish_reason": "length", "precision": spans}]}
    tail = b'"cut": 1}]}\n\ndata: %b\n\n' % json.dumps(last).encode() + b"".join(events(0))
    one = RequestOutcome(0, 0.0, 3, 4, status=200, events=5)
    conclude(one, tail)
    assert (one.finish, one.error, one.prompt_tokens, one.events) == ("length", "", 3, 4)
    assert one.spans == [(3, 0), (1, 2)]


@pytest.mark.parametrize(
    ("tail", "error"),
    [
        (
            b'data: {"error": {"message": "m", "code": "worker_lost"}}\n\ndata: [DONE]\n\n',
            "stream: worker_lost",
        ),
        (b'data: {"error": "gone"}\n\n', "stream: gone"),
        (b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n', "stream ended early"),
        (b"", "stream ended early"),
    ],
)
def test_a_stream_without_its_end_is_an_error(tail: bytes, error: str) -> None:
    one = RequestOutcome(0, 0.0, 3, 4, status=200)
    conclude(one, tail)
    assert one.error == error


def test_the_card_says_it_all() -> None:
    shown = text_of(card(run_file(mixed(), notes=["2 rows of zero tokens"])))
    for told in (
        "trace.csv against http://127.0.0.1:8000 (demo), 6.5 s",
        "9 sent, 8 served",
        "2 (22.2%) of TTFT 2 s, 2 (22.2%) of TPOT 0.1 s, 3 (33.3%) of either",
        "0.92 requests/s, 10.2 output tokens/s, of requests within both",
        "1 x 503 server_overloaded, 1 x not sent",
        "p50 1.00, p99 1.00, max 1.00 ms",
        "94.3% of tokens with all layers at full precision, 5.7% with 2 below",
        "KV 100 to 140 blocks, at most 90 in use, 0 to 2 layers below full, tp 1, queueing up to 0.40 s",
        "1 swap applied",
        "2 rows of zero tokens",
    ):
        assert told in shown, shown


def test_the_server_s_own_counters_tell_tokens_by_precision() -> None:
    name = 'instar_generation_tokens_by_precision_total{{model_name="demo",precision="{}"}}'
    assert tokens_by_precision({name.format("full"): 30.0, name.format("int4"): 10.0, "other": 5.0}) == (
        "full 75.0%, int4 25.0%"
    )
    assert tokens_by_precision({name.format("full"): 0.0}) == tokens_by_precision({}) == ""


def test_another_s_server_has_no_queue_and_no_shape_on_its_card() -> None:
    shown = text_of(card(run_file([outcome(0, 0.0, spans=[], prompt_tokens=23)], observed=False)))
    assert "queue" not in shown and "morphs" not in shown and "precision" not in shown
    assert "20 tokens sent, 23 as the server counts" in shown


def test_a_generator_that_was_late_says_so() -> None:
    assert "above 5 ms" in lateness_text({"p50": 0.001, "p99": 0.0061, "max": 0.2})
    assert "later" not in lateness_text({"p50": 0.001, "p99": 0.0049, "max": 0.2})
    assert precision_text({"0": 1}) == "100.0% of tokens with all layers at full precision"


def test_a_run_of_only_failures_has_a_card() -> None:
    run = run_file([failed(0, 0.0, "503"), failed(1, 1.0, "503")])
    run.said = {"503": "no worker is there"}
    shown = text_of(card(run))
    assert "2 x 503" in shown and "503: no worker is there" in shown


def test_a_file_gives_the_numbers_of_its_run_again(tmp_path: Path) -> None:
    run = run_file([one.rounded() for one in mixed()])
    run.said = {"503 server_overloaded": "too many"}
    path = files.write(tmp_path, run)
    again = files.read(tmp_path)
    assert again.as_json() == run.as_json()
    assert json.loads(path.read_text()) == json.loads(json.dumps(run.as_json()))
    assert text_of(card(again)) == text_of(card(run)) == text_of(card(files.read(path)))


@pytest.mark.faults
@pytest.mark.slow  # matplotlib takes seconds
@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_picture_is_the_same_whenever_it_is_drawn(tmp_path: Path, names: str) -> None:
    runs = [run_file(mixed(), name, observed=name != "b") for name in names]
    drawn = []
    for name in ("a.png", "b.png"):
        plots.draw(runs, tmp_path / name)
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1] and drawn[0].startswith(b"\x89PNG")


@pytest.mark.faults
@pytest.mark.slow
def test_a_picture_takes_names_for_names(tmp_path: Path) -> None:
    runs = [run_file(mixed(), name, source="a$b_{$.csv", arrivals_sha256=name) for name in ("$a^$", "b")]
    plots.draw(runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_several_runs_are_laid_over_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[list[str], Path]] = []
    monkeypatch.setattr(plots, "draw", lambda runs, path: drawn.append(([run.name for run in runs], path)))
    for name, outcomes in {"full": mixed(), "int4": mixed()[:6], "other": mixed()}.items():
        run = run_file(outcomes, name, observed=name != "other", arrivals_sha256=name[:1])
        (tmp_path / name).mkdir()
        files.write(tmp_path / name, run)
    folders = [str(tmp_path / name) for name in ("full", "int4", "other")]
    assert main(["bench", "plot", *folders, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert drawn == [(["full", "int4", "other"], tmp_path / "compare.png")]
    for row in ("full", "int4", "TTFT p95, s", "22.2%", "goodput, requests/s"):
        assert row in told.out
    assert "these runs had different loads" in told.err


def test_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    runs = [run_file(mixed(), name) for name in ("full", "full", "int4", "full")]
    for run, folder in zip(runs, ("a/full", "b/full", "b/int4", "b/full"), strict=True):
        run.folder = folder
    named = files.with_unique_names(runs)
    assert [run.name for run in named] == ["a/full", "b/full (1)", "int4", "b/full (2)"]
    assert [run.name for run in runs] == ["full", "full", "int4", "full"]
    assert "a/full" in text_of(comparison(named))


def test_runs_of_one_load_are_compared_without_a_doubt() -> None:
    runs = [run_file(mixed(), name) for name in "ab"]
    assert differing_loads(runs) == ""
    assert "tokens at full precision" in text_of(comparison(runs))
    assert "[red]a" in text_of(comparison([run_file(mixed(), "[red]a"), runs[0]]))
    runs[1] = RunFile(runs[1].about, Slo(1.0, 0.1), runs[1].outcomes)
    assert differing_loads(runs) == "these runs were held to different SLOs"


def test_a_folder_is_looked_at_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.prepare(tmp_path / "new" / "deep", 100, 10.0, draws=True)
    files.write(tmp_path, run_file(mixed()))
    with pytest.raises(InputError, match="holds a run already"):
        files.prepare(tmp_path, 100, 10.0, draws=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; name a folder"):
        files.prepare(tmp_path / "file", 100, 10.0, draws=True)
    with pytest.raises(InputError, match="cannot be written: "):
        files.prepare(tmp_path / "file" / "below", 100, 10.0, draws=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 3 << 20))
    with pytest.raises(InputError, match=r"3 MiB are free on its disk, the run may need 4\.08"):
        files.prepare(tmp_path / "new", 100, 10.0, draws=True)
    files.prepare(tmp_path / "new", 100, 10.0, draws=False)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"run\.json: cannot be written: No space left on device"):
        files.write(tmp_path, run_file(mixed()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no run in it"),
        ("{", "is not JSON"),
        ("[]", "is not a run of `instar bench replay`: it has no version"),
        ("{}", "is not a run of `instar bench replay`: it has no version"),
        ('{"version": 9}', "has version 9; this program reads 1"),
        ('{"version": 1}', "is not a run of `instar bench replay`: Object missing required field `about`"),
        (
            '{"version": 1, "about": {}, "slo": {"ttft_s": 1, "tpot_s": 1}, "requests": []}',
            "run.json: has no request",
        ),
    ],
)
def test_what_is_no_run_is_told(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError) as problem:
        files.read(tmp_path)
    assert told in str(problem.value)


def test_without_matplotlib_it_is_said_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'instar\[bench\]'"):
        plots.draw([run_file(mixed())], Path("run.png"))


def test_counters_are_found_on_a_page_of_metrics() -> None:
    page = (
        "# HELP instar_num_preemptions_total Sequences put back.\n"
        'instar_num_preemptions_total{engine="demo@w0",model_name="demo"} 3.0\n'
        'instar_generation_tokens_by_precision_total{model_name="demo",precision="full"} 1e+03\n'
        'instar_kv_blocks_used{engine="demo@w0"} 9\n'
    )
    assert counters(page) == {
        'instar_num_preemptions_total{engine="demo@w0",model_name="demo"}': 3.0,
        'instar_generation_tokens_by_precision_total{model_name="demo",precision="full"}': 1000.0,
    }


async def test_a_counter_that_began_anew_is_told_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter(
        ['instar_num_preemptions_total{engine="a"} 9\n', 'instar_num_preemptions_total{engine="a"} 2\n']
    )

    async def answer(server: ServerAddress, method: str, path: str, **_: object) -> tuple[int, bytes]:
        return 200, next(pages).encode() if path == "/metrics" else b'{"instances": []}'

    monkeypatch.setattr("instar.replay.observer.fetch", answer)
    observer = Observer(ServerAddress.at("http://127.0.0.1:1", None))
    assert await observer.begin() == ""
    await observer.end(lambda: 1.0)
    assert observer.counted == {'instar_num_preemptions_total{engine="a"}': 2.0}


async def test_a_queueing_delay_is_of_the_run_and_not_of_what_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The metric looks back over a window; what began before the run is none of its."""
    metrics = {
        "instances": [{"id": "a", "queue_delay_seconds": 9.0, "last": {"oldest_wait_seconds": 0.25}}],
        "window_seconds": 10.0,
        "age_seconds": 0.5,
    }

    async def answer(*_: object, **__: object) -> tuple[int, bytes]:
        return 200, json.dumps({"instances": [{"id": "a"}], "metrics": metrics}).encode()

    monkeypatch.setattr("instar.replay.observer.fetch", answer)
    observer = Observer(ServerAddress.at("http://127.0.0.1:1", None))
    for now_s in (0.0, 12.0, 13.0):
        await observer.sample(lambda now_s=now_s: now_s)  # type: ignore[misc]
    assert [one["instances"]["a"]["queue_delay_s"] for one in observer.samples] == [0.25, 0.25, 9.0]


@pytest.mark.faults
@pytest.mark.slow  # matplotlib takes seconds
def test_a_picture_that_was_cut_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def cut(_: Figure, path: Path, **__: object) -> None:
        path.write_bytes(b"\x89PNG")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", cut)
    with pytest.raises(InputError, match=r"a\.png: cannot be written: No space left on device"):
        plots.draw([run_file(mixed())], tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
@pytest.mark.slow
def test_axes_of_what_did_not_change_count_in_whole_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    found: list[tuple[float, float]] = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **_: found.append(figure.axes[7].get_ylim()) or path.touch(),  # type: ignore
    )
    run = run_file(mixed())
    run.observed["samples"] = run.observed["samples"][:1] * 2
    plots.draw([run], tmp_path / "a.png")
    plt.close("all")
    assert found == [(0.0, 2.2)]
