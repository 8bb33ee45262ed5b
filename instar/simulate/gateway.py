"""The gateway and the monitor of a simulated cluster: what they know of instances, and the choice of one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from controller.morphing.forecast import Forecast
from gateway.delivery.dispatch import Candidate, TooLong, choose
from instar.simulate.calibration import EngineCalibration
from instar.simulate.engine import SimulatedInstance
from instar.simulate.relief import SimulatedMorphs
from instar.simulate.shortlist import Shortlist
from instar.simulate.windows import Smoothed

SHOWN_INSTANCES: Final = 8  # with more instances, samples are added up
ALL: Final = "all"


@dataclass(slots=True, eq=False)
class ActiveInstance:
    """An instance that has requests or is not at rest yet, as the gateway and the monitor see it."""

    instance: SimulatedInstance
    morphs: SimulatedMorphs
    seen: Smoothed
    num_own: int = 0  # requests of the gateway
    num_since: int = 0  # sent since the last metrics
    tokens_since: int = 0
    forecast: Forecast = field(default_factory=Forecast)  # of the blocks that it needs


class SimulatedGateway:
    """Knows active instances by their last report and what was sent since, and idle ones by their number."""

    def __init__(self, calibration: EngineCalibration, num_workers: int) -> None:
        self._calibration, self._num_workers = calibration, num_workers
        self._kv_blocks = calibration.memory.kv_blocks
        self._width = len(str(num_workers - 1))
        self._idle = list(range(num_workers))  # a heap of those at rest
        self._idle_candidate: tuple[int, Candidate] | None = None
        self._shortlist = Shortlist()
        self._changed: dict[int, ActiveInstance] = {}  # not in the shortlist since their last change

    def name(self, number: int) -> str:
        """Return the name of an instance; names are in the order of the numbers."""
        return f"{self._calibration.model}@w{number:0{self._width}}"

    def choose(self, num_tokens: int) -> int | None:
        """Return the number of the instance for a request, None if it is too long for any."""
        idle = self._first_idle()
        if idle is None or num_tokens > idle.max_tokens:
            for one in self._changed.values():
                self._shortlist.put(_candidate(one))
            self._changed.clear()
        found = choose(self._shortlist.of(num_tokens, idle), num_tokens)
        if isinstance(found, Candidate):
            return int(found.instance.rpartition("@w")[2])
        assert isinstance(found, TooLong), found
        return None

    def wake(self, number: int) -> None:
        """Note that an instance is at rest no more; of those that are, only the first is ever chosen."""
        if self._idle and self._idle[0] == number:
            heapq.heappop(self._idle)

    def rest(self, one: ActiveInstance) -> None:
        """Note that an instance is idle and as it was made."""
        self._changed.pop(one.instance.number, None)
        self._shortlist.remove(one.instance.name)
        heapq.heappush(self._idle, one.instance.number)

    def show(self, one: ActiveInstance) -> None:
        """Renew the view of an active instance.

        One that has load comes after every idle one, so its view is made when there is no idle one.
        """
        if one.num_own or one.seen.load:
            self._shortlist.remove(one.instance.name)
            self._changed[one.instance.number] = one
        else:
            self._changed.pop(one.instance.number, None)
            self._shortlist.put(_candidate(one))

    def _first_idle(self) -> Candidate | None:
        """Return the first idle instance."""
        if not self._idle:
            return None
        number = self._idle[0]
        if self._idle_candidate is None or self._idle_candidate[0] != number:
            tokens, name = self._kv_blocks * self._calibration.limits.block_tokens, self.name(number)
            candidate = Candidate(
                instance=name,
                worker=name.rpartition("@")[2],
                epoch=1,
                num_measured=0.0,
                num_own=0,
                num_own_since=0,
                max_tokens=min(self._calibration.limits.max_model_len, tokens),
                free_tokens=tokens,
                can_split=False,
            )
            self._idle_candidate = number, candidate
        return self._idle_candidate[1]

    def sample(self, active: Iterable[ActiveInstance], now_s: float) -> dict[str, Any]:
        """Return what `instar bench replay` samples: each instance of a few, the sums of many."""
        shapes = {one.instance.name: _shown(one, now_s) for one in active}
        if self._num_workers <= SHOWN_INSTANCES:
            names = map(self.name, range(self._num_workers))
            return {name: shapes.get(name) or self._at_rest() for name in names}
        keys = ("kv_blocks", "kv_used", "running", "waiting", "layers_below_full", "preemptions")
        total: dict[str, Any] = {key: sum(shape[key] for shape in shapes.values()) for key in keys}
        total["kv_blocks"] += (self._num_workers - len(shapes)) * self._kv_blocks
        total["queue_delay_s"] = max((shape["queue_delay_s"] for shape in shapes.values()), default=0.0)
        return {ALL: total | {"tp": 1}}

    def _at_rest(self) -> dict[str, Any]:
        zeros = dict.fromkeys(("kv_used", "running", "waiting", "layers_below_full", "queue_delay_s"), 0)
        return {"kv_blocks": self._kv_blocks, "tp": 1} | zeros


def _candidate(one: ActiveInstance) -> Candidate:
    instance, seen = one.instance, one.seen
    block_tokens, kv_blocks = instance.limits.block_tokens, instance.scheduler.blocks.capacity
    free_tokens = (kv_blocks - seen.last_used) * block_tokens - seen.waiting_tokens - one.tokens_since
    return Candidate(
        instance=instance.name,
        worker=instance.name.rpartition("@")[2],
        epoch=1,
        num_measured=seen.load,
        num_own=one.num_own,
        num_own_since=one.num_since,
        max_tokens=min(instance.limits.max_model_len, kv_blocks * block_tokens),
        kv_usage=seen.kv_usage,
        free_tokens=free_tokens,
        can_split=False,
    )


def _shown(one: ActiveInstance, now_s: float) -> dict[str, Any]:
    instance = one.instance
    return {
        "kv_blocks": instance.scheduler.blocks.capacity,
        "kv_used": instance.used_at(now_s),
        "running": instance.num_running,
        "waiting": len(instance.waiting),
        "layers_below_full": instance.shape.num_below,
        "tp": 1,
        "queue_delay_s": round(instance.oldest_wait_s(now_s), 4),
        "preemptions": instance.scheduler.num_preemptions,
    }
