"""What benches of a real service share: whose CPU time was spent, and its last words where it fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from tests.support.service import Service


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Spent so far by the service and its client, and by everybody else on the machine."""

    ours: float
    others: float


def cpu_seconds(service: Service) -> CpuSeconds:
    """This process is the client."""
    pids = [process.pid for process in service.processes.values()]
    times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
    ours = sum(spent.user + spent.system for spent in times)
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    return CpuSeconds(ours, busy - ours)


@contextmanager
def noting_logs(service: Service) -> Iterator[None]:
    """Adds the words of its processes to what goes wrong."""
    try:
        yield
    except BaseException as problem:
        problem.add_note(service.logs())
        raise
