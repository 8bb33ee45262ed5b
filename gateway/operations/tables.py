"""What other programs draw from: the tables of precisions, kinds of morphs, policy fields and charts.

`GET /admin/tables` and the first message of /admin/live have them. The dashboard has no list of its own: a
new precision, kind or field needs no change there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from bus import morphs, policy
from bus.precisions import DEFAULT_SWAP, TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart: a field of InstanceMoment, of several instances their sum or the highest."""

    label: str
    field: str
    of: Literal["sum", "highest"]
    colour: str  # a variable of the dashboard's style sheet
    is_area: bool = False
    is_stepped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartEntry:
    """One chart over time. `floor`: the lowest top of its scale. `slo`: the objective drawn in it."""

    title: str
    unit: Literal["count", "count/s", "seconds", "whole"]
    floor: float
    series: tuple[Series, ...]
    slo: Literal["ttft_s", "tpot_s", ""] = ""


CHARTS: Final = (
    ChartEntry(
        title="Load",
        unit="count",
        floor=4,
        series=(
            Series(label="running", field="running", of="sum", colour="s1", is_area=True),
            Series(label="waiting", field="waiting", of="sum", colour="s2"),
        ),
    ),
    ChartEntry(
        title="Throughput",
        unit="count/s",
        floor=10,
        series=(Series(label="tokens", field="tokens_per_s", of="sum", colour="s1", is_area=True),),
    ),
    ChartEntry(
        title="Queue delay",
        unit="seconds",
        floor=0.05,
        series=(Series(label="longest", field="queue_delay_s", of="highest", colour="s2"),),
    ),
    ChartEntry(
        title="TTFT",
        unit="seconds",
        floor=0.05,
        slo="ttft_s",
        series=(Series(label="P95", field="ttft_p95_s", of="highest", colour="s1"),),
    ),
    ChartEntry(
        title="TPOT",
        unit="seconds",
        floor=0.01,
        slo="tpot_s",
        series=(Series(label="P95", field="tpot_p95_s", of="highest", colour="s1"),),
    ),
    ChartEntry(
        title="KV blocks",
        unit="count",
        floor=16,
        series=(
            Series(label="all", field="kv_blocks", of="sum", colour="kv-line", is_stepped=True),
            Series(label="used", field="kv_used", of="sum", colour="kv-used", is_area=True),
        ),
    ),
    ChartEntry(
        title="Layers below full",
        unit="count",
        floor=4,
        series=(
            Series(
                label="layers",
                field="layers_below_full",
                of="sum",
                colour=DEFAULT_SWAP,
                is_area=True,
                is_stepped=True,
            ),
        ),
    ),
    ChartEntry(
        title="Degree",
        unit="whole",
        floor=2,
        series=(Series(label="highest", field="tp", of="highest", colour="s1", is_stepped=True),),
    ),
)


def tables() -> dict[str, Any]:
    """Return all tables as JSON values."""
    return {
        "precisions": [asdict(entry) for entry in TABLE],
        "morphs": morphs.describe(),
        "steps": morphs.STEPS,
        "policy": policy.describe(),
        "charts": [asdict(chart) for chart in CHARTS],
    }
