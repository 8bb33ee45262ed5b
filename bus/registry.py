"""The registry: leases that expire by themselves, and the cards of the workers that hold them.

A worker is alive while its lease holds its epoch. A card without a lease means that the worker died; a clean
exit removes both. One script reads all workers, so a card and its lease are of the same moment.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from redis.asyncio import Redis

from bus.codec import DecodeError, decode, encode
from bus.errors import NameTaken
from bus.link import RedisLink
from bus.messages import READS, WorkerCard
from bus.policy import Policy
from bus.schema import in_words

log = logging.getLogger("bus")

# PEXPIRE works at maxmemory, where SET is refused: a full Redis must not cost workers their leases.
_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_DROP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('DEL', KEYS[1], KEYS[2])
    redis.call('SREM', KEYS[3], ARGV[2])
    return 1
end
return 0
"""
_SET_IF = """
if (redis.call('GET', KEYS[1]) or '') == ARGV[1] then
    redis.call('SET', KEYS[2], ARGV[2])
    return 1
end
return 0
"""
_PICTURE = """
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local found = {run_id, redis.call('GET', KEYS[2])}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local lease = ARGV[1] .. id
    found[#found + 1] = {
        id, redis.call('GET', lease), redis.call('PTTL', lease), redis.call('GET', ARGV[2] .. id)
    }
end
return found
"""


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker whose lease holds the epoch of its card. The lease expires in `lease_ms` unless renewed."""

    card: WorkerCard
    epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """One id of the set of workers. `lease_epoch` is None without a lease, `card` without a readable card."""

    id: str
    card: WorkerCard | None
    lease_epoch: int | None
    lease_ms: int


class Registry(RedisLink):
    """Leases, cards and the policy. Methods raise BusUnavailable, BusFull (if they write), RedisProblem."""

    async def register_worker(self, card: WorkerCard, lease_s: float) -> None:
        """Write card, membership and lease. The holder of an older epoch finds out at its renewal."""

        async def call(client: Redis) -> None:
            async with client.pipeline(transaction=True) as pipe:
                pipe.set(self.names.card(card.id), encode(card, self.schema))
                pipe.sadd(self.names.workers, card.id)
                pipe.set(self.names.lease(card.id), card.epoch, px=_ms(lease_s))
                await pipe.execute()

        await self.run(call)

    async def last_epoch(self, worker: str) -> int:
        """Return the latest epoch in the worker's lease or card; 0 without either."""
        keys = [self.names.lease(worker), self.names.card(worker)]
        found: Any = await self.run(lambda client: client.mget(keys))
        lease, card = found
        member = _member(worker.encode(), lease, 0, card)
        return max(member.lease_epoch or 0, member.card.epoch if member.card else 0)

    async def renew_lease(self, worker: str, epoch: int, lease_s: float) -> bool:
        """Renew a lease. False: it expired or is another's; the worker must register with a new epoch."""
        return bool(await self.script(_RENEW, [self.names.lease(worker)], [str(epoch), _ms(lease_s)]))

    async def update_card(self, card: WorkerCard) -> bool:
        """Replace a worker's card. Returns False, and does nothing, unless the lease holds its epoch."""
        keys = [self.names.lease(card.id), self.names.card(card.id)]
        return bool(await self.script(_SET_IF, keys, [str(card.epoch), encode(card, self.schema)]))

    async def drop_lease(self, worker: str, epoch: int) -> bool:
        """Delete lease, card and membership, for a clean exit. Returns False if the lease is another's."""
        keys = [self.names.lease(worker), self.names.card(worker), self.names.workers]
        return bool(await self.script(_DROP, keys, [str(epoch), worker]))

    async def refuse_namesake(self, kind: Literal["worker", "gateway"], name: str, lease_s: float) -> None:
        """Raise NameTaken if a process with this name renews its lease; this may take `lease_s / 2`.

        A holder renews its lease three times in its length. One that died leaves a lease that only runs out.
        """
        names = self.names
        key = names.lease(name) if kind == "worker" else names.gateway_lease(name)
        least_ms, until_s = math.inf, time.monotonic() + lease_s / 2
        while (left_ms := await self._left_ms(key)) > 0 and time.monotonic() < until_s:
            if left_ms > least_ms:
                raise NameTaken(
                    f"another {kind} is called {name!r} and lives: it renews its lease {key}. Two of one "
                    f"name would end each other's requests; give this one another name: {kind}.id "
                    f"(INSTAR_{kind.upper()}__ID)"
                )
            least_ms = left_ms
            await asyncio.sleep(lease_s / 30)

    async def _left_ms(self, key: str) -> int:
        """Return the time that is left of a lease; negative without one."""
        return int(await self.run(lambda client: client.pttl(key)))

    async def members(self) -> list[RegisteredWorker]:
        """Return every worker that joined and did not leave, dead ones too. See `RedisLink.picture`."""
        prefixes = [self.names.lease(""), self.names.card("")]
        rows = await self.picture(_PICTURE, [self.names.workers, self.names.boot], prefixes)
        return [_member(*row) for row in rows]

    async def workers(self) -> list[LiveWorker]:
        """Return the live workers that read what this process writes, in the order of their ids."""
        live = [
            LiveWorker(card=member.card, epoch=member.card.epoch, lease_ms=member.lease_ms)
            for member in await self.members()
            if member.card is not None and member.lease_epoch == member.card.epoch
            if self.schema in member.card.reads
        ]
        return sorted(live, key=lambda worker: worker.card.id)

    async def renew_gateway(self, gateway: str, lease_s: float = 5.0) -> bool:
        """Renew a gateway's lease and tokens stream. False: the lease was lost, maybe requests, too.

        The lease shows what the gateway reads, also where a process of another release made it.
        """

        async def call(client: Redis) -> bool:
            key, reads = self.names.gateway_lease(gateway), in_words(READS)
            async with client.pipeline(transaction=False) as pipe:
                pipe.pexpire(key, _ms(lease_s))
                pipe.pexpire(self.names.tokens(gateway), _ms(10 * lease_s))
                pipe.get(key)
                held, _, shown = await pipe.execute()
            if not held or shown != reads.encode():
                await client.set(key, reads, px=_ms(lease_s))
            return bool(held)

        return await self.run(call)

    async def drop_gateway(self, gateway: str) -> None:
        """Delete a gateway's lease and tokens stream, for a clean exit."""
        keys = [self.names.gateway_lease(gateway), self.names.tokens(gateway)]
        await self.run(lambda client: client.delete(*keys))

    async def live_gateways(self, gateways: Iterable[str]) -> set[str]:
        """Return those of `gateways` that hold a lease."""
        asked = list(gateways)
        if not asked:
            return set()
        keys = [self.names.gateway_lease(gateway) for gateway in asked]
        found = await self.run(lambda client: client.mget(keys))
        return {gateway for gateway, lease in zip(asked, found, strict=True) if lease is not None}

    async def read_policy(self) -> Policy:
        """Return the policy; without one the defaults. An unreadable one counts as mode "manual"."""
        return _policy(await self._stored_policy())

    async def write_policy(self, policy: Policy) -> bool:
        """Write a policy whose revision is the stored one's plus 1. Returns False if it is not."""
        before = await self._stored_policy()
        if policy.revision != _policy(before).revision + 1:
            return False
        keys = [self.names.policy, self.names.policy]
        return bool(await self.script(_SET_IF, keys, [before, encode(policy, self.schema)]))

    async def _stored_policy(self) -> bytes:
        found: Any = await self.run(lambda client: client.get(self.names.policy))
        return bytes(found or b"")


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _member(worker: bytes, lease: bytes | None, lease_ms: int, data: bytes | None) -> RegisteredWorker:
    name, card = worker.decode(), None
    try:
        card = decode(data, WorkerCard) if data is not None else None
    except DecodeError as error:
        log.debug("the card of %s is unreadable: %s", name, error)
    epoch = int(lease) if lease is not None and lease.isdigit() else None
    return RegisteredWorker(id=name, card=card, lease_epoch=epoch, lease_ms=max(0, lease_ms))


def _policy(data: bytes) -> Policy:
    if not data:
        return Policy()
    try:
        return decode(data, Policy)
    except DecodeError as error:
        log.debug("the policy is unreadable: %s", error)
        return Policy(mode="manual")
