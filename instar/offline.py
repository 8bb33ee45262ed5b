"""Commands that run where torch is: a child process does the work, so that the command line stays light."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence

CANNOT = 2
INTERRUPTED = 130


def run_offline(module: str, argv: Sequence[str]) -> int:
    """`python -m module ARGV` on this terminal; its exit status."""
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("instar: this command needs torch: pip install 'instar[worker]'\n")
        return CANNOT
    child = subprocess.Popen([sys.executable, "-m", module, *argv])
    try:
        return child.wait()
    except KeyboardInterrupt:
        # The terminal told the child, too: it says itself what is kept.
        child.send_signal(signal.SIGINT)
        child.wait()
        return INTERRUPTED
