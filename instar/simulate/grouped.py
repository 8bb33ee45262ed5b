"""A simulated cluster whose instances become groups and part, as the controller decides."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from bus.morphs import MorphOutcome, MorphReport, Swap
from bus.policy import Policy
from controller.morphing.decision import MorphDecision
from controller.morphing.groups import Group
from gateway.delivery.dispatch import TooLong
from instar.replay.outcomes import UNFINISHED, RequestOutcome
from instar.simulate.calibration import EngineCalibration
from instar.simulate.cluster import TOO_LONG, SimulatedCluster
from instar.simulate.dispatcher import Dispatcher, ServiceDispatcher, tokens_of
from instar.simulate.engine import SimulatedSequence
from instar.simulate.gateway import ActiveInstance
from instar.simulate.groups import DegreeChange, SimulatedGroup
from instar.simulate.shaping import SimulatedController


class GroupedCluster(SimulatedCluster):
    """All instances are made at the start. The reflex of a group acts for all its members.

    queue: what waits at the gateway. groups: by the number of their leader.
    """

    _settles = True  # the controller and the gateway look at sequences

    def __init__(
        self,
        calibration: EngineCalibration,
        num_workers: int,
        policy: Policy | None = None,
        *,
        degrees: Sequence[int] = (),
        dispatcher: Dispatcher | None = None,
        on_window: Callable[[float], None] = lambda at_s: None,
        moves: bool = False,
        **options: Any,
    ) -> None:
        """degrees: of the groups at the start, from the first worker on; the others are alone.

        policy: None or mode manual: no group forms or parts. on_window: called after each window of metrics.
        moves: the controller moves queued requests, too.
        """
        super().__init__(calibration, num_workers, policy, **options)
        self.queue: list[RequestOutcome] = []
        self.groups: dict[int, SimulatedGroup] = {}
        self._of: dict[int, SimulatedGroup] = {}
        self._workers: dict[str, ActiveInstance] = {}
        self._moved: set[int] = set()  # requests that were moved once
        self._forming: list[tuple[list[SimulatedGroup], SimulatedGroup]] = []  # parts, and the whole
        is_free = policy is not None and policy.mode != "manual"
        self._controller = SimulatedController(policy, moves=moves) if policy and is_free else None
        free_share = policy.scale_down_free if policy else 1.0
        longest = calibration.limits.max_model_len
        tokens_at = {degree: min(tokens, longest) for degree, tokens in calibration.tokens_at.items()}
        self._dispatcher = dispatcher or ServiceDispatcher(
            tokens_at, can_split=is_free, free_share=free_share
        )
        self._on_window, self._num_ordered, self._num_heard = on_window, 0, 0
        first = 0
        for degree in (*degrees, *[1] * (num_workers - sum(degrees))):
            members = [self._activate(number) for number in range(first, first + degree)]
            self._workers |= {one.morphs.worker: one for one in members}
            self._add(SimulatedGroup(members, calibration, degree))
            if degree > 1:
                self._share(self.groups[first])
            first += degree

    def of(self, worker: str) -> ActiveInstance:
        """Return a worker's instance."""
        return self._workers[worker]

    def _add(self, group: SimulatedGroup) -> None:
        self.groups[group.leader.instance.number] = group
        for number in group.numbers:
            self._of[number] = group

    def _share(self, group: SimulatedGroup) -> None:
        """Give a group of several workers its blocks and its reflex."""
        group.share_blocks()
        if group.own:
            group.morphs = self._morphs_of(group.own)

    # ------------------------------------------------------------------------------------- requests

    def _arrive(self, outcome: RequestOutcome) -> None:
        outcome.sent_s = self.now_s
        self.queue.append(outcome)
        self._report()
        self._place(outcome)

    def _place(self, outcome: RequestOutcome) -> None:
        found = self._dispatcher.place(self, outcome)
        if found is None:
            return
        self.queue.remove(outcome)
        if isinstance(found, TooLong):
            outcome.error, outcome.status, outcome.ended_s = TOO_LONG, 400, self.now_s
        else:
            self._send(found, outcome)

    def _submit(self, one: ActiveInstance, outcome: RequestOutcome) -> None:
        if tokens_of(outcome) <= self._of[one.instance.number].max_tokens:
            super()._submit(one, outcome)
            return
        del self._homes[outcome.number]  # the group has parted meanwhile: it comes back
        one.num_own -= 1
        self._wait(outcome)

    def recall(self, seq: SimulatedSequence) -> None:
        """Take a request that waits at an instance back."""
        one = self._homes.pop(seq.outcome.number)
        one.num_own -= 1
        if seq in one.instance.waiting:
            one.instance.withdraw(seq)
        self._wait(seq.outcome)

    def _wait(self, outcome: RequestOutcome) -> None:
        self.queue.append(outcome)
        self.queue.sort(key=lambda one: one.due_s)

    def _end(self, ends_s: float) -> None:
        for outcome in self.queue:
            outcome.error, outcome.ended_s = UNFINISHED, ends_s
        super()._end(ends_s)

    # ------------------------------------------------------------------------------------- steps

    def _change(self, one: ActiveInstance, change: Callable[[], None]) -> None:
        group, version = self._of[one.instance.number], one.instance.version
        leader = group.leader.instance
        before = leader.version
        change()
        if one.instance.version != version:
            group.interrupt(self.now_s)
        if not group.is_stepping:
            self._boundary(group.leader)
        elif leader.version != before:
            self._push_step(group.leader)

    def _boundary(self, one: ActiveInstance) -> None:
        group = self._of[one.instance.number]
        if group.is_held:
            return
        if len(group.members) == 1:
            super()._boundary(one)
            return
        for member in group.instances:
            member.take_in()
        spent_s = 0.0
        if group.morphs and not group.transition:
            self._carry_on(group.leader, group.morphs)
            spent_s = group.morphs.spent_s
        group.start(self.now_s + spent_s)
        if group.is_stepping:
            self._push_step(group.leader)

    def _stepped(self, one: ActiveInstance, version: int) -> None:
        if version != one.instance.version or not one.instance.is_stepping:
            return
        group = self._of[one.instance.number]
        has_changed = group.finish()
        if group.is_held:
            self._come_together()
        elif has_changed:
            self._reshape(group)
        else:
            self._boundary(group.leader)

    def _rest(self, one: ActiveInstance) -> None:
        """Keep all instances in view."""

    def _is_at_rest(self) -> bool:
        if self._homes or self.queue or len(self.groups) < len(self._workers):
            return False
        return all(one.seen.is_settled and one.instance.shape.is_at_rest for one in self._workers.values())

    def _windowed(self) -> None:
        for outcome in list(self.queue):
            self._place(outcome)
        self._dispatcher.window(self)
        if self._controller:
            for report in self.record.morphs[self._num_heard :]:
                if report.kind != "transform":
                    self._controller.observe(report, self.now_s)
            self._num_heard = len(self.record.morphs)
            for group in self.groups.values():
                if (morphs := group.morphs or group.leader.morphs).running:
                    self._controller.observe(morphs.progress, self.now_s)
            self._controller.window(self, self._calibration.model, self._dispatcher.demand(self))
        self._on_window(self.now_s)

    # ------------------------------------------------------------------------------------- degrees

    def groups_seen(self) -> list[Group]:
        """Return the groups of which none changes now, as the controller knows them."""
        return [one.as_controller_sees(self.now_s) for one in self.groups.values() if not one.is_changing]

    def order(self, workers: Sequence[str], tp: int) -> None:
        """Have workers become one group, at the next boundary of all of them."""
        self._num_ordered += 1
        self._transform(workers, tp, f"ordered-{self._num_ordered}")

    def transform(self, decision: MorphDecision, morph_id: str) -> None:
        """Begin a change of degree that the controller decided, or a swap for one."""
        command = decision.command(morph_id)
        if isinstance(command, Swap):
            one = self._workers[decision.worker]
            (self._of[one.instance.number].morphs or one.morphs).order(command, decision.reason)
            self._go_on(one)
            return
        self._transform(list(decision.epochs), decision.tp, morph_id)

    def move(self, instance: str, num_tokens: int) -> None:
        """Take the latest short requests back from the queue of an instance, and place them again."""
        one = self._workers[instance.rpartition("@")[2]]
        moved = [seq for seq in one.instance.waiting if isinstance(seq, SimulatedSequence)]
        for seq in reversed(moved):
            if num_tokens > 0 and seq.outcome.number not in self._moved:
                self._moved.add(seq.outcome.number)
                self.recall(seq)
                num_tokens -= seq.num_prompt
        for outcome in list(self.queue):
            self._place(outcome)

    def restrict(self, moved: Mapping[str, int], held: Container[str]) -> None:
        for group in self.groups.values():
            morphs, name = group.morphs or group.leader.morphs, group.leader.instance.name
            morphs.restrict(moved.get(name, 0), any(one.name in held for one in group.instances))

    def _transform(self, workers: Sequence[str], tp: int, morph_id: str) -> None:
        members = [self._workers[name] for name in workers]
        groups = list({id(of): of for of in (self._of[one.instance.number] for one in members)}.values())
        assert sum(len(of.members) for of in groups) == len(members) and not any(
            of.is_changing for of in groups
        ), "a change of degree concerns whole groups that do not change"
        layers = self._calibration.num_layers
        transition = DegreeChange(morph_id, groups[0].tp, tp, self.now_s, layers)
        if tp < groups[0].tp:
            self._part(groups[0], transition)
            return
        for group in groups:
            group.is_held = True
        together = SimulatedGroup(members, self._calibration, groups[0].tp, transition)
        self._forming.append((groups, together))
        self._come_together()

    def _part(self, group: SimulatedGroup, transition: DegreeChange) -> None:
        if obstacle := group.obstacle(transition.tp):
            self._tell(group, transition, "deferred", obstacle)
            return
        group.restrict(transition.tp)
        group.transition = transition
        if not group.is_stepping:
            self._boundary(group.leader)

    def _come_together(self) -> None:
        """Let groups form whose members are all between two steps."""
        waiting, self._forming = self._forming, []
        for each in waiting:
            groups, together = each
            if any(one.is_stepping for one in groups):
                self._forming.append(each)
                continue
            assert together.transition
            if obstacle := _unlike(groups, together.members):
                self._tell(together, together.transition, "deferred", obstacle)
                for one in groups:
                    one.is_held = False
                    self._boundary(one.leader)
                continue
            for one in groups:
                del self.groups[one.leader.instance.number]
            self._add(together)
            self._boundary(together.leader)

    def _reshape(self, group: SimulatedGroup) -> None:
        """End a change of degree."""
        assert group.transition
        transition, group.transition = group.transition, None
        made = [group]
        if transition.tp > group.tp:
            group.tp = transition.tp
        else:
            del self.groups[group.leader.instance.number]
            made = group.parts(transition.tp)
        for part in made:
            self._add(part)
            if part.tp > 1:
                self._share(part)
            for seq in part.too_long():  # it came too late
                self.recall(seq)
        self._tell(group, transition, "applied", "simulated")
        for part in made:
            self._boundary(part.leader)

    def _tell(
        self, group: SimulatedGroup, transition: DegreeChange, state: MorphOutcome, reason: str
    ) -> None:
        leader = group.leader
        report = MorphReport(
            id=transition.morph_id,
            kind="transform",
            target=leader.instance.name,
            worker=leader.morphs.worker,
            epoch=1,
            state=state,
            reason=reason,
            numbers={
                "tp_before": transition.tp_before,
                "tp_after": transition.tp,
                "layers": self._calibration.num_layers,
                "layers_done": self._calibration.num_layers - transition.layers_left,
                "moving_seconds": transition.moving_s,
            },
            started_ms=round(transition.began_s * 1000),
            ended_ms=round(self.now_s * 1000),
            workers=[one.morphs.worker for one in group.members],
        )
        self.record.morphs.append(report)
        is_up = transition.tp > 1 and len(group.members) == transition.tp
        self.record.levers["scale_up" if is_up else "scale_down", state] += 1
        if self._controller:
            self._controller.observe(report, self.now_s)


def _unlike(groups: Sequence[SimulatedGroup], members: Sequence[ActiveInstance]) -> str:
    """Return why workers cannot form a group: their layers must have equal precisions; or ""."""
    first = members[0].instance
    for group in groups:
        if group.morphs and group.morphs.running:
            return f"{group.leader.instance.name} morphs"
    for one in members:
        if one.morphs.running:
            return f"{one.instance.name} morphs"
        if one.instance.shape.layers != first.shape.layers:
            return f"the layers of {one.instance.name} differ in precision from those of {first.name}"
    return ""
