"""numba's compiler with this package's settings, and a cache that knows when it is stale."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, config, njit

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


def _cache_folder() -> str:
    """One folder per state of the sources. Numba itself compares only the file of the function it loads:
    after an edit of a helper in another file it would go on with the old code."""
    paths = [*sorted(HERE.glob("*.py")), HERE.parent / "packing.py"]
    sources = b"".join(path.read_bytes() for path in paths)
    name = f"kernels-{hashlib.sha256(sources).hexdigest()[:12]}"
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return str(_first_writable(HERE / "__pycache__" / name, users / "instar" / name))


if not config.CACHE_DIR:  # NUMBA_CACHE_DIR, where the user has set it, wins
    config.CACHE_DIR = _cache_folder()


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code per types of the arguments; no exceptions, no Python objects."""
    return njit(function, nogil=True, cache=True, error_model="numpy")


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """A function that C can call; `.address` is where it is."""
    return cfunc(signature, nopython=True, cache=True)(function)
