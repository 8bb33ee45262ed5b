"""Devices that several models share, and the requests that keep them busy, by arithmetic and seeded.

No simulator of serving, which `instar.simulate` is: there are no steps, batches, tokens or KV blocks here.
A model runs one request at a time, first come, first served, as in iServe (§6: no batching). It runs on all
of its devices at once, at the rate of the most contended: a device gives each model that runs on it an equal
share of its time, and is busy while any does. Which configuration is deployed, and where, the controller's
own code decides (`controller.planning`), on the load of the last 120 seconds, read every second.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.placement.models import ARCHITECTURES, DEGREES, DEVICE_BYTES, USABLE, Architecture, profile_of
from bus.deployments import Intent, Profile
from bus.messages import Stage
from controller.planning.fitting import Device
from controller.planning.memory import MemoryModel
from controller.planning.placement import LoadWindow, Placing
from controller.planning.plan import Plan, plan

NUM_DEVICES = 8
SECONDS = 1800.0
SAMPLE_S = 1.0
INTENT = Intent(minimise="latency", prompt_tokens=512, output_tokens=64)
MODELS = ("Llama-2-13B", "Llama-2-7B", "GPT-J-6B", "Falcon-7B") * 2
# Share of the time that a model runs if its devices are its own. Four models on one device, as packing has
# them, nearly fill it at the highest.
LEVELS = (0.03, 0.06, 0.12, 0.22)


# --------------------------------------------------------------------------- what comes


@dataclass(frozen=True, slots=True)
class Trace:
    """Deployments and requests, the same for every policy.

    `arrivals` are by model, in the order of MODELS.
    """

    deployments: list[float]
    levels: list[tuple[float, float]]  # levels and their beginnings
    arrivals: list[list[float]]


def trace_of(seed: int, load: float = 1.0, seconds: float = SECONDS) -> Trace:
    """Return a trace: a model every 2-3 minutes, and requests of each by a Poisson process.

    The rate is a level over the model's latency, times `load`. The level is the same for all models, and
    changes every 2-3 minutes too.
    """
    rng = random.Random(seed)
    gaps = [rng.uniform(120, 180) for _ in MODELS[1:]]
    deployments = list(itertools.accumulate(gaps, initial=0.0))
    levels, at_s = [], 0.0
    while at_s < seconds:
        levels.append((at_s, load * rng.choice(LEVELS)))
        at_s += rng.uniform(120, 180)
    arrivals = [
        list(_arrivals(rng, levels, latency_alone(ARCHITECTURES[name]), begin_s, seconds))
        for name, begin_s in zip(MODELS, deployments, strict=True)
    ]
    return Trace(deployments, levels, arrivals)


def latency_alone(one: Architecture) -> float:
    """Return the latency at the highest degree on devices of its own."""
    return one.seconds(one.num_layers, max(DEGREES), INTENT.prompt_tokens, INTENT.output_tokens)


def _arrivals(
    rng: random.Random, levels: Sequence[tuple[float, float]], latency_s: float, begin_s: float, end_s: float
) -> Iterator[float]:
    """Yield arrivals by thinning: candidates at the highest rate, kept with the probability of their rate."""
    most, at_s = max(level for _, level in levels), begin_s
    while (at_s := at_s + rng.expovariate(most / latency_s)) < end_s:
        level = next(level for since_s, level in reversed(levels) if since_s <= at_s)
        if rng.random() < level / most:
            yield at_s


# --------------------------------------------------------------------------- what serves it


@dataclass(slots=True, eq=False)
class PlacedModel:
    """A deployed model; `left_s` is what the running request still needs on devices of its own."""

    number: int
    workers: tuple[str, ...]
    latency_s: float
    queue: deque[float] = field(default_factory=deque)  # when each came; the first runs
    left_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Finished:
    model: int
    arrived_s: float
    latency_s: float
    alone_s: float  # time on devices of its own


@dataclass(slots=True)
class SharedDevices:
    """The devices under one policy; `in_use` has pairs of a time and the number of devices with a model."""

    placing: Placing
    free: dict[str, int] = field(
        default_factory=lambda: {f"gpu{i}": int(DEVICE_BYTES * USABLE) for i in range(NUM_DEVICES)}
    )
    served: dict[int, PlacedModel] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    in_use: list[tuple[float, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    now_s: float = 0.0
    _window: LoadWindow = field(default_factory=LoadWindow)

    def run(self, trace: Trace, seconds: float = SECONDS) -> None:
        """Run to the end of the trace; unfinished requests count with the time they have waited."""
        events = sorted(
            [(at_s, 0, number) for number, at_s in enumerate(trace.deployments)]
            + [(at_s, 1, number) for number, times in enumerate(trace.arrivals) for at_s in times]
            + [(second * SAMPLE_S, 2, 0) for second in range(1, int(seconds / SAMPLE_S) + 1)]
        )
        sampled: dict[str, float] = dict.fromkeys(self.free, 0.0)
        for at_s, kind, number in events:
            self._advance(at_s)
            if kind == 0:
                self._deploy(number)
            elif kind == 1 and number in self.served:
                self._arrive(self.served[number])
            elif kind == 2:
                for worker in self.free:
                    self._window.see(worker, at_s, (self.busy_s[worker] - sampled[worker]) / SAMPLE_S)
                    sampled[worker] = self.busy_s[worker]
        for one in self.served.values():
            for arrived_s in one.queue:
                self.finished.append(Finished(one.number, arrived_s, self.now_s - arrived_s, one.latency_s))

    def _advance(self, until_s: float) -> None:
        while True:
            active = Counter(w for one in self.served.values() if one.queue for w in one.workers)
            running = [
                (one, max(active[w] for w in one.workers)) for one in self.served.values() if one.queue
            ]
            next_s = min([until_s, *(self.now_s + one.left_s * share for one, share in running)])
            for one, share in running:
                one.left_s -= (next_s - self.now_s) / share
            for worker in active:
                self.busy_s[worker] += next_s - self.now_s
            self.now_s = next_s
            ended = [one for one, _ in running if one.left_s <= 1e-9]
            for one in ended:
                self._end(one)
            if not ended:
                return

    def _arrive(self, one: PlacedModel) -> None:
        if not one.queue:
            one.left_s = one.latency_s
        one.queue.append(self.now_s)

    def _end(self, one: PlacedModel) -> None:
        arrived_s = one.queue.popleft()
        self.finished.append(Finished(one.number, arrived_s, self.now_s - arrived_s, one.latency_s))
        one.left_s = one.latency_s

    def _deploy(self, number: int) -> None:
        profile = profile_of(ARCHITECTURES[MODELS[number]], INTENT)
        found = self._plan(profile)
        if found.chosen is None:
            self.refused.append(f"{profile.model}: {found.reason}")
            return
        self._take(profile, found)
        workers = tuple(worker for stage in found.stages for worker in stage.workers)
        self.served[number] = PlacedModel(number, workers, found.chosen.latency_s.value)
        used = {worker for one in self.served.values() for worker in one.workers}
        self.in_use.append((self.now_s, len(used)))

    def _plan(self, profile: Profile) -> Plan:
        devices = [
            Device(worker=worker, host="h", free_bytes=free, load=self._window.load(worker, self.now_s))
            for worker, free in self.free.items()
        ]
        return plan(profile, INTENT, devices, degrees=DEGREES, placing=self.placing, whole_first=False)

    def _take(self, profile: Profile, found: Plan) -> None:
        assert found.chosen is not None
        need = MemoryModel(profile).need(found.chosen.configuration, INTENT, whole_first=False)
        for i, stage in enumerate(found.stages):
            for worker in stage.workers:
                self.free[worker] -= need.of(_size(stage), leads=i == 0)


def _size(stage: Stage) -> int:
    return stage.end - stage.first
