"""A request that no instance holds and a group could: it waits, says so, and is sent when the shape is there.
The gateway's core with cards by hand; then the gateway and the controller as they run, over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bus.client import Bus, BusUnavailable
from bus.messages import Demand, Event, LayerShape, Metrics, PageCounts, RejectReason, Submit, WorkerTelemetry
from bus.morphs import MorphReport, Transform
from bus.policy import Policy
from bus.settings import ControllerSettings, MonitorSettings, Settings
from controller import service as controller_service
from gateway.delivery.dispatch import SPLIT_PATIENCE_S, Candidate
from gateway.delivery.request import RequestState, RetryReason
from gateway.errors import ApiError
from monitor import service as monitor_service
from tests.support import service_loop
from tests.support.bus_samples import telemetry
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_core import Core, Ear
from tests.support.gateway_harness import ANSWER, BODY, Gate, metrics_of, running
from tests.support.parallelism_groups import metrics_for, worker_card

pytest_plugins = ["tests.support.gateway_fixtures"]

FOUR = ("w0", "w1", "w2", "w3")
KV_CAPACITY = RejectReason.KV_CAPACITY

# --------------------------------------------------------------------------- the core


class Cluster(Core):
    """Four workers of one host: 100 tokens each, 400 in pairs, 1200 together."""

    def __init__(self, *names: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.group()
        self.cards = {name: worker_card(name) for name in names or FOUR}
        self.poll()

    def group(self, *members: str) -> None:
        """Their cards tell of a group; none: of nobody's."""
        for name in members:
            self.cards[name] = worker_card(name, members)

    def look(self, used: int = 0, longest: int = 0) -> None:
        """A poll, then new metrics of everybody, then another."""
        self.poll()
        self.report(metrics_for(*self.cards.values(), used=used, longest=longest))
        self.poll()

    def ask(self, name: str, num_tokens: int) -> RequestState:
        state = self.state(name, max_tokens=num_tokens - 1)
        self.delivery.submit(state)
        return state

    def candidates(self) -> list[Candidate]:
        return self.gateway.placement.candidates("m")

    def told(self) -> list[tuple[int, int]]:
        return [(one.tokens, one.count) for one in self.delivery.demands("g")]


def workers_of(states: list[RequestState]) -> list[str | None]:
    return [state.target.worker if state.target else None for state in states]


def test_a_long_request_waits_for_a_group_and_goes_there() -> None:
    core = Cluster()
    state = core.ask("long", 1000)
    assert state.target is None and core.told() == [(1000, 1)]
    assert core.gateway.has_demand.is_set()
    core.group(*FOUR)
    core.poll()
    assert state.target is not None and state.target.worker == "w0"
    assert core.told() == []
    core.gateway.check_integrity()


def test_a_group_is_believed_to_be_large_before_its_first_metrics() -> None:
    core = Cluster()
    core.look()
    state = core.ask("long", 1000)
    core.group(*FOUR)
    core.poll()
    assert state.target is not None


def test_a_group_that_parted_is_not_believed_its_old_metrics() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.look()
    core.cards = {name: worker_card(name) for name in FOUR}
    core.poll()
    assert core.ask("long", 1000).target is None


def test_a_request_that_no_shape_holds_is_refused_at_once_with_what_one_could() -> None:
    core = Cluster()
    with pytest.raises(ApiError, match="context holds 1200 tokens") as refusal:
        core.ask("huge", 1201)
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    core.cluster.max_tp = 2
    with pytest.raises(ApiError, match="holds 400 tokens"):
        core.ask("long", 401)
    assert core.told() == []


def test_workers_that_went_a_moment_ago_still_count() -> None:
    core = Cluster()
    state = core.ask("long", 1000)
    del core.cards["w3"]
    core.poll()
    assert isinstance(state.sink, Ear) and state.sink.error is None
    core.poll(after_s=11)
    assert state.sink.error is not None and "holds 400 tokens" in state.sink.error.message


def test_long_requests_go_first_come_first_served() -> None:
    core = Cluster()
    first, second, third = core.ask("a", 1000), core.ask("b", 300), core.ask("c", 150)
    assert core.told() == [(1000, 3)]
    core.group("w0", "w1")
    core.poll()
    assert [one.target for one in (first, second, third)] == [None, None, None]
    core.group(*FOUR)
    core.poll()
    assert first.target is not None and second.target is None  # no room for both: 1200 hold 1000
    core.gateway.check_integrity()


