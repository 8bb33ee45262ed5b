"""A worker or a gateway that notes when it does what, for `bench.engine steps`.

    WATCH=worker WATCH_FILE=notes.json python -m bench.engine.watched

It runs the service itself with a clock around some of its functions, and writes the notes when it ends. All
times are of time.perf_counter, which on Linux is the same clock in all processes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from bus.access import Role
from bus.service import run

PARTS_OF_KERNELS: Final = {
    "_dot": "products",
    "_dot_pairs": "products",
    "_add_up": "products",
    "_multiply_t": "products",
    "_prepare": "products",
    "_multiply_bytes": "products",
    "_reduce": "products",
    "_multiply_few": "products",
    "_multiply_many": "products",
    "_multiply": "products",
    "_attend": "attention",
}
PARTS_OF_CALLS: Final = {
    "linear": "products",
    "linear_t": "products",
    "stacked_linear": "products",
    "stacked_linear_t": "products",
    "steady_linear": "products",
    "quantized_linear": "products",
    "paged_attention": "attention",
}
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# In each event of a stream but the one of the usage. Within a text the quotes would be escaped.
EVENT: Final = b'"choices":[{'

Notes = list[Any]
Call = Callable[..., Any]
_now = time.perf_counter


def main() -> int:
    service: Role = "worker" if os.environ["WATCH"] == "worker" else "gateway"
    file = Path(os.environ["WATCH_FILE"])
    notes = _watch_worker() if service == "worker" else _watch_gateway()
    status = run(service, _main_of(service))
    file.write_bytes(msgspec.json.encode(notes()))
    return status


def _main_of(service: str) -> Any:
    if service == "worker":
        from worker.__main__ import main as worker_main

        return worker_main
    from gateway.service import main as gateway_main

    return gateway_main


def _around(owner: type, name: str, wrap: Callable[[Call], Call]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _noted(owner: type, name: str, notes: Notes, about: Call) -> None:
    """Note the beginning of each call, the thread's processor time in it, and `about` its arguments."""

    def wrap(function: Call) -> Call:
        def call(*args: Any) -> Any:
            at, spent = _now(), time.thread_time()
            result = function(*args)
            notes.append((at, time.thread_time() - spent, about(*args)))
            return result

        return call

    _around(owner, name, wrap)


# ----------------------------------------------------------------------------- the gateway


def _watch_gateway() -> Callable[[], dict[str, Any]]:
    from gateway.delivery.delivery import Delivery
    from gateway.http.connection import ClientSocket

    taken: Notes = []
    flushed: Notes = []
    written: Notes = []
    _noted(Delivery, "on_step", taken, lambda _, step, deltas: sum(len(each.token_ids) for each in deltas))
    _noted(Delivery, "flush", flushed, lambda _: 0)
    _noted(ClientSocket, "write_chunk", written, lambda _, body: body.count(EVENT))
    return lambda: {"taken": taken, "flushed": flushed, "written": written}


# ----------------------------------------------------------------------------- the worker


def _watch_worker() -> Callable[[], dict[str, Any]]:
    import kernels  # noqa: F401 before torch: it settles how torch's threads wait

    # isort: split
    from kernels.cpu.program import KernelProgram
    from kernels.registry import KernelCall
    from worker.engine.core import EngineCore
    from worker.model import Model
    from worker.service.engine_thread import EngineThread
    from worker.service.publisher import OutputPublisher, ResultQueue

    watch = _EngineWatch()
    made: Notes = []
    taken: Notes = []
    for name in ("schedule", "sample", "publish"):
        _around(EngineCore, f"_{name}", partial(watch.part, name))
    _around(Model, "forward", watch.forward)
    _around(KernelProgram, "run", watch.program)
    _around(KernelCall, "__call__", watch.kernel)
    _around(EngineThread, "_step", watch.step)
    _noted(OutputPublisher, "take", taken, lambda _, __, results: _num_tokens(results))
    _noted(ResultQueue, "put", made, lambda _, __, results: _num_tokens(results))
    return lambda: watch.notes() | {"made": made, "taken": taken}


def _num_tokens(results: Iterable[Any]) -> int:
    return sum(len(output.delta.token_ids) for result in results for output in result.outputs)


