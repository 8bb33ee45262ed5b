"""`pytest_plugins = ["tests.support.worker_fixtures"]` in a test module: a worker that serves a toy model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bus.settings import RedisSettings
from tests.support.worker_bench import Bench, running


@pytest.fixture
async def bench(redis_settings: RedisSettings) -> AsyncIterator[Bench]:
    async with running(redis_settings) as started:
        yield started
