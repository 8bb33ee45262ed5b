"""Commands that run where torch is: this process becomes theirs, so that the command line stays light.

They read their own flags: this package does without the worker's, which the services' image does not have.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

# Each is `python -m worker.offline NAME`.
OFFLINE = {
    "quantize": "make what a model's layers can be swapped for",
    "profile": "find the order in which layers are swapped",
}
CANNOT = 2


def run_offline(name: str, argv: Sequence[str]) -> int:
    """Returns, with an exit status, only if the command cannot run here."""
    missing = [package for package in ("worker", "torch") if importlib.util.find_spec(package) is None]
    if not missing:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "worker.offline", name, *argv])
    sys.stderr.write(
        f"instar {name}: there is no {missing[0]} here, and it runs where the worker does:"
        " pip install 'instar[worker]'\n"
    )
    return CANNOT
