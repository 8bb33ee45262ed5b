"""The morphs of one simulated instance, and the reflex that serves behind them.

`worker.morph.reflex_loop.ReflexLoop` decides here as in a worker; only time and memory are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from bus.morphs import ConvertCache, Morph, MorphReport, Resize, Swap
from bus.policy import MOVES_S, Envelope, Policy, Slowdown
from bus.precisions import LOWEST, PRECISIONS, Precision
from instar.simulate.calibration import EngineCalibration
from instar.simulate.engine import SimulatedInstance
from instar.simulate.group_shape import GroupInstance
from instar.simulate.morphs import MorphingInstance, SimulatedMorph, Turn
from worker.distributed.messages import MemberLoad
from worker.morph import reflex
from worker.morph.plan import Half
from worker.morph.reflex import Lever
from worker.morph.reflex_loop import MemberRoom, Reflex, ReflexLoop
from worker.morph.sizing import KVState

Clock = Callable[[], float]


class SimulatedTarget:
    """An instance as its reflex sees it: `worker.morph.target.Target` has the same rules."""

    knows_members = True

    def __init__(self, instance: MorphingInstance, clock: Clock) -> None:
        self._instance, self._clock = instance, clock
        self.losses = instance.shape.losses

    @property
    def order(self) -> Sequence[int]:
        return self._instance.shape.order

    @property
    def halves(self) -> Mapping[Half, Precision]:
        return self._instance.shape.halves

    @property
    def kv(self) -> KVState:
        return self._instance.shape.kv

    @property
    def is_kv_at_rest(self) -> bool:
        return self._instance.shape.kv_form == "full"

    @property
    def kv_blocks(self) -> int:
        return self._instance.blocks.capacity

    @property
    def min_blocks(self) -> int:
        return self._instance.shape.min_blocks

    def pages(self, half: Half, precision: Precision) -> int:
        return self._instance.shape.half_pages(half, precision)

    def room(self) -> MemberRoom:
        shape = self._instance.shape
        return MemberRoom(shape.kv_pages, max(0, shape.spare_pages // shape.num_layers), LOWEST)

    def loads(self) -> list[MemberLoad]:
        instance = self._instance
        return [*map(self._load, instance.members if isinstance(instance, GroupInstance) else [instance])]

    def _load(self, instance: SimulatedInstance) -> MemberLoad:
        scheduler = instance.scheduler
        return MemberLoad(
            used=scheduler.blocks.num_used,
            needed=scheduler.num_blocks_needed,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waited_s=scheduler.waited_for_blocks_s(self._clock()),
            residence_s=instance.residence.mean_s,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens_due,
            prompt_rate=instance.prompt_rate.per_s,
            arriving=scheduler.arrivals_per_s(self._clock()),
            floor_refused=LOWEST,
        )


class SimulatedMorphs:
    """Runs the morph that the reflex of an instance began, if there is one; without a policy there is none.

    policy: in force. renewed_s: returns when the controller last renewed its envelopes.
    """

    epoch = 1

    def __init__(
        self,
        instance: MorphingInstance,
        calibration: EngineCalibration,
        policy: Policy | None,
        clock: Clock,
        renewed_s: Clock,
    ) -> None:
        self.worker = instance.name.rpartition("@")[2]
        self.urgencies: Mapping[str, float] = {}
        self.running: SimulatedMorph | None = None
        self._instance, self._clock, self._renewed_s = instance, clock, renewed_s
        self._costs, self._page_bytes = calibration.morph, calibration.memory.page_bytes
        self._target = SimulatedTarget(instance, clock)
        self._turn = Turn(calibration.morph.share, clock)
        self._ordered: SimulatedMorph | None = None  # begins when the reflex has decided
        self._cancelled: list[MorphReport] = []
        self._loop: ReflexLoop | None = None
        self._granted: Envelope | None = None  # without the controller's restrictions
        self._moved_s = float("-inf")  # when requests were moved last
        if policy is not None:
            numbers = count(1)
            self._loop = ReflexLoop(self, clock, lambda: f"{instance.name}-{next(numbers)}")
            self._granted = _granted(instance, policy, calibration.slowdowns)
            self._loop.grant(self._granted)

    # ------------------------------------------------------------------------------------- for the reflex

    @property
    def targets(self) -> Mapping[str, SimulatedTarget]:
        return {self._instance.name: self._target}

    @property
    def obstacle(self) -> Callable[[type[Morph]], str]:
        return lambda kind: ""

    def is_morphing(self, instance: str) -> bool:
        return self.running is not None or self._ordered is not None

    def begin(self, command: Morph, *, reason: str) -> None:
        assert isinstance(command, Swap | Resize | ConvertCache)
        self._ordered = SimulatedMorph(command, reason, self._clock(), self._page_bytes, self._costs)

    def cancel(self, morph_id: str) -> None:
        if self.running is not None and self.running.command.id == morph_id:
            self._cancelled.append(self.running.cancel(self._instance, self._clock()))
            self.running = None

    # ------------------------------------------------------------------------------------- for the cluster

    def order(self, command: Swap, reason: str) -> None:
        """Begin a swap that the controller ordered, at the next boundary; one that runs is given up."""
        if self.running is not None:
            self.cancel(self.running.command.id)
        self.begin(command, reason=reason)

    def restrict(self, moved_blocks: int, is_held: bool) -> None:
        """Take the controller's word for how many blocks no loss is needed, and whether layers may change."""
        if (found := self._loop and self._loop.of(self._instance.name)) and self._granted:
            self._moved_s = self._clock()
            policy = replace(self._granted.policy, mode="manual") if is_held else self._granted.policy
            found.envelope = replace(found.envelope, moved_blocks=moved_blocks, policy=policy)

    @property
    def progress(self) -> MorphReport:
        """A report that the morph runs, if there is one."""
        assert self.running
        return self.running.progress(self._instance, self._clock())

    @property
    def lever(self) -> Lever:
        """The lever of the last morph."""
        found = self._loop and self._loop.of(self._instance.name)
        assert found
        return found.lever

    @property
    def spent_s(self) -> float:
        """Seconds that the morph has taken at this boundary: the next step begins so much later."""
        return self._turn.spent_s

    def at_boundary(self) -> list[MorphReport]:
        """Ask the reflex, and carry its morph on, between two steps; returns the reports of what ended."""
        loop, self._turn.spent_s = self._loop, 0.0
        if loop is None:
            return []
        if found := loop.of(self._instance.name):
            if self._is_at_ease(found, self._instance.blocks.num_used):
                self.urgencies = {}
                return []
            found.granted_s = self._renewed_s()
            if self._clock() >= self._moved_s + MOVES_S:
                found.envelope = replace(found.envelope, moved_blocks=0)
        loop.act()
        reports, self._cancelled = self._cancelled, []
        if report := self._advance():
            reports.append(report)
        loop.hear(reports)
        return reports

    def _advance(self) -> MorphReport | None:
        running = self.running or self._ordered
        if running is None:
            return None
        urgency = max(running.urgency, self.urgencies.get(self._instance.name, 0.0))
        self._turn.begin(self._instance.has_work, urgency)
        if self._ordered:
            self.running, self._ordered = running, None
            report = running.begin(self._instance, self._turn)
        else:
            report = running.advance(self._instance, self._turn)
        if report:
            self.running = None
        return report

    def expect(self, blocks: int) -> bool:
        """Take the controller's forecast of the KV blocks that will be needed; False: it is no other."""
        found = self._loop and self._loop.of(self._instance.name)
        if not found or found.envelope.expected_blocks == blocks:
            return False
        found.envelope = replace(found.envelope, expected_blocks=blocks)
        return True

    def lets_alone(self, num_used: int) -> bool:
        """Return True if the reflex would do nothing for a request that comes alone and uses so many blocks.

        When it comes, it waits for none of them, so that there is no pressure. All layers are in full
        precision, so that none can go back, and urgency counts for nothing.
        """
        if self._loop is None:
            return True
        found = self._loop.of(self._instance.name)
        return found is not None and not found.state.is_by_hand and self._is_at_ease(found, num_used)

    def is_quiet(self, num_used: int) -> bool:
        """Return True if the reflex wants nothing from now on until `num_used` blocks are in use.

        Until then all sequences decode, nothing is admitted, and only the blocks in use grow. The reflex is
        asked what it would say now of these blocks. Below full precision it counts the steps in which layers
        could go back, so none is left out, and before that none at which such a row ends.
        """
        found = self._loop and self._loop.of(self._instance.name)
        instance = self._instance
        instance.is_at_ease = not found or self._is_at_ease(found, num_used)
        if not self._loop or not found or instance.is_at_ease:
            return True
        if (
            self.running
            or instance.scheduler.waiting
            or found.state.pressure
            or not instance.shape.is_at_rest
        ):
            return False
        load = replace(self._loop.load(self._target, found), kv_used=num_used)
        state, _ = reflex.judge(found.state, load, found.envelope)
        return not state.pressure and (state.ease > 0 or not found.state.ease)

    def _is_at_ease(self, found: Reflex, num_used: int) -> bool:
        """Return True if the reflex need not be asked with so many blocks in use.

        All layers are in full precision, and there is no pressure: it would do nothing.
        """
        instance, scheduler, state = self._instance, self._instance.scheduler, found.state
        return not (
            self.running
            or self._ordered
            or not instance.shape.is_at_rest
            or scheduler.waiting
            or state.pressure
            or found.envelope.expected_blocks
            or scheduler.num_preemptions > state.preemptions
            or self._clock() < state.preempted_s + reflex.PREEMPTED_S
            or num_used > found.envelope.policy.kv_usage_low * instance.blocks.capacity
        )


def _granted(instance: MorphingInstance, policy: Policy, slowdowns: dict[Precision, Slowdown]) -> Envelope:
    below = PRECISIONS[1 : PRECISIONS.index(policy.precision) + 1]
    return Envelope(
        id="",
        epoch=SimulatedMorphs.epoch,
        instance=instance.name,
        policy=policy,
        precisions=[precision for precision in below if precision in instance.shape.variants],
        kv_precisions=["int8"],
        slowdowns=slowdowns,
    )
