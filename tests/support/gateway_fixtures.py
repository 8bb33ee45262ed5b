"""`pytest_plugins = ["tests.support.gateway_fixtures"]` in a test module: a gateway with one fake worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.settings import RedisSettings
from tests.support import tiny_model, tool_models
from tests.support.gateway_harness import Gate, running


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model; for reading."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.byte_level(folder)
    return folder


@pytest.fixture
async def gate(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Gate]:
    async with running(redis_settings, folder) as gate:
        yield gate


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model that calls tools; for reading."""
    return tool_models.write(tmp_path_factory.mktemp("models") / "tools")
