"""A team's threads each keep to a core of their own, and no other thread does."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernels  # noqa: F401 before torch runs anything: it settles how torch's threads wait
from kernels.cores import on_every_core
from kernels.cpu.pinning import PinnedTeam
from kernels.cpu.team import gomp_parallel

CORES = os.sched_getaffinity(0)
NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)

pytestmark = pytest.mark.skipif(gomp_parallel() is None, reason="torch has another OpenMP runtime")


def cores_of_threads() -> dict[int, set[int]]:
    return {
        int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()
    }


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that ends, and its team with it. Raises what it raises."""
    problems = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 raised again
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]


def test_each_thread_of_the_team_has_a_core_of_its_own() -> None:
    def work() -> None:
        others = cores_of_threads().keys() - {threading.get_native_id()}
        team = PinnedTeam(len(CORES))
        team.pin()
        torch.zeros(1 << 20).add_(1)
        team.check()
        now = cores_of_threads()
        pinned = [now[thread] for thread in now.keys() - others]
        assert sorted(map(sorted, pinned)) == [[core] for core in sorted(CORES)]
        assert all(now[thread] == CORES for thread in others & now.keys())
        assert team.is_pinned

    in_thread(work)


def test_threads_that_the_runtime_replaced_are_let_go() -> None:
    def work() -> None:
        freed = list[bool]()
        team = PinnedTeam(len(CORES))
        team._cores = (
            sorted(CORES) * 4
        )  # a team of more threads than there are cores: a smaller one ends some
        team.on_freed = lambda: freed.append(True)
        team.pin()
        launch = gomp_parallel()
        assert launch
        launch(NOTHING, None, 2, 0)
        team.check()
        assert freed == [True] and not team.is_pinned
        assert all(os.sched_getaffinity(thread) == CORES for thread in team._thread_ids())
        team.check()
        assert freed == [True]

    in_thread(work)


def test_only_a_team_with_a_thread_for_each_core_can_be_pinned() -> None:
    with pytest.raises(ValueError, match=f"{len(CORES) + 1} threads compute on {len(CORES)} cores"):
        PinnedTeam(len(CORES) + 1)


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_a_thread_that_a_pinned_one_starts_may_use_every_core() -> None:
    def work() -> None:
        seen = list[set[int]]()
        os.sched_setaffinity(0, {min(CORES)})
        started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        with on_every_core():
            started.start()
        started.join()
        assert seen == [CORES]
        assert os.sched_getaffinity(0) == {min(CORES)}

    in_thread(work)
