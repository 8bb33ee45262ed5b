"""A step of a group has no more tokens than a step of one of its workers: there is memory for no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.group_workers import transform, workers
from tests.model_folders import make_oracle
from worker.engine.work import Work
from worker.parallel.budget import allowances, even
from worker.parallel.canary import TOKENS
from worker.parallel.merged import MergedStep


@given(st.data(), st.integers(1, 8), st.integers(1, 600))
def test_together_planners_may_run_what_one_worker_may(data: Any, size: int, max_tokens: int) -> None:
    allowed = [even(max_tokens, size)] * size
    for _ in range(5):
        ran = [data.draw(st.integers(0, limit)) for limit in allowed]
        before, allowed = allowed, allowances(ran, allowed, max_tokens)
        assert sum(allowed) <= max(size, max_tokens - TOKENS) and min(allowed) >= 1
        for tokens, limit, after in zip(ran, before, allowed, strict=True):
            assert tokens < limit or after >= even(max_tokens, size), "who has more to run gets its part"


def test_one_busy_planner_gets_most_of_what_the_others_leave() -> None:
    allowed = [even(512, 4)] * 4
    for _ in range(3):
        allowed = allowances([allowed[0], 0, 0, 3], allowed, 512)
    assert allowed[0] > 0.85 * 512
    allowed = allowances([allowed[0], allowed[1], 0, 3], allowed, 512)
    assert allowed[1] == allowed[0], "who begins to run has its share one step later"


def test_no_step_of_a_group_has_more_tokens_than_one_worker_has_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_oracle("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    steps: list[int] = []
    plain = MergedStep.forward

    def forward(self: MergedStep, works: list[Work]) -> Any:
        steps.append(sum(work.num_tokens for work in works))
        return plain(self, works)

    monkeypatch.setattr(MergedStep, "forward", forward)
    with workers(tmp_path, 2, max_num_batched_tokens=40) as each:
        assert each[0].end_of(transform(each, 2)).state == "applied"
        for worker in each:
            for i in range(2):
                worker.submit(f"{worker.name}-{i}", [(7 * i + k) % 211 for k in range(50)], 2)
        for worker in each:
            worker.wait_ends(*(f"{worker.name}-{i}" for i in range(2)))
        assert each[0].end_of(transform(each, 1)).state == "applied"
    assert 20 < max(steps) <= 40
