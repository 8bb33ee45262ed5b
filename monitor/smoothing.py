"""Telemetry to metrics: averages of gauges, rates of counters, percentiles of histograms. Pure.

Time is the time of the messages (their entry ids: Redis' clock, which never runs backwards within a
stream), never the time of reading. So a monitor that was stopped, or starts again and reads what it missed,
gets the same numbers as one that was always there.

Gauges are averaged over reports (exponentially, `smoothing` is the weight of the newest); counters and
histograms count since the worker's epoch began, and the window is the difference of its two ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bus import histogram
from bus.messages import (
    Histogram,
    InstanceMetrics,
    InstanceTelemetry,
    Metrics,
    WorkerMetrics,
    WorkerTelemetry,
)

FORGET_STALES = 6  # a worker silent for this many times `stale_s` is not mentioned any more


@dataclass(frozen=True, slots=True)
class Gauges:
    """Running averages of one instance."""

    running: float
    waiting: float
    waiting_tokens: float
    kv_used: float

    @classmethod
    def of(cls, report: InstanceTelemetry) -> Gauges:
        return cls(report.running, report.waiting, report.waiting_tokens, report.kv_used)

    def towards(self, newest: Gauges, weight: float) -> Gauges:
        return Gauges(
            running=blend(self.running, newest.running, weight),
            waiting=blend(self.waiting, newest.waiting, weight),
            waiting_tokens=blend(self.waiting_tokens, newest.waiting_tokens, weight),
            kv_used=blend(self.kv_used, newest.kv_used, weight),
        )


def blend(average: float, newest: float, weight: float) -> float:
    return average + weight * (newest - average)


@dataclass(slots=True)
class _History:
    """One epoch of one worker: its reports of the window, oldest first, and its averages."""

    epoch: int
    reports: deque[tuple[float, WorkerTelemetry]] = field(default_factory=deque)
    busy: float = 0.0
    gauges: dict[str, Gauges] = field(default_factory=dict)

    @property
    def newest(self) -> tuple[float, WorkerTelemetry]:
        return self.reports[-1]


def _shape(report: WorkerTelemetry) -> object:
    return report.pages, [(one.id, one.kv_blocks, one.layers, one.workers) for one in report.instances]


class Smoother:
    """`window_s`: over which rates and percentiles are taken. `stale_s`: older reports are not used: the
    instance is absent from the metrics then, since absent is not zero."""

    def __init__(self, *, window_s: float, smoothing: float, stale_s: float) -> None:
        self._window_s = window_s
        self._smoothing = smoothing
        self._stale_s = stale_s
        self._workers: dict[str, _History] = {}

    def observe(self, at_s: float, report: WorkerTelemetry) -> bool:
        """Takes one report. A newer epoch starts its worker afresh; reports of an older one are dropped.
        Returns whether it tells of another shape than the one before: an idle worker may morph, too."""
        history = self._workers.get(report.worker)
        if history is None or report.epoch > history.epoch:
            history = self._workers[report.worker] = _History(report.epoch)
        elif report.epoch < history.epoch:
            return False
        is_morphed = not history.reports or _shape(history.newest[1]) != _shape(report)
        self._average(history, report)
        history.reports.append((at_s, report))
        # one report from before the window stays: it is the window's beginning
        while len(history.reports) > 2 and history.reports[1][0] <= at_s - self._window_s:
            history.reports.popleft()
        return is_morphed

    def _average(self, history: _History, report: WorkerTelemetry) -> None:
        first = not history.reports
        history.busy = report.busy if first else blend(history.busy, report.busy, self._smoothing)
        before, history.gauges = history.gauges, {}
        for instance in report.instances:
            newest = Gauges.of(instance)
            average = before.get(instance.id, newest)
            history.gauges[instance.id] = average.towards(newest, self._smoothing)

    def has_load(self, now_s: float) -> bool:
        """Whether any instance runs or holds requests, by its newest report that is not stale."""
        return any(
            instance.running or instance.waiting
            for history in self._fresh(now_s)
            for instance in history.newest[1].instances
        )

    def metrics(self, now_s: float, at_ms: int) -> Metrics:
        """The picture at `now_s`, on the clock of the messages."""
        self._forget(now_s)
        return Metrics(
            at_ms=at_ms,
            window_seconds=self._window_s,
            workers=[_worker(name, history, now_s) for name, history in sorted(self._workers.items())],
            instances=[
                _instance(history, report)
                for history in self._fresh(now_s)
                for report in history.newest[1].instances
            ],
        )

    def _fresh(self, now_s: float) -> Iterable[_History]:
        for _, history in sorted(self._workers.items()):
            if now_s - history.newest[0] <= self._stale_s:
                yield history

    def _forget(self, now_s: float) -> None:
        oldest = now_s - FORGET_STALES * self._stale_s
        self._workers = {name: h for name, h in self._workers.items() if h.newest[0] >= oldest}


def _instance(history: _History, last: InstanceTelemetry) -> InstanceMetrics:
    first, seconds = _window_start(history, last.id)
    average = history.gauges[last.id]
    queue = window_of(last, first, lambda report: report.queue_seconds)
    queue_p95 = histogram.quantile(queue, 0.95)
    ttft = window_of(last, first, lambda report: report.time_to_first_token)
    tpot = window_of(last, first, lambda report: report.time_per_output_token)
    return InstanceMetrics(
        id=last.id,
        worker=history.newest[1].worker,
        epoch=history.epoch,
        running=average.running,
        waiting=average.waiting,
        waiting_tokens=average.waiting_tokens,
        kv_blocks=last.kv_blocks,
        kv_used=average.kv_used,
        # without a block nothing fits: full, not empty
        kv_usage=min(1.0, average.kv_used / last.kv_blocks) if last.kv_blocks else 1.0,
        queue_seconds_p95=queue_p95,
        ttft_p50=histogram.quantile(ttft, 0.5),
        ttft_p95=histogram.quantile(ttft, 0.95),
        tpot_p50=histogram.quantile(tpot, 0.5),
        tpot_p95=histogram.quantile(tpot, 0.95),
        prompt_tokens_per_second=rate(last.prompt_tokens, first.prompt_tokens, seconds),
        generation_tokens_per_second=rate(last.generation_tokens, first.generation_tokens, seconds),
        preemptions_per_second=rate(last.preemptions, first.preemptions, seconds),
        last=last,
        # while nobody is admitted no wait ends, so none is observed: the longer the jam, the less the
        # percentile sees of it. The head's age does.
        queue_delay_seconds=max(queue_p95 or 0.0, last.oldest_wait_seconds),
    )


def _window_start(history: _History, instance: str) -> tuple[InstanceTelemetry, float]:
    """The instance's first report of the window, and the seconds from there to its newest."""
    newest_at = history.newest[0]
    for at_s, report in history.reports:
        for candidate in report.instances:
            if candidate.id == instance:
                return candidate, newest_at - at_s
    raise AssertionError(f"{instance} is in the newest report of its own history")


def window_of(
    last: InstanceTelemetry, first: InstanceTelemetry, which: Callable[[InstanceTelemetry], Histogram]
) -> Histogram:
    """What a histogram gained in the window. A worker that changed its bounds, or counted backwards, has no
    window: nothing observed."""
    try:
        return histogram.difference(which(last), which(first))
    except histogram.HistogramMismatch:
        return Histogram(bounds=(), counts=[0])


def rate(last: int, first: int, seconds: float) -> float:
    """Per second; 0 for a single report."""
    return max(0, last - first) / seconds if seconds > 0 else 0.0


def _worker(name: str, history: _History, now_s: float) -> WorkerMetrics:
    at_s, report = history.newest
    return WorkerMetrics(
        worker=name,
        epoch=history.epoch,
        busy=history.busy,
        pages=report.pages,
        age_seconds=max(0.0, now_s - at_s),
    )
