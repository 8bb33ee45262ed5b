"""The picture of `bench.serving`: throughput over time, workers in groups, what short requests waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.plots import picture
from bench.serving.load import ServingLoad
from bench.serving.report import TTFT_LIMIT_S, ServingRun, grouped

BIN_S = 10.0


def draw(runs: Sequence[ServingRun], load: ServingLoad, path: Path) -> None:
    """Write the picture as PNG."""
    options = {"figsize": (11, 10), "sharex": True, "height_ratios": (3, 1, 3)}
    with picture(path, 3, 1, **options) as (_, (rates, groups, waits)):
        for run in runs:
            style: dict[str, Any] = {
                "label": run.way,
                "linestyle": ":" if run.way.startswith("static") else "-",
                "linewidth": 1.2,
            }
            bins = [BIN_S * i for i in range(int((load.seconds + load.drain_s) / BIN_S))]
            rates.plot(
                [at_s + BIN_S / 2 for at_s in bins],
                [sum(one.tokens_between(at_s, at_s + BIN_S) for one in run.served) / BIN_S for at_s in bins],
                **style,
            )
            if not run.way.startswith("static"):
                steps = grouped(run, load.seconds + load.drain_s)
                groups.step([at_s for at_s, _ in steps], [num for _, num in steps], where="post", **style)
            short = [one for one in run.served if not one.arrival.is_long and one.token_s]
            waits.plot([one.arrival.at_s for one in short], [one.ttft_s(0.0) for one in short], **style)
        waits.axhline(TTFT_LIMIT_S, color="grey", linestyle="--", linewidth=1)
        for panel in (rates, groups, waits):
            panel.axvspan(load.warm_up_s, load.seconds, color="grey", alpha=0.1)
            panel.grid(alpha=0.3)
        rates.set(ylabel="tokens/s got through", ylim=(0, None))
        groups.set(ylabel="workers in groups")
        waits.set(ylabel="TTFT of short ones, s", xlabel="seconds, when the request was due", yscale="log")
        rates.legend(fontsize=8)
