"""The schedulers that `bench.scheduler` compares.

Ours is the service's own code: `choose` of the gateway, `scale_up` and `scale_down` of the controller. The
others differ in where a request goes, and make a group as soon as a long request comes to an instance that
cannot hold it (Gyges §6.2.4); their groups split by the same rules as ours.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from bench.scheduler import costs
from bench.scheduler.model import Cluster, Request, Unit
from bus.groups import natural
from bus.messages import Demand
from bus.morphs import MorphReport
from bus.policy import Policy
from controller.morphing.decision import MorphDecision
from controller.morphing.groups import Group
from controller.morphing.scaling import hear, scale_down, scale_up
from controller.morphing.track import Freshness, State, observe, sent
from gateway.delivery.dispatch import (
    SPLIT_PATIENCE_S,
    Candidate,
    QueuesAhead,
    Seat,
    TooLong,
    WaitForSplit,
    choose,
    crowded,
    member_for,
    num_to_recall,
)

FRESHNESS = Freshness(stale_s=5.0, gap_s=7.0)


def group_of(unit: Unit) -> Group:
    return Group(
        model="m",
        host="h",
        workers=unit.workers,
        instances=tuple(f"m@{name}" for name in unit.workers),
        epochs=(1,) * len(unit.workers),
        tp=unit.tp,
        tokens_at=costs.TOKENS_AT,
        max_tokens=unit.max_tokens,
        used_tokens=unit.used_tokens,
        own_tokens=tuple(unit.used_by(name) for name in unit.workers),
        longest_tokens=max((one.num_tokens for one in unit.requests), default=0),
        load=len(unit.requests),
        waiting=len(unit.waiting),
    )


class Shapes:
    """Transforms as the controller decides them; without a policy nothing changes."""

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self._state = State()
        self._numbers = itertools.count(1)

    def window(self, cluster: Cluster) -> None:
        if self.policy is None:
            return
        groups = self._groups(cluster)
        self._state, parting = scale_down(self._state, groups, self.policy, cluster.now, FRESHNESS)
        self._carry_out(cluster, parting)

    def demand(self, cluster: Cluster, waiting: Iterable[Request]) -> None:
        tokens = [one.num_tokens for one in waiting]
        if self.policy is None or not tokens:
            return
        demand = Demand(gateway="g", model="m", tokens=max(tokens), count=len(tokens), at_ms=0)
        self._state = hear(self._state, demand, cluster.now)
        groups = self._groups(cluster)
        self._state, merging = scale_up(self._state, groups, self.policy, cluster.now, FRESHNESS)
        self._carry_out(cluster, merging)

    def reshaped(self, cluster: Cluster, morph_id: str, units: Iterable[Unit]) -> None:
        workers = [name for unit in units for name in unit.workers]
        report = MorphReport(
            id=morph_id,
            kind="transform",
            target=f"m@{workers[0]}",
            worker=workers[0],
            epoch=1,
            state="applied",
            reason="modelled",
            started_ms=0,
            workers=workers,
        )
        self._state = observe(self._state, report, cluster.now)

    def _groups(self, cluster: Cluster) -> list[Group]:
        return [group_of(unit) for unit in cluster.units.values() if not unit.is_changing]

    def _carry_out(self, cluster: Cluster, decisions: Iterable[MorphDecision]) -> None:
        for one in decisions:
            morph_id = f"morph-{next(self._numbers)}"
            for name in one.instances:
                self._state = sent(self._state, name, one.lever, morph_id, cluster.now)
            cluster.transform(tuple(one.epochs), one.tp, morph_id)


class Ours:
    """A gateway that sees metrics twice a second and what it sent since.

    Without a policy shapes are static.
    """

    name = "transformation-aware"

    def __init__(self, policy: Policy | None = None) -> None:
        self._shapes = Shapes(policy)
        self._seen: dict[str, tuple[int, float]] = {}  # leader: requests and free tokens in the last window
        self._homes: dict[str, tuple[int, int]] = {}  # worker: requests and tokens of short ones, likewise
        self._since: Counter[str] = Counter()  # by worker: requests sent since
        self._tokens_since: Counter[str] = Counter()
        self._placed_s = 0.0  # when a short one got a place last
        self._stuck_s = -1.0  # a short one found no place then, so the later ones of its size do not either

    def place(self, cluster: Cluster, request: Request) -> Unit | None:
        waiting = cluster.waiting_long
        if request.is_long and waiting and waiting[0] is not request:
            return None
        if not request.is_long and self._stuck_s == cluster.now:
            return None
        candidates = [self._candidate(cluster, unit) for unit in cluster.units.values()]
        before = [one.num_tokens for one in waiting if one.arrives_s < request.arrives_s]
        first = waiting[0].num_tokens if waiting else 0
        ahead = QueuesAhead(long_tokens=first, reserved_tokens=max(before, default=0))
        found = choose(candidates, request.num_tokens, "", ahead)
        since_s = max(request.arrives_s, self._placed_s)
        is_late = isinstance(found, WaitForSplit) and cluster.now >= since_s + SPLIT_PATIENCE_S
        if isinstance(found, WaitForSplit) and is_late:
            found = found.candidate
        if isinstance(found, Candidate) and not self._is_behind(cluster, request, found):
            if not request.is_long and not is_late:
                self._placed_s = cluster.now
            return self._send(cluster, request, found)
        request.is_refused = isinstance(found, TooLong) and self._shapes.policy is None
        if not request.is_long:
            self._stuck_s = cluster.now
        return None

    @staticmethod
    def _is_behind(cluster: Cluster, request: Request, group: Candidate) -> bool:
        """Return whether another short request waits for a seat before this one."""
        if request.is_long or request.waits or not group.can_split:
            return False
        return any(not one.is_long for one in cluster.waiting)

    def _send(self, cluster: Cluster, request: Request, to: Candidate) -> Unit:
        member = member_for(to, request.num_tokens)
        request.home = member.worker
        self._since[request.home] += 1
        self._tokens_since[request.home] += request.num_tokens
        return cluster.units[to.instance]

    def window(self, cluster: Cluster) -> None:
        self._since.clear()
        self._tokens_since.clear()
        self._seen = {name: (len(unit.requests), self._room_of(unit)) for name, unit in cluster.units.items()}
        self._homes = {name: _home_of(unit, name) for unit in cluster.units.values() for name in unit.workers}
        if self._shapes.policy is not None:
            self._recall(cluster)
        self._shapes.window(cluster)
        self._shapes.demand(cluster, cluster.waiting_long)

    def _recall(self, cluster: Cluster) -> None:
        """Recall requests, so that no group has a queue."""
        homes = {name: unit for unit in cluster.units.values() for name in unit.workers}
        candidates = [self._candidate(cluster, unit) for unit in cluster.units.values()]
        first = next((one.num_tokens for one in cluster.waiting_long), 0)
        for seat in crowded(candidates, first):
            unit = homes[seat.worker]
            queued = [one for one in unit.waiting if one.home == seat.worker and not one.is_long]
            count = num_to_recall(seat, [one.prompt for one in queued])
            cluster.recall(unit, queued[len(queued) - count :])

    def reshaped(self, cluster: Cluster, morph_id: str, units: Iterable[Unit]) -> None:
        """Forget what was seen of the units, whose shapes were others."""
        for unit in units:
            self._seen.pop(unit.leader, None)
        self._shapes.reshaped(cluster, morph_id, units)

    def _candidate(self, cluster: Cluster, unit: Unit) -> Candidate:
        """Return a unit as the gateway sees it; members of a group that forms count as one here."""
        count, free = self._seen.get(unit.leader, (len(unit.requests), self._room_of(unit)))
        return Candidate(
            instance=unit.leader,
            worker=unit.leader,
            epoch=1,
            max_tokens=unit.max_tokens,
            num_measured=count,
            num_own=len(unit.requests),
            num_own_since=sum(self._since[name] for name in unit.workers),
            tp=unit.tp,
            low_tokens=costs.TOKENS_AT[1],
            free_tokens=free - sum(self._tokens_since[name] for name in unit.workers),
            stays=self._shapes.policy is None or any(one.is_long for one in unit.requests),
            can_split=self._shapes.policy is not None,
            seats=tuple(self._seat(unit, name) for name in unit.workers if len(unit.workers) > 1),
        )

    def _seat(self, unit: Unit, name: str) -> Seat:
        count, tokens = self._homes.get(name, (0, 0))
        return Seat(
            instance=unit.leader,
            worker=name,
            epoch=1,
            num_measured=count,
            num_own=_home_of(unit, name)[0],
            num_own_since=self._since[name],
            short_tokens=tokens + self._tokens_since[name],
            home_tokens=costs.TOKENS_AT[1],
        )

    @staticmethod
    def _room_of(unit: Unit) -> float:
        return unit.max_tokens - unit.used_tokens - sum(one.prompt for one in unit.waiting)


def _home_of(unit: Unit, name: str) -> tuple[int, int]:
    """Return the number of requests of one worker, and the tokens of the short ones among them."""
    there = [one for one in unit.requests if one.home == name]
    return len(there), sum(one.prompt + one.generated for one in there if not one.is_long)


class Unaware:
    """A scheduler that knows nothing of transformations: a request goes where `pick` says.

    A long request at an instance that cannot hold it makes that a group with its neighbours, and waits for
    it.
    """

    name = ""

    def __init__(self, policy: Policy) -> None:
        self._shapes = Shapes(policy)
        self._made: dict[Request, tuple[str, ...]] = {}  # for whom these come together
        self._numbers = itertools.count(1)

    def pick(self, cluster: Cluster, units: list[Unit]) -> Unit:
        raise NotImplementedError

    def place(self, cluster: Cluster, request: Request) -> Unit | None:
        if request in self._made:
            return self._arrived(cluster, request)
        units = sorted(cluster.units.values(), key=lambda unit: natural(unit.leader))
        unit = self.pick(cluster, units)
        if request.num_tokens <= unit.max_tokens:
            request.home = unit.emptiest
            return unit
        workers = _neighbours(unit, request.num_tokens)
        self._made[request] = workers
        return self._arrived(cluster, request)

    def _arrived(self, cluster: Cluster, request: Request) -> Unit | None:
        """Return the group once it has formed; order it if that is possible now."""
        workers = self._made[request]
        there = [unit for unit in cluster.units.values() if set(unit.workers) & set(workers)]
        if any(unit.is_changing for unit in there):
            return None
        if len(there) == 1 and there[0].max_tokens >= request.num_tokens:
            del self._made[request]
            request.home = there[0].emptiest
            return there[0]
        cluster.transform(workers, len(workers), f"unaware-{next(self._numbers)}")
        return None

    def window(self, cluster: Cluster) -> None:
        self._shapes.window(cluster)

    def reshaped(self, cluster: Cluster, morph_id: str, units: Iterable[Unit]) -> None:
        self._shapes.reshaped(cluster, morph_id, units)


class RoundRobin(Unaware):
    """Picks one instance after the other, in the order of their workers."""

    name = "round-robin"
    _last = -1

    def pick(self, cluster: Cluster, units: list[Unit]) -> Unit:
        after = [unit for unit in units if int(unit.leader[1:]) > self._last]
        chosen = (after or units)[0]
        self._last = int(chosen.leader[1:])
        return chosen


class LeastLoad(Unaware):
    """Picks the instance with the fewest tokens left to process."""

    name = "least-load-first"

    def pick(self, cluster: Cluster, units: list[Unit]) -> Unit:
        return min(units, key=lambda unit: (unit.outstanding_tokens, natural(unit.leader)))


def _neighbours(unit: Unit, num_tokens: int) -> tuple[str, ...]:
    tp = next(tp for tp, tokens in sorted(costs.TOKENS_AT.items()) if tokens >= num_tokens)
    first = int(unit.leader[1:]) // tp * tp
    return tuple(f"w{i}" for i in range(first, first + tp))
