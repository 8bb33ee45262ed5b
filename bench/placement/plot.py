"""The picture of `bench.placement`, after iServe's Figure 10: load, GPUs in use and latency over time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from bench.common.plots import picture
from bench.common.results import quantile
from bench.placement.devices import NUM_DEVICES, SECONDS, SharedDevices, Trace

WINDOW_S = 60.0


def draw(trace: Trace, clusters: Mapping[str, SharedDevices], path: Path) -> None:
    """Write the picture as PNG."""
    options = {"figsize": (10, 11), "sharex": True, "height_ratios": (1, 1, 2, 2)}
    with picture(path, 4, 1, **options) as (_, (load, devices, median, p95)):
        since, levels = zip(*trace.levels, (SECONDS, trace.levels[-1][1]), strict=True)
        load.step(since, levels, where="post")
        load.set(ylabel="load of a model", ylim=(0, None))
        for at_s in trace.deployments:
            load.axvline(at_s, color="grey", linewidth=0.6)
        for name, cluster in clusters.items():
            times, counts = zip(*cluster.in_use, (SECONDS, cluster.in_use[-1][1]), strict=True)
            devices.step(times, counts, where="post", label=name)
            middles, medians, p95s = over_time(cluster)
            median.plot(middles, medians, label=name)
            p95.plot(middles, p95s, label=name)
        devices.set(ylabel="GPUs in use", ylim=(0, NUM_DEVICES + 0.5))
        devices.legend(fontsize=8)
        median.set(ylabel="slowdown, median of a minute", ylim=(0, None))
        p95.set(ylabel="slowdown, P95 of a minute", xlabel="seconds (modelled)", ylim=(0, None))


def over_time(cluster: SharedDevices) -> tuple[list[float], list[float], list[float]]:
    """Return the middle of each minute of arrival, and the median and P95 of the slowdown then."""
    minutes: dict[int, list[float]] = {}
    for one in cluster.finished:
        minutes.setdefault(int(one.arrived_s // WINDOW_S), []).append(one.latency_s / one.alone_s)
    rows = sorted(minutes.items())
    return (
        [(minute + 0.5) * WINDOW_S for minute, _ in rows],
        [statistics.median(values) for _, values in rows],
        [quantile(values, 0.95) or 0.0 for _, values in rows],
    )
