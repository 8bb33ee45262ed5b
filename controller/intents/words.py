"""Numbers as people read them. Pure."""

from __future__ import annotations

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def sized(num_bytes: float) -> str:
    """In the largest unit of which there is one: "95 bytes", "12.3 MiB"."""
    left, unit = float(num_bytes), 0
    while abs(left) >= 1024 and unit < len(UNITS) - 1:
        left, unit = left / 1024, unit + 1
    return f"{left:.1f} {UNITS[unit]}" if unit else f"{left:.0f} {UNITS[0]}"
