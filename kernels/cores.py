"""The cores that the threads of this process may run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_every_core() -> Iterator[None]:
    """Let this thread, and each thread that starts inside, run on every core of the process.

    A thread inherits the cores of the one that starts it. Where that is the engine's, it would take turns
    with the engine on one core (`kernels.cpu.pinning.PinnedTeam`).
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))  # those of the main thread
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
