"""What `make soak` takes for lost, for excused and for growth."""

from __future__ import annotations

import random

import httpx
import pytest

from bench.common.growth import Life, theil_sen
from bench.soak.soak import JUDGED_S, flat
from bench.soak.traffic import KINDS, Traffic, problem_of


def life(name: str, mib_per_minute: float, descriptors: list[float] | None = None) -> Life:
    """An hour of samples every ten seconds, in which every tenth is a peak."""
    rng = random.Random(name)
    at_s = [10.0 * number for number in range(360)]
    own = [50 + mib_per_minute * at / 60 + (30 * rng.random() if rng.random() < 0.1 else 0) for at in at_s]
    return Life(name, 1, at_s, own, descriptors or [20.0 + rng.choice((0, 1)) for _ in at_s])


def test_a_slope_is_that_of_most_points() -> None:
    assert theil_sen([0, 1, 2, 3], [1, 3, 5, 7]) == 2.0
    assert theil_sen([0, 1, 2, 3, 4, 5], [0, 1, 2, 300, 4, 5]) == pytest.approx(1.0)
    assert theil_sen([1], [1]) == theil_sen([], []) == 0.0
    many = [float(number) for number in range(5000)]
    assert theil_sen(many, [3 * at for at in many]) == pytest.approx(3.0)


def test_what_grows_misses_its_bar_and_peaks_do_not() -> None:
    quiet, leaking = life("quiet", 0.0), life("leaking", 0.4)
    assert all(one["is_met"] for one in flat([quiet]).values())
    missed = {name for name, one in flat([quiet, leaking]).items() if not one["is_met"]}
    assert missed == {"MiB a minute (leaking)"}
    sockets = life("sockets", 0.0, [20.0 + number // 20 for number in range(360)])
    missed = {name for name, one in flat([quiet, sockets]).items() if not one["is_met"]}
    assert missed == {"descriptors a minute (sockets)"}
    assert quiet.seconds > JUDGED_S and flat([]) == {}


def test_only_the_death_of_its_gateway_excuses_a_request() -> None:
    traffic = Traffic(["http://a", "http://b"], 1)
    broken, refused = httpx.ReadError(""), httpx.ConnectError("")
    assert not traffic.excuses(broken, "http://a", 1.0) and not traffic.excuses(refused, "http://a", 1.0)
    traffic.leaves("http://a")
    assert traffic.excuses(refused, "http://a", 1.0) and not traffic.excuses(broken, "http://a", 1.0)
    traffic.dies("http://a")
    assert traffic.excuses(broken, "http://a", 1e12) and not traffic.excuses(broken, "http://b", 1.0)
    traffic.is_dead("http://a")
    traffic.joins("http://a")
    assert traffic.excuses(broken, "http://a", 1.0) and not traffic.excuses(broken, "http://a", 1e12)


def test_an_answer_is_whole_with_its_end_and_all_of_its_tokens() -> None:
    kinds = {one.name: one for one in KINDS}
    usage = b'"usage":{"prompt_tokens":3,"completion_tokens":%d}'
    assert problem_of(kinds["completion"], 200, usage % 12) == ""
    assert problem_of(kinds["completion"], 200, usage % 11).startswith("[b'11'] of 12 tokens")
    assert problem_of(kinds["completion"], 500, b"").startswith("500")
    assert problem_of(kinds["refused"], 400, b"{}") == "" and problem_of(kinds["refused"], 200, b"")
    stream = b"data: {" + usage % 48 + b"}\n\n"
    assert problem_of(kinds["stream"], 200, stream).startswith("a stream without its end")
    assert problem_of(kinds["stream"], 200, stream + b"data: [DONE]\n\n") == ""
    assert problem_of(kinds["stream"], 200, b'data: {"error":1}\n\n' + stream + b"data: [DONE]\n\n")
