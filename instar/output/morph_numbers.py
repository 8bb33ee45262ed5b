"""The numbers of a morph in words with their units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from instar.output.tables import MIB, short

Numbers = Mapping[str, Any]

# Words for one name or several together. Other names stand for themselves; zeros are left out.
WORDS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("tp_before", "tp_after"), "tp{} to tp{}"),
    (("steps_done", "steps"), "{} of {} steps"),
    (("layers_done", "layers"), "{} of {} layers"),
    (("layers_per_step",), "{} a step"),
    (("halves_applied", "halves"), "{} of {} halves of layers"),
    (("bytes_copied", "copy_seconds"), "{} copied in {}"),
    (("bytes_from_disk", "disk_seconds"), "{} of it from disk in {}"),
    (("bytes_exchanged",), "{} exchanged"),
    (("pages_mapped",), "{} mapped"),
    (("pages_unmapped",), "{} unmapped"),
    (("pages_freed",), "{} freed"),
    (("blocks_before", "blocks_after"), "KV blocks {} to {}"),
    (("blocks_moved",), "{} KV blocks moved"),
    (("blocks_seconds",), "KV cache larger after {}"),
    (("wait_seconds",), "waited {}"),
    (("boundary_seconds",), "paused requests for {}"),
)
LEFT_OUT: Final = ("seconds",)  # the heading has it


def heading(morph: Numbers) -> str:
    """Return what a morph was and how it ended. The time of a running one is left out: clocks differ."""
    took = f" in {morph['ended'] - morph['started']:.2f} s" if morph.get("ended") else ""
    return f"{morph['kind']} {morph['id']} of {morph['target']}: {morph['state']}{took}"


def numbers_text(numbers: Numbers, page_bytes: int | None = None, in_reason: str = "") -> str:
    """Return `4 of 4 halves of layers, 3.1 MiB copied in 0.5 s, ...`.

    Without `page_bytes` pages stay pages. Numbers of two digits or more that the reason has are left out.
    """
    stated = set(re.findall(r"\d{2,}", in_reason))
    kept = {
        name: value
        for name, value in numbers.items()
        if value and name not in LEFT_OUT and str(value) not in stated
    }
    for same in ("blocks", "tp"):
        if kept.get(f"{same}_before") == kept.get(f"{same}_after"):
            kept.pop(f"{same}_before", None)
            kept.pop(f"{same}_after", None)
    texts = []
    for names, words in WORDS:
        if all(name in kept for name in names):
            texts.append(words.format(*(_value(name, kept.pop(name), page_bytes) for name in names)))
    return ", ".join([*texts, *(_named(name, value, page_bytes) for name, value in kept.items())])


def _named(name: str, value: Any, page_bytes: int | None) -> str:
    what = name.removeprefix("bytes_").removeprefix("pages_")
    for unit in ("_bytes_per_s", "_seconds", "_bytes"):
        what = what.removesuffix(unit)
    if name.startswith("blocks_"):
        what = f"KV {what}"
    return f"{what.replace('_', ' ')} {_value(name, value, page_bytes)}"


def _value(name: str, value: Any, page_bytes: int | None) -> str:
    """Return the value with the unit that its name says."""
    if name.endswith("_bytes_per_s"):
        return f"{short(value / MIB)} MiB/s"
    if name.endswith("_seconds"):
        return f"{short(value)} s"
    if name.endswith("_bytes") or name.startswith("bytes_"):
        return f"{short(value / MIB)} MiB"
    if name.startswith("pages_") and name != "pages_per_layer":
        return f"{short(value * page_bytes / MIB)} MiB" if page_bytes else f"{value} pages"
    return short(value)
