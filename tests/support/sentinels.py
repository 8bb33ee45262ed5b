"""Redis Sentinels that a test starts: three or one, with names and times that suit tests."""

from __future__ import annotations

from pathlib import Path

from instar.serve.redis_server import find_redis_server

PRIMARY = "instar"  # what they call the primary
DOWN_AFTER_MS = 2000


def sentinel_command(
    folder: Path, port: int, primary_port: int, *, quorum: int, password: str = ""
) -> list[str]:
    """Write a Sentinel's file, which it changes by itself, and return its command.

    quorum: how many must miss the primary, each for DOWN_AFTER_MS. password: of its user of Redis.
    """
    lines = [
        *(f"port {port}", "bind 127.0.0.1", f"dir {folder}"),
        f"sentinel monitor {PRIMARY} 127.0.0.1 {primary_port} {quorum}",
        f"sentinel down-after-milliseconds {PRIMARY} {DOWN_AFTER_MS}",
        f"sentinel failover-timeout {PRIMARY} 3000",
    ]
    if password:
        lines += [f"sentinel auth-user {PRIMARY} sentinel", f"sentinel auth-pass {PRIMARY} {password}"]
    file = folder / f"sentinel-{port}.conf"
    file.write_text("\n".join(lines) + "\n")
    return [str(find_redis_server()), str(file), "--sentinel"]
