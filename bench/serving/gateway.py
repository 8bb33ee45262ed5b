"""A gateway that knows nothing of transformations: the service's own, except for where requests go.

    INSTAR_GATEWAY__PORT=... BENCH_PICK=round-robin python -m bench.serving.gateway

Gyges §6.2.4 compares with round-robin and least-load-first. A request goes to the instance that is next, or
has the least to do. A long request at an instance that cannot hold it makes that a group with its neighbours,
at once, through the admin API, and waits for it. All else is the service: queues, streams, replays; groups
split by the controller's rules.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx

from bus.groups import natural
from bus.messages import InstanceCard
from bus.service import run
from gateway import service, state
from gateway.delivery.cluster import Cluster, ReadyInstance
from gateway.delivery.dispatch import Candidate, Wait
from gateway.delivery.placement import Placement
from gateway.delivery.request import RequestState
from gateway.delivery.table import RequestTable
from gateway.errors import too_long

ORDER_TIMEOUT_S: Final = 60.0

# Of instances, and of the tokens left to do at workers.
Pick = Callable[[Sequence[ReadyInstance], Mapping[str, int]], ReadyInstance]


class RoundRobinPick:
    """Picks one instance after the other, in the order of their workers."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()

    def __call__(self, instances: Sequence[ReadyInstance], _: Mapping[str, int]) -> ReadyInstance:
        ordered = sorted(instances, key=lambda one: natural(one.worker))
        chosen = next((one for one in ordered if natural(one.worker) > self._last), ordered[0])
        self._last = natural(chosen.worker)
        return chosen


def least_load(instances: Sequence[ReadyInstance], left_at: Mapping[str, int]) -> ReadyInstance:
    """Return the instance with the fewest tokens left to process, and the first by name of equals."""
    return min(
        instances,
        key=lambda one: (sum(left_at.get(name, 0) for name in workers_of(one)), natural(one.worker)),
    )


PICKS: Final[dict[str, Callable[[], Pick]]] = {
    "round-robin": RoundRobinPick,
    "least-load-first": lambda: least_load,
}


@dataclass(frozen=True, slots=True)
class LongRequestGroup:
    """The workers that form a group for a long request."""

    workers: tuple[str, ...]

    def holding(self, instances: Iterable[ReadyInstance]) -> ReadyInstance | None:
        """Return the instance of all these workers, if it exists."""
        return next((one for one in instances if set(workers_of(one)) >= set(self.workers)), None)


class Orders:
    """Orders groups through the admin API of this gateway, one at a time for the same workers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._sent: dict[LongRequestGroup, asyncio.Task[None]] = {}

    def send(self, group: LongRequestGroup) -> None:
        if group not in self._sent:
            task = self._sent[group] = asyncio.get_running_loop().create_task(self._carry_out(group))
            task.add_done_callback(lambda _: self._sent.pop(group))

    async def _carry_out(self, group: LongRequestGroup) -> None:
        """Order the group. The cards show if it formed; a refused order is sent again."""
        body = {"workers": list(group.workers), "tp": len(group.workers)}
        url = f"{self._url}/admin/instances/transform"
        async with httpx.AsyncClient(timeout=ORDER_TIMEOUT_S) as client:
            await client.post(url, params={"wait": "true"}, json=body)


class UnawarePlacement(Placement):
    """A placement that sends requests where `pick` says."""

    def __init__(
        self, cluster: Cluster, table: RequestTable, *args: Any, pick: Pick, orders: Orders, **named: Any
    ) -> None:
        super().__init__(cluster, table, *args, **named)
        self._pick = pick
        self._orders = orders
        self._made: dict[str, LongRequestGroup] = {}  # request of the group

    def find(self, state: RequestState) -> Candidate | Wait | None:
        instances = self._cluster.ready(state.request.model)
        if not instances:
            return None
        now = self._clock()
        if state.request.num_tokens > (limit := self._cluster.longest_tokens(state.request.model, now)):
            raise too_long(len(state.request.prompt_token_ids), limit, state.request.sampling.max_tokens)
        if state.id in self._made:
            return self._arrived(state, instances, now)
        chosen = self._pick(instances, tokens_left(self._table))
        if state.request.num_tokens <= self._cluster.max_tokens(chosen, now):
            return self._candidate_of(state, chosen)
        self._made[state.id] = neighbours(chosen, state.request.num_tokens, list(self._cluster.workers))
        return self._arrived(state, instances, now)

    def to_recall(self, _: str) -> list[RequestState]:
        """Return nothing: requests stay where they were sent."""
        return []

    def _arrived(
        self, state: RequestState, instances: Sequence[ReadyInstance], now: float
    ) -> Candidate | None:
        """Return the group once it has formed; order it until then."""
        group = self._made[state.id]
        there = group.holding(instances)
        if there is None or self._cluster.max_tokens(there, now) < state.request.num_tokens:
            self._orders.send(group)
            return None
        del self._made[state.id]
        return self._candidate_of(state, there)

    def _candidate_of(self, state: RequestState, ready: ReadyInstance) -> Candidate | None:
        there = self.candidates(state.request.model)
        return next((one for one in there if one.instance == ready.card.id), None)


def tokens_left(table: RequestTable) -> dict[str, int]:
    """Return the tokens of prompts and outputs that are not processed yet, by worker."""
    left: dict[str, int] = {}
    for target, place in table.assigned.items():
        tokens = sum(_left_of(state) for state in place.requests.values())
        left[target.worker] = left.get(target.worker, 0) + tokens
    return left


def _left_of(state: RequestState) -> int:
    through = len(state.request.prompt_token_ids) + len(state.received) if state.received else 0
    return state.request.num_tokens - through


def neighbours(chosen: ReadyInstance, num_tokens: int, workers: Iterable[str]) -> LongRequestGroup:
    """Return the workers of the lowest degree that holds the tokens, from a multiple of that degree on."""
    tp = lowest_degree(chosen.card, num_tokens)
    ordered = sorted(workers, key=natural)
    first = ordered.index(chosen.worker) // tp * tp
    return LongRequestGroup(tuple(ordered[first : first + tp]))


def lowest_degree(card: InstanceCard, num_tokens: int) -> int:
    return min(tp for tp, tokens in card.tokens_at.items() if tokens >= num_tokens)


def workers_of(ready: ReadyInstance) -> tuple[str, ...]:
    return tuple(ready.card.workers) or (ready.worker,)


if __name__ == "__main__":
    orders = Orders(f"http://127.0.0.1:{os.environ['INSTAR_GATEWAY__PORT']}")
    pick = PICKS[os.environ["BENCH_PICK"]]()
    vars(state)["Placement"] = partial(
        UnawarePlacement, pick=pick, orders=orders
    )  # its parts are put together there
    sys.exit(run("gateway", service.main))
