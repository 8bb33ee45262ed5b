"""The numba compiler with this package's settings, and a cache that detects stale code."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, config, njit

from kernels.packing import CODE_BITS

HERE = Path(__file__).parent


def _first_writable(*folders: Path) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="instar-kernels-"))


def _sources_digest() -> str:
    """Return a digest of this package's sources.

    Numba compares only the file of the function that it loads: after an edit of a helper in another file, or
    of the table of precisions, it would run the old code.
    """
    paths = [*sorted(HERE.glob("*.py")), HERE.parent / "packing.py"]
    sources = b"".join(path.read_bytes() for path in paths) + repr(CODE_BITS).encode()
    return hashlib.sha256(sources).hexdigest()[:12]


SOURCES_DIGEST = _sources_digest()


def _cache_folder() -> str:
    """Return a folder for this state of the sources."""
    name = f"kernels-{SOURCES_DIGEST}"
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return str(_first_writable(HERE / "__pycache__" / name, users / "instar" / name))


if not config.CACHE_DIR:  # the user's NUMBA_CACHE_DIR wins
    config.CACHE_DIR = _cache_folder()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function for each combination of argument types; no exceptions, no Python objects."""
    return njit(function, nogil=True, cache=True, error_model="numpy")


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile a function that C can call; `.address` is its address."""
    return cfunc(signature, nopython=True, cache=True)(function)
