"""The numbers of a morph in words, with their units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MIB: Final = 1 << 20

Numbers = Mapping[str, Any]

# What is told of a name, or of several together; others are told as they are called. 0 of any says nothing.
WORDS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("tp_before", "tp_after"), "tp{} to tp{}"),
    (("layers_done", "layers"), "{} of {} layers"),
    (("layers_per_step",), "{} a step"),
    (("halves_applied", "halves"), "{} of {} halves of layers"),
    (("bytes_copied", "copy_seconds"), "{} copied in {}"),
    (("bytes_exchanged",), "{} exchanged"),
    (("pages_mapped",), "{} mapped"),
    (("pages_unmapped",), "{} unmapped"),
    (("pages_freed",), "{} freed"),
    (("blocks_before", "blocks_after"), "KV blocks {} to {}"),
    (("blocks_moved",), "{} KV blocks moved"),
    (("wait_seconds",), "waited {}"),
    (("boundary_seconds",), "{} between steps"),
)
LEFT_OUT: Final = ("seconds",)  # the heading tells it


def numbers_text(numbers: Numbers, page_bytes: int | None = None, in_reason: str = "") -> str:
    """`4 of 4 halves of layers, 3.1 MiB copied in 0.5 s, ...`. `page_bytes`: of the worker's pages; None: not
    known, they stay pages. Numbers that stand in the reason are left out; a single digit may be another's."""
    told_already = set(re.findall(r"\d{2,}", in_reason))
    kept = {
        name: value
        for name, value in numbers.items()
        if value and name not in LEFT_OUT and str(value) not in told_already
    }
    if kept.get("blocks_before") == kept.get("blocks_after"):  # it stayed as it is
        kept.pop("blocks_before", None)
        kept.pop("blocks_after", None)
    told = []
    for names, words in WORDS:
        if all(name in kept for name in names):
            told.append(words.format(*(_value(name, kept.pop(name), page_bytes) for name in names)))
    return ", ".join([*told, *(_as_called(name, value, page_bytes) for name, value in kept.items())])


def _as_called(name: str, value: Any, page_bytes: int | None) -> str:
    what = name.removeprefix("bytes_").removeprefix("pages_")
    for unit in ("_bytes_per_s", "_seconds", "_bytes"):
        what = what.removesuffix(unit)
    if name.startswith("blocks_"):
        what = f"KV {what}"
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
