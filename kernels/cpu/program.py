"""Many kernel calls as one launch of the team, to be run again and again on the same memory.

A step for a few tokens is some hundred short kernels. Launched one by one, they cost the interpreter more
than a tenth of the step, and after each the caller waits for the interpreter's lock. A program is recorded
once, and then the team runs all its calls, with a barrier where it matters; Python only waits for the end.

What a program computes with are addresses, so all that changes from run to run must lie in memory that
stays: the caller writes there before each run.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.compiled import compiled
from kernels.cpu.simd import (
    address_of,
    announce,
    arrive,
    call_for_int,
    call_with,
    cycles,
    heard,
    read_i64,
    write_i64,
)
from kernels.cpu.team import Kernel, function_address, gomp_parallel, recorded_by

SPINS = 1000  # looks at a barrier, some 20 us, before the processor is offered to others
_CALL = struct.Struct("qqq")  # function, parameters, and the cycle counter when the last run had done it
_WORDS = struct.Struct("qqqqqq")
_STATE_BYTES = 256  # three cache lines
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")


class NotRecordable(Exception):
    """Something other than a kernel of this package would compute."""


@compiled
def _call(calls, i):
    """Run call i, or the items of it that no other thread takes."""
    params = read_i64(calls + i * 24 + 8)
    call_with(read_i64(calls + i * 24), params)


@compiled
def _end_call(calls, i):
    """Make call i ready for the next run and note when it was done."""
    write_i64(read_i64(calls + i * 24 + 8), 0)
    write_i64(calls + i * 24 + 16, cycles())


@compiled
def _is_short(calls, i):
    """Return True if a call has one work item: it is not worth a barrier."""
    return read_i64(read_i64(calls + i * 24 + 8) + 8) <= 1


def _run(kind):
    """Run calls, each by all threads of the team.

    The last thread to arrive at a barrier runs the short calls behind it, and then lets the others go on.
    Words: calls and their number, state of the barriers (arrivals; barriers passed; the next call, each on a
    cache line of its own), addresses of omp_get_num_threads and sched_yield.
    """
    p = address_of(kind)
    calls, count, state = read_i64(p), read_i64(p + 8), read_i64(p + 16)
    threads = call_for_int(read_i64(p + 24))
    give_way = read_i64(p + 32)
    i = number = 0
    while i < count:
        _call(calls, i)
        number += 1
        if arrive(state) == threads * number:
            _end_call(calls, i)
            i += 1
            while i < count and _is_short(calls, i):
                _call(calls, i)
                _end_call(calls, i)
                i += 1
            write_i64(state + 128, i)
            announce(state + 64, number)
        else:
            looks = 0
            while heard(state + 64) < number:
                looks += 1
                if looks > SPINS and give_way != 0:
                    call_for_int(give_way)
            i = read_i64(state + 128)


RUN = Kernel(_run, "")


class _ViewsOnly(TorchDispatchMode):  # type: ignore[misc]  # torch leaves it untyped
    """Lets torch allocate and view, keeps what it returns, and refuses everything that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _ALLOCATIONS:
            raise NotRecordable(f"torch.{name}")
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


class KernelProgram:
    """The kernel calls of `function`, which is called once, and what it returned.

    Nothing is computed until `run`. Raises NotRecordable if the function calls torch for more than memory and
    views, or if there is no OpenMP runtime that knows its threads.
    """

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._calls: list[tuple[int, Any]] = []
        self._names: list[str] = []
        self._most_items = 1
        threads_of_team = function_address("omp_get_num_threads")
        if not threads_of_team:
            raise NotRecordable("an OpenMP runtime without omp_get_num_threads")
        views = _ViewsOnly()
        with recorded_by(self), views:
            self.result = function()
        # The calls read and write by address: what the function refers to has to live as long as they do.
        self._memory = function, views.kept
        self._table = ctypes.create_string_buffer(_CALL.size * len(self._calls))
        for i, (address, params) in enumerate(self._calls):
            _CALL.pack_into(self._table, i * _CALL.size, address, ctypes.addressof(params), 0)
        self._state = ctypes.create_string_buffer(_STATE_BYTES)
        state = -(-ctypes.addressof(self._state) // 64) * 64
        self._words = ctypes.create_string_buffer(_WORDS.size)
        _WORDS.pack_into(
            self._words,
            0,
            *(ctypes.addressof(self._table), len(self._calls), state),
            *(threads_of_team, function_address("sched_yield"), 0),
        )
        self._address, self._alone = RUN.compile(torch.float32)

    def add(self, name: str, address: int, params: Any, items: int) -> None:
        """Record a call (`team.CallRecorder`)."""
        self._names.append(name)
        self._calls.append((address, params))
        self._most_items = max(self._most_items, items)

    @property
    def cycles(self) -> list[tuple[str, int]]:
        """The name of each call, and the cycle counter when the last run had done it."""
        done = [_CALL.unpack_from(self._table, i * _CALL.size)[2] for i in range(len(self._calls))]
        return list(zip(self._names, done, strict=True))

    def run(self) -> torch.Tensor:
        """Run the calls. The result is the same memory each time."""
        ctypes.memset(self._state, 0, _STATE_BYTES)
        launch, threads = gomp_parallel(), min(self._most_items, torch.get_num_threads())
        if launch and threads > 1:
            launch(self._address, self._words, threads, 0)
        else:
            self._alone(self._words)
        return self.result
