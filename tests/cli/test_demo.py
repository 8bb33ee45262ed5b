"""`instar demo` without its service: the burst, the card, the picture, and what is refused at once."""

from __future__ import annotations

import asyncio
import io
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from bus.burst import FEWEST, MEAN_OUTPUT_TOKENS, MOST, OVERLOAD, tokens_per_s
from bus.settings import load_settings
from instar.cli import main
from instar.demo import run as demo_run
from instar.demo.burst import burst, long_request
from instar.demo.card import blocks_gained, card, num_lost, verdict
from instar.demo.picture import draw
from instar.demo.run import Show, before_end, has_browser, say
from instar.demo.service import (
    NEEDED_MIB,
    DemoService,
    available_mib,
    is_at_rest,
    is_complete,
    memory_problem,
    own_environment,
)
from instar.errors import InputError, ServerError
from instar.output.progress import bar
from instar.output.tables import trimmed
from instar.replay.files import RunFile
from instar.running import running_services, sole_demo
from tests.support.replay_samples import failed, outcome, run_file


def run_of(name: str, *, first_s: float, num_failed: int = 0) -> RunFile:
    """Twenty requests with a TTFT of `first_s` seconds, and some that failed."""
    served = [outcome(number, float(number), first_s=number + first_s) for number in range(20)]
    return run_file([*served, *(failed(20 + one, 1.0, "503") for one in range(num_failed))], name)


# ------------------------------------------------------------------------------------- the burst


def test_the_burst_is_the_same_every_time_and_asks_for_more_than_the_machine_does() -> None:
    load = burst(600.0, 20.0)
    assert load.arrivals == burst(600.0, 20.0).arrivals
    assert len(load.arrivals) == round(OVERLOAD * 600.0 / MEAN_OUTPUT_TOKENS * 20.0)
    times = [one.at_s for one in load.arrivals]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 20.0
    assert len(burst(1.0, 20.0).arrivals) == FEWEST and len(burst(1e6, 20.0).arrivals) == MOST


def test_the_rate_is_that_of_whole_seconds() -> None:
    assert tokens_per_s([10, 300, 500, 20]) == 400
    assert tokens_per_s([0, 0, 10, 300, 500, 20]) == 400  # it began late
    assert tokens_per_s([300]) == 300
    assert tokens_per_s([]) == tokens_per_s([0, 0, 0]) == 0.0


@pytest.mark.parametrize(
    ("tokens_at", "tokens"),
    [
        ({"1": 700, "2": 3000}, 1374),  # no more than the context of 2048
        ({"1": 700, "2": 1500}, 1100),
        ({"1": 3000, "2": 9000}, 0),
        ({"1": 700}, 0),
        ({}, 0),
    ],
)
def test_a_long_request_needs_two_workers(tokens_at: dict[str, int], tokens: int) -> None:
    assert long_request(tokens_at, 2048) == tokens


# ------------------------------------------------------------------------------------- the card


def test_the_card_sets_both_runs_side_by_side() -> None:
    with trimmed() as console, console.capture() as shown:
        console.print(card(run_of("full precision", first_s=4.0), run_of("with morphs", first_s=0.5)))
    lines = [" ".join(line.split()) for line in shown.get().splitlines()]
    for told in (
        "full precision with morphs",
        "requests 20 20",
        "requests lost 0 0",
        "TTFT P95, s 4.000 0.500",
        "TTFT over the limit 20 of 20 over 2 s 0 of 20 over 2 s",
        "most layers below full 2 2",
        "KV blocks, first and most 100, 140 100, 140",
    ):
        assert told in lines, lines


def test_the_verdict_is_honest_in_both_directions_and_counts_what_was_lost() -> None:
    slow, quick = run_of("a", first_s=4.0), run_of("b", first_s=0.5, num_failed=2)
    assert verdict(slow, quick) == (
        "P95 TTFT 8.0 times lower with morphs; 40 KV blocks gained; requests lost: 2 of 42"
    )
    assert "8.0 times higher with morphs: nothing was gained here" in verdict(quick, slow)
    nothing = run_file([failed(0, 0.0, "503")], observed=False)
    assert verdict(slow, nothing).startswith("No request was served in one of the runs; 0 KV blocks")
    assert num_lost(quick) == 2 and blocks_gained(slow) == 40 and blocks_gained(nothing) == 0


def test_the_picture_is_drawn_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    draw(run_of("full precision", first_s=4.0), run_of("with morphs", first_s=0.5, num_failed=1), path)
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]


def test_a_bar_has_its_width_whatever_the_share() -> None:
    assert bar(0.25, 8) == "[##......]"
    assert bar(-1.0, 4) == "[....]" and bar(7.0, 4) == "[####]"


# ------------------------------------------------------------------------------------- before it begins