class _EngineWatch:
    """Notes the parts of each step of the engine's thread, in seconds, and when the step ended."""

    def __init__(self) -> None:
        self._clock = _CycleClock()
        self._waits: _Waits | None = None
        self._parts: dict[str, float] = defaultdict(float)  # of the present step
        self._programs: list[tuple[float, float, list[tuple[str, int]]]] = []  # began, ended, kernels
        self._steps: list[tuple[float, dict[str, float], int]] = []  # ended, parts, its program's number + 1
        self._depth = 0
        self._engine_thread = self._weight_bytes = 0

    def notes(self) -> dict[str, Any]:
        seconds = self._clock.in_seconds()
        programs = [_inside(*one, seconds) for one in self._programs]
        steps = [(at, parts | (programs[one - 1] if one else {})) for at, parts, one in self._steps]
        return {
            "steps": steps,
            "engine_thread": self._engine_thread,
            "weight_bytes": self._weight_bytes,
        }

    def step(self, function: Call) -> Call:
        def call(thread: Any) -> None:
            if self._waits is None:
                self._waits, self._engine_thread = _Waits(), threading.get_native_id()
            self._parts, before, began = defaultdict(float), len(self._programs), _now()
            function(thread)
            ended = _now()
            self._parts["step"] = ended - began
            self._parts["on a core"], self._parts["no core"] = self._waits.read()
            number = len(self._programs)
            self._steps.append((ended, self._parts, number if number > before else 0))

        return call

    def part(self, name: str, function: Call) -> Call:
        def call(*args: Any) -> Any:
            began = _now()
            result = function(*args)
            self._parts[name] += _now() - began
            return result

        return call

    def forward(self, function: Call) -> Call:
        timed = self.part("forward", function)

        def call(model: Any, *args: Any) -> Any:
            self._weight_bytes = self._weight_bytes or sum(map(_nbytes, model.products()))
            return timed(model, *args)

        return call

    def program(self, function: Call) -> Call:
        def call(program: Any) -> Any:
            began = _now()
            result = function(program)
            ended = _now()
            self._programs.append((began, ended, program.cycles))
            self._parts["watch"] += _now() - ended
            return result

        return call

    def kernel(self, function: Call) -> Call:
        """Time kernels that are called one by one, as in a step with a product of torch's."""

        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            began = _now()
            self._depth += 1
            try:
                return function(kernel, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._parts[PARTS_OF_CALLS.get(kernel.reference.__name__, "rows")] += _now() - began

        return call


def _nbytes(product: Any) -> int:
    """Return the bytes of the weights of a dense product."""
    return 0 if product.form == "quantized" else product.outputs * product.inputs * ITEM_BYTES[product.dtype]


class _Waits:
    """Seconds that this thread was on a core, and that it waited for one, since it began."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._text = ctypes.create_string_buffer(64)
        # It keeps the interpreter's lock: to give that away here would change what is measured.
        self._pread = ctypes.PyDLL(None).pread

    def read(self) -> tuple[float, float]:
        self._pread(self._file, self._text, 63, 0)
        return time.thread_time(), int(self._text.value.split()[1]) / 1e9


class _CycleClock:
    """Turns the processor's cycle counter into seconds of time.perf_counter."""

    def __init__(self) -> None:
        from numba import njit

        from kernels.cpu.simd import cycles

        self._read = njit(lambda: cycles())
        self._read()
        self._first = self._pair()

    def _pair(self) -> tuple[float, int]:
        """Return both clocks at one moment: of many readings the quickest."""
        best = (1.0, 0.0, 0)
        for _ in range(1000):
            began = _now()
            counter = self._read()
            took = _now() - began
            best = min(best, (took, began + took / 2, counter))
        return best[1:]

    def in_seconds(self) -> Callable[[int], float]:
        """Return what turns a counter into seconds, by what has passed since the beginning."""
        (at, counter), (then, later) = self._first, self._pair()
        per_second = (later - counter) / (then - at)
        return lambda value: at + (value - counter) / per_second


def _inside(
    began: float, ended: float, ran: list[tuple[str, int]], seconds: Callable[[int], float]
) -> dict[str, float]:
    """Return the parts of one run of a recorded program.

    launch: to wake the team and run the first kernel. lock: from the last kernel until the interpreter's lock
    was back.
    """
    found: dict[str, float] = defaultdict(float)
    found["launch"] = seconds(ran[0][1]) - began
    found["lock"] = ended - seconds(ran[-1][1])
    for (_, before), (name, after) in itertools.pairwise(ran):
        found[PARTS_OF_KERNELS.get(name, "rows")] += seconds(after) - seconds(before)
    return found


if __name__ == "__main__":
    sys.exit(main())
