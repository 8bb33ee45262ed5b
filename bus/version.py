"""The version of the program that runs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def program_version() -> str:
    """Return the version of the installed package; "unknown" in a copy that was not installed."""
    try:
        return version("instar")
    except PackageNotFoundError:
        return "unknown"
