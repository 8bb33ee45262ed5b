"""Placement policies, which choose the devices of a model (iServe §6). Pure; see docs/deploy.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bus.deployments import Configuration
from bus.groups import natural
from bus.messages import Stage
from controller.planning.fitting import Device, Refusal, fit
from controller.planning.memory import Footprint

PlacementPolicy = Literal["least-loaded", "packing", "hybrid"]
POLICIES: tuple[PlacementPolicy, ...] = get_args(PlacementPolicy)
WINDOW_S = 120.0  # "matches the rate at which load changes in production" (iServe §6)
# iServe gives none. In `bench.placement` 0.3 uses five of eight devices, as its Figure 10 does, at half the
# P95 of packing.
THRESHOLD = 0.3


@dataclass(frozen=True, slots=True)
class Placing:
    policy: PlacementPolicy = "hybrid"
    threshold: float = THRESHOLD  # load below which a device is packable


class LoadWindow:
    """The share of the last `window_s` that each worker was busy. It has no clock of its own."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, float]]] = {}  # worker -> (at_s, share of time till then)

    def see(self, worker: str, at_s: float, busy: float) -> None:
        """Add a sample. `busy`: share of the time since the last one, 0..1."""
        samples = self._samples.setdefault(worker, deque())
        if samples and at_s <= samples[-1][0]:
            return
        samples.append((at_s, min(1.0, max(0.0, busy))))
        while len(samples) > 1 and samples[1][0] <= at_s - self._window_s:
            samples.popleft()

    def load(self, worker: str, at_s: float) -> float:
        """Return the load, 0..1; time without a sample counts as idle."""
        samples = self._samples.get(worker, ())
        begin_s, busy_s = at_s - self._window_s, 0.0
        before_s = None
        for seen_s, busy in samples:
            if before_s is not None:
                busy_s += busy * max(0.0, min(seen_s, at_s) - max(before_s, begin_s))
            before_s = seen_s
        return min(1.0, busy_s / self._window_s)


Order = Callable[[Device], tuple[object, ...]]


def _least_loaded(device: Device) -> tuple[object, ...]:
    return device.load, -device.free_bytes, natural(device.worker)


def _most_loaded(device: Device) -> tuple[object, ...]:
    return -device.load, -device.free_bytes, natural(device.worker)


def place(
    need: Footprint,
    configuration: Configuration,
    num_layers: int,
    devices: Iterable[Device],
    placing: Placing | None = None,
) -> list[Stage] | Refusal:
    """Return the stages on the first K devices in the policy's order that take it, else on the K freest."""
    there = list(devices)
    whole = fit(need, configuration, num_layers, there)
    if isinstance(whole, Refusal) and whole.is_sure:
        return whole
    for candidates, order in _tries(there, placing or Placing()):
        ordered = sorted(candidates, key=order)
        for end in range(configuration.num_devices, len(ordered) + 1):
            placed = fit(need, configuration, num_layers, ordered[:end])
            if not isinstance(placed, Refusal):
                return placed
    return whole


def _tries(devices: Sequence[Device], placing: Placing) -> list[tuple[Sequence[Device], Order]]:
    if placing.policy == "least-loaded":
        return [(devices, _least_loaded)]
    if placing.policy == "packing":
        return [(devices, _most_loaded)]
    packable = [one for one in devices if one.load < placing.threshold]
    others = [one for one in devices if one.load >= placing.threshold]
    return [(packable, _most_loaded), (others, _least_loaded), (devices, _least_loaded)]
