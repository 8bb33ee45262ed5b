"""What can go wrong between a service and Redis, by who must act.

`RedisProblem`: somebody must change a setting or start a server; a service prints it and exits.
`BusUnavailable`: Redis is away for now; try again later. `BusFull`: it is there and has no memory left.
"""

from __future__ import annotations


class RedisProblem(Exception):
    """Redis cannot be used as it is. The text says what was found and what to do; never a password."""


class BadRedisUrl(RedisProblem):
    """settings.redis.url is not the address of a Redis server."""


class RedisNotThere(RedisProblem):
    """Nobody answers at the address."""


class NotRedis(RedisProblem):
    """Somebody answers, but not as Redis does."""


class RedisTooOld(RedisProblem):
    """The server lacks commands that the bus needs."""


class RedisPassword(RedisProblem):
    """The server asks for a password, or refused the one given."""


class RedisForbidden(RedisProblem):
    """The server's access list keeps this user from a command or key that the bus needs."""


class BusUnavailable(Exception):
    """Redis did not answer. Whether the command was carried out is unknown: send it again only if doing it
    twice is harmless (every message of the bus is, by attempt, epoch and index)."""


class BusFull(Exception):
    """Redis is at maxmemory and refuses writes (`noeviction`). Nothing was written."""
