"""The card of the demo: one burst at full precision and with morphs, side by side. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rich.table import Table

from instar.output.tables import ABSENT, make_table
from instar.replay.card import morphs_text, seconds_text
from instar.replay.files import RunFile
from instar.replay.plots import sums_over_instances
from instar.replay.statistics import share_at_full

ROWS: Final[dict[str, Callable[[RunFile], str]]] = {
    "requests": lambda run: str(run.summary["requests"]),
    "requests lost": lambda run: str(num_lost(run)),
    "TTFT P50, s": lambda run: _ttft_text(run, "p50"),
    "TTFT P95, s": lambda run: _ttft_text(run, "p95"),
    "TTFT over the limit": lambda run: _violations_text(run),
    "most layers below full": lambda run: _most_text(run, "layers_below_full"),
    "KV blocks, first and most": lambda run: _blocks_text(run),
    "tokens at full precision": lambda run: _full_text(run),
    "morphs": lambda run: morphs_text(run.observed.get("morphs", [])),
}


def card(full: RunFile, morphed: RunFile) -> Table:
    """Return a row for each number and a column for each run."""
    table = make_table([""], ["full precision", "with morphs"])
    for name, text in ROWS.items():
        table.add_row(name, text(full), text(morphed))
    return table


def verdict(full: RunFile, morphed: RunFile) -> str:
    """Return in a line what morphs changed, for better or worse."""
    lost, sent = num_lost(full) + num_lost(morphed), full.summary["requests"] + morphed.summary["requests"]
    blocks = blocks_gained(morphed)
    ends = f"{blocks} KV blocks gained; requests lost: {lost} of {sent}"
    before, after = p95_s(full), p95_s(morphed)
    if before is None or after is None:
        return f"No request was served in one of the runs; {ends}"
    if after < before:
        return f"P95 TTFT {before / after:.1f} times lower with morphs; {ends}"
    return f"P95 TTFT {after / before:.1f} times higher with morphs: nothing was gained here; {ends}"


def num_lost(run: RunFile) -> int:
    """Return how many requests were sent and not served to their end."""
    found = run.summary
    return int(found["requests"] - found["served"])


def p95_s(run: RunFile) -> float | None:
    found: dict[str, float] | None = run.summary["ttft_s"]
    return found["p95"] if found else None


def blocks_gained(run: RunFile) -> int:
    """Return by how many blocks the KV caches of all instances grew at most."""
    blocks = _seen(run, "kv_blocks")
    return int(max(blocks) - blocks[0]) if blocks else 0


def _seen(run: RunFile, key: str) -> list[float]:
    """Return the sums over all instances, sample by sample."""
    return sums_over_instances(run, key)[1]


def _ttft_text(run: RunFile, column: str) -> str:
    found: dict[str, Any] | None = run.summary["ttft_s"]
    return seconds_text(found[column]) if found else ABSENT


def _violations_text(run: RunFile) -> str:
    found = run.summary["violations"]["ttft"]
    return f"{found['count']} of {run.summary['requests']} over {run.slo.ttft_s:g} s"


def _most_text(run: RunFile, key: str) -> str:
    found = _seen(run, key)
    return f"{max(found):.0f}" if found else ABSENT


def _blocks_text(run: RunFile) -> str:
    blocks = _seen(run, "kv_blocks")
    return f"{blocks[0]:.0f}, {max(blocks):.0f}" if blocks else ABSENT


def _full_text(run: RunFile) -> str:
    tokens = run.summary["tokens_by_layers_below_full"]
    return f"{share_at_full(tokens):.1%}" if tokens else ABSENT
