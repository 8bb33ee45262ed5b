"""The catalogue: records of models, deployments and profiles, and orders to change them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bus.batch import Record, WriteBatch, key_of
from bus.codec import DecodeError, decode, encode
from bus.deployments import Answer, Deployment, ModelCard, Order, Profile
from bus.link import RedisLink

log = logging.getLogger("bus")

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
        return contents_of([*self.records, record])

    @property
    def records(self) -> list[Record]:
        return [*self.models.values(), *self.deployments.values(), *self.profiles.values()]


class Catalogue:
    """`bus.catalogue`. Every method raises BusUnavailable, BusFull (where it writes) and RedisProblem.

    Only the controller writes models and deployments; workers write profiles. An order is an entry of the
    stream `orders` until the controller settles it: one script deletes the entry, changes the records and
    writes the answer. So an order takes effect once, or never, if a gateway withdraws it first.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link, self._names = link, link.names

    async def read(self) -> Contents:
        """Return all records, read in one round trip, in the order of their keys (`RedisLink.picture`)."""
        rows = await self._link.picture(_READ, [self._names.catalogue, self._names.boot], [])
        return contents_of(_readable(rows))

    async def write(self, *records: Record) -> None:
        """Write all records, or none."""
        batch = WriteBatch(self._link)
        for record in records:
            batch.write(record)
        await batch.send()

    async def order(self, order: Order) -> str:
        """Send an order to the controller. Returns the id of its entry."""
        payload, stream = encode(order, self._link.schema), self._names.orders
        keep = self._names.limit(stream)
        entry: Any = await self._link.run(
            lambda client: client.xadd(stream, {b"m": payload}, maxlen=keep, approximate=False)
        )
        return str(entry, "ascii")

    async def settle(
        self, entry: str, answer: Answer, *, write: Iterable[Record] = (), remove: Iterable[Record] = ()
    ) -> bool:
        """End an order with its answer and changes. Returns False, and does nothing, if it is gone."""
        written = list(write)
        version, names = self._link.schema, self._names
        pairs = [part for one in written for part in (key_of(names, one), encode(one, version))]
        keys = [self._names.orders, self._names.answer(answer.id), self._names.catalogue]
        removed = [key_of(self._names, record) for record in remove]
        args = [entry, encode(answer, version), round(ANSWER_S * 1000), len(written), *pairs, *removed]
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


def contents_of(records: Iterable[Record]) -> Contents:
    """Sort records by what they are; of those with the same key, keep the last."""
    contents = Contents()
    for record in records:
        if isinstance(record, ModelCard):
            contents.models[record.name] = record
        elif isinstance(record, Deployment):
            contents.deployments[record.id] = record
        else:
            contents.profiles[record.model, record.device] = record
    return contents


def _readable(rows: list[tuple[bytes, bytes | None]]) -> Iterator[Record]:
    for key, data in sorted(rows):
        try:
            yield decode(data or b"", ModelCard, Deployment, Profile)
        except DecodeError as error:
            log.debug("%s is unreadable: %s", key.decode(), error)
