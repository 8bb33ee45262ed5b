"""Who is there: leases that expire by themselves, and the cards of their holders.

A worker is alive while `lease:{worker}` holds its epoch. Its card stays behind when the lease expires, so
that a card without a lease says *died*; a clean exit removes both. All workers are read in one round trip,
by a script: an atomic picture, in which no card can belong to another moment than its lease.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from bus.codec import DecodeError, decode, encode
from bus.errors import BusUnavailable
from bus.link import RedisLink
from bus.messages import WorkerCard
from bus.policy import Policy

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
_UPDATE_CARD = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('SET', KEYS[2], ARGV[2])
    return 1
end
return 0
"""
_EXCHANGE = """
if (redis.call('GET', KEYS[1]) or '') == ARGV[1] then
    redis.call('SET', KEYS[1], ARGV[2])
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
PICTURES = 3  # taken at most, where the server changes under them


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker whose lease holds the epoch of its card; `lease_ms` until the lease expires unless renewed."""

    card: WorkerCard
    epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """One id of the set of workers. `lease_epoch` None: no lease. `card` None: no readable card."""

    id: str
    card: WorkerCard | None
    lease_epoch: int | None
    lease_ms: int


class Registry:
    """Leases and cards of workers and gateways. Every method raises BusUnavailable, BusFull (where it
    writes) and RedisProblem."""

    def __init__(self, link: RedisLink) -> None:
        self.link = link
        self.names: Final = link.names

    # ------------------------------------------------------------------------------------- workers

    async def register_worker(self, card: WorkerCard, lease_s: float) -> None:
        """Card, membership and lease in one MULTI. A lease of an older epoch is overwritten: its holder
        finds out at its next renewal."""

        async def call(client: Redis) -> None:
            async with client.pipeline(transaction=True) as pipe:
                pipe.set(self.names.card(card.id), encode(card))
                pipe.sadd(self.names.workers, card.id)
                pipe.set(self.names.lease(card.id), card.epoch, px=_ms(lease_s))
                await pipe.execute()

        await self.link.run(call)

    async def last_epoch(self, worker: str) -> int:
        """The latest epoch that the worker's lease or card tells of; 0 without either."""
        keys = [self.names.lease(worker), self.names.card(worker)]
        found: Any = await self.link.run(lambda client: client.mget(keys))
        lease, card = found
        member = _member(worker.encode(), lease, 0, card)
        return max(member.lease_epoch or 0, member.card.epoch if member.card else 0)

    async def renew_lease(self, worker: str, epoch: int, lease_s: float) -> bool:
        """False: the lease expired or another epoch holds it. The worker must then stop all it runs, take
        a new epoch and register again."""
        keys = [self.names.lease(worker)]
        return bool(await self.link.script(_RENEW, keys, [str(epoch), _ms(lease_s)]))

    async def update_card(self, card: WorkerCard) -> bool:
        """A new card (state, progress, instances) while the lease holds its epoch; else False."""
        keys = [self.names.lease(card.id), self.names.card(card.id)]
        return bool(await self.link.script(_UPDATE_CARD, keys, [str(card.epoch), encode(card)]))

    async def drop_lease(self, worker: str, epoch: int) -> bool:
        """A clean exit: lease, card and membership go. False where another epoch holds the lease."""
        keys = [self.names.lease(worker), self.names.card(worker), self.names.workers]
        return bool(await self.link.script(_DROP, keys, [str(epoch), worker]))

    async def members(self) -> list[RegisteredWorker]:
        """Every worker that joined and did not leave, dead ones too.

        A restart is told (`on_restart`) before the first picture of the restarted server is handed out: the
        connections are made again without a sign, and an empty registry would look as if all had left.
        """
        prefixes = [self.names.lease(""), self.names.card("")]
        for _ in range(PICTURES):
            run_id, boot, *rows = await self.link.script(
                _PICTURE, [self.names.workers, self.names.boot], prefixes
            )
            if self.link.is_known(run_id.decode(), (boot or b"").decode()):
                return [_member(*row) for row in rows]
            await self.link.doubt()
        raise BusUnavailable(f"Redis was another one in each of {PICTURES} answers")

    async def workers(self) -> list[LiveWorker]:
        """The live ones, in the order of their ids."""
        live = [
            LiveWorker(card=member.card, epoch=member.card.epoch, lease_ms=member.lease_ms)
            for member in await self.members()
            if member.card is not None and member.lease_epoch == member.card.epoch
        ]
        return sorted(live, key=lambda worker: worker.card.id)

    # ------------------------------------------------------------------------------------- gateways

    async def renew_gateway(self, gateway: str, lease_s: float = 5.0) -> bool:
        """Makes or renews a gateway's lease, and keeps its tokens stream from expiring for ten leases.
        False: the lease was not held (any more), and workers may have dropped what it had asked for."""

        async def call(client: Redis) -> bool:
            key = self.names.gateway_lease(gateway)
            async with client.pipeline(transaction=False) as pipe:
                pipe.pexpire(key, _ms(lease_s))
                pipe.pexpire(self.names.tokens(gateway), _ms(10 * lease_s))
                held, _ = await pipe.execute()
            if not held:
                await client.set(key, b"1", px=_ms(lease_s))
            return bool(held)

        return await self.link.run(call)

    async def drop_gateway(self, gateway: str) -> None:
        """A clean exit: the lease and the tokens stream go."""
        keys = [self.names.gateway_lease(gateway), self.names.tokens(gateway)]
        await self.link.run(lambda client: client.delete(*keys))

    async def live_gateways(self, gateways: Iterable[str]) -> set[str]:
        """Those of `gateways` whose lease stands."""
        asked = list(gateways)
        if not asked:
            return set()
        keys = [self.names.gateway_lease(gateway) for gateway in asked]
        found = await self.link.run(lambda client: client.mget(keys))
        return {gateway for gateway, lease in zip(asked, found, strict=True) if lease is not None}

    # ------------------------------------------------------------------------------------- the policy

    async def read_policy(self) -> Policy:
        """The morph policy; its defaults (revision 0) where none was written. What cannot be read means
        manual: nothing morphs by itself until a policy is written again, as revision 1."""
        return _policy(await self._stored_policy())

    async def write_policy(self, policy: Policy) -> bool:
        """Compare and set: `policy.revision` must be the stored one's plus 1. False: another revision is
        there (read it, and ask again)."""
        before = await self._stored_policy()
        if policy.revision != _policy(before).revision + 1:
            return False
        return bool(await self.link.script(_EXCHANGE, [self.names.policy], [before, encode(policy)]))

    async def _stored_policy(self) -> bytes:
        found: Any = await self.link.run(lambda client: client.get(self.names.policy))
        return bytes(found or b"")


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _member(worker: bytes, lease: bytes | None, lease_ms: int, card: bytes | None) -> RegisteredWorker:
    name = worker.decode()
    epoch = int(lease) if lease is not None and lease.isdigit() else None
    return RegisteredWorker(id=name, card=_card(name, card), lease_epoch=epoch, lease_ms=max(0, lease_ms))


def _card(worker: str, data: bytes | None) -> WorkerCard | None:
    if data is None:
        return None
    try:
        return decode(data, WorkerCard)
    except DecodeError as error:
        log.debug("the card of %s is unreadable: %s", worker, error)
        return None


def _policy(data: bytes) -> Policy:
    if not data:
        return Policy()
    try:
        return decode(data, Policy)
    except DecodeError as error:
        log.debug("the policy is unreadable: %s", error)
        return Policy(mode="manual")
