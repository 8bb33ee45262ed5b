"""The parts of a step's time: the host's, the device's, and what lies between two kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from worker.engine.core import EngineCore

LONG_GAP_US = 20.0  # between two kernels: the device has nothing to run


class StepTimes:
    """Times the parts of an instance's steps while it is entered."""

    def __init__(self, instance: EngineCore, device: torch.device) -> None:
        self._instance, self._is_cuda = instance, device.type == "cuda"
        self.wait_s = self.launched_s = 0.0  # for tokens; from the begins of steps to their last launches
        self.began = 0.0  # the step
        self._events: list[tuple[Any, Any]] = []  # around the launches of each step, in their stream

    def __enter__(self) -> StepTimes:
        executor, sampler = self._instance.local_executor, self._instance.sampler
        self._timed = ((executor, "execute"), (executor, "collect"), (sampler, "sample"))
        for owner, name in self._timed:
            timed_by = self._launches if name == "execute" else self._waits
            setattr(owner, name, partial(timed_by, getattr(owner, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name in self._timed:
            delattr(owner, name)

    def _launches(self, call: Callable[..., Any], *args: Any) -> Any:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._is_cuda else []
        for event in events[:1]:
            event.record()
        result = call(*args)
        self.launched_s += time.perf_counter() - self.began
        for event in events[1:]:
            event.record()
            self._events.append((events[0], event))
        return result

    def _waits(self, call: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        result = call(*args)
        self.wait_s += time.perf_counter() - began
        return result

    def on_device(self) -> dict[str, float]:
        """Return the medians over the steps of their spans on the device, and of what lies between them."""
        if len(self._events) < 2:
            return {}
        spans = [begin.elapsed_time(end) for begin, end in self._events]
        between = [a[1].elapsed_time(b[0]) for a, b in pairwise(self._events)]
        return {"span_ms": statistics.median(spans), "between_ms": statistics.median(between)}


def clocks(device: torch.device) -> dict[str, float]:
    """Return the clock and the power of a GPU now, where they are told."""
    told: dict[str, float] = {}
    if device.type == "cuda":
        with suppress(Exception):  # NVML has errors of its own
            told = {"mhz": torch.cuda.clock_rate(device), "watts": torch.cuda.power_draw(device) / 1e3}
    return told


def gaps(kernels_us: list[tuple[float, float]], steps: int) -> dict[str, float]:
    """Return the milliseconds a step in kernels, which begin and end at these times, and between them.

    A longer gap than LONG_GAP_US is idleness, a shorter one the cost of going from one kernel to the next.
    """
    busy, at, between = 0.0, min(kernels_us)[0], list[float]()
    for begin, end in sorted(kernels_us):
        if begin > at:
            between.append(begin - at)
        busy += max(0.0, end - max(begin, at))
        at = max(at, end)
    short = [gap for gap in between if gap <= LONG_GAP_US]
    return {
        "busy_ms": busy / 1e3 / steps,
        "gaps": len(short) / steps,
        "gap_us": statistics.median(short or [0.0]),
        "gaps_ms": sum(short) / 1e3 / steps,
        "idle_ms": (sum(between) - sum(short)) / 1e3 / steps,
    }
