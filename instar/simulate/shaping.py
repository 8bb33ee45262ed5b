"""The changes of degree of a simulated cluster, as the controller decides them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import count
from typing import Final, Protocol

from bus.messages import Demand
from bus.morphs import MorphReport
from bus.policy import Policy
from controller.morphing.decision import MorphDecision
from controller.morphing.groups import Group
from controller.morphing.pressure import PressureState, relieve_pressure
from controller.morphing.scaling import hear, scale_down, scale_up
from controller.morphing.track import Freshness, State, observe, sent
from controller.morphing.weighing import learn_speeds
from controller.planning.lever_costs import LeverCosts, observe_cost, predict

FRESHNESS: Final = Freshness(stale_s=5.0, gap_s=7.0)


class Transforms(Protocol):
    """The cluster whose instances change."""

    now_s: float

    def groups_seen(self) -> list[Group]:
        """Return the groups of which none changes now."""

    def transform(self, decision: MorphDecision, morph_id: str) -> None:
        """Begin a change of degree, or a swap for one."""

    def move(self, instance: str, num_tokens: int) -> None:
        """Take queued requests with so many tokens back from an instance."""

    def restrict(self, moved: Mapping[str, int], held: Container[str]) -> None:
        """Tell reflexes of the blocks that moves bring now, by instance; the held change no layers."""


class SimulatedController:
    """Hears what waits, and decides on windows of metrics; `controller.morphing` does.

    moves: queued requests are moved, too.
    """

    def __init__(self, policy: Policy, *, moves: bool = False) -> None:
        self._policy, self._state, self._numbers = policy, State(), count(1)
        self._moves, self._pressure, self._costs = moves, PressureState(), LeverCosts()

    def window(self, cluster: Transforms, model: str, waiting: Iterable[int]) -> None:
        """Judge a window. waiting: tokens of the requests that no instance holds."""
        self._costs = learn_speeds(self._costs, cluster.groups_seen())
        now = self._policy, cluster.now_s, FRESHNESS, self._costs
        self._state, parting = scale_down(self._state, cluster.groups_seen(), *now)
        self._send(cluster, parting)
        if tokens := list(waiting):
            demand = Demand(gateway="g", model=model, tokens=max(tokens), count=len(tokens), at_ms=0)
            self._state = hear(self._state, demand, cluster.now_s)
            self._state, merging = scale_up(self._state, cluster.groups_seen(), *now)
            self._send(cluster, merging)
        if self._moves:
            self._pressure, moves, _ = relieve_pressure(self._pressure, cluster.groups_seen(), *now)
            cluster.restrict(self._pressure.moved, self._state.reshaping(cluster.now_s))
            for one in moves:
                cluster.move(one.instance, int(one.numbers["tokens"]))

    def observe(self, report: MorphReport, at_s: float) -> None:
        """Take note of a change that ended."""
        self._state = observe(self._state, report, at_s)
        self._costs = observe_cost(self._costs, report)

    def _send(self, cluster: Transforms, decisions: Iterable[MorphDecision]) -> None:
        for one in decisions:
            morph_id = f"morph-{next(self._numbers)}"
            for name in one.instances:
                self._state = sent(self._state, name, one.lever, morph_id, cluster.now_s)
            if one.predicted_s:
                self._costs = predict(self._costs, morph_id, one.predicted_s)
            cluster.transform(one, morph_id)
