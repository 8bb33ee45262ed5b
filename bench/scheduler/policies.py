"""The dispatchers that `bench.scheduler` compares with the service's own.

They differ in where a request goes, and make a group as soon as a long request comes to an instance that
cannot hold it (Gyges §6.2.4). Their groups part by the same rules as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.scheduler import costs
from bus.policy import Policy
from instar.replay.outcomes import RequestOutcome
from instar.replay.schemas import Arrival
from instar.simulate.cluster import Record
from instar.simulate.dispatcher import Dispatcher, ServedCluster, tokens_of
from instar.simulate.gateway import ActiveInstance
from instar.simulate.grouped import GroupedCluster
from instar.simulate.groups import SimulatedGroup, most_tokens

Pick = Callable[[Sequence[SimulatedGroup]], SimulatedGroup]


class Unaware:
    """A dispatcher that knows nothing of transformations: a request goes where `pick` says.

    A long request at an instance that cannot hold it makes that a group with its neighbours, and waits for
    it.
    """

    def __init__(self, pick: Pick) -> None:
        self._pick = pick
        self._made: dict[int, tuple[str, ...]] = {}  # by request: the workers that come together for it

    def place(self, cluster: ServedCluster, outcome: RequestOutcome) -> ActiveInstance | None:
        if outcome.number not in self._made:
            group = self._pick([cluster.groups[number] for number in sorted(cluster.groups)])
            if tokens_of(outcome) <= group.max_tokens:
                return emptiest(group)
            self._made[outcome.number] = _neighbours(group, tokens_of(outcome))
        return self._arrived(cluster, outcome)

    def _arrived(self, cluster: ServedCluster, outcome: RequestOutcome) -> ActiveInstance | None:
        """Return a member of the group once it has formed; order it if that is possible now."""
        workers = self._made[outcome.number]
        there = [
            group
            for group in cluster.groups.values()
            if any(one.morphs.worker in workers for one in group.members)
        ]
        if any(group.is_changing for group in there):
            return None
        if len(there) == 1 and there[0].max_tokens >= tokens_of(outcome):
            del self._made[outcome.number]
            return emptiest(there[0])
        cluster.order(workers, len(workers))
        return None

    def window(self, cluster: ServedCluster) -> None:
        pass

    def demand(self, cluster: ServedCluster) -> list[int]:
        return []


def round_robin() -> Unaware:
    """Return one that picks an instance after the other, in the order of their workers."""
    last = -1

    def pick(groups: Sequence[SimulatedGroup]) -> SimulatedGroup:
        nonlocal last
        after = [group for group in groups if group.numbers[0] > last]
        chosen = (after or groups)[0]
        last = chosen.numbers[0]
        return chosen

    return Unaware(pick)


def least_load_first() -> Unaware:
    """Return one that picks the instance with the fewest tokens left to process."""
    return Unaware(lambda groups: min(groups, key=_outstanding_tokens))


def emptiest(group: SimulatedGroup) -> ActiveInstance:
    """Return the member with the fewest requests, and the first of equals."""
    return min(group.members, key=lambda one: one.num_own)


def _outstanding_tokens(group: SimulatedGroup) -> int:
    return sum(most_tokens(seq) - seq.num_computed_tokens for seq in group.sequences)


def _neighbours(group: SimulatedGroup, num_tokens: int) -> tuple[str, ...]:
    tp = next(tp for tp, tokens in sorted(costs.TOKENS_AT.items()) if tokens >= num_tokens)
    first = group.numbers[0] // tp * tp
    return tuple(f"w{i}" for i in range(first, first + tp))


@dataclass(slots=True)
class Modelled:
    """A run of a cluster. rates: a sample in each window: when, tokens so far, groups of several workers."""

    cluster: GroupedCluster
    seconds: float
    rates: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def record(self) -> Record:
        return self.cluster.record

    @property
    def num_tokens(self) -> int:
        """Tokens got through, once each."""
        recomputed = sum(one.instance.scheduler.num_recomputed for one in self.cluster.instances.values())
        return self.record.tally.computed - recomputed

    def transforms(self, lever: str) -> int:
        """Return how many changes of degree were applied."""
        return self.record.levers[lever, "applied"]


def modelled(
    dispatcher: Dispatcher | None,
    arrivals: Sequence[Arrival],
    seconds: float,
    degrees: Sequence[int] = (1,) * 8,
    *,
    is_static: bool = False,
) -> Modelled:
    """Run a cluster of the given degrees at first for so long. dispatcher: None for the service's own."""
    policy = None if is_static else Policy()
    cluster = GroupedCluster(
        costs.calibration(),
        sum(degrees),
        policy,
        degrees=degrees,
        dispatcher=dispatcher,
        on_window=lambda at_s: run.rates.append((at_s, run.num_tokens, _num_groups(cluster))),
    )
    run = Modelled(cluster, seconds)
    cluster.run(arrivals, seconds - max(one.at_s for one in arrivals))
    return run


def _num_groups(cluster: GroupedCluster) -> int:
    return sum(len(group.members) > 1 for group in cluster.groups.values())
