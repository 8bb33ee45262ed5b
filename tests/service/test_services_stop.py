"""The duties of all services towards their supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

import controller.service
import monitor.service
from bus.client import connect
from bus.service import Main
from bus.settings import ControllerSettings, MonitorSettings, Settings
from tests.conftest import settings_of
from tests.support.redis_process import RedisProcess
from tests.support.service_loop import running

SETTINGS = Settings(
    controller=ControllerSettings(interval_s=0.1, grace_s=0.3),
    monitor=MonitorSettings(interval_s=0.05, idle_interval_s=0.4),
)


@pytest.mark.parametrize(
    "main",
    [
        pytest.param(controller.service.main, id="controller"),
        pytest.param(monitor.service.main, id="monitor"),
    ],
)
async def test_it_stops_in_time_while_redis_is_away(
    own_redis: Callable[..., RedisProcess], main: Main
) -> None:
    server = own_redis()
    async with connect(settings_of(server.url)) as bus:
        async with running(main, SETTINGS, bus):
            server.kill()
            await asyncio.sleep(0.3)
            began = time.monotonic()
        assert time.monotonic() - began < 1.0
