"""Telemetry to metrics, without a clock and without Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import histogram
from bus.clock import MessageClock
from bus.messages import GpuTelemetry, InstanceMetrics, WorkerTelemetry
from instar.replay.statistics import percentile
from monitor.smoothing import Smoother
from tests.support.bus_samples import telemetry


def smoother(**changes: float) -> Smoother:
    return Smoother(**({"window_s": 10.0, "smoothing": 0.5, "stale_s": 5.0} | changes))


def with_instance(report: WorkerTelemetry, **changes: Any) -> WorkerTelemetry:
    return replace(report, instances=[replace(report.instances[0], **changes)])


def only_instance(of: Smoother, now_s: float) -> InstanceMetrics:
    (instance,) = of.metrics(now_s, at_ms=0).instances
    return instance


def test_gauges_move_towards_the_newest_report_by_the_smoothing_weight() -> None:
    monitor = smoother(smoothing=0.25)
    for at_s, running in enumerate((8, 4, 4)):
        monitor.observe(at_s, telemetry(running=running))
    instance = only_instance(monitor, 2)
    assert instance.running == pytest.approx(8 - 1 - 0.75)
    assert instance.kv_used == pytest.approx(62.5)
    assert instance.kv_usage == pytest.approx(0.625)
    assert instance.last.running == 4


def test_rates_are_the_growth_of_counters_over_the_window() -> None:
    monitor = smoother(window_s=4)
    for at_s in range(11):
        monitor.observe(at_s, telemetry(tokens=0 if at_s < 8 else 100 * (at_s - 7)))
    instance = only_instance(monitor, 10)  # between 6 s (no tokens) and 10 s (300)
    assert instance.prompt_tokens_per_second == pytest.approx(75)
    assert instance.generation_tokens_per_second == pytest.approx(150)


def test_percentiles_are_of_the_window_and_absent_is_not_zero() -> None:
    monitor = smoother(window_s=4)
    old = (20.0,) * 50
    monitor.observe(0, telemetry(ttft=old))
    monitor.observe(1, telemetry(ttft=(*old, 0.03, 0.03)))
    instance = only_instance(monitor, 1)
    assert instance.ttft_p95 is not None
    assert instance.ttft_p95 == pytest.approx(0.03, rel=0.01)
    assert instance.tpot_p50 is None
    assert instance.queue_seconds_p95 is None
    for at_s in range(2, 8):
        monitor.observe(at_s, telemetry(ttft=(*old, 0.03, 0.03)))
    assert only_instance(monitor, 7).ttft_p95 is None


def test_percentiles_of_a_group_are_those_of_all_its_members_requests() -> None:
    monitor = smoother()
    group = ["w0", "w1"]
    ttft = {"w0": [0.1] * 95, "w1": [1.0, 2.0, 3.0, 4.0, 5.0]}
    for at_s in (0, 1):
        for worker in group:
            report = telemetry(worker, ttft=tuple(ttft[worker] * at_s))
            monitor.observe(at_s, with_instance(report, workers=group))
    instances = monitor.metrics(1, at_ms=0).instances
    assert [one.worker for one in instances] == group
    for one in instances:
        assert one.ttft_p95 == pytest.approx(percentile(sorted(ttft["w0"] + ttft["w1"]), 95), rel=0.01)


def test_what_readers_get_has_percentiles_and_no_sketches() -> None:
    monitor = smoother()
    monitor.observe(0, telemetry(ttft=(1.0,)))
    assert only_instance(monitor, 0).last.time_to_first_token.counts == {}


def test_the_delay_of_a_jammed_queue_is_the_age_of_its_head() -> None:
    monitor = smoother()
    monitor.observe(0, telemetry())
    assert only_instance(monitor, 0).queue_delay_seconds == 0
    monitor.observe(1, with_instance(telemetry(), waiting=3, oldest_wait_seconds=0.9))
    jammed = only_instance(monitor, 1)
    assert (jammed.queue_seconds_p95, jammed.queue_delay_seconds) == (None, 0.9)


def test_the_delay_of_a_moving_queue_is_its_percentile_where_that_is_longer() -> None:
    monitor = smoother()
    queued = histogram.Accumulator()
    monitor.observe(0, with_instance(telemetry(), queue_seconds=queued.snapshot()))
    for _ in range(20):
        queued.observe(2.0)
    monitor.observe(1, with_instance(telemetry(), queue_seconds=queued.snapshot(), oldest_wait_seconds=0.1))
    moving = only_instance(monitor, 1)
    assert moving.queue_delay_seconds == moving.queue_seconds_p95
    assert moving.queue_delay_seconds > 1


def test_one_report_has_gauges_and_no_rates_yet() -> None:
    monitor = smoother()
    monitor.observe(3, telemetry(running=2, tokens=1000, ttft=(1.0,)))
    instance = only_instance(monitor, 3)
    assert instance.running == 2
    assert instance.prompt_tokens_per_second == 0
    assert instance.ttft_p50 is None


def test_a_new_epoch_starts_afresh_and_the_old_one_is_not_heard_any_more() -> None:
    monitor = smoother()
    monitor.observe(0, telemetry(epoch=1, running=8, tokens=5000))
    monitor.observe(1, telemetry(epoch=2, running=0, tokens=0))
    monitor.observe(2, telemetry(epoch=1, running=8, tokens=6000))  # late
    monitor.observe(3, telemetry(epoch=2, running=0, tokens=20))
    instance = only_instance(monitor, 3)
    assert (instance.epoch, instance.running) == (2, 0)
    assert instance.prompt_tokens_per_second == pytest.approx(10)


def test_a_silent_workers_instances_are_absent_then_it_is_forgotten() -> None:
    monitor = smoother(stale_s=5)
    monitor.observe(0, telemetry("w0", running=3))
    monitor.observe(10, telemetry("w1", running=1))
    metrics = monitor.metrics(10, at_ms=0)
    assert [instance.worker for instance in metrics.instances] == ["w1"]
    assert {worker.worker: worker.age_seconds for worker in metrics.workers} == {"w0": 10, "w1": 0}
    assert monitor.has_load(10)
    assert not monitor.has_load(16)
    assert [worker.worker for worker in monitor.metrics(35, at_ms=0).workers] == ["w1"]


def test_an_instance_without_blocks_is_full() -> None:
    monitor = smoother()
    monitor.observe(0, with_instance(telemetry(), kv_blocks=0, kv_used=0))
    assert only_instance(monitor, 0).kv_usage == 1.0


def test_an_instance_deployed_later_has_its_own_window() -> None:
    monitor = smoother()
    first, second = telemetry(tokens=10), telemetry(tokens=20)
    added = replace(second.instances[0], id="other@w0", prompt_tokens=7)
    monitor.observe(0, first)
    monitor.observe(1, replace(second, instances=[*second.instances, added]))
    monitor.observe(2, replace(second, instances=[replace(added, prompt_tokens=9)]))
    instance = only_instance(monitor, 2)
    assert instance.id == "other@w0"
    assert instance.prompt_tokens_per_second == pytest.approx(2)


def test_counters_that_went_backwards_give_no_negative_rate_and_no_percentile() -> None:
    monitor = smoother()
    monitor.observe(0, telemetry(tokens=100, ttft=(1.0, 1.0)))
    monitor.observe(1, telemetry(tokens=50, ttft=(1.0,)))
    instance = only_instance(monitor, 1)
    assert instance.prompt_tokens_per_second == 0
    assert instance.ttft_p50 is None


@given(st.lists(st.tuples(st.floats(0, 60), st.integers(0, 50)), min_size=1, max_size=30))
def test_averages_stay_between_the_lowest_and_the_highest_report(reports: list[tuple[float, int]]) -> None:
    monitor = smoother()
    for at_s, running in sorted(reports):
        monitor.observe(at_s, telemetry(running=running))
    newest_s = max(at_s for at_s, _ in reports)
    values = [running for _, running in reports]
    assert min(values) - 1e-9 <= only_instance(monitor, newest_s).running <= max(values) + 1e-9


def test_memory_is_bounded_by_the_window() -> None:
    monitor = smoother(window_s=1)
    for tick in range(1000):
        monitor.observe(tick / 10, telemetry(tokens=tick))
    assert len(monitor._workers["w0"].reports) <= 12


def test_the_clock_of_the_messages_goes_by_the_entry_that_was_read_soonest() -> None:
    clock = MessageClock()
    assert clock.now(5.0) == 5.0
    assert clock.observe("1000000-0", local_s=50.0) == 1000.0  # a backlog, read 900 s late
    assert clock.observe("1900000-3", local_s=50.1) == 1900.0
    assert clock.now(51.1) == pytest.approx(1901.0)
    clock.observe("1900500-0", local_s=51.1)  # read half a second late: no reason to turn back
    assert clock.now(51.1) == pytest.approx(1901.0)


def test_a_clock_that_was_set_back_is_believed_after_a_minute() -> None:
    clock = MessageClock()
    for second in range(10):
        clock.observe(f"{2_000_000 + 1000 * second}-0", local_s=100.0 + second)
    for second in range(10, 71):
        clock.observe(f"{1_900_000 + 1000 * second}-0", local_s=100.0 + second)
    assert clock.now(171.0) == pytest.approx(1971.0)
    assert len(clock._ahead) <= 2


def test_a_gpu_is_averaged_over_the_window_and_its_counters_and_memory_are_the_last() -> None:
    monitor = smoother(window_s=4)
    readings = [
        GpuTelemetry(
            utilization=share,
            power_watts=None,
            memory_used_bytes=used,
            xid_errors={"13": used},
            throttling=slow,
        )
        for share, used, slow in (
            (0.0, 9, {"thermal": 1.0}),  # before the window, but for its beginning
            (0.2, 1, {"thermal": 1.0}),
            (0.8, 2, {"thermal": 0.0}),
            (0.8, 3, {"thermal": 0.0}),
        )
    ]
    for at_s, gpu in zip((0, 6, 8, 10), readings, strict=True):
        monitor.observe(at_s, replace(telemetry(), gpu=gpu))
    (worker,) = monitor.metrics(10, at_ms=0).workers
    assert worker.gpu is not None
    assert worker.gpu.utilization == pytest.approx(0.6)
    assert worker.gpu.throttling["thermal"] == pytest.approx(1 / 3), (
        "a short one is seen for the whole window"
    )
    assert (worker.gpu.power_watts, worker.gpu.memory_used_bytes, worker.gpu.xid_errors) == (
        None,
        3,
        {"13": 3},
    )


def test_a_gpu_of_which_nvml_says_nothing_more_is_absent() -> None:
    monitor = smoother()
    monitor.observe(0, replace(telemetry(), gpu=GpuTelemetry(utilization=0.5)))
    monitor.observe(1, telemetry())
    (worker,) = monitor.metrics(1, at_ms=0).workers
    assert worker.gpu is None
