"""Health of a container: `healthy.py gateway` (a model can be asked) or `worker` (holds its lease)."""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request

from redis import Redis, RedisError

from bus.connection import credentials, of_role
from bus.errors import RedisProblem
from bus.names import Names
from bus.settings import load_settings
from bus.tls import pinned_context


def gateway() -> str:
    section = load_settings().gateway
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


def worker() -> str:
    settings = load_settings()
    worker_id = settings.worker.id or f"{socket.gethostname()}-0"
    lease = Names(settings.redis.prefix).lease(worker_id)
    try:
        given = credentials(settings.redis, "worker")
        with Redis.from_url(of_role(settings.redis.url, "worker"), socket_timeout=3, **given) as redis:
            return "" if redis.exists(lease) else f"{lease} is gone: the worker is stuck or was fenced"
    except (RedisError, RedisProblem) as error:
        return f"Redis: {error}"


if __name__ == "__main__":
    sys.exit({"gateway": gateway, "worker": worker}[sys.argv[1]]() or 0)
