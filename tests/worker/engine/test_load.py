"""The numbers by which others judge an instance (`worker.engine.load`)."""

from __future__ import annotations

import pytest

from bus.precisions import LOWEST
from tests.support.engine_toys import Client, request, run, toy_engine
from worker.engine.load import REFUSED_S
from worker.engine.residence import WEIGHT, Residence


def test_the_rate_of_prompts_is_that_of_the_steps_that_had_some() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    engine, instance = toy_engine(tokens=10, clock=clock)
    rate = instance.load.prompt_rate
    assert rate.per_s == 0.0
    engine.submit("toy@w0", request("a", list(range(1, 31)), 20))
    for _ in range(3):
        engine.step()
    measured = rate.per_s
    assert measured == pytest.approx(10 / instance.step_s)
    for _ in range(5):
        engine.step()
    assert rate.per_s == measured  # decodes alone say nothing


def test_the_longest_request_counts_while_it_waits_and_while_it_runs() -> None:
    engine, instance = toy_engine(num_seqs=1)
    assert instance.load.longest_tokens() == 0
    engine.submit("toy@w0", request("runs", [1] * 3, 4))
    engine.submit("toy@w0", request("waits", [1] * 5, 6))
    client = Client()
    client.take(engine.step())
    assert instance.load.longest_tokens() == 11
    run(engine, client)
    assert instance.load.longest_tokens() == 0


def test_the_work_left_counts_of_those_alone_that_may_grow_too_long() -> None:
    engine, instance = toy_engine(tokens=8)
    engine.submit("toy@w0", request("short", [1] * 3, 4))
    engine.submit("toy@w0", request("long", [1] * 20, 30))
    engine.step()
    assert instance.load.most_uncomputed(above=7) == 15, "five of its tokens fitted beside the short one"
    assert instance.load.most_uncomputed(above=50) == 0
    for _ in range(2):
        engine.step()
    assert instance.load.most_uncomputed(above=7) == 1


def test_a_refused_floor_counts_for_as_long_as_the_gateway_may_try_again() -> None:
    now = [100.0]
    engine, instance = toy_engine(clock=lambda: now[0])
    instance.kv.precision = "int8"  # type: ignore[misc]
    engine.submit("toy@w0", request("no", [1], min_precision="full"))
    now[0] += REFUSED_S
    assert instance.load.floor_refused() == "full"
    now[0] += 0.1
    assert instance.load.floor_refused() == LOWEST


def test_the_requests_that_insist_on_a_precision_are_counted_until_they_end() -> None:
    engine, instance = toy_engine()
    for name, floor in (("a", "full"), ("b", "int8"), ("c", "int8"), ("d", "")):
        engine.submit("toy@w0", request(name, [1], 3, min_precision=floor))
    assert instance.load.floors() == {"full": 1, "int8": 2}
    run(engine, Client())
    assert instance.load.floors() == {}


def test_the_mean_time_in_the_instance_follows_the_last_requests() -> None:
    residence = Residence()
    residence.add(4.0)
    assert residence.mean_s == 4.0, "the first one is all that is known"
    residence.add(8.0)
    assert residence.mean_s == pytest.approx(4.0 + WEIGHT * 4.0)
