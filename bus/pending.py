"""Entries that were delivered and not acknowledged: ending them by id, by consumer, or without a consumer."""

from __future__ import annotations

from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from bus.connection import is_group_missing
from bus.link import RedisLink
from bus.names import GROUP

CHUNK = 1000  # pending entries ended in one round trip, which blocks Redis for some 5 ms

# If the stream or the group is missing, XPENDING fails and there is nothing to do.
_DISCARD = """
local found = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3], ARGV[2])
if found.err then
    return 0
end
if #found == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
    return 0
end
local ids = {}
for index, entry in ipairs(found) do
    ids[index] = entry[1]
end
redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
redis.call('XDEL', KEYS[1], unpack(ids))
return #ids
"""


def as_numbers(entry_id: str) -> tuple[int, int]:
    """Return `1700000000000-3` as (milliseconds, sequence); ids compare as these do."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


async def settle(client: Redis, stream: str, ids: list[str]) -> None:
    """Acknowledge, then delete entries in one round trip; a MULTI would be refused at maxmemory."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.xack(stream, GROUP, *ids)
        pipe.xdel(stream, *ids)
        await pipe.execute()


async def consumers_of(client: Redis, stream: str) -> list[str]:
    """Return the names of the group's consumers; none if the stream or the group is missing."""
    try:
        found: Any = await client.xinfo_consumers(stream, GROUP)
    except exceptions.ResponseError as error:
        if is_group_missing(error):
            return []
        raise
    return [consumer["name"].decode() for consumer in found]


async def discard_pending(link: RedisLink, stream: str, consumer: str) -> int:
    """Acknowledge and delete everything that is pending with one consumer, then remove the consumer.

    It goes by consumer (XPENDING), not by age (XAUTOCLAIM), so a live incarnation keeps its entries. The
    consumer goes last. Returns the number of entries. Raises BusUnavailable.
    """
    total = 0
    while ended := int(await link.script(_DISCARD, [stream], [GROUP, consumer, CHUNK])):
        total += ended
    return total


async def drop_stranded(client: Redis, stream: str) -> int:
    """Delete delivered entries that no consumer has, if none is pending. Returns their number."""
    try:
        groups: Any = await client.xinfo_groups(stream)
    except exceptions.ResponseError as error:
        if is_group_missing(error):
            return 0
        raise
    for group in groups:
        if group["name"].decode() == GROUP and group["pending"] == 0:
            milliseconds, sequence = as_numbers(group["last-delivered-id"].decode())
            return int(await client.xtrim(stream, minid=f"{milliseconds}-{sequence + 1}", approximate=False))
    return 0
