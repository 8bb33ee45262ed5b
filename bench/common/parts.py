"""The command line of a package of benchmarks: `python -m bench.PACKAGE [PART] [options]`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module


def run_part(package: str, parts: Sequence[str], default: str = "") -> None:
    """Run the part of `package` that the command line names first, or the default one. Does not return.

    A part is a module of the package with a `main`. It is imported only when it runs, since some parts set up
    their process before torch is loaded. SIGTERM ends it like an exception, so that it ends what it started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    part = default
    if sys.argv[1:2] and sys.argv[1] in parts:
        part = sys.argv.pop(1)
    if not part:
        sys.stderr.write(f"usage: python -m {package} {{{','.join(parts)}}} [options]\n")
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    sys.argv[0] = f"python -m {package}" + ("" if part == default else f" {part}")
    sys.exit(import_module(f"{package}.{part}").main())