def test_short_requests_do_not_wait_behind_long_ones() -> None:
    core = Cluster()
    core.ask("long", 1000)
    assert core.ask("short", 50).target is not None


def test_a_long_request_waits_for_room_in_a_full_group() -> None:
    core = Cluster("w0", "w1", "w2", "w3", "w4")
    core.group(*FOUR)
    core.look(used=900, longest=900)
    state = core.ask("long", 1000)
    assert state.target is None and core.told() == [(1000, 1)]
    core.look(used=100, longest=100)
    assert state.target is not None


def test_a_short_request_keeps_away_from_a_group_that_is_to_part() -> None:
    core = Cluster("w0", "w1", "w2", "w3", "w4")
    core.group(*FOUR)
    core.look()
    core.report(metrics_for(core.cards["w0"], *(core.cards[name] for name in FOUR[1:])))
    states = [core.ask(str(i), 50) for i in range(3)]
    assert {state.target.worker for state in states if state.target} == {"w4"}


def test_a_short_request_waits_for_the_only_group_to_part_and_at_last_keeps_it() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.look(used=240)
    state = core.ask("short", 50)
    assert state.target is None and core.told() == []
    core.cards = {name: worker_card(name) for name in FOUR}
    core.poll()
    assert state.target is not None
    core.group(*FOUR)
    core.look(used=240)
    second = core.ask("second", 50)
    core.now += SPLIT_PATIENCE_S
    core.look(used=240)
    assert second.target is not None
    core.gateway.check_integrity()


def test_the_requests_of_a_group_go_to_all_its_members() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.look(used=0, longest=1000)
    states = [core.ask(str(i), 20) for i in range(8)]
    assert workers_of(states) == [*FOUR, *FOUR]
    assert core.cluster.ready("m")[0].card.workers == list(FOUR)
    (group,) = core.candidates()
    assert (group.num_own, group.free_tokens) == (8, 1200 - 8 * 20)
    core.report(metrics_for(*core.cards.values(), used=160, longest=1000, running=2))
    core.delivery.table.on_metrics()
    (group,) = core.candidates()
    assert (group.num_measured, group.free_tokens, group.num_own_since) == (8, 1040, 0)
    core.gateway.check_integrity()


def test_a_member_whose_card_does_not_tell_of_the_group_gets_no_request_of_it() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.cards["w1"] = replace(core.cards["w1"], state="draining")
    core.cards["w2"] = worker_card("w2", ("w2", "w3"))  # a message behind
    del core.cards["w3"]
    core.look(longest=1000)
    assert [[seat.worker for seat in one.seats] for one in core.candidates() if one.tp == 4] == [["w0"]]
    core.cards["w2"] = worker_card("w2", FOUR)
    core.poll()
    assert [[seat.worker for seat in one.seats] for one in core.candidates()] == [["w0", "w2"]]


def test_a_members_death_costs_its_share_of_the_requests() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.look(longest=1000)
    states = [core.ask(str(i), 20) for i in range(8)]
    for state in states:
        core.sent(state)
    core.losses.on_worker_gone("w2", 1, RetryReason.WORKER_LOST)
    assert [state.strikes for state in states] == [0, 0, 1, 0] * 2
    assert {state.attempt for state in states} == {1, 2} and "w2" not in workers_of(states)
    core.gateway.check_integrity()


def test_short_requests_beside_a_long_one_are_no_more_than_the_parts_will_hold() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.look()
    long = core.ask("long", 600)
    core.sent(long)
    core.look()
    core.delivery.table.on_metrics()
    states = [core.ask(str(i), 40) for i in range(9)]
    assert workers_of(states) == ["w1", "w2", "w3", "w0", "w1", "w2", "w3", "w0", None]
    core.now += 1
    late = core.ask("late", 10)  # though it would fit: others came before
    assert late.target is None
    core.delivery.table.on_metrics()
    core.look(used=240)
    assert workers_of([states[8], late]) == ["w1", "w2"]
    core.gateway.check_integrity()


def test_the_room_at_home_is_of_the_cache_and_not_of_a_context_that_ends_before_it() -> None:
    core = Cluster()
    core.cards = {name: worker_card(name, FOUR, max_model_len=150) for name in FOUR}
    core.look()
    core.sent(core.ask("long", 140))
    core.look()
    core.delivery.table.on_metrics()
    assert workers_of([core.ask(str(i), 40) for i in range(9)]).count(None) == 1


