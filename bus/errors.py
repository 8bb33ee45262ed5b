"""Errors between a service and Redis.

`RedisProblem`: an operator must change a setting or start a server; the service prints it and exits.
`BusUnavailable`: Redis is away; try again later. `BusFull`: Redis has no memory left.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RedisProblem(Exception):
    """Redis cannot be used as it is. The text says what was found and what to do, and holds no password."""


class BadRedisUrl(RedisProblem):
    """The setting redis.url is not the address of a Redis server."""


class RedisNotThere(RedisProblem):
    """No server answers at the address."""


class NotRedis(RedisProblem):
    """The server at the address is not Redis."""


class RedisTooOld(RedisProblem):
    """The server lacks commands that the bus needs."""


class RedisPassword(RedisProblem):
    """The server asks for a password, or refused the one that it got."""


class RedisCertificate(RedisProblem):
    """The server's certificate is not trusted, or is another's."""


class RedisForbidden(RedisProblem):
    """The server's access list keeps this user from a command or key that the bus needs."""


class NameTaken(RedisProblem):
    """Another process that lives has the name of this one."""


class OtherSchema(RedisProblem):
    """The processes of the cluster write messages in a version that this program does not read."""


class BusUnavailable(Exception):
    """Redis did not answer. Whether it carried out the command is unknown.

    Send a command again only if running it twice is harmless; messages of the bus are, thanks to attempt,
    epoch and index.
    """


class Fenced(BusUnavailable):
    """This process does not lead, so Redis refused what it wrote. Nothing was written."""


class BusFull(Exception):
    """Redis is at maxmemory and refuses writes (`noeviction`). Nothing was written."""


def meant(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?`, or the names of all there are."""
    names = list(known)
    if near := get_close_matches(name[:200], names, n=1):
        return f"did you mean {near[0]!r}?"
    return f"there are: {', '.join(names)}" if names else "there is none"
