"""Commands that run where torch is: a child process does the work, so that the command line stays light.

It reads its flags, too: this package does without the worker's, which the services' image does not have.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence

# Each is `python -m worker.{name}`.
OFFLINE = {
    "quantize": "make what a model's layers can be swapped for",
    "profile": "find the order in which layers are swapped",
}
CANNOT = 2
INTERRUPTED = 130


def run_offline(name: str, argv: Sequence[str]) -> int:
    """The command on this terminal; its exit status."""
    missing = [package for package in ("worker", "torch") if importlib.util.find_spec(package) is None]
    if missing:
        sys.stderr.write(
            f"instar {name}: there is no {missing[0]} here, and it runs where the worker does:"
            " pip install 'instar[worker]'\n"
        )
        return CANNOT
    child = subprocess.Popen([sys.executable, "-m", f"worker.{name}", *argv])
    try:
        return child.wait()
    except KeyboardInterrupt:
        # The terminal told the child, too; it says itself what is kept.
        child.send_signal(signal.SIGINT)
        child.wait()
        return INTERRUPTED
