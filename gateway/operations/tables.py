"""The tables that other programs draw from: precisions, morphs, fields, charts, and numbers of decisions.

The dashboard has no list of its own: a new precision, kind or field needs no change there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from bus import morphs, policy
from bus.burst import BURST_FIELDS
from bus.levers import NEVER_S
from bus.precisions import DEFAULT_SWAP, TABLE


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: a field of InstanceMoment; of several instances their sum, or the highest."""

    label: str
    field: str
    of: Literal["sum", "highest"]
    colour: str  # a variable of the dashboard's style sheet
    is_area: bool = False
    is_stepped: bool = False


@dataclass(frozen=True, slots=True)
class ChartEntry:
    """One chart over time. `floor`: the lowest top of its scale. `slo`: the objective drawn in it."""

    title: str
    unit: Literal["count", "count/s", "seconds", "whole"]
    floor: float
    series: tuple[Series, ...]
    slo: Literal["ttft_s", "tpot_s", ""] = ""


_LOAD: Final = (
    Series("running", "running", "sum", "s1", is_area=True),
    Series("waiting", "waiting", "sum", "s2"),
)
_KV: Final = (
    Series("all", "kv_blocks", "sum", "kv-line", is_stepped=True),
    Series("used", "kv_used", "sum", "kv-used", is_area=True),
)
_BELOW_FULL: Final = Series("layers", "layers_below_full", "sum", DEFAULT_SWAP, is_area=True, is_stepped=True)
CHARTS: Final = (
    ChartEntry("Load", "count", 4, _LOAD),
    ChartEntry("Throughput", "count/s", 10, (Series("tokens", "tokens_per_s", "sum", "s1", is_area=True),)),
    ChartEntry("Queue delay", "seconds", 0.05, (Series("longest", "queue_delay_s", "highest", "s2"),)),
    ChartEntry("TTFT", "seconds", 0.05, (Series("P95", "ttft_p95_s", "highest", "s1"),), slo="ttft_s"),
    ChartEntry("TPOT", "seconds", 0.01, (Series("P95", "tpot_p95_s", "highest", "s1"),), slo="tpot_s"),
    ChartEntry("KV blocks", "count", 16, _KV),
    ChartEntry("Layers below full", "count", 4, (_BELOW_FULL,)),
    ChartEntry("Degree", "whole", 2, (Series("highest", "tp", "highest", "s1", is_stepped=True),)),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """Numbers of a decision that are shown side by side, as bars of one scale: (name, label) of each."""

    title: str
    numbers: tuple[tuple[str, str], ...]


_BLOCKS: Final = (
    ("kv_used", "KV in use"),
    ("kv_needed", "KV needed"),
    ("kv_blocks", "KV blocks now"),
    ("blocks_after", "KV blocks afterwards"),
)
COMPARED: Final = (
    Compared("KV blocks", _BLOCKS),
    Compared("Longest wait", (("wait_without_s", "without the swap"), ("wait_with_s", "with it"))),
    Compared("Growth of the perplexity", (("loss", "by the profile"), ("loss_budget", "at most"))),
)


def tables() -> dict[str, Any]:
    """Return all tables as JSON values."""
    return {
        "precisions": [asdict(entry) for entry in TABLE],
        "morphs": morphs.describe(),
        "steps": morphs.STEPS,
        "policy": policy.describe(),
        "charts": [asdict(chart) for chart in CHARTS],
        "compared": [asdict(one) for one in COMPARED],
        "burst": [asdict(one) for one in BURST_FIELDS],
        "never_s": NEVER_S,
    }
