"""The gateway and the monitor of a simulated cluster: what they know of instances, and the choice of one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
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
COUNTS: Final = ("kv_blocks", "kv_used", "running", "waiting", "layers_below_full", "preemptions")


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
    ticks: int = 0  # number of the last report that was taken
    num_sampled: int = 0  # samples that it is in
    settles: int = 0  # number of the report at which it may be at rest

    @property
    def is_as_at_rest(self) -> bool:
        """True if a sample shows nothing of it that one of an instance at rest does not."""
        instance, scheduler = self.instance, self.instance.scheduler
        is_in_group = scheduler.blocks is not instance.blocks
        return not (instance.has_work or is_in_group or scheduler.num_preemptions) and instance.is_as_made

    @property
    def is_idle(self) -> bool:
        return not (self.num_own or self.instance.has_work or self.morphs.running)


class SimulatedGateway:
    """Knows active instances by their last report and what was sent since, and idle ones by their number."""

    def __init__(
        self,
        calibration: EngineCalibration,
        num_workers: int,
        active: Mapping[int, ActiveInstance],
        catch_up: Callable[[ActiveInstance], None],
    ) -> None:
        """catch_up: takes the reports of an active instance until now."""
        self._calibration, self._num_workers = calibration, num_workers
        self._active, self._catch_up = active, catch_up
        self._is_outdated = False  # metrics have come: the shortlist lacks all that have load
        self._kv_blocks = calibration.memory.kv_blocks
        self._width = len(str(num_workers - 1))
        self._idle = list(range(num_workers))  # a heap of those at rest
        self._resting: dict[int, Candidate] = {}  # views of idle instances at rest
        self._shortlist = Shortlist()
        self._changed: dict[int, ActiveInstance] = {}  # not in the shortlist since their last change

    def name(self, number: int) -> str:
        """Return the name of an instance; names are in the order of the numbers."""
        return f"{self._calibration.model}@w{number:0{self._width}}"

    def choose(self, num_tokens: int) -> int | None:
        """Return the number of the instance for a request, None if it is too long for any."""
        idle = self._first_idle()
        if idle is None or num_tokens > idle.max_tokens:
            self._complete()
        candidates = self._shortlist.of(num_tokens, idle)
        if idle and candidates == [idle] and num_tokens <= idle.max_tokens:  # nothing to choose: it has room
            return self._idle[0]
        found = choose(candidates, num_tokens)
        if isinstance(found, Candidate):
            return int(found.instance.rpartition("@w")[2])
        assert isinstance(found, TooLong), found
        return None

    def renew(self) -> None:
        """Note that metrics of all instances have come. Those with load are looked at when it matters."""
        self._shortlist, self._is_outdated = Shortlist(), True

    def _complete(self) -> None:
        """Put all active instances into the shortlist."""
        changed = self._active if self._is_outdated else self._changed
        for one in changed.values():
            self._catch_up(one)
        if self._is_outdated:
            self._shortlist = Shortlist(map(_candidate, changed.values()))
        else:
            for one in changed.values():
                self._shortlist.put(_candidate(one))
        self._changed.clear()
        self._is_outdated = False

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
        if number not in self._resting:
            tokens, name = self._kv_blocks * self._calibration.limits.block_tokens, self.name(number)
            self._resting[number] = Candidate(
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
        return self._resting[number]

    def new_sample(self, at_s: float) -> dict[str, Any]:
        """Return a sample of all at rest, as `instar bench replay` takes it: a few instances, or the sums."""
        if self._num_workers <= SHOWN_INSTANCES:
            instances = {self.name(number): self._at_rest() for number in range(self._num_workers)}
        else:
            counts = dict.fromkeys(COUNTS, 0) | {"kv_blocks": self._num_workers * self._kv_blocks}
            instances = {ALL: counts | {"queue_delay_s": 0.0, "tp": 1}}
        return {"at_s": round(at_s, 3), "instances": instances}

    def add_to(self, samples: Sequence[dict[str, Any]], one: ActiveInstance) -> None:
        """Add an active instance, as it was then, to samples since its last event."""
        instance, is_summed = one.instance, self._num_workers > SHOWN_INSTANCES
        if is_summed and one.is_as_at_rest:
            return
        times, has_queue = [sample["at_s"] for sample in samples], instance.has_queue
        counts = (
            ("kv_blocks", instance.scheduler.blocks.capacity - (self._kv_blocks if is_summed else 0)),
            ("running", instance.num_running),
            ("waiting", instance.num_waiting),
            ("layers_below_full", instance.shape.num_below),
            ("preemptions", instance.scheduler.num_preemptions),
        )
        changes = [(key, count) for key, count in counts if count]
        for sample, at_s, used in zip(samples, times, instance.used_at(times), strict=True):
            if not is_summed:
                sample["instances"][instance.name] = dict.fromkeys(COUNTS, 0) | {
                    "queue_delay_s": 0.0,
                    "tp": 1,
                }
            shown = sample["instances"][ALL if is_summed else instance.name]
            for key, count in changes:
                shown[key] += count
            shown["kv_used"] += used
            if has_queue:
                shown["queue_delay_s"] = max(shown["queue_delay_s"], round(instance.oldest_wait_s(at_s), 4))

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
