"""The numbers of `bench.deploy`, of runs whose seconds and bytes are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.deploy.compare import complete
from bench.deploy.plot import draw
from bench.deploy.report import (
    FIXED,
    NUM_WORKERS,
    SLO,
    Chosen,
    DeployRun,
    batches,
    intents_of,
    report,
    say_card,
)
from bus.deployments import Configuration, Intent

SMALL = Configuration(precision="int4")
EXPECTED = {"latency_s": {"value": 1.0}, "memory_bytes": {"value": 1e6}}


def run(configuration: Configuration, seconds: float, mib: int, number: int = 0) -> DeployRun:
    return DeployRun(
        model="m",
        configuration=configuration,
        round=number,
        seconds=[seconds, seconds * 3],
        memory_bytes=mib << 20,
        others_cores=0.1,
        loaded_s=1.0,
    )


def chosen(configuration: Configuration) -> list[Chosen]:
    intents = intents_of(Intent(prompt_tokens=8, output_tokens=4), 2.0, 1.0)
    return [Chosen("m", name, intent, configuration, EXPECTED) for name, intent in intents.items()]


FIXED_RUNS = [
    run(FIXED["maximum TP"], 4.0, 160),
    run(FIXED["maximum PP"], 2.0, 100),
    run(FIXED["one worker"], 1.0, 100),
]


def test_each_intent_is_compared_by_its_own_quantity() -> None:
    found = report(chosen(SMALL), [run(SMALL, 0.5, 25), *FIXED_RUNS])
    rows = {row["intent"]: row for row in found["intents"]}
    times = {name: [one["times"] for one in row["fixed"].values()] for name, row in rows.items()}
    assert times["latency"] == [8.0, 4.0, 2.0]
    assert times["memory"] == [6.4, 4.0, 4.0]
    assert times["cost"] == times[SLO] == [51.2, 16.0, 8.0]
    assert times["gpu_hours"] == [32.0, 16.0, 2.0]
    assert found["verdicts"] == {"better": 15, "same": 0, "worse": 0} and found["is_met"]


def test_a_choice_that_is_itself_a_fixed_configuration_is_the_same_and_no_better() -> None:
    found = report(chosen(Configuration()), FIXED_RUNS)
    assert found["verdicts"]["same"] == 5
    memory = next(row for row in found["intents"] if row["intent"] == "memory")
    assert memory["fixed"]["maximum PP"]["verdict"] == "worse", "as much is not better"
    assert not found["is_met"]


def test_a_limit_that_is_missed_is_not_met_however_cheap_it_was() -> None:
    found = report(chosen(SMALL), [run(SMALL, 0.9, 1), *FIXED_RUNS])
    row = next(row for row in found["intents"] if row["intent"] == SLO)
    assert row["max_latency_s"] == 1.5 and row["latency_s"] == pytest.approx(1.8)
    assert not row["is_met"] and not found["is_met"]


def test_of_two_that_miss_the_limit_the_cheaper_is_better_and_one_that_meets_it_beats_all() -> None:
    quick = [run(one.configuration, one.seconds[0] / 4, one.memory_bytes >> 20) for one in FIXED_RUNS]
    found = report(chosen(SMALL), [run(SMALL, 0.9, 1), *FIXED_RUNS[:2], quick[2]])
    row = next(row for row in found["intents"] if row["intent"] == SLO)
    assert [one["verdict"] for one in row["fixed"].values()] == ["better", "better", "worse"]


def test_as_many_are_deployed_side_by_side_as_there_are_workers_groups_first() -> None:
    small = [Configuration(precision=one) for one in ("int8", "int4", "int3")]
    pair = Configuration(tp=2, precision="int4")
    by_size = [len(batch) for batch in batches([*small, *FIXED.values(), pair])]
    assert by_size == [1, 1, 3, 2]
    for batch in batches([*small, *FIXED.values(), pair]):
        assert sum(one.num_devices for one in batch) <= NUM_WORKERS
        assert all(one.tp == 1 for one in batch[1:]), "a group needs empty workers"
    alone = batches([*small, *FIXED.values()])[-1]
    assert set(alone) == {*small, Configuration()}, "those of one worker are compared side by side"


def test_models_that_were_not_asked_in_every_configuration_are_left_out() -> None:
    asked = chosen(SMALL)
    other = [replace(one, model="other") for one in asked]
    runs = [run(SMALL, 0.5, 25), *FIXED_RUNS]
    some = [replace(one, model="other") for one in FIXED_RUNS]
    assert complete([*asked, *other], [*runs, *some]) == (asked, runs)
    with pytest.raises(RuntimeError, match="no model"):
        complete(other, some)


def test_rounds_are_put_together_and_told_with_their_spread(tmp_path: Path) -> None:
    runs = [run(SMALL, 0.5, 25), run(SMALL, 0.7, 27, number=1), *FIXED_RUNS]
    found = report(chosen(SMALL), runs)
    small = next(one for one in found["configurations"] if one["configuration"] == "tp1 pp1 int4")
    assert small["latency_of_rounds_s"] == [1.0, 1.4] and small["latency_s"] == pytest.approx(1.1)
    assert small["memory_bytes"] == 26 << 20
    say_card(found)
    draw(found, tmp_path / "deploy.png")
    assert (tmp_path / "deploy.png").stat().st_size > 0
