"""The measurements of `make gpu` on two layers and of the whole model, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.estimate.truth import Found
from bench.gpu import fingerprint as gpu_fingerprint
from bench.gpu.fingerprint import CPU
from bus.deployments import Configuration, Intent
from bus.precisions import PRECISIONS
from tests.support.known_truths import SPEED, Truth, profile_of
from worker.engine.build import make_pool

HERE = torch.device("cpu")


def test_two_layers_and_the_whole_run_on_a_cpu_in_every_precision_that_is_asked_for() -> None:
    found = gpu_fingerprint.measure(HERE, replace(CPU, precisions=("full", "int4")))
    told = [(row["precision"], row["request"]) for row in found["rows"]]
    assert told == [(one, size) for size in ("16+6 x1", "30+4 x1") for one in ("full", "int4")]
    assert all(row["latency_ms"] > 0 and row["estimated_ms"] > 0 for row in found["rows"])
    assert not found["left_out"] and found["profiling_s"] > 0
    assert len(list(gpu_fingerprint.lines(found))) == 1 + 4 + 2


def test_a_precision_without_room_beside_full_is_left_out_with_the_numbers() -> None:
    pool = make_pool(HERE, 2 << 20)
    try:
        config = gpu_fingerprint.config_of(CPU)
        plan = gpu_fingerprint._plan(config, pool, CPU, ["int8"], [config.num_layers])
        assert gpu_fingerprint.no_room(plan, pool, CPU) == ""
        taken = pool.reserve(20 * pool.page_bytes, kind="kv", owner="test")
        taken.map(0, 20)
        assert "MiB of pages, 1 are free" in gpu_fingerprint.no_room(plan, pool, CPU)
    finally:
        pool.close()


def test_errors_are_shares_of_the_truth() -> None:
    truth, intent = Truth(), Intent(prompt_tokens=128, output_tokens=32)
    profile = profile_of(truth, configurations=[Configuration(precision=one) for one in SPEED])
    true = {
        (one, intent): Found(2 * truth.latency(one, intent), truth.memory(one, intent), 3)
        for one in (Configuration(precision=precision) for precision in SPEED)
    }
    rows = list(gpu_fingerprint.compared(profile, true, [intent]))
    assert [row["precision"] for row in rows] == [one for one in PRECISIONS if one in SPEED]
    for off in gpu_fingerprint.errors(rows).values():
        assert off["latency_mean"] == pytest.approx(0.5, abs=0.02)
        assert off["memory_worst"] == pytest.approx(0.0, abs=1e-3)
