"""Telemetry to metrics: averages of gauges, rates of counters, percentiles of histograms. Pure.

Time is that of the messages (Redis' clock, from their entry ids), never that of reading: a monitor that reads
late what it missed gets the same numbers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from bus import histogram
from bus.messages import (
    GpuTelemetry,
    Histogram,
    InstanceMetrics,
    InstanceTelemetry,
    Metrics,
    WorkerMetrics,
    WorkerTelemetry,
)

FORGET_STALES = 6  # the metrics omit a worker that was silent for this many times `stale_s`
GAUGES = ("running", "waiting", "waiting_tokens", "kv_used")
GPU_GAUGES = ("utilization", "memory_utilization", "power_watts", "temperature_celsius", "sm_clock_hertz")
SKETCHES = ("queue_seconds", "time_to_first_token", "time_per_output_token")


@dataclass(slots=True)
class _History:
    """One epoch of one worker: its reports of the window, oldest first, and its averages."""

    epoch: int
    reports: deque[tuple[float, WorkerTelemetry]] = field(default_factory=deque)
    busy: float = 0.0
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)  # gauges by instance, then by name

    @property
    def newest(self) -> tuple[float, WorkerTelemetry]:
        return self.reports[-1]


class Smoother:
    """The window of each worker's reports, and the metrics that follow from it.

    Gauges are averaged over reports, with weight `smoothing` for the newest. Counters and histograms count
    since the worker's epoch began: rates and percentiles are of the difference over `window_s`. Metrics omit
    instances whose newest report is older than `stale_s`, since absent is not zero.
    """

    def __init__(self, *, window_s: float, smoothing: float, stale_s: float) -> None:
        self._window_s, self._smoothing, self._stale_s = window_s, smoothing, stale_s
        self._workers: dict[str, _History] = {}

    def observe(self, at_s: float, report: WorkerTelemetry) -> bool:
        """Take one report; one of an older epoch is dropped. Return True if it shows another shape."""
        history = self._workers.get(report.worker)
        if history is None or report.epoch > history.epoch:
            history = self._workers[report.worker] = _History(report.epoch)
        elif report.epoch < history.epoch:
            return False
        is_morphed = not history.reports or _shape(history.newest[1]) != _shape(report)
        self._average(history, report)
        history.reports.append((at_s, report))
        # One report from before the window stays: it is the window's beginning.
        while len(history.reports) > 2 and history.reports[1][0] <= at_s - self._window_s:
            history.reports.popleft()
        return is_morphed

    def _average(self, history: _History, report: WorkerTelemetry) -> None:
        history.busy = self._blend(history.busy if history.reports else report.busy, report.busy)
        before, history.gauges = history.gauges, {}
        for instance in report.instances:
            newest = {name: float(getattr(instance, name)) for name in GAUGES}
            average = before.get(instance.id, newest)
            history.gauges[instance.id] = {name: self._blend(average[name], newest[name]) for name in GAUGES}

    def _blend(self, average: float, newest: float) -> float:
        return average + self._smoothing * (newest - average)

    def has_load(self, now_s: float) -> bool:
        """Return True if an instance runs or holds requests, by its newest report that is not stale."""
        return any(
            instance.running or instance.waiting
            for history in self._fresh(now_s)
            for instance in history.newest[1].instances
        )

    def metrics(self, now_s: float, at_ms: int) -> Metrics:
        """Return the metrics at `now_s`, on the clock of the messages."""
        oldest = now_s - FORGET_STALES * self._stale_s
        self._workers = {name: one for name, one in self._workers.items() if one.newest[0] >= oldest}
        fresh = self._fresh(now_s)
        windows = [_Window(one, instance) for one in fresh for instance in one.newest[1].instances]
        groups: dict[object, list[_Window]] = defaultdict(list)
        for window in windows:
            groups[window.group].append(window)
        return Metrics(
            at_ms=at_ms,
            window_seconds=self._window_s,
            workers=[_worker(name, history, now_s) for name, history in sorted(self._workers.items())],
            instances=[window.metrics(groups[window.group]) for window in windows],
        )

    def _fresh(self, now_s: float) -> Iterable[_History]:
        for _, history in sorted(self._workers.items()):
            if now_s - history.newest[0] <= self._stale_s:
                yield history


def _shape(report: WorkerTelemetry) -> object:
    return report.pages, [(one.id, one.kv_blocks, one.layers, one.workers) for one in report.instances]


def group_of(worker: str, instance: InstanceTelemetry) -> tuple[str, ...]:
    """Return what the members of one tensor-parallel group have in common: model and workers."""
    return instance.id.removesuffix(f"@{worker}"), *(instance.workers or [worker])


class _Window:
    """One instance between its first report of the window and its newest."""

    def __init__(self, history: _History, last: InstanceTelemetry) -> None:
        self.history, self.last = history, last
        self.group = group_of(history.newest[1].worker, last)
        self.first, self.seconds = _window_start(history, last.id)
        self.queue, self.ttft, self.tpot = map(self._gained, SKETCHES)

    def _gained(self, name: str) -> Histogram:
        """Return what a histogram gained; nothing for a worker that counted backwards."""
        try:
            return histogram.difference(getattr(self.last, name), getattr(self.first, name))
        except histogram.HistogramMismatch:
            return Histogram()

    def _rate(self, last: int, first: int) -> float:
        """Return the growth per second; 0 for a single report."""
        return max(0, last - first) / self.seconds if self.seconds > 0 else 0.0

    def metrics(self, group: Iterable[_Window]) -> InstanceMetrics:
        """Return the smoothed view. TTFT and TPOT are those of all members of its group together."""
        last, first, average = self.last, self.first, self.history.gauges[self.last.id]
        empty: dict[str, Any] = dict.fromkeys(SKETCHES, Histogram())
        queue_p95 = histogram.quantile(self.queue, 0.95)
        ttft = histogram.merge(one.ttft for one in group)
        tpot = histogram.merge(one.tpot for one in group)
        return InstanceMetrics(
            id=last.id,
            worker=self.history.newest[1].worker,
            epoch=self.history.epoch,
            kv_blocks=last.kv_blocks,
            **average,
            # Without a block nothing fits: full, not empty.
            kv_usage=min(1.0, average["kv_used"] / last.kv_blocks) if last.kv_blocks else 1.0,
            queue_seconds_p95=queue_p95,
            ttft_p50=histogram.quantile(ttft, 0.5),
            ttft_p95=histogram.quantile(ttft, 0.95),
            tpot_p50=histogram.quantile(tpot, 0.5),
            tpot_p95=histogram.quantile(tpot, 0.95),
            prompt_tokens_per_second=self._rate(last.prompt_tokens, first.prompt_tokens),
            generation_tokens_per_second=self._rate(last.generation_tokens, first.generation_tokens),
            preemptions_per_second=self._rate(last.preemptions, first.preemptions),
            # Readers have the percentiles; cumulative sketches would only make the message larger.
            last=replace(last, **empty),
            # While nothing is admitted no wait ends, so none is observed: the longer the jam, the less the
            # percentile sees of it. The head's age does.
            queue_delay_seconds=max(queue_p95 or 0.0, last.oldest_wait_seconds),
        )


def _window_start(history: _History, instance: str) -> tuple[InstanceTelemetry, float]:
    """Return the instance's first report of the window, and the seconds from there to its newest."""
    found = (
        (one, at_s) for at_s, report in history.reports for one in report.instances if one.id == instance
    )
    first, at_s = next(found)  # the newest report, at least, has it
    return first, history.newest[0] - at_s


def _worker(name: str, history: _History, now_s: float) -> WorkerMetrics:
    at_s, report = history.newest
    return WorkerMetrics(
        worker=name,
        epoch=history.epoch,
        busy=history.busy,
        pages=report.pages,
        age_seconds=max(0.0, now_s - at_s),
        at_ms=report.at_ms,
        gpu=smoothed_gpu([one.gpu for _, one in history.reports if one.gpu]) if report.gpu else None,
    )


def smoothed_gpu(readings: Sequence[GpuTelemetry]) -> GpuTelemetry:
    """Return the means of what changes fast, beside the rest of the last reading; there must be one.

    They are means over the window, not moving averages over reports: under load a worker reports the same
    reading several times. A reason to throttle that lasted for one reading shows for the whole window.
    """
    last = readings[-1]
    values = {name: [getattr(one, name) for one in readings] for name in GPU_GAUGES}
    known = {name: [one for one in each if one is not None] for name, each in values.items()}
    means: dict[str, Any] = {name: fmean(each) for name, each in known.items() if each}
    shares = {
        reason: fmean(one.throttling.get(reason, 0.0) for one in readings) for reason in last.throttling
    }
    return replace(last, **means, throttling=shares)
