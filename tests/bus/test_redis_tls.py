"""Redis behind TLS: a real server behind an end of TLS on a real socket, since not every build speaks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bus.client import connect
from bus.errors import BadRedisUrl, RedisCertificate
from bus.messages import Demand
from bus.settings import RedisSettings
from bus.tls import server_context
from tests.support.certificates import Authority, Pair, authority

__all__ = ["authority"]


@contextlib.asynccontextmanager
async def behind_tls(settings: RedisSettings, pair: Pair) -> AsyncIterator[RedisSettings]:
    """Yield the settings of the same Redis behind TLS."""
    plain = urlsplit(settings.url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(plain.hostname, plain.port)
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    context = server_context(pair.cert, pair.key, setting="redis")
    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    login = plain.netloc.rpartition("@")[0]
    try:
        url = f"rediss://{login}@127.0.0.1:{port}/0" if login else f"rediss://127.0.0.1:{port}/0"
        yield settings.model_copy(update={"url": url})
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_the_bus_works_over_tls_with_the_authority(
    redis_settings: RedisSettings, authority: Authority
) -> None:
    async with behind_tls(redis_settings, authority.sign("redis")) as there:
        secure = there.model_copy(update={"ssl_ca_certs": authority.ca})
        async with connect(secure) as bus, bus.reader(bus.names.demand, Demand, start="0") as reader:
            message = Demand(gateway="g", model="demo", tokens=0, count=1, at_ms=1)
            await bus.publish(bus.names.demand, message)
            assert [one for _, one in await reader.next_batch()] == [message]


async def test_a_certificate_of_another_authority_is_one_sentence(
    redis_settings: RedisSettings, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "other")
    async with behind_tls(redis_settings, authority.sign("foreign")) as there:
        with pytest.raises(RedisCertificate, match=r"is not trusted .*redis\.ssl_ca_certs"):
            async with connect(there.model_copy(update={"ssl_ca_certs": other.ca})):
                pass


async def test_a_file_of_authorities_that_is_not_there_is_named(
    redis_settings: RedisSettings, tmp_path: Path
) -> None:
    absent = str(tmp_path / "ca.pem")
    settings = redis_settings.model_copy(update={"url": "rediss://127.0.0.1:1/0", "ssl_ca_certs": absent})
    with pytest.raises(BadRedisUrl, match=f"redis.ssl_ca_certs {absent} cannot be read"):
        connect(settings)


def test_authorities_without_tls_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing is encrypted"):
        RedisSettings(url="redis://127.0.0.1:6379/0", ssl_ca_certs="ca.pem")
