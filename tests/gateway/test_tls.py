"""The gateway over HTTPS, on real sockets: who reads it, and who holds a connection without a handshake."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.settings import RedisSettings, Settings
from bus.settings_sources import SettingsError
from gateway.service import main
from instar.cli import main as instar
from instar.serve.preflight import tls_problem
from tests.support.certificates import Authority, Pair, authority
from tests.support.gateway_harness import ANSWER, BODY, running

pytest_plugins = ["tests.support.gateway_fixtures"]
__all__ = ["authority"]


def files_of(pair: Pair) -> dict[str, Any]:
    return {"ssl_certfile": pair.cert, "ssl_keyfile": pair.key}


async def test_a_client_with_the_authority_reads_whole_answers_and_streams(
    redis_settings: RedisSettings, folder: Path, authority: Authority
) -> None:
    pair = authority.sign("gateway")
    files = files_of(pair)
    async with running(redis_settings, folder, **files) as gate:
        assert gate.url.startswith("https://")
        async with gate.http(verify=ssl.create_default_context(cafile=authority.ca)) as http:
            whole = await http.post("/v1/completions", json=BODY)
            assert whole.json()["choices"][0]["text"] == ANSWER
            stream = await http.post("/v1/completions", json=BODY | {"stream": True})
            assert stream.text.endswith("data: [DONE]\n\n") and '"error"' not in stream.text
        async with gate.http(verify=ssl.create_default_context()) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/ready")


async def test_a_connection_without_a_handshake_is_closed_in_time(
    redis_settings: RedisSettings, folder: Path, authority: Authority
) -> None:
    pair = authority.sign("patient")
    files = files_of(pair)
    async with running(redis_settings, folder, header_timeout_s=0.5, **files) as gate:
        async with gate.connection() as (reader, _), asyncio.timeout(5):
            assert await reader.read() == b""
        async with gate.connection() as (reader, writer), asyncio.timeout(5):
            writer.write(b"GET /ready HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in await reader.read()  # plain HTTP is answered by TLS's alert at most


async def test_commands_take_the_certificate_of_the_settings_and_no_other(
    redis_settings: RedisSettings,
    folder: Path,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair, other = authority.sign("named"), authority.sign("unnamed")
    files = files_of(pair)
    async with running(redis_settings, folder, **files) as gate:
        monkeypatch.setenv("INSTAR_PORT", str(gate.settings.gateway.port))
        monkeypatch.setenv("INSTAR_GATEWAY__SSL_CERTFILE", pair.cert)
        assert await asyncio.to_thread(instar, ["status"]) == 0
        monkeypatch.setenv("INSTAR_GATEWAY__SSL_CERTFILE", other.cert)
        assert await asyncio.to_thread(instar, ["status"]) != 0
        assert "certificate that is not trusted here" in capsys.readouterr().err


async def test_a_certificate_that_cannot_serve_ends_the_gateway_and_serve(authority: Authority) -> None:
    pair, other = authority.sign("mine"), authority.sign("theirs")
    settings = Settings.model_validate({"gateway": {"ssl_certfile": pair.cert, "ssl_keyfile": other.key}})
    assert f"ssl_keyfile {other.key} is not the key" in tls_problem(settings.gateway)
    with pytest.raises(SystemExit) as ended:
        await main(settings, None, asyncio.Event())  # type: ignore[arg-type]
    assert ended.value.code == 2


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="ssl_certfile is empty") as caught:
        Settings.model_validate({"gateway": {"ssl_keyfile": "key.pem"}})
    assert not isinstance(caught.value, SettingsError)
