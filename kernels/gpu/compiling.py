"""Compiles Triton's kernels before they serve, in processes of their own, and watches that none is left.

A launch whose arguments Triton has not seen makes it compile, which takes a second and holds up all threads.
So a model's calls run once on device "meta" in `recorded`: each launch says what it needs, and nothing is
compiled or launched. `compile_all` makes the machine code, and `watch` reports what is compiled afterwards.
It works without a GPU too, for any GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.gpu.device import IMAGINED, Properties, num_processors

log = logging.getLogger(__name__)

WARP = 32
LEAST_OF_A_PROCESS = 2  # kernels; starting it takes 2 s of a core, and compiling one 0.5 s or more
TELL_EVERY_S = 5.0
LOADING_THREADS = 8
NICENESS = 5  # of a process that compiles, since other models may serve meanwhile


@dataclass(frozen=True, slots=True)
class Specialization:
    """A kernel for one kind of arguments: their types, what divides them, and the constants.

    ======== ====================================================================================
    field    meaning
    ======== ====================================================================================
    kernel   module and name, joined by a dot
    key      Triton's key for the arguments and options
    data     JSON from Triton, of which it makes the same kernel again (`JITFunction.preload`)
    ======== ====================================================================================
    """

    kernel: str
    key: str = field(repr=False)
    data: str = field(repr=False)

    @property
    def function(self) -> Any:
        module, _, name = self.kernel.rpartition(".")
        return getattr(importlib.import_module(module), name)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants by the names of the kernel's parameters, without arguments that are None or 1."""
        found = json.loads(self.data)
        names = [param.name for param in self.function.params if param.is_constexpr]
        by_place = {self.function.params[place[0]].name: value for place, value in _constants(found)}
        return {name: by_place[name] for name in names if name in by_place}

    @property
    def options(self) -> dict[str, Any]:
        """Triton's options, such as num_warps and num_stages."""
        found: dict[str, Any] = json.loads(self.data)["options"]
        return found

    @property
    def pointers(self) -> list[str]:
        """The types of the tensors, in the order of the parameters."""
        signature = json.loads(self.data)["signature"]
        return [kind for kind in signature.values() if isinstance(kind, str) and kind.startswith("*")]


def _constants(found: dict[str, Any]) -> Iterator[tuple[list[int], Any]]:
    yield from zip(found["constant_keys"], found["constant_vals"], strict=True)


# ----------------------------------------------------------------------------- in place of the driver


@dataclass(frozen=True, slots=True)
class _Imagined:
    """A GPU in place of the machine's, in one thread. `made` lists what launches need; None: they compile."""

    target: GPUTarget
    made: dict[tuple[str, str], Specialization] | None = None

    @property
    def device(self) -> tuple[str, int, int]:
        """The number of the device. What is recorded is kept apart for each recording."""
        if self.made is None:
            return "compiled", self.target.arch, 0
        return "recorded", self.target.arch, id(self.made)


class _NoKernel:
    """A kernel that was recorded already: launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


_imagined: ContextVar[_Imagined | None] = ContextVar("imagined GPU", default=None)
_may_compile: ContextVar[bool] = ContextVar("this thread may compile", default=False)


class _Driver:
    """Triton's driver; in a thread with an imagined GPU, that one's.

    Triton keeps the kernels of each device apart, so what the machine's GPU has is neither found nor launched
    there.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(driver.default, name)

    def get_current_target(self) -> GPUTarget:
        found = _imagined.get()
        return found.target if found else driver.default.get_current_target()

    def get_current_device(self) -> Any:
        found = _imagined.get()
        return found.device if found else driver.default.get_current_device()

    def get_current_stream(self, device: Any) -> Any:
        return 0 if _imagined.get() else driver.default.get_current_stream(device)


_changing = threading.Lock()
_users = 0  # threads with an imagined GPU


@contextmanager
def _in_place_of_driver(imagined: _Imagined) -> Iterator[None]:
    global _users
    with _changing:
        _users += 1
        driver.set_active(_Driver())
        knobs.runtime.jit_cache_hook = _before_compiling
    token = _imagined.set(imagined)
    try:
        yield
    finally:
        _imagined.reset(token)
        with _changing:
            _users -= 1
            if not _users and torch.cuda.is_available():  # launches are faster without it
                driver.set_active(driver.default)