def test_who_waits_for_a_group_with_its_precision_holds_nobody_up_that_goes_elsewhere() -> None:
    core = Cluster("w0", "w1", "w2")
    core.group("w0", "w1")
    core.poll()
    both = metrics_for(core.cards["w0"], core.cards["w1"], used=160)  # 80 each of the 100 to take along
    alone = metrics_for(core.cards["w2"])
    (coarse,) = alone.instances
    coarse = replace(coarse, last=replace(coarse.last, layers=[LayerShape(ffn="int8")]))
    core.report(
        replace(both, workers=both.workers + alone.workers, instances=[*both.instances, coarse]),
    )
    exact = core.state("exact", min_precision="full", max_tokens=39)
    core.delivery.submit(exact)
    core.now += 1
    assert workers_of([exact, core.ask("any", 40)]) == [None, "w2"]
    core.now += SPLIT_PATIENCE_S - 1  # and who passes it does not make it wait for longer
    core.cluster.metrics_at = core.now
    core.delivery.attempts.place_waiting()
    assert workers_of([exact]) == ["w0"]
    core.gateway.check_integrity()


def test_a_request_that_waits_for_a_precision_asks_for_it_until_it_is_there() -> None:
    core = Cluster("w0")
    coarse = metrics_for(core.cards["w0"])
    (one,) = coarse.instances
    core.report(
        replace(coarse, instances=[replace(one, last=replace(one.last, layers=[LayerShape(ffn="int4")]))])
    )
    core.delivery.submit(core.state("a", min_precision="int8", max_tokens=39))
    core.delivery.submit(core.state("b", min_precision="full", max_tokens=39))
    assert core.gateway.has_demand.is_set()
    (demand,) = core.delivery.demands("g")
    assert (demand.model, demand.count, demand.tokens, demand.floor) == ("m", 0, 0, "full")
    core.look()
    assert core.delivery.demands("g") == []
    core.gateway.check_integrity()


def test_no_queue_is_brought_into_a_group_that_is_to_be_made() -> None:
    """Else the group would take it all at once, and not part before that has ended."""
    core = Cluster("w0", "w1")
    running = [core.ask(name, 90) for name in ("a", "b")]
    queued = [core.ask(name, 50) for name in ("c", "d")]
    for state in running:
        core.sent(state)
    for state in queued:
        core.sent(state, begun=False)
    assert workers_of([*running, *queued]) == ["w0", "w1", "w0", "w1"]
    core.written()
    core.now += 1
    long = core.ask("long", 400)
    core.now += 1
    later = core.ask("later", 50)
    core.poll()
    assert workers_of([*running, *queued, later, long]) == ["w0", "w1", None, None, None, None]
    assert core.cancels() == [(["c"], 1), (["d"], 1)]
    assert [one.id for one in core.delivery.table.waiting.values()] == ["c", "d", "long", "later"]
    core.deliver(running[0], [], finish="length")
    core.poll()
    assert workers_of([*queued, later]) == ["w0", "w0", None]  # first come, first served
    core.gateway.check_integrity()
    core.cluster.can_split = False  # nothing forms by itself: why wait
    core.poll()
    assert None not in workers_of([*queued, later])
    assert (queued[0].attempt, queued[0].strikes, queued[0].deadline) == (
        2,
        0,
        queued[0].request.arrived + 60,
    )


def test_what_waits_at_a_member_beyond_what_it_can_take_along_comes_back() -> None:
    core = Cluster()
    states = [core.ask(str(i), 30) for i in range(20)]
    for i, state in enumerate(states):
        core.sent(state, begun=i < 4)
    core.group(*FOUR)
    core.poll()  # at each 1 token of one that runs, 120 of four that wait: 100 it could take along
    assert [one.id for one in core.delivery.table.for_parts] == ["16", "17", "18", "19"]
    assert workers_of(states[:16]) == [*FOUR] * 4 and workers_of(states[16:]) == [None] * 4
    core.gateway.check_integrity()


def test_no_more_come_back_than_are_too_many_though_the_last_metrics_still_count_them() -> None:
    core = Cluster("w0", "w1")
    core.cluster.can_split = False
    core.group("w0", "w1")
    core.look()
    states = [core.state(str(i), prompt=[1] * 29, max_tokens=1) for i in range(12)]
    for state in states:
        core.delivery.submit(state)
        core.sent(state, begun=False)
    told = metrics_for(*core.cards.values())
    queued = [
        replace(one, last=replace(one.last, waiting=6, waiting_tokens=6 * 29)) for one in told.instances
    ]
    core.report(replace(told, instances=queued))
    core.delivery.table.on_metrics()
    core.cluster.can_split = True
    attempts = [list[int](), list[int]()]
    for each in attempts:
        core.delivery.attempts.place_waiting()
        each += [i for i, state in enumerate(states) if state.was_recalled]
    assert attempts[0] == attempts[1] == [6, 7, 8, 9, 10, 11]
    core.gateway.check_integrity()


