"""The choice of morphs in a simulation: an interface, and the reflex that serves behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from bus.morphs import HalfOrder, MorphReport, Resize, Swap
from bus.policy import Envelope, Policy
from bus.precisions import PRECISIONS
from instar.simulate.engine import SimulatedInstance
from worker.morph import reflex
from worker.morph.reflex import Decision, Lever, Load, Need, ReflexState, Shape
from worker.morph.reflex_loop import WAIT_S

Command = Swap | Resize


@dataclass(frozen=True, slots=True)
class Order:
    """What a relief wants now: a morph to begin and why, or that the one under way is cancelled."""

    command: Command | None = None
    lever: Lever = "resize"
    reason: str = ""
    cancels: bool = False


NOTHING = Order()


class Relief(Protocol):
    """Chooses the morphs of one instance. `urgency`: the share of the time (0..1) that morphs may take."""

    urgency: float

    def at_boundary(self, instance: SimulatedInstance, at_s: float, *, is_morphing: bool) -> Order:
        """Decide between two steps."""

    def is_quiet(self, instance: SimulatedInstance, num_used: int, at_s: float) -> bool:
        """Return True if it wants nothing at the boundaries from now on until `num_used` blocks are in use.

        Until then all sequences decode, and nothing is admitted.
        """

    def ended(self, report: MorphReport, at_s: float) -> None:
        """Take note of the end of a morph."""


class NoRelief:
    """All layers stay in full precision."""

    urgency = 0.0

    def at_boundary(self, instance: SimulatedInstance, at_s: float, *, is_morphing: bool) -> Order:
        return NOTHING

    def is_quiet(self, instance: SimulatedInstance, num_used: int, at_s: float) -> bool:
        return True

    def ended(self, report: MorphReport, at_s: float) -> None:
        pass


class ReflexRelief:
    """The reflex of a worker, with an envelope that the controller would grant and renew.

    It asks as `worker.morph.reflex_loop` does; only time and memory are simulated.
    """

    def __init__(self, policy: Policy) -> None:
        self.urgency = 0.0
        self.decisions: list[tuple[float, Decision]] = []
        self._policy = policy.in_force() or policy
        self._state = ReflexState()
        self._envelope: Envelope | None = None
        self._morph_id, self._began_s = "", 0.0
        self._lever: Lever = "resize"

    def at_boundary(self, instance: SimulatedInstance, at_s: float, *, is_morphing: bool) -> Order:
        load, envelope = _load(instance, at_s), self._envelope or self._granted(instance)
        self.urgency = reflex.urgency(load, self._policy)
        self._state, needs = reflex.judge(self._state, load, envelope)
        if not needs:
            return NOTHING
        if is_morphing:
            is_wrong = self._lever == "swap_up" and any(need.goal == "relief" for need in needs)
            return Order(cancels=bool(self._morph_id) and is_wrong)
        shape = _shape(instance, load)
        for need in needs:
            if decision := self._decide(load, shape, envelope, need):
                command = self._begin(instance, decision, at_s)
                return Order(command, decision.lever, decision.reason)
        return NOTHING

    def is_quiet(self, instance: SimulatedInstance, num_used: int, at_s: float) -> bool:
        """Ask the reflex what it would say now of the blocks that are in use then.

        Only these grow meanwhile, where nothing waits. Below full precision it counts the steps in which
        layers could go back, so none is left out.
        """
        if self._policy.mode == "manual":
            return True
        if instance.shape.num_below or instance.scheduler.waiting or self._state.pressure:
            return False
        load = replace(_load(instance, at_s), kv_used=num_used)
        return not reflex.judge(self._state, load, self._envelope or self._granted(instance))[0].pressure

    def ended(self, report: MorphReport, at_s: float) -> None:
        if report.id == self._morph_id:
            took_s, is_applied = at_s - self._began_s, report.state == "applied"
            self._state = reflex.ended(self._state, self._lever, is_applied, took_s, at_s)
            self._morph_id = ""

    def _decide(self, load: Load, shape: Shape, envelope: Envelope, need: Need) -> Decision | None:
        if need.goal == "return":
            return reflex.restore(self._state, load, shape, envelope, need)
        return reflex.relieve(self._state, load, shape, envelope, need, may_lose=True)

    def _begin(self, instance: SimulatedInstance, decision: Decision, at_s: float) -> Command:
        self.decisions.append((at_s, decision))
        self._morph_id = f"{instance.name}-{len(self.decisions)}"
        self._lever, self._began_s = decision.lever, at_s
        self._state = reflex.decided(self._state, decision.lever, at_s)
        if decision.lever == "resize":
            return Resize(
                id=self._morph_id, epoch=1, instance=instance.name, blocks=decision.blocks, wait_s=WAIT_S
            )
        halves = [
            HalfOrder(layer=half.layer, part=half.part, precision=precision)
            for half, precision in decision.halves.items()
        ]
        return Swap(id=self._morph_id, epoch=1, instance=instance.name, halves=halves, wait_s=WAIT_S)

    def _granted(self, instance: SimulatedInstance) -> Envelope:
        below = PRECISIONS[1 : PRECISIONS.index(self._policy.precision) + 1]
        allowed = [precision for precision in below if precision in instance.shape.variants]
        self._envelope = Envelope(
            id="", epoch=1, instance=instance.name, policy=self._policy, precisions=allowed
        )
        return self._envelope


def _load(instance: SimulatedInstance, at_s: float) -> Load:
    """Return what the boundary shows; `worker.morph.target.Target.load` has the same rules."""
    scheduler = instance.scheduler
    return Load(
        at_s=at_s,
        kv_blocks=instance.blocks.capacity,
        kv_used=instance.blocks.num_used,
        kv_needed=scheduler.num_blocks_needed,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        wanting_s=instance.wanting_s(at_s) if scheduler.num_blocks_wanted else 0.0,
        residence_s=instance.residence_s,
        preemptions=scheduler.num_preemptions,
    )


def _shape(instance: SimulatedInstance, load: Load) -> Shape:
    shape = instance.shape
    return Shape(
        halves=shape.halves,
        losses=shape.losses,
        pages=shape.half_pages,
        order=shape.order,
        pages_spare=max(0, shape.spare_pages // shape.num_layers) * shape.num_layers,
        pages_per_block=shape.kv_pages * shape.num_layers / load.kv_blocks,
        min_blocks=shape.min_blocks,
    )
