"""A model that goes while another one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bus.morphs import Retire
from worker.deploy.unload import TURN_S, UnloadRun


def test_one_that_waits_for_another_to_be_through_looks_again_though_nobody_wakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    model_host: Any = SimpleNamespace(busy_with="another")
    run = UnloadRun(Retire(id="r", epoch=1, instance="m@w0"), model_host)
    assert run.deadline is None
    assert next(run.steps()) is False
    assert run.deadline == 7.0 + TURN_S