def test_a_last_chance_is_had_alone_in_the_whole_group() -> None:
    """All members make the step that kills one."""
    core = Cluster(max_attempts=2)
    core.group(*FOUR)
    core.look(longest=1000)
    first, second = core.ask("first", 20), core.ask("second", 20)
    for state in (first, second):
        core.sent(state)
        core.delivery.attempts.replay(state, RetryReason.WORKER_LOST, "test")
    assert first.target is not None and second.target is None
    core.sent(first)
    core.deliver(first, [], finish="length")
    core.poll()
    assert second.target is not None


def test_a_request_that_comes_back_keeps_its_place_by_arrival() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.poll()
    state = core.ask("first", 1000)
    core.sent(state, begun=False)
    core.cards = {name: worker_card(name) for name in FOUR}  # it parts meanwhile
    core.poll()
    later = core.ask("later", 1100)
    core.deliver(state, [], finish="error", error="63 blocks are missing", reject_reason=KV_CAPACITY)
    assert [one.id for one in core.delivery.table.for_room] == ["first", "later"]
    core.group(*FOUR)
    core.poll()
    assert state.target is not None and later.target is None
    core.gateway.check_integrity()


def test_where_nothing_parts_by_itself_a_group_takes_short_requests_at_once() -> None:
    core = Cluster()
    core.cluster.can_split = False
    core.group(*FOUR)
    core.look(used=200)
    assert core.ask("short", 50).target is not None


def test_where_there_are_only_groups_requests_go_in_the_order_they_came() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.look(used=900, longest=900)
    core.now += 1
    long = core.ask("long", 1000)
    core.now += 1
    short = core.ask("short", 50)
    assert (long.target, short.target) == (None, None) and core.told() == [(1000, 1)]
    core.look(used=100, longest=900)
    assert long.target is not None and short.target is not None
    core.gateway.check_integrity()


def test_a_deadline_in_the_wait_for_a_group_says_so() -> None:
    core = Cluster()
    state = core.ask("long", 1000)
    core.now += 61
    core.losses.tick()
    assert isinstance(state.sink, Ear) and state.sink.error is not None
    assert (state.sink.error.status, state.sink.error.code) == (504, "deadline_exceeded")
    assert "no instance could hold its 1000 tokens" in state.sink.error.message
    assert core.told() == []


def test_a_worker_that_finds_its_cache_too_small_gives_the_request_back() -> None:
    core = Cluster()
    core.group(*FOUR)
    core.poll()
    state = core.ask("long", 1000)
    core.sent(state, begun=False)
    core.cards = {name: worker_card(name) for name in FOUR}  # it parted meanwhile
    core.deliver(state, [], finish="error", error="63 blocks are missing", reject_reason=KV_CAPACITY)
    assert (state.target, state.strikes, core.told()) == (None, 0, [(1000, 1)])
    core.poll()
    assert state.target is None
    core.group(*FOUR)
    core.poll()
    assert state.target is not None and state.attempt == 2
    core.gateway.check_integrity()


def test_a_request_that_every_worker_gives_back_ends() -> None:
    core = Cluster(max_attempts=3)
    core.group(*FOUR)
    core.poll()
    state = core.ask("long", 1000)
    for _ in range(3):
        core.sent(state, begun=False)
        core.deliver(state, [], finish="error", error="63 blocks are missing", reject_reason=KV_CAPACITY)
        core.poll()
    assert isinstance(state.sink, Ear) and state.sink.error is not None
    assert state.sink.error.message == (
        "no worker could hold it: 63 blocks are missing. The longest that this cluster holds is 1200 tokens"
    )


# --------------------------------------------------------------------------- the gateway as it runs


TOKENS_AT = {1: 64, 2: 256}
LONG: dict[str, Any] = BODY | {"max_tokens": 120}


