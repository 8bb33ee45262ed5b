"""The catalogue: records of models, deployments and profiles in keys of their own, and orders to change them.

Only the controller writes models and deployments; workers write profiles. An order is an entry of the stream
`orders` until the controller settles it: one script deletes the entry, changes the records and writes the
answer. So an order takes effect once, or never, if a gateway withdraws it first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from bus.codec import DecodeError, decode, encode
from bus.deployments import Answer, Deployment, ModelCard, Order, Profile
from bus.link import RedisLink
from bus.names import Names

log = logging.getLogger("bus")

Record = ModelCard | Deployment | Profile
ANSWER_S = 60.0  # lifetime of an answer
LOOK_S = 0.02  # between two looks for an answer, doubling
LONGEST_LOOK_S = 0.2

_READ = """
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local found = {run_id, redis.call('GET', KEYS[2])}
for _, key in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    found[#found + 1] = {key, redis.call('GET', key)}
end
return found
"""
# KEYS: orders, answer, catalogue. ARGV: entry, answer, lifetime of the answer in ms, number of records to
# write, key and bytes of each, keys of the records to remove.
_SETTLE = """
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then
    return 0
end
local last = 4 + 2 * tonumber(ARGV[4])
for at = 5, last, 2 do
    redis.call('SET', ARGV[at], ARGV[at + 1])
    redis.call('SADD', KEYS[3], ARGV[at])
end
for at = last + 1, #ARGV do
    redis.call('DEL', ARGV[at])
    redis.call('SREM', KEYS[3], ARGV[at])
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Contents:
    """All records at one moment: models by name, deployments by id, profiles by model and kind of device."""

    models: dict[str, ModelCard] = field(default_factory=dict)
    deployments: dict[str, Deployment] = field(default_factory=dict)
    profiles: dict[tuple[str, str], Profile] = field(default_factory=dict)

    def with_record(self, record: Record) -> Contents:
        """Return a copy with this record in place of the one with the same key."""
        models, deployments, profiles = dict(self.models), dict(self.deployments), dict(self.profiles)
        if isinstance(record, ModelCard):
            models[record.name] = record
        elif isinstance(record, Deployment):
            deployments[record.id] = record
        else:
            profiles[record.model, record.device] = record
        return Contents(models, deployments, profiles)

    @property
    def records(self) -> list[Record]:
        return [*self.models.values(), *self.deployments.values(), *self.profiles.values()]


class Catalogue:
    """`bus.catalogue`. Every method raises BusUnavailable, BusFull (where it writes) and RedisProblem."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._names: Final[Names] = link.names

    # ------------------------------------------------------------------------------------- records

    async def read(self) -> Contents:
        """Return all records, read in one round trip, in the order of their keys (`RedisLink.picture`)."""
        return _contents(await self._link.picture(_READ, [self._names.catalogue, self._names.boot], []))

    async def write(self, *records: Record) -> None:
        """Write all records, or none."""

        async def call(client: Redis) -> None:
            async with client.pipeline(transaction=True) as pipe:
                for record in records:
                    key = key_of(self._names, record)
                    pipe.set(key, encode(record))
                    pipe.sadd(self._names.catalogue, key)
                await pipe.execute()

        if records:
            await self._link.run(call)

    # ------------------------------------------------------------------------------------- orders

    async def order(self, order: Order) -> str:
        """Send an order to the controller. Returns the id of its entry."""
        payload, stream = encode(order), self._names.orders
        keep = self._names.limit(stream)

        async def call(client: Redis) -> Any:
            return await client.xadd(stream, {b"m": payload}, maxlen=keep, approximate=False)

        entry: bytes = await self._link.run(call)
        return entry.decode()

    async def settle(
        self, entry: str, answer: Answer, *, write: Iterable[Record] = (), remove: Iterable[Record] = ()
    ) -> bool:
        """End an order: write its answer and its changes of records.

        Returns False, and changes nothing, if the order was withdrawn or settled before.
        """
        written = list(write)
        pairs = [part for record in written for part in (key_of(self._names, record), encode(record))]
        keys = [self._names.orders, self._names.answer(answer.id), self._names.catalogue]
        removed = [key_of(self._names, record) for record in remove]
        args = [entry, encode(answer), round(ANSWER_S * 1000), len(written), *pairs, *removed]
        return bool(await self._link.script(_SETTLE, keys, args))

    async def answer(self, order: str) -> Answer | None:
        """Return the answer to an order; None before the controller settles it and after ANSWER_S."""
        found: Any = await self._link.run(lambda client: client.get(self._names.answer(order)))
        return decode(found, Answer) if found else None

    async def await_answer(self, order: str, entry: str, within_s: float) -> Answer | None:
        """Wait for the answer to an order; None: it was not settled in time and is withdrawn."""
        pause_s, waited_s = LOOK_S, 0.0
        while waited_s < within_s:
            if answer := await self.answer(order):
                return answer
            await asyncio.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, LONGEST_LOOK_S)
        withdrawn = await self._link.run(lambda client: client.xdel(self._names.orders, entry))
        return None if withdrawn else await self.answer(order)


def key_of(names: Names, record: Record) -> str:
    if isinstance(record, ModelCard):
        return names.model(record.name)
    if isinstance(record, Deployment):
        return names.deployment(record.id)
    return names.profile(record.model, record.device)


def _contents(rows: list[tuple[bytes, bytes | None]]) -> Contents:
    contents = Contents()
    for key, data in sorted(rows):
        record = _record(key, data)
        if isinstance(record, ModelCard):
            contents.models[record.name] = record
        elif isinstance(record, Deployment):
            contents.deployments[record.id] = record
        elif record is not None:
            contents.profiles[record.model, record.device] = record
    return contents


def _record(key: bytes, data: bytes | None) -> Record | None:
    try:
        found: Record = decode(data or b"", ModelCard, Deployment, Profile)
    except DecodeError as error:
        log.debug("%s is unreadable: %s", key.decode(), error)
        return None
    return found
