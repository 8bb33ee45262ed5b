"""`pytest_plugins = ["tests.support.gateway_fixtures"]` in a test module: a gateway with one fake worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bus.settings import RedisSettings
from tests.conftest import settings_of
from tests.support import tiny_model, tool_models
from tests.support.gateway_harness import Gate, running
from tests.support.redis_process import RedisProcess


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model; for reading."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.byte_level(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gate(redis_server: RedisProcess, folder: Path) -> AsyncIterator[Gate]:
    """One for all tests of a module that has `pytestmark = pytest.mark.asyncio(loop_scope="module")`.

    The module's own `gate` returns it `as_new`.
    """
    async with running(settings_of(redis_server.url), folder) as gate:
        yield gate


@pytest.fixture
async def gate(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Gate]:
    async with running(redis_settings, folder) as gate:
        yield gate


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model that calls tools; for reading."""
    return tool_models.write(tmp_path_factory.mktemp("models") / "tools")