@pytest.fixture
async def pair(redis_settings: Any, folder: Path) -> AsyncIterator[Gate]:
    """Two workers that hold 64 tokens each, and 256 together."""
    async with running(redis_settings, folder, workers=0, queue_timeout_s=1.5) as gate:
        for name in ("w0", "w1"):
            worker = FakeWorker(gate.bus, folder, gate.says(ANSWER), worker=name)
            worker.tokens_at = TOKENS_AT
            gate.workers.append(await worker.start())
            await gate.bus.event("worker_joined", name, "test")
        await gate.wait_ready()
        await gate.bus.publish(gate.bus.names.metrics, both(gate.workers, kv_blocks=4))
        await asyncio.sleep(0.1)
        yield gate


def both(workers: list[FakeWorker], **numbers: int) -> Metrics:
    told = [metrics_of(worker, **numbers) for worker in workers]
    return replace(
        told[0],
        workers=[one for metrics in told for one in metrics.workers],
        instances=[one for metrics in told for one in metrics.instances],
    )


async def demands_of(bus: Bus) -> list[Demand]:
    async with bus.reader(bus.names.demand, Demand, start="0") as reader:
        return [message for _, message in await reader.read()]


async def test_the_gateway_asks_again_and_again_and_answers_when_the_group_is_there(pair: Gate) -> None:
    async with pair.client() as client:
        asked = asyncio.create_task(client.completions.create(**LONG))
        async with asyncio.timeout(2.5):
            while len(told := await demands_of(pair.bus)) < 2:
                await asyncio.sleep(0.05)
        assert {(one.model, one.tokens, one.count) for one in told} == {("demo", 3 + 120, 1)}
        for worker in reversed(pair.workers):
            await worker.join("w0", "w1")
        assert (await asked).choices[0].text == ANSWER
    assert [len(worker.submits) for worker in pair.workers] == [1, 0]
    count = len(await demands_of(pair.bus))
    await asyncio.sleep(0.8)
    assert len(await demands_of(pair.bus)) == count  # nothing waits any more


