"""The picture of `bench.scheduler`: throughput and the number of groups over time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from bench.common.plots import picture
from bench.scheduler.policies import Modelled

SMOOTH_S = 60.0


def draw(clusters: Mapping[str, Modelled], path: Path) -> None:
    """Write the picture as PNG."""
    options = {"figsize": (11, 7), "sharex": True, "height_ratios": (3, 1)}
    with picture(path, 2, 1, **options) as (_, (rates, groups)):
        for name, cluster in clusters.items():
            points = cluster.rates[:: int(SMOOTH_S / 0.5)]
            rates.plot(
                [later[0] for _, later in pairwise(points)],
                [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairwise(points)],
                label=name,
                linestyle=":" if name.startswith("static") else "-",
            )
            if not name.startswith("static"):
                groups.step(
                    [one[0] for one in cluster.rates],
                    [one[2] for one in cluster.rates],
                    where="post",
                    label=name,
                )
        rates.set(ylabel="tokens/s got through, by the minute (modelled)", ylim=(0, None))
        rates.legend(fontsize=8)
        groups.set(xlabel="seconds", ylabel="groups", yticks=range(4))
