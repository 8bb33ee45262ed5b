"""The reflexes of one worker: what its envelopes allow, done at step boundaries and reported.

`act` before the manager's `advance`, in the engine's thread. A morph by hand goes first: a reflex waits until
nothing else morphs its instance, then takes the shape as it is. What was swapped by hand stands until
something runs, what the controller ordered for as long as the order says (`Swap.stands_s`); then the reflex
gives it back as if it had taken it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bus.clock import now_ms
from bus.messages import Event, Number
from bus.morphs import Cause, ConvertCache, HalfOrder, Morph, MorphReport, Resize, Swap
from bus.policy import MOVES_S, NEWS_S, Envelope, Policy
from bus.precisions import LOWEST, PRECISIONS, Precision
from worker.distributed.messages import MemberLoad
from worker.morph import reflex, sizing
from worker.morph.losses import Losses
from worker.morph.plan import Half
from worker.morph.reflex import Lever, Load, Need, Withheld
from worker.morph.sizing import Decision, KVState, Shape

WAIT_S = 1.0  # wait for pages before a swap is deferred: a running step may free some
NO_ENVELOPE = Policy()  # policy without an envelope: only its objective is used
LOOK_S = 0.5  # how often an idle engine looks whether layers can go back
AGAIN_S = 0.2  # after a look at all halves in vain; to look at each step would take a share of its time


class MemberRoom(NamedTuple):
    """The memory of the member that has least, in pages of each layer of its KV cache."""

    kv_pages: int
    growable_pages: int  # by which each layer can grow now
    floor: Precision  # the most bits that a request at any member insists on


class ReflexTarget(Protocol):
    """An instance as its reflex sees it."""

    losses: Losses

    @property
    def order(self) -> Sequence[int]:
        """The layers, the first to lose bits first."""

    @property
    def halves(self) -> Mapping[Half, Precision]: ...

    @property
    def kv(self) -> KVState:
        """The KV cache of all members, which are known."""

    @property
    def is_kv_at_rest(self) -> bool: ...

    @property
    def kv_blocks(self) -> int: ...

    @property
    def min_blocks(self) -> int: ...

    @property
    def knows_members(self) -> bool:
        """True if every member has reported its status, and the group stands."""

    def pages(self, half: Half, precision: Precision) -> int: ...

    def loads(self) -> list[MemberLoad]:
        """Return what runs and waits at every member, as far as they are known."""

    def room(self) -> MemberRoom: ...


class ReflexMorphs(Protocol):
    """The morphs of one worker, as `worker.morph.manager.MorphManager` runs them."""

    worker: str
    epoch: int
    urgencies: Mapping[str, float]  # by instance: the share of the time (0..1) for its morphs at least

    @property
    def targets(self) -> Mapping[str, ReflexTarget]: ...

    @property
    def obstacle(self) -> Callable[[type[Morph]], str]: ...

    def is_morphing(self, instance: str) -> bool: ...

    def begin(self, command: Morph, *, reason: str) -> None: ...

    def cancel(self, morph_id: str) -> None: ...


def _new_id() -> str:
    return f"reflex-{uuid.uuid4().hex[:12]}"


@dataclass(slots=True)
class Reflex:
    """One instance: its envelope, what is remembered, and the morph under way."""

    envelope: Envelope
    granted_s: float
    state: reflex.ReflexState = field(default_factory=reflex.ReflexState)
    morph_id: str = ""
    lever: Lever = "resize"
    cause: Cause | None = None
    began_s: float = 0.0
    vain_s: dict[Cause, float] = field(default_factory=dict)  # when nothing could be done for it

    @property
    def is_relieving(self) -> bool:
        """True while layers lose bits for what runs and waits now."""
        return bool(self.morph_id) and self.lever in reflex.DOWN and self.cause != "forecast"


class ReflexLoop:
    """The reflexes of all instances of one worker, whose morphs `morphs` runs."""

    def __init__(
        self,
        morphs: ReflexMorphs,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        self._morphs, self._clock, self._new_id = morphs, clock, new_id
        self._reflexes: dict[str, Reflex] = {}

    def grant(self, envelope: Envelope) -> None:
        """Use `envelope` from now on; one for another epoch is ignored."""
        if envelope.epoch != self._morphs.epoch:
            return
        if found := self._reflexes.get(envelope.instance):
            found.envelope, found.granted_s = envelope, self._clock()
        else:
            self._reflexes[envelope.instance] = Reflex(envelope, self._clock())

    @property
    def patience_s(self) -> float | None:
        """Seconds that an idle engine may sleep before `act` is due; None: until it is woken."""
        targets = self._morphs.targets
        due = (self._due_s(one, targets[name]) for name, one in self._reflexes.items() if name in targets)
        return min((one for one in due if one is not None), default=None)

    def act(self) -> list[Event]:
        """Decide at a step boundary. Returns the events of the decisions; their morphs have begun."""
        events, urgencies = list[Event](), dict[str, float]()
        for name, target in self._morphs.targets.items():
            found = self._reflexes.get(name)
            load = self.load(target, found)
            if found:
                events += self._consider(name, found, target, load)
            policy = found.envelope.policy if found else NO_ENVELOPE
            is_relieving = found is not None and found.is_relieving
            urgencies[name] = reflex.urgency(load, policy, is_relieving=is_relieving)
        self._morphs.urgencies = urgencies
        for name in self._reflexes.keys() - self._morphs.targets.keys():
            del self._reflexes[name]
        return events

    def hear(self, reports: Iterable[MorphReport]) -> None:
        """Note the ends of the morphs that were begun here."""
        for report in reports:
            found, now_s = self._reflexes.get(report.target), self._clock()
            if not found or report.state == "running":
                continue
            if report.id == found.morph_id:
                took_s, is_applied = now_s - found.began_s, report.state == "applied"
                halves = int(report.numbers.get("halves_applied", 0))
                work_s = report.worked_s
                found.state = reflex.ended(
                    found.state, found.lever, is_applied, took_s, now_s, halves, work_s
                )
                found.morph_id = ""
            elif report.numbers.get({"swap": "halves_applied", "kv": "layers_done"}.get(report.kind, "")):
                found.state = reflex.ordered(found.state, report.numbers.get("stands_seconds", 0), now_s)

    def of(self, instance: str) -> Reflex | None:
        """Return the reflex of an instance that has an envelope."""
        return self._reflexes.get(instance)

    def _due_s(self, found: Reflex, target: ReflexTarget) -> float | None:
        """Return the seconds until a return may be due on an idle engine."""
        envelope = found.envelope
        at_rest = all(reflex.is_at_rest(one, envelope.resting) for one in target.halves.values())
        at_rest = at_rest and target.is_kv_at_rest
        if envelope.policy.mode == "manual" or found.morph_id or at_rest or found.state.is_by_hand:
            return None
        return max(LOOK_S, found.state.return_due_s(envelope.policy) - self._clock())

    def _consider(self, name: str, found: Reflex, target: ReflexTarget, load: Load) -> list[Event]:
        found.state, needs = reflex.judge(found.state, load, found.envelope)
        events = self._withhold(name, found, load, reflex.waits_for_compute(load, found.envelope))
        if not needs or not target.knows_members:
            return events
        if self._morphs.is_morphing(name) or self._morphs.obstacle(Swap):
            if found.morph_id and found.lever in reflex.UP and any(need.goal == "relief" for need in needs):
                self._morphs.cancel(found.morph_id)  # what is half done is undone, and relief comes next
            return events
        needs = [need for need in needs if load.at_s >= found.vain_s.get(need.cause, -AGAIN_S) + AGAIN_S]
        if not needs:
            return events
        shape = self._shape(target, load)
        is_fresh = not reflex.is_stale(found.envelope, found.granted_s, load.at_s)
        for need in needs:
            about = found.state, load, shape, found.envelope
            soon = reflex.soon_over(found.state, load, need) if need.goal == "relief" else None
            decision: Decision | Withheld | None
            if need.goal == "return":
                decision = sizing.restore(*about, need)
            else:
                decision = sizing.relieve(*about, need, may_lose=is_fresh and not soon)
            if isinstance(decision, Decision):
                return [*events, self._begin(name, found, decision, load.at_s)]
            if soon:  # that is looked at again at the next step, for more may have come
                events += self._withhold(name, found, load, soon, need)
                continue
            found.vain_s[need.cause] = load.at_s
            if need.goal == "relief" and need.cause != "forecast":
                why = decision or sizing.why_nothing(*about, may_lose=is_fresh)
                events += self._withhold(name, found, load, why, need)
        return events

    def _withhold(
        self, name: str, found: Reflex, load: Load, why: Withheld | None, need: Need | None = None
    ) -> list[Event]:
        """Tell once in a burst why nothing is done."""
        if why is None:
            return []
        found.state, is_new = reflex.withhold(found.state, why, load.at_s)
        if not is_new:
            return []
        reason = f"{need.words}: {why.reason}" if need else why.reason
        return [self._event("relief_withheld", name, reason, sizing.seen(found.state, load, found.envelope))]

    def _begin(self, name: str, found: Reflex, decision: Decision, at_s: float) -> Event:
        morph_id = self._new_id()
        found.morph_id, found.lever, found.cause = morph_id, decision.lever, decision.cause
        found.began_s = at_s
        found.vain_s.clear()  # of the shape before this morph
        found.state = reflex.decided(found.state, decision.lever, at_s)
        self._morphs.begin(self._command(name, morph_id, decision), reason=decision.reason)
        return self._event(
            "morph_decided", name, decision.reason, decision.numbers, morph_id=morph_id, cause=decision.cause
        )

    def _event(
        self,
        kind: str,
        name: str,
        reason: str,
        numbers: Mapping[str, Number],
        morph_id: str = "",
        cause: str = "",
    ) -> Event:
        return Event(
            kind=kind,
            source=self._morphs.worker,
            subject=name,
            reason=reason,
            at_ms=now_ms(),
            numbers=dict(numbers),
            morph_id=morph_id,
            cause=cause,
        )

    def _command(self, name: str, morph_id: str, decision: Decision) -> Morph:
        epoch = self._morphs.epoch
        if decision.lever == "resize":
            return Resize(id=morph_id, epoch=epoch, instance=name, blocks=decision.blocks, wait_s=WAIT_S)
        if decision.kv:
            return ConvertCache(id=morph_id, epoch=epoch, instance=name, kv_dtype=decision.kv, wait_s=WAIT_S)
        halves = [
            HalfOrder(layer=half.layer, part=half.part, precision=precision)
            for half, precision in decision.halves.items()
        ]
        return Swap(id=morph_id, epoch=epoch, instance=name, halves=halves, wait_s=WAIT_S)

    def load(self, target: ReflexTarget, found: Reflex | None) -> Load:
        """Add up what runs and waits at all members of the instance, and what waits at gateways."""
        at_s, floor, expected, moved = self._clock(), LOWEST, 0, 0
        if found and at_s < found.granted_s + NEWS_S:
            floor, expected = found.envelope.floor or LOWEST, found.envelope.expected_blocks
        if found and at_s < found.granted_s + MOVES_S:
            moved = found.envelope.moved_blocks
        members = target.loads()
        used = sum(each.used for each in members)
        refused = [floor, *(each.floor_refused for each in members)]
        return Load(
            at_s=at_s,
            kv_blocks=target.kv_blocks,
            kv_used=used,
            kv_needed=max(used, sum(each.needed for each in members) - moved),
            running=sum(each.running for each in members),
            waiting=sum(each.waiting for each in members),
            waited_s=max(each.waited_s for each in members),
            residence_s=max(each.residence_s for each in members),
            preemptions=sum(each.preemptions for each in members),
            prompt_tokens=sum(each.prompt_tokens for each in members),
            prompt_rate=sum(each.prompt_rate for each in members),
            arriving=sum(each.arriving for each in members),
            floor_refused=min(refused, key=PRECISIONS.index),
            kv_expected=expected,
            members=len(members),
        )

    def _shape(self, target: ReflexTarget, load: Load) -> Shape:
        room, num_layers = target.room(), len(target.order)
        kv_pages = room.kv_pages * num_layers
        return Shape(
            halves=target.halves,
            losses=target.losses,
            pages=target.pages,
            order=target.order,
            kv=target.kv,
            pages_spare=max(0, room.growable_pages) * num_layers,
            pages_per_block=kv_pages / load.kv_blocks if load.kv_blocks else 0.0,
            min_blocks=target.min_blocks,
            floor=min(load.floor_refused, room.floor, key=PRECISIONS.index),
        )