def _before_compiling(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
    """Be told by Triton of a kernel that it has not compiled; True leaves it so, and the launch too."""
    found = _imagined.get()
    if found is not None and found.made is not None:
        made = Specialization(f"{fn.module}.{fn.name}", key, compile["specialization_data"])
        found.made[made.kernel, key] = made
        fn.jit_function.device_caches[found.device][0][key] = _NoKernel()  # Triton takes 0.5 ms to get here
        return True
    if found is None and _watch.is_on and not _may_compile.get():
        _watch.report(f"{fn.module}.{fn.name}", key)
    return False


@contextmanager
def recorded(target: GPUTarget | None = None, processors: int = 0) -> Iterator[list[Specialization]]:
    """Collect what the launches inside need, in this thread; nothing is compiled, and nothing launched.

    The list is filled at the end. Tensors must be on device "meta", as a kernel that is there already is not
    launched either. target, processors: of a GPU that is imagined, with so many multiprocessors; None: of the
    machine's.
    """
    found: list[Specialization] = []
    made: dict[tuple[str, str], Specialization] = {}
    target = target or driver.active.get_current_target()
    processors = processors or num_processors(torch.device("cuda", torch.cuda.current_device()))
    sized, imagined = IMAGINED.set(Properties(processors, target.arch)), _Imagined(target, made)
    try:
        with _in_place_of_driver(imagined):
            yield found
            found += made.values()
    finally:
        IMAGINED.reset(sized)
        for each in made.values():
            each.function.device_caches.pop(imagined.device, None)


@contextmanager
def compiling() -> Iterator[None]:
    """Let this thread compile kernels inside without a report of `watch`."""
    token = _may_compile.set(True)
    try:
        yield
    finally:
        _may_compile.reset(token)


# ----------------------------------------------------------------------------- compiling


def compile_for(target: GPUTarget, wanted: Specialization) -> Any:
    """Compile for a GPU that need not be there; return Triton's kernel. Raises what Triton raises."""
    with _in_place_of_driver(_Imagined(target)):
        return wanted.function.preload(wanted.data)


def compile_all(wanted: Sequence[Specialization], *, processes: int = 0) -> None:
    """Compile for the machine's GPU, and load the kernels onto it, but for those that it has.

    What Triton's folder on disk lacks is compiled by processes of their own, since compiling holds up all
    threads. Workers that start together compile one after the other: the first one's kernels are the others'
    too. processes: at most so many; 0: as many as this process has cores. Raises what Triton raises for a
    kernel that does not compile.
    """
    target, device = driver.active.get_current_target(), driver.active.get_current_device()
    wanted = [each for each in wanted if each.key not in each.function.device_caches[device][0]]
    began = time.monotonic()
    if missing := _missing(wanted, target):
        with _alone():
            missing = _missing(wanted, target)
            if missing:
                log.info("compiling %d of %d kernels, a minute at most", len(missing), len(wanted))
                compile_apart(missing, target, processes or len(os.sched_getaffinity(0)))
    compiled = time.monotonic()
    with compiling():
        made = [each.function.preload(each.data) for each in wanted]
    # Loading the machine code: Triton 3.6 builds a launcher for each signature in C, in another process.
    with ThreadPoolExecutor(
        LOADING_THREADS, "loading", initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
    ) as threads:
        list(threads.map(lambda kernel: kernel.run, made))
    loaded = time.monotonic()
    ahead = _watch.ahead
    ahead.kernels += len(missing)
    ahead.compile_s += compiled - began
    ahead.load_s += loaded - compiled
    if missing:
        log.info(
            "compiled %d kernels in %.0f s, and loaded %d in %.0f s; the slowest was %s, in %.0f s",
            *(len(missing), compiled - began, len(wanted), loaded - compiled, ahead.slowest, ahead.slowest_s),
        )


def compile_apart(wanted: Sequence[Specialization], target: GPUTarget, processes: int) -> list[str]:
    """Compile in at most so many processes into Triton's folder on disk; return what went wrong."""
    waiting: SimpleQueue[Specialization] = SimpleQueue()
    for each in sorted(wanted, key=lambda each: len(each.constants), reverse=True):  # the slowest first
        waiting.put(each)
    count = max(1, min(processes, math.ceil(len(wanted) / LEAST_OF_A_PROCESS)))
    progress = _Progress(len(wanted))
    with ThreadPoolExecutor(count, thread_name_prefix="compiling") as threads:
        failed = threads.map(lambda _: _feed(waiting, target, progress), range(count))
        return [problem for problems in failed for problem in problems]


def _feed(waiting: SimpleQueue[Specialization], target: GPUTarget, progress: _Progress) -> list[str]:
    """Give one process a kernel after another until none waits."""
    problems = list[str]()
    # No GPU for it, and every module from where this process has it.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kernels.gpu.compiling", json.dumps([target.backend, target.arch])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin and process.stdout
        while True:
            try:
                each = waiting.get_nowait()
            except Empty:
                break
            began = time.monotonic()
            try:
                process.stdin.write(json.dumps([each.kernel, each.key, each.data]) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                problems.append(f"{each.kernel}: the process that compiled it ended; is there enough memory?")
                break
            if problem := json.loads(answer):
                problems.append(f"{each.kernel}: {problem}")
            else:
                _mark(each, target).touch()
            progress.add(each.kernel, time.monotonic() - began)
        process.stdin.close()
    for problem in problems:
        log.error("not compiled: %s", problem)
    return problems


class _Progress:
    """Says in the log how far the compilation is."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._told = total, 0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, kernel: str, seconds: float) -> None:
        """Count a kernel that took so long, for the first one of a process its start included."""
        with self._lock:
            self._done += 1
            if seconds > _watch.ahead.slowest_s:
                _watch.ahead.slowest, _watch.ahead.slowest_s = kernel, seconds
            if time.monotonic() - self._told > TELL_EVERY_S:
                self._told = time.monotonic()
                log.info("compiled %d of %d kernels", self._done, self._total)


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of this machine compiles into the same folder."""
    with (_marks() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _missing(wanted: Sequence[Specialization], target: GPUTarget) -> list[Specialization]:
    return [each for each in wanted if not _mark(each, target).exists()]


def _mark(wanted: Specialization, target: GPUTarget) -> Path:
    """Return the path of an empty file beside Triton's, there once the kernel has been compiled."""
    parts = (triton.__version__, target.arch, wanted.kernel, wanted.function.cache_key, wanted.data)
    return _marks() / hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _marks() -> Path:
    folder = Path(knobs.cache.dir) / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ----------------------------------------------------------------------------- while serving


@dataclass(slots=True)
class Ahead:
    """The kernels compiled before serving, and what that took."""

    kernels: int = 0
    compile_s: float = 0.0
    load_s: float = 0.0  # of these and of those that were on disk
    slowest: str = ""
    slowest_s: float = 0.0  # with the start of its process, if it was its first


class _Watch:
    """The kernels that were compiled before serving, and those that should have been."""

    def __init__(self) -> None:
        self.is_on = False
        self.ahead = Ahead()
        self.late: list[str] = []

    def report(self, kernel: str, key: str) -> None:
        self.late.append(f"{kernel} {key}")
        log.error(
            "kernel %s was not compiled before serving, and its compilation holds up all threads now; its"
            " arguments: %s",
            kernel,
            key,
        )


_watch = _Watch()


def watch() -> None:
    """Report what this process compiles from now on, outside of `compiling`, as an error in the log."""
    knobs.runtime.jit_cache_hook = _before_compiling
    _watch.is_on = True


def compiled_late() -> list[str]:
    """Return the kernels, with their arguments, that were compiled after `watch`."""
    return list(_watch.late)


def compiled_ahead() -> Ahead:
    """Return what was compiled before serving so far."""
    return replace(_watch.ahead)


# ----------------------------------------------------------------------------- the process that compiles


def main() -> int:
    """Compile what comes as lines on standard input; answer each with a line: what went wrong, or ""."""
    backend, arch = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Triton prints what it cannot compile
    os.nice(NICENESS)
    for line in sys.stdin:
        problem = ""
        try:
            compile_for(GPUTarget(backend, arch, WARP), Specialization(*json.loads(line)))
        except Exception as error:  # noqa: BLE001 whatever the compiler raises is the answer
            problem = str(error)[-2000:] or repr(error)
        answers.write(json.dumps(problem) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
