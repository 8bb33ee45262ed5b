"""The processes that are present, and the versions of the schema that each one reads."""

from __future__ import annotations

from typing import Any

from bus.leftovers import all_keys
from bus.registry import Registry
from bus.schema import parsed


async def readers(registry: Registry) -> dict[str, tuple[int, ...]]:
    """Return by process, such as "worker w0", what it reads. Raises BusUnavailable.

    A worker tells it on its card, a gateway in its lease, monitors and controllers in a key of their own.
    Those of release 0.1 are found by card and lease; a monitor or controller of it is not. A card that cannot
    be read is that of a worker that reads nothing known here.
    """
    found = {
        f"worker {member.id}": member.card.reads if member.card else ()
        for member in await registry.members()
        if member.lease_epoch is not None
    }
    leases, shown = registry.names.gateway_lease(""), registry.names.reads("")
    keys = sorted(key for key in await all_keys(registry) if key.startswith((leases, shown)))
    values: Any = await registry.run(lambda client: client.mget(keys)) if keys else []
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            role, _, name = key.removeprefix(shown).partition(":")
            name = f"{role} {name}" if key.startswith(shown) else f"gateway {key.removeprefix(leases)}"
            found[name] = parsed(value)
    return found


def has_monitor(processes: dict[str, tuple[int, ...]]) -> bool:
    """Return True if a monitor is among what `readers` returned."""
    return any(name.startswith("monitor ") for name in processes)