def test_too_little_memory_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert memory_problem(NEEDED_MIB) == ""
    monkeypatch.setattr(demo_run, "available_mib", lambda: 500.0)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert f"500 MiB of memory are available and the demo needs {NEEDED_MIB}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    here = available_mib(tmp_path / "none")
    (tmp_path / "memory.current").write_text(str(300 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {100 << 20}\n")
    (tmp_path / "memory.max").write_text("max")
    assert available_mib(tmp_path) == pytest.approx(here, rel=0.5)
    (tmp_path / "memory.max").write_text(str(250 << 20))
    assert available_mib(tmp_path) == 50.0


def test_a_second_demo_is_refused_with_the_address_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_run, "available_mib", lambda: 1e6)
    with sole_demo("http://127.0.0.1:9001/"):
        assert running_services() == []  # other commands do not take it for a service
        assert main(["demo"]) == 2
        assert "a demo runs already: http://127.0.0.1:9001/" in capsys.readouterr().err
    with sole_demo("http://127.0.0.1:9002/"):
        pass  # the first one has ended


def test_settings_of_another_service_are_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_environment({"PATH": "/bin", "INSTAR_PORT": "1", "INSTAR_MODEL": "x"}) == {"PATH": "/bin"}
    settings = load_settings(DemoService(tmp_path, 9003).settings_path, environ={})
    assert settings.gateway.port == 9003 and settings.serve.workers == 2 and settings.worker.max_tp == 2
    assert settings.worker.models[0].startswith("demo=/") and not settings.worker.prefix_cache
    assert main(["demo", "--config", "mine.toml"]) == 2
    assert "the demo has settings of its own" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "available_mib", lambda: 1e6)
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file" / "out")]) == 2
    with pytest.raises(InputError, match="cannot be written"):
        DemoService(tmp_path / "missing", 9004)


def test_a_page_is_opened_in_windows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [webbrowser.BackgroundBrowser("firefox")]
    monkeypatch.setattr(webbrowser, "get", lambda: found[0])
    assert not has_browser({}) and has_browser({"DISPLAY": ":0"}) and has_browser({"WAYLAND_DISPLAY": "w"})
    found[0] = webbrowser.GenericBrowser("w3m")
    assert not has_browser({"DISPLAY": ":0"})

    def get() -> Any:
        raise webbrowser.Error("none")

    monkeypatch.setattr(webbrowser, "get", get)
    assert not has_browser({"DISPLAY": ":0"})


def test_a_line_is_whole_on_a_narrow_terminal_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "[1/5] Start: two workers of 34 MB each, so that a burst fills what the weights leave"
    monkeypatch.setenv("COLUMNS", "7")
    monkeypatch.setenv("TERM", "dumb")
    out = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    say(line)
    assert out.buffer.getvalue().decode() == f"{line}\n"


# ------------------------------------------------------------------------------------- its service


def instance(**fields: Any) -> dict[str, Any]:
    idle = {"running": 0, "waiting": 0, "kv": {"blocks": 47, "used": 0}, "layers_below_full": 0, "tp": 1}
    return {"state": "serving"} | idle | fields


def test_a_service_is_complete_with_both_workers_and_at_rest_when_nothing_is_left_to_do() -> None:
    assert not is_complete({"instances": [instance()]}) and not is_complete({})
    assert is_at_rest({"instances": [instance(), instance()]})
    for busy in (
        {"running": 1},
        {"waiting": None},  # not reported, which is not zero
        {"layers_below_full": 2},
        {"tp": 2},
        {"kv": {"blocks": 47, "used": 3}},
        {"kv": {"blocks": None, "used": None}},
        {"state": "draining"},
    ):
        assert not is_at_rest({"instances": [instance(), instance(**busy)]}), busy


async def test_a_service_that_ends_by_itself_ends_the_demo() -> None:
    cancelled = False

    async def scenes() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def ended() -> str:
        await asyncio.sleep(0.01)
        return "the service ended by itself with status 2: no room"

    with pytest.raises(ServerError, match="status 2: no room"):
        await before_end(scenes(), ended)
    assert cancelled


async def test_scenes_that_end_or_fail_do_not_wait_for_the_service() -> None:
    async def done() -> None:
        await asyncio.sleep(0)

    async def wrong() -> None:
        raise ServerError("no group")

    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    async with asyncio.timeout(5):
        await before_end(done(), never)
        with pytest.raises(ServerError, match="no group"):
            await before_end(wrong(), never)


async def test_a_second_ctrl_c_hurries_the_service_and_does_not_cancel_what_stops_it(tmp_path: Path) -> None:
    hurried: list[bool] = []
    service = DemoService(tmp_path, 9005)
    service.hurry = lambda: hurried.append(True)  # type: ignore[method-assign]
    show = Show(service, None)  # type: ignore[arg-type]
    stopped = False

    async def play() -> None:
        nonlocal stopped
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)  # the service is being stopped
            stopped = True

    task = asyncio.create_task(play())
    await asyncio.sleep(0)
    show.stop(task)
    await asyncio.sleep(0)
    show.stop(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped and hurried == [True]