async def test_the_gateway_refuses_what_no_shape_holds_and_times_out_what_none_takes(pair: Gate) -> None:
    async with pair.http() as http:
        refused = await http.post("/v1/completions", json=LONG | {"max_tokens": 260})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "holds 256 tokens" in refused.json()["error"]["message"]
        late = await http.post("/v1/completions", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "no group that can was made" in late.json()["error"]["message"]


async def test_an_answer_whose_length_was_not_asked_for_forms_no_group(pair: Gate) -> None:
    async with pair.client() as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        await client.chat.completions.create(**body)
    submits: list[Submit] = [submit for worker in pair.workers for submit in worker.submits]
    assert len(submits[0].prompt_token_ids) + submits[0].sampling.max_tokens == 64
    assert await demands_of(pair.bus) == []


# --------------------------------------------------------------------------- the controller as it runs


FAST = Settings(
    monitor=MonitorSettings(interval_s=0.05, idle_interval_s=0.1, window_s=1.0, smoothing=1.0, stale_s=0.5),
    controller=ControllerSettings(interval_s=0.1, grace_s=0.3),
)
EAGER = Policy(revision=1, windows=3, cooldown_s=0.6)
controlling = partial(service_loop.running, controller_service.main, FAST)
monitoring = partial(service_loop.running, monitor_service.main, FAST)


class Host:
    """Two workers with a script instead of a load; `longest` is that of their requests."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.workers = [FakeWorker(bus, folder, lambda _: [], worker=name) for name in ("w0", "w1")]
        for worker in self.workers:
            worker.tokens_at = TOKENS_AT
        self.longest = 0

    @property
    def morphs(self) -> list[Any]:
        return [morph for worker in self.workers for morph in worker.morphs]

    async def report(self) -> None:
        while True:
            with suppress(BusUnavailable):
                await self.bus.publish(self.bus.names.telemetry, *map(self._telemetry, self.workers))
            await asyncio.sleep(0.03)

    def _telemetry(self, worker: FakeWorker) -> WorkerTelemetry:
        one = telemetry(worker.id, worker.epoch)
        blocks = TOKENS_AT[len(worker.group)] // 16
        instance = replace(
            one.instances[0],
            id=worker.instance,
            kv_blocks=blocks,
            kv_used=0,
            waiting=0,
            longest_tokens=self.longest,
        )
        return replace(one, instances=[instance], pages=PageCounts(budget=250, weights=40, kv=200, free=10))

    async def demand(self, tokens: int = 123, times: int = 3) -> None:
        for _ in range(times):
            told = Demand(gateway="g", model="demo", tokens=tokens, count=1, at_ms=0)
            await self.bus.publish(self.bus.names.demand, told)
            await asyncio.sleep(0.1)

    async def join(self, *group: str) -> None:
        for worker in self.workers:
            await worker.join(*(group or (worker.id,)))

    async def told(self, count: int = 1) -> list[Any]:
        async with asyncio.timeout(5):
            while len(self.morphs) < count:
                await asyncio.sleep(0.01)
        return self.morphs


@pytest.fixture
async def host(bus: Bus, tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(bus, tmp_path)
    for worker in host.workers:
        await worker.start()
    reports = asyncio.create_task(host.report())
    try:
        async with monitoring(bus), controlling(bus):
            await asyncio.sleep(0.3)
            yield host
    finally:
        reports.cancel()
        for worker in host.workers:
            await worker.die()


async def test_a_demand_becomes_a_transform_and_the_event_says_why(bus: Bus, host: Host) -> None:
    await bus.write_policy(EAGER)
    await host.demand(times=2)
    assert host.morphs == []
    await host.demand(times=1)
    (transform,) = await host.told()
    epochs = {worker.id: worker.epoch for worker in host.workers}
    assert isinstance(transform, Transform)
    assert (transform.instance, transform.epoch) == ("demo@w0", epochs["w0"])
    assert (transform.workers, transform.epochs, transform.tp) == (["w0", "w1"], epochs, 2)
    (decided,) = await decided_of(bus)
    assert (decided.morph_id, decided.subject) == (transform.id, "demo@w0")
    assert decided.reason.startswith("a request of 123 tokens waits and no instance has room for it: w0, w1")
    assert decided.numbers["waiting_tokens"] == 123 and decided.numbers["tokens_after"] == 256


async def test_a_group_parts_when_its_long_requests_are_over(bus: Bus, host: Host) -> None:
    host.longest = 200
    await host.join("w0", "w1")
    await bus.write_policy(EAGER)
    await asyncio.sleep(0.8)
    assert host.morphs == []
    host.longest = 0
    (transform,) = await host.told()
    assert (transform.workers, transform.tp, transform.instance) == (["w0", "w1"], 1, "demo@w0")
    (decided,) = await decided_of(bus)
    assert decided.reason.startswith("no long request is left")


async def test_a_manual_policy_leaves_demands_and_groups_to_the_operator(bus: Bus, host: Host) -> None:
    await bus.write_policy(replace(EAGER, mode="manual"))
    await host.demand(times=6)
    await host.join("w0", "w1")
    await asyncio.sleep(0.6)
    assert host.morphs == []


async def test_a_demand_from_before_the_controller_started_is_over(bus: Bus, tmp_path: Path) -> None:
    host = Host(bus, tmp_path)
    await host.demand(times=5)
    for worker in host.workers:
        await worker.start()
    reports = asyncio.create_task(host.report())
    try:
        async with monitoring(bus), controlling(bus):
            await asyncio.sleep(0.6)
            assert host.morphs == []
    finally:
        reports.cancel()
        for worker in host.workers:
            await worker.die()


async def decided_of(bus: Bus) -> list[Event]:
    async with bus.reader(bus.names.events, Event, MorphReport, start="0") as reader:
        told = [message for _, message in await reader.read()]
    return [one for one in told if isinstance(one, Event) and one.kind == "morph_decided"]


def test_the_latest_that_queue_at_an_instance_are_moved_to_another_once() -> None:
    core = Cluster("w0")
    core.look()
    states = []
    for i in range(6):
        core.now += 0.01
        states.append(core.state(str(i), prompt=[1] * 20, max_tokens=5))
        core.delivery.submit(states[i])
        core.sent(states[i], begun=i < 2)
    core.cards["w1"] = worker_card("w1")
    core.look()
    target = states[0].target
    assert target is not None and workers_of(states) == ["w0"] * 6
    core.delivery.attempts.move(target, 80, queued_tokens=160)  # half of them are another gateway's
    assert workers_of(states) == ["w0"] * 4 + ["w1"] * 2
    assert [state.strikes for state in states] == [0] * 6
    for state in states[4:]:
        core.sent(state, begun=False)
    to = states[4].target
    assert to is not None
    core.delivery.attempts.move(to, 1000)
    assert workers_of(states[4:]) == ["w1"] * 2, "they were moved before"
    core.delivery.attempts.move(to._replace(epoch=7), 1000)  # of an epoch that is over
    core.gateway.check_integrity()
