"""Keys of the file against a real gateway: scopes, limits, and changes without a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bus.api_keys import change_keys, new_key
from bus.client import connect
from bus.messages import Event
from bus.settings import GatewaySettings, RedisSettings, Settings
from gateway.service import main
from tests.support.gateway_harness import BODY, running

pytest_plugins = ["tests.support.gateway_fixtures"]


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def test_a_key_is_rotated_in_two_gateways_without_a_restart(
    redis_settings: RedisSettings, folder: Path, path: Path
) -> None:
    old, key = new_key("alice")
    change_keys(path, lambda _: [key])
    own: dict[str, Any] = {
        "api_keys": ["of-the-settings"],
        "admin_keys": ["an-admin-key"],
        "keys_file": str(path),
    }
    async with (
        running(redis_settings, folder, wait=False, **own) as gate,
        running(redis_settings, folder, workers=0, **own) as second,
        gate.http() as http,
        second.http() as other,
        gate.bus.reader(gate.bus.names.events, Event, start="0") as events,
    ):

        async def statuses(text: str) -> set[int]:
            return {(await one.get("/v1/models", headers=bearer(text))).status_code for one in (http, other)}

        async def until(text: str, status: int) -> None:
            for _ in range(200):
                if await statuses(text) == {status}:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"not {status} within 10 s: {await statuses(text)}")

        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(old))).status_code == 200
        new, added = new_key("alice again")
        assert await statuses(new) == {401}
        change_keys(path, lambda keys: [*keys, added])
        await until(new, 200)
        gate.worker.stop_at = 2
        running_one = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(old)))
        await gate.until("it runs", lambda: gate.worker.num_running == 1)
        change_keys(path, lambda keys: [one for one in keys if one.id != key.id])
        await until(old, 401)
        path.write_text("not a file of keys")  # they stay as they were
        await asyncio.sleep(1.2)
        assert await statuses(new) == await statuses("of-the-settings") == {200}
        gate.worker.stop_at = None
        assert (await running_one).status_code == 200, "what runs goes on"
        told = [(event.kind, event.subject) for _, event in await events.read()]
        assert told.count(("key_added", added.id)) == told.count(("key_revoked", key.id)) == 2


async def test_scopes_part_v1_from_reading_and_from_changing(
    redis_settings: RedisSettings, folder: Path, path: Path
) -> None:
    caller = new_key("caller")
    reader, writer = new_key("reader", scopes=("admin-read",)), new_key("writer", scopes=("admin-write",))
    change_keys(path, lambda _: [key for _, key in (caller, reader, writer)])
    async with running(redis_settings, folder, keys_file=str(path), admin_keys=["an-admin-key"]) as gate:

        async def status(text: str, method: str, url: str) -> int:
            async with gate.http(headers=bearer(text)) as http:
                return (await http.request(method, url, json=BODY if "/v1" in url else {})).status_code

        asked = (
            *(("POST", "/v1/completions"), ("GET", "/admin/state")),
            *(("PUT", "/admin/policy"), ("DELETE", "/admin/burst")),
        )
        found = {}
        for text, key in (caller, reader, writer):
            found[key.name] = [await status(text, *one) for one in asked]
        assert found["caller"] == [200, 403, 403, 403]
        assert found["reader"] == [403, 200, 403, 403]
        assert found["writer"][:2] == [403, 200] and found["writer"][2] not in (401, 403)
        assert found["writer"][3] == 409  # it may stop a burst, and none is played
        assert await status("an-admin-key", "GET", "/admin/state") == 200


async def test_a_key_over_its_tokens_is_told_when_to_come_again(
    redis_settings: RedisSettings, folder: Path, path: Path
) -> None:
    text, key = new_key("small", tpm=10, rpm=100)
    change_keys(path, lambda _: [key])
    async with running(redis_settings, folder, keys_file=str(path)) as gate:
        async with gate.http(headers=bearer(text)) as http:
            first, second = [await http.post("/v1/completions", json=BODY) for _ in range(2)]
            metrics = (await http.get("/metrics")).text
        assert (first.status_code, second.status_code) == (200, 429)
        used = first.json()["usage"]
        assert first.headers["x-ratelimit-limit-tokens"] == "10"
        assert first.headers["x-ratelimit-remaining-tokens"] == str(10 - used["prompt_tokens"])
        assert first.headers["x-ratelimit-remaining-requests"] == "99"
        wait_s = int(second.headers["retry-after"])
        assert abs(wait_s - 6 * (1 + used["total_tokens"] - 10)) <= 5, "six seconds a token"
        assert second.json()["error"]["code"] == "rate_limit_exceeded"
        assert 'instar_key_rejections_total{key="small"} 1.0' in metrics


async def test_a_gateway_does_not_start_without_its_file_of_keys(
    redis_settings: RedisSettings, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(redis=redis_settings, gateway=GatewaySettings(port=0, keys_file=str(path)))
    async with connect(redis_settings, source="gateway") as bus:
        with pytest.raises(SystemExit) as end:
            await main(settings, bus, asyncio.Event())
    assert end.value.code == 2 and "instar keys add" in caplog.text
