"""Three placement policies on eight GPUs by arithmetic: no GPU is used, no time is measured.

    python -m bench.placement [--quick]

The setting of iServe's Figure 10 (§6): half an hour, a model deployed every two to three minutes, requests by
a Poisson process whose rate changes every two to three minutes. Eight RTX A6000, four kinds of models twice
(`bench.placement.models`: what they take is arithmetic), intent: least latency. As in the paper, ranks may
lie on devices that other models use (a group of workers here may not, yet), and a request has its model for
itself. Ranking, fitting and placing are the controller's own code. Slowdown: latency over what it is on idle
devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.common.results import RESULTS, conclude, parser, quantile, say
from bench.placement.devices import INTENT, LEVELS, MODELS, NUM_DEVICES, SECONDS, SharedDevices, trace_of
from controller.planning.placement import POLICIES, THRESHOLD, WINDOW_S, Placing

SWEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
HEAVY = 2.0  # times the load, at which devices that hold four models cannot keep up


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    """The numbers of one trace: seconds, and devices in the mean from the first deployment to the end."""

    devices: float
    devices_after_four: float
    devices_at_end: float
    median_s: float
    p95_s: float
    median_slowdown: float
    p95_slowdown: float
    busy: float  # share of the time, of the devices in use at the end
    num_requests: float
    num_refused: float


def use_of(placing: Placing, seed: int, load: float = 1.0) -> SharedDevices:
    cluster = SharedDevices(placing)
    cluster.run(trace_of(seed, load))
    return cluster


def outcome_of(cluster: SharedDevices) -> PlacementOutcome:
    latencies = [one.latency_s for one in cluster.finished]
    slowdowns = [one.latency_s / one.alone_s for one in cluster.finished]
    ends = [at_s for at_s, _ in cluster.in_use[1:]] + [SECONDS]
    device_s = sum(count * (end_s - at_s) for (at_s, count), end_s in zip(cluster.in_use, ends, strict=True))
    at_end = cluster.in_use[-1][1]
    return PlacementOutcome(
        devices=device_s / SECONDS,
        devices_after_four=cluster.in_use[3][1],
        devices_at_end=at_end,
        median_s=quantile(latencies, 0.5) or 0.0,
        p95_s=quantile(latencies, 0.95) or 0.0,
        median_slowdown=quantile(slowdowns, 0.5) or 0.0,
        p95_slowdown=quantile(slowdowns, 0.95) or 0.0,
        busy=sum(cluster.busy_s.values()) / (at_end * SECONDS),
        num_requests=len(latencies),
        num_refused=len(cluster.refused),
    )


def mean_of(clusters: Sequence[SharedDevices]) -> dict[str, float]:
    rows = [asdict(outcome_of(cluster)) for cluster in clusters]
    return {key: round(statistics.fmean(row[key] for row in rows), 4) for key in rows[0]}


def say_row(name: str, row: dict[str, float]) -> None:
    say(
        f"{name:18} {row['devices']:7.2f} {row['devices_after_four']:7.1f} {row['devices_at_end']:5.1f} "
        f"{row['median_s']:9.2f} {row['p95_s']:6.2f} {row['median_slowdown']:9.2f} "
        f"{row['p95_slowdown']:6.2f} {row['busy']:7.0%}"
    )


def _middle(clusters: Sequence[SharedDevices]) -> int:
    """Return the number of the trace in which the median of devices is used."""
    uses = [outcome_of(cluster).devices for cluster in clusters]
    return uses.index(statistics.median_high(uses))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one trace in place of ten")
    quick = options.parse_args().quick
    seeds, began_s = range(1 if quick else 10), time.perf_counter()
    minutes = SECONDS / 60
    say(f"{NUM_DEVICES} GPUs (modelled), {len(MODELS)} models in {minutes:.0f} minutes, traces: {len(seeds)}")
    say(f"{'':18} GPUs: mean, after 4, end   latency s: P50  P95   slowdown: P50   P95   busy")
    clusters = {policy: [use_of(Placing(policy), seed) for seed in seeds] for policy in POLICIES}
    found = {policy: mean_of(runs) for policy, runs in clusters.items()}
    for policy, row in found.items():
        say_row(policy, row)
    sweep = {
        threshold: mean_of([use_of(Placing("hybrid", threshold), seed) for seed in seeds])
        for threshold in SWEEP
    }
    for threshold, row in sweep.items():
        say_row(f"hybrid at {threshold:g}", row)
    heavy = {policy: mean_of([use_of(Placing(policy), seed, HEAVY) for seed in seeds]) for policy in POLICIES}
    for policy, row in heavy.items():
        say_row(f"{policy} x{HEAVY:g}", row)
    least, hybrid = found["least-loaded"], found["hybrid"]
    ratios = {
        f"hybrid / {other} {what}": round(hybrid[what] / found[other][what], 3)
        for other in ("least-loaded", "packing")
        for what in ("devices_at_end", "median_s", "p95_s")
    }
    is_between = least["devices_at_end"] >= hybrid["devices_at_end"] and (
        hybrid["p95_s"] <= found["packing"]["p95_s"]
    )
    result: dict[str, Any] = {
        "bench": "placement",
        "model": "event-driven, 8 RTX A6000, latency and memory by arithmetic; nothing is measured",
        "seconds": SECONDS,
        "traces": len(seeds),
        "models": MODELS,
        "intent": asdict(INTENT),
        "levels": LEVELS,
        "threshold": THRESHOLD,
        "window_s": WINDOW_S,
        "outcomes": found,
        "hybrid_by_threshold": {str(threshold): row for threshold, row in sweep.items()},
        "outcomes_at_twice_the_load": heavy,
        "ratios": ratios,
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    if not quick:
        from bench.placement.plot import draw

        shown = _middle(clusters["hybrid"])
        drawn: dict[str, SharedDevices] = {policy: runs[shown] for policy, runs in clusters.items()}
        draw(trace_of(seeds[shown]), drawn, RESULTS / "placement.png")
    conclude(result, is_kept=not quick)
    return 0 if is_between else 1
