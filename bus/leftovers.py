"""Removal of the streams and cards that dead workers and gateways leave in Redis.

The script that removes a stream checks its owner's lease too, so an owner that comes back loses nothing.
"""

from __future__ import annotations

import re
from typing import Any

from bus.names import Names
from bus.registry import Registry

_REMOVE = """
if redis.call('EXISTS', KEYS[1]) == 1 then
    return 0
end
for index = 3, #KEYS do
    redis.call('DEL', KEYS[index])
end
if ARGV[1] ~= '' then
    redis.call('SREM', KEYS[2], ARGV[1])
end
return 1
"""
SCAN_COUNT = 500


def lease_of(names: Names, key: str) -> str | None:
    """Return the lease key of a stream's owner; None for a key without an owner.

    `requests:{model}@{worker}` and `control:{worker}` are the worker's, `tokens:{gateway}` the gateway's.
    """
    kind, _, owner = key.removeprefix(names.prefix).partition(":")
    if not owner or kind not in ("requests", "control", "tokens"):
        return None
    if kind == "tokens":
        return names.gateway_lease(owner)
    return names.lease(owner.rpartition("@")[2] if kind == "requests" else owner)


async def without_owner(registry: Registry) -> dict[str, str]:
    """Return the streams whose owner holds no lease now: key -> lease key. Raises BusUnavailable."""
    names = registry.names
    leases = {key: lease for key in await all_keys(registry) if (lease := lease_of(names, key))}
    if not leases:
        return {}
    wanted = sorted(set(leases.values()))
    found = await registry.run(lambda client: client.mget(wanted))
    held = {lease for lease, value in zip(wanted, found, strict=True) if value is not None}
    return {key: lease for key, lease in leases.items() if lease not in held}


async def all_keys(registry: Registry) -> set[str]:
    """Return all keys by SCAN, which finds every key that is there from its beginning to its end."""
    pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", registry.names.prefix) + "*"
    keys: set[str] = set()
    cursor = 0
    while True:
        page: Any = await registry.run(
            lambda client, cursor=cursor: client.scan(cursor, match=pattern, count=SCAN_COUNT)  # type: ignore[misc]
        )
        cursor, found = int(page[0]), page[1]
        keys |= {key.decode() for key in found}
        if cursor == 0:
            return keys


async def remove_streams(registry: Registry, lease: str, *keys: str) -> bool:
    """Delete the streams. Returns False, and does nothing, if the lease is held."""
    return bool(await registry.script(_REMOVE, [lease, registry.names.workers, *keys], [""]))


async def remove_worker(registry: Registry, worker: str) -> bool:
    """Remove a dead worker's card and membership. Returns False, and does nothing, if its lease is held."""
    names = registry.names
    keys = [names.lease(worker), names.workers, names.card(worker)]
    return bool(await registry.script(_REMOVE, keys, [worker]))
