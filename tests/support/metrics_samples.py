"""The metrics of one worker with one instance."""

from __future__ import annotations

import time
from dataclasses import replace

from bus.messages import (
    Histogram,
    InstanceMetrics,
    InstanceTelemetry,
    LayerShape,
    Metrics,
    PageCounts,
    WorkerMetrics,
)


def metrics_of(
    instance: str = "m@w0",
    epoch: int = 1,
    *,
    running: int = 0,
    waiting: int = 0,
    kv_blocks: int = 64,
    kv_used: int = 0,
    steps: int = 0,
    layers: list[LayerShape] | None = None,
) -> Metrics:
    """Just made. `instance` is "{model}@{worker}"; `steps` since its start."""
    worker = instance.partition("@")[2]
    last = _telemetry(instance, running, waiting, kv_blocks, kv_used, steps)
    if layers is not None:
        last = replace(last, layers=layers)
    pages = PageCounts(budget=100, weights=60, kv=30, free=10)
    report = WorkerMetrics(worker=worker, epoch=epoch, busy=0.5, pages=pages, age_seconds=0.0)
    return Metrics(
        at_ms=time.time_ns() // 1_000_000,
        window_seconds=10.0,
        workers=[report],
        instances=[_smoothed(last, worker, epoch)],
    )


def _telemetry(
    instance: str, running: int, waiting: int, kv_blocks: int, kv_used: int, steps: int
) -> InstanceTelemetry:
    empty = Histogram()
    return InstanceTelemetry(
        id=instance,
        running=running,
        waiting=waiting,
        waiting_tokens=0,
        kv_blocks=kv_blocks,
        kv_used=kv_used,
        layers=[LayerShape()],
        prompt_tokens=0,
        generation_tokens=0,
        preemptions=3,
        finished={},
        queue_seconds=empty,
        step_seconds=Histogram(counts={0: steps}),
        time_to_first_token=empty,
        time_per_output_token=empty,
    )


def _smoothed(last: InstanceTelemetry, worker: str, epoch: int) -> InstanceMetrics:
    return InstanceMetrics(
        id=last.id,
        worker=worker,
        epoch=epoch,
        running=last.running,
        waiting=last.waiting,
        waiting_tokens=last.waiting_tokens,
        kv_blocks=last.kv_blocks,
        kv_used=last.kv_used,
        kv_usage=last.kv_used / last.kv_blocks,
        queue_seconds_p95=None,
        ttft_p50=None,
        ttft_p95=None,
        tpot_p50=None,
        tpot_p95=None,
        prompt_tokens_per_second=0.0,
        generation_tokens_per_second=0.0,
        preemptions_per_second=0.0,
        last=last,
    )
