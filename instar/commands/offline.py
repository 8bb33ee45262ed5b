"""`instar quantize` and `instar profile`: this process becomes `python -m worker.offline`.

They parse their own flags, since the image of the services has neither the worker nor torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

OFFLINE = {
    "quantize": "quantise layers, to swap to under load",
    "profile": "find the order in which layers are swapped",
}
CANNOT_RUN = 2


def run_offline(name: str, argv: Sequence[str]) -> int:
    """Replace this process. Returns an exit status only if the worker is not installed here."""
    missing = [package for package in ("worker", "torch") if importlib.util.find_spec(package) is None]
    if not missing:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "worker.offline", name, *argv])
    sys.stderr.write(f"instar {name}: {missing[0]} is not installed here: pip install 'instar[worker]'\n")
    return CANNOT_RUN
