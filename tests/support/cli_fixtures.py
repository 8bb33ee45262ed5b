"""Fixtures of the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cli_gateway import Script, scripted


@pytest.fixture
def gateway() -> Iterator[Script]:
    with scripted() as script:
        yield script
