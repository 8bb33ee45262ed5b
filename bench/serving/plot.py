"""The serving benchmark as one picture: throughput over time, workers in groups, what short ones waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt

from bench.serving.load import Load
from bench.serving.report import TTFT_LIMIT_S, Run, grouped

BIN_S = 10.0


def draw(runs: Sequence[Run], load: Load, path: Path) -> None:
    """Writes a PNG."""
    figure, (rates, groups, waits) = plt.subplots(
        3, 1, figsize=(11, 10), sharex=True, height_ratios=(3, 1, 3)
    )
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
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
