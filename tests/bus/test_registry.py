"""Leases and cards: who is alive, and as which incarnation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bus.client import Bus, RedisProblem
from bus.leftovers import lease_of, remove_streams, remove_worker, without_owner
from bus.names import Names
from bus.policy import Policy
from tests.support.bus_samples import card, step_output


async def test_a_registered_worker_is_alive_until_its_lease_runs_out(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=0.2)
    (worker,) = await bus.workers()
    assert (worker.card, worker.epoch) == (card("w0", 5), 5)
    assert 0 < worker.lease_ms <= 200
    await asyncio.sleep(0.25)
    assert await bus.workers() == []
    (member,) = await bus.members()
    assert (member.card, member.lease_epoch) == (card("w0", 5), None)  # a card without a lease: it died


async def test_a_renewed_lease_lasts_longer(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=0.2)
    for _ in range(3):
        await asyncio.sleep(0.1)
        assert await bus.renew_lease("w0", 5, lease_s=0.2)
    assert [worker.epoch for worker in await bus.workers()] == [5]


async def test_an_incarnation_whose_lease_another_holds_is_told_so_and_changes_nothing(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=5)
    await bus.register_worker(card("w0", 6), lease_s=5)
    assert not await bus.renew_lease("w0", 5, lease_s=60)
    assert not await bus.update_card(replace(card("w0", 5), state="draining"))
    assert not await bus.drop_lease("w0", 5)
    (worker,) = await bus.workers()
    assert (worker.epoch, worker.card.state) == (6, "serving")
    assert worker.lease_ms <= 5000


async def test_an_expired_lease_is_not_renewed(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=0.05)
    await asyncio.sleep(0.1)
    assert not await bus.renew_lease("w0", 5, lease_s=5)


async def test_a_card_can_be_updated_while_the_lease_stands(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5, state="loading"), lease_s=5)
    assert await bus.update_card(card("w0", 5, state="serving"))
    assert [worker.card.state for worker in await bus.workers()] == ["serving"]


async def test_a_clean_exit_leaves_neither_lease_nor_card(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=5)
    assert await bus.drop_lease("w0", 5)
    assert await bus.members() == []


async def test_workers_come_in_the_order_of_their_ids(bus: Bus) -> None:
    for name in ("w2", "w0", "w1"):
        await bus.register_worker(card(name), lease_s=5)
    assert [worker.card.id for worker in await bus.workers()] == ["w0", "w1", "w2"]


async def test_an_unreadable_card_hides_its_worker_and_no_other(bus: Bus) -> None:
    await bus.register_worker(card("w0"), lease_s=5)
    await bus.register_worker(card("w1"), lease_s=5)
    await bus.run(lambda client: client.set(bus.names.card("w0"), b"junk"))
    assert [worker.card.id for worker in await bus.workers()] == ["w1"]


async def test_scripts_work_again_after_the_server_forgot_them(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=5)
    assert await bus.renew_lease("w0", 5, lease_s=5)
    await bus.run(lambda client: client.script_flush())
    assert await bus.renew_lease("w0", 5, lease_s=5)


async def test_a_gateway_is_alive_until_its_lease_runs_out_or_is_dropped(bus: Bus) -> None:
    assert await bus.live_gateways([]) == set()
    await bus.renew_gateway("g1", lease_s=5)
    await bus.renew_gateway("g2", lease_s=0.05)
    await bus.renew_gateway("g3", lease_s=5)
    await bus.drop_gateway("g3")
    await asyncio.sleep(0.1)
    assert await bus.live_gateways(["g1", "g2", "g3", "never"]) == {"g1"}


async def test_a_gateway_learns_whether_its_lease_still_stood(bus: Bus) -> None:
    assert await bus.renew_gateway("g", lease_s=0.2) is False
    assert await bus.renew_gateway("g", lease_s=0.05) is True
    await asyncio.sleep(0.1)
    assert await bus.renew_gateway("g", lease_s=5) is False


async def test_a_gateways_tokens_expire_when_nobody_renews(bus: Bus) -> None:
    await bus.publish(bus.names.tokens("g"), step_output())
    await bus.renew_gateway("g", lease_s=0.02)
    await asyncio.sleep(0.3)
    assert await bus.length(bus.names.tokens("g")) == 0


async def test_a_key_of_the_wrong_type_is_a_problem_that_is_named(bus: Bus) -> None:
    await bus.run(lambda client: client.set(bus.names.events, b"text"))
    with pytest.raises(RedisProblem, match="WRONGTYPE"):
        await bus.event("k", "s", "r")
    assert bus.up


def test_every_stream_that_somebody_owns_has_its_owners_lease() -> None:
    names = Names("p:")
    assert lease_of(names, names.requests("org/model@v1@w0")) == names.lease("w0")
    assert lease_of(names, names.control("w0")) == names.lease("w0")
    assert lease_of(names, names.tokens("host-1")) == names.gateway_lease("host-1")
    for key in (
        names.events,
        names.telemetry,
        names.workers,
        names.card("w0"),
        names.boot,
        names.lease("w0"),
    ):
        assert lease_of(names, key) is None


async def test_leftovers_are_found_by_their_missing_lease_and_removed_only_without_one(bus: Bus) -> None:
    names = bus.names
    for worker in ("w0", "w1"):
        await bus.register_worker(card(worker), lease_s=5)
        await bus.publish(names.requests(f"demo@{worker}"), step_output())
        await bus.publish(names.control(worker), step_output())
    await bus.publish(names.tokens("g"), step_output())
    await bus.run(lambda client: client.delete(names.lease("w0")))
    orphans = await without_owner(bus)
    assert set(orphans) == {names.requests("demo@w0"), names.control("w0"), names.tokens("g")}

    assert await remove_streams(bus, names.lease("w0"), names.control("w0"))
    assert await bus.length(names.control("w0")) == 0
    assert not await remove_streams(bus, names.lease("w1"), names.control("w1"))
    assert await bus.length(names.control("w1")) == 1

    assert await remove_worker(bus, "w0")
    assert not await remove_worker(bus, "w1")
    assert [member.id for member in await bus.members()] == ["w1"]


async def test_leftovers_of_other_clusters_on_the_same_server_are_not_seen(bus: Bus) -> None:
    await bus.run(lambda client: client.xadd("elsewhere:tokens:g", {b"m": b""}))
    assert await without_owner(bus) == {}
    await bus.run(lambda client: client.delete("elsewhere:tokens:g"))


async def test_a_policy_is_written_only_as_the_revision_after_the_stored_one(bus: Bus) -> None:
    assert await bus.read_policy() == Policy()
    first, second = Policy(revision=1, mode="accuracy"), Policy(revision=2, mode="performance")
    assert not await bus.write_policy(second)
    assert await bus.write_policy(first)
    assert not await bus.write_policy(replace(first, mode="performance"))
    assert await bus.read_policy() == first
    assert await bus.write_policy(second)
    assert await bus.read_policy() == second


async def test_of_two_writers_of_one_revision_one_wins(bus: Bus) -> None:
    wishes = [Policy(revision=1, windows=1 + n) for n in range(8)]
    written = await asyncio.gather(*(bus.write_policy(wish) for wish in wishes))
    assert sum(written) == 1
    assert await bus.read_policy() == wishes[written.index(True)]


async def test_an_unreadable_policy_means_manual_and_can_be_replaced(bus: Bus) -> None:
    await bus.run(lambda client: client.set(bus.names.policy, b"junk"))
    assert (await bus.read_policy()).mode == "manual"
    assert await bus.write_policy(Policy(revision=1))
    assert (await bus.read_policy()).mode == "default"
