"""The numbers of a morph in words, with their units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MIB: Final = 1 << 20

Numbers = Mapping[str, Any]

# Pairs that are told together.
PAIRS: Final = {
    ("tp_before", "tp_after"): "tp{} to tp{}",
    ("layers_done", "layers"): "{} of {} layers",
    ("halves_applied", "halves"): "{} of {} halves of layers",
    ("blocks_before", "blocks_after"): "KV blocks {} to {}",
    ("rows_host_bytes_per_s", "rows_peer_bytes_per_s"): "rows at {} from the host, {} from peers",
}
PLAIN: Final = {"layers_per_step": "layers a step", "requests_sent_away": "requests sent away"}
NOTHING: Final = ("wait_seconds", "blocks_moved", "requests_sent_away", "requests_holding")  # 0 says nothing


def numbers_text(numbers: Numbers, page_bytes: int | None = None, in_reason: str = "") -> str:
    """`4 of 4 halves of layers, copied 3.1 MiB, ...`. `page_bytes`: of the worker's pages; None: not known,
    they stay pages. Numbers that stand in the reason are left out; a single digit may be another's."""
    told_already = set(re.findall(r"\d{2,}", in_reason))
    kept = {name: value for name, value in numbers.items() if str(value) not in told_already}
    for name in NOTHING:
        if not kept.get(name, True):
            del kept[name]
    told = []
    for name in numbers:
        if name not in kept:
            continue
        pair = next((one for one in PAIRS if name in one and all(part in kept for part in one)), None)
        if pair is None:
            told.append(_text(name, kept.pop(name), page_bytes))
        else:
            told.append(PAIRS[pair].format(*(_value(part, kept.pop(part), page_bytes) for part in pair)))
    return ", ".join(told)


def _text(name: str, value: Any, page_bytes: int | None) -> str:
    """What it is, and how much."""
    what = name
    for unit in ("_bytes_per_s", "_seconds", "_bytes", "bytes_", "pages_"):
        what = what.removesuffix(unit).removeprefix(unit)
    if name in PLAIN:
        return f"{_short(value)} {PLAIN[name]}"
    if name.startswith("blocks_"):
        return f"KV blocks {name.removeprefix('blocks_')} {_short(value)}"
    return f"{what.replace('_', ' ')} {_value(name, value, page_bytes)}"


def _value(name: str, value: Any, page_bytes: int | None) -> str:
    """With its unit, as the name tells it."""
    if name.endswith("_bytes_per_s"):
        return f"{_short(value / MIB)} MiB/s"
    if name.endswith("_seconds"):
        return f"{_short(value)} s"
    if name.endswith("_bytes") or name.startswith("bytes_"):
        return f"{_short(value / MIB)} MiB"
    if name.startswith("pages_") and name != "pages_per_layer":
        return f"{_short(value * page_bytes / MIB)} MiB" if page_bytes else f"{value} pages"
    return _short(value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:.0f}"
