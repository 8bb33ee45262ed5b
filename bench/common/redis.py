"""A Redis server as `instar serve` runs it, with one more user, who may do everything."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from instar.serve.redis_server import plan_redis, wait_until_listening

START_S = 10


@contextmanager
def running_redis(maxmemory_mb: int = 256) -> Iterator[tuple[str, int]]:
    """Yield the URL and the process id of a server. Raises InputError, or RuntimeError."""
    server, password = plan_redis(maxmemory_mb, "instar:"), secrets.token_urlsafe(24)
    everything = f"user bench on >{password} ~* &* +@all\n".encode()
    with subprocess.Popen(server.argv, stdin=subprocess.PIPE, stdout=sys.stderr) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(server.config + everything)
            process.stdin.close()
            if not wait_until_listening(server.port, START_S):
                raise RuntimeError(
                    f"{server.program} does not listen on port {server.port} after {START_S} s"
                )
            yield f"redis://bench:{password}@127.0.0.1:{server.port}/0", process.pid
        finally:
            process.kill()
