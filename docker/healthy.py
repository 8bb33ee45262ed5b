"""Health of a container: `healthy.py CHECK`, with status 0 or the reason on stderr.

| check | fails when |
| --- | --- |
| `gateway` | no model can be asked |
| `worker` | the worker does not hold its lease |
| `serving` | it loads, drains or does not hold its lease |
| `alive` | Redis answers and the worker does not hold its lease |
| `monitor` | Redis answers and its last metrics are older than STALE_S |
| `controller` | Redis answers and no controller leads |
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final

from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from bus.access import Role
from bus.codec import decode
from bus.connection import credentials, of_role, primary_of
from bus.errors import RedisProblem
from bus.messages import WorkerCard
from bus.names import Names
from bus.sentinels import addresses, sentinel_options, url_at
from bus.settings import RedisSettings, Settings, load_settings
from bus.tls import pinned_context

STALE_S: Final = 30.0


def gateway(settings: Settings) -> str:
    section = settings.gateway
    scheme = "https" if section.ssl_certfile else "http"
    url = f"{scheme}://127.0.0.1:{section.port}/ready"
    try:
        trust = pinned_context(section.ssl_certfile) if section.ssl_certfile else None
        urllib.request.urlopen(url, timeout=3, context=trust).close()
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}: no worker serves"
    except OSError as error:
        return f"{url}: {error}"
    return ""


def worker(settings: Settings) -> str:
    lease = Names(settings.redis.prefix).lease(_worker_id(settings))
    with _redis(settings, "worker") as redis:
        return "" if redis.get(lease) else f"{lease} is gone: the worker is stuck or was fenced"


def serving(settings: Settings) -> str:
    names, worker_id = Names(settings.redis.prefix), _worker_id(settings)
    with _redis(settings, "worker") as redis:
        lease, card = redis.mget(names.lease(worker_id), names.card(worker_id))
    if not (lease and card):
        return f"{worker_id} holds no lease"
    state = decode(card, WorkerCard).state
    return "" if state == "serving" else f"{worker_id} is {state}"


def monitor(settings: Settings) -> str:
    stream = Names(settings.redis.prefix).metrics
    with _redis(settings, "monitor") as redis:
        last, (now_s, _) = redis.xrevrange(stream, count=1), redis.time()
    if not last:
        return f"{stream} is empty"
    age_s = now_s - int(last[0][0].partition(b"-")[0]) / 1000
    return f"{stream} is {age_s:.0f} s old: the monitor is stuck" if age_s > STALE_S else ""


def controller(settings: Settings) -> str:
    lease = Names(settings.redis.prefix).leader_lease
    with _redis(settings, "controller") as redis:
        return "" if redis.get(lease) else f"{lease} is gone: no controller leads"


def alive(check: Callable[[Settings], str]) -> Callable[[Settings], str]:
    """Return a check that passes while Redis is away or full."""

    def passes(settings: Settings) -> str:
        try:
            return check(settings)
        except RedisError:
            return ""

    return passes


def _worker_id(settings: Settings) -> str:
    return settings.worker.id or f"{socket.gethostname()}-0"


def _redis(settings: Settings, role: Role) -> Redis:
    """Return a client that gives up after seconds: a probe that does not end counts as failed."""
    given = credentials(settings.redis, role)
    url = of_role(settings.redis.url, role)
    if settings.redis.sentinels:
        url = _primary_url(settings.redis, url, given)
    return Redis.from_url(url, **_once(3), **given)


def _primary_url(settings: RedisSettings, url: str, given: Mapping[str, Any]) -> str:
    """Return the URL of the primary that the Sentinels name. Raises RedisError if none does."""
    options = sentinel_options(settings, given) | _once(1) | {"ssl": url.startswith("rediss:")}
    sentinel = Sentinel(addresses(settings), sentinel_kwargs=options)
    return url_at(url, *sentinel.discover_master(primary_of(url)))


def _once(within_s: float) -> dict[str, Any]:
    """Return the options of a connection that is tried once, and tells nothing of itself (CLIENT)."""
    limits = {"socket_timeout": within_s, "socket_connect_timeout": within_s}
    return limits | {"retry": Retry(NoBackoff(), 0), "protocol": 2, "driver_info": None}


CHECKS: Final = {
    "gateway": gateway,
    "worker": worker,
    "serving": serving,
    "alive": alive(worker),
    "monitor": alive(monitor),
    "controller": alive(controller),
}


def main(name: str) -> str:
    """Run a check and return the reason, or an empty text."""
    try:
        return CHECKS[name](load_settings())
    except (RedisError, RedisProblem) as error:
        return f"Redis: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
