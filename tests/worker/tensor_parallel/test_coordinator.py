"""A step of a group has no more tokens than a step of one of its workers: there is memory for no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.common.oracles import make_oracle
from tests.support.group_workers import transform, workers
from worker.engine.input_batch import ModelInput
from worker.parallel.coordinator import SHORT_SHARE, TokenNeed, allowances, even_share
from worker.parallel.merged_step import TOKENS, MergedStep


@given(st.data(), st.integers(1, 8), st.integers(1, 600))
def test_together_planners_may_run_what_one_worker_may(data: Any, size: int, max_tokens: int) -> None:
    allowed = [even_share(max_tokens, size)] * size
    for _ in range(5):
        ran = [data.draw(st.integers(0, limit)) for limit in allowed]
        needs = [TokenNeed(tokens, limit) for tokens, limit in zip(ran, allowed, strict=True)]
        before, allowed = allowed, allowances(needs, max_tokens)
        assert sum(allowed) <= max(size, max_tokens - TOKENS) and min(allowed) >= 1
        for tokens, limit, after in zip(ran, before, allowed, strict=True):
            assert tokens < limit or after >= even_share(max_tokens, size), (
                "who has more to run gets its part"
            )


def after(ran: list[int], allowed: list[int]) -> list[int]:
    return allowances([TokenNeed(*each) for each in zip(ran, allowed, strict=True)], 512)


need = st.builds(
    TokenNeed, st.integers(0, 600), st.integers(1, 600), st.integers(0, 64), st.integers(0, 9999)
)


@given(st.lists(need, min_size=1, max_size=8), st.integers(1, 600))
def test_a_long_request_takes_from_prompts_of_short_ones_and_from_no_decode(
    needs: list[TokenNeed], max_tokens: int
) -> None:
    part = even_share(max_tokens, len(needs))
    allowed = allowances(needs, max_tokens)
    assert sum(allowed) <= part * len(needs) and min(allowed) >= 1
    if any(one.long_remaining for one in needs):
        for one, tokens in zip(needs, allowed, strict=True):
            assert tokens >= min(part, one.running), "who decodes gets its tokens"
            if one.long_remaining <= 1:
                assert tokens <= max(one.running + 1, part // SHORT_SHARE)


def test_the_prompt_of_a_long_request_gets_most_of_each_step() -> None:
    allowed = allowances(
        [TokenNeed(20, 20), TokenNeed(100, 100, long_remaining=5000), TokenNeed(0, 1), TokenNeed(5, 5, 2)],
        512,
    )
    assert allowed[1] > 0.75 * 512
    decoding = allowances(
        [TokenNeed(20, 20), TokenNeed(1, 100, 1, long_remaining=1), TokenNeed(0, 1), TokenNeed(5, 5, 2)], 512
    )
    assert sum(decoding) <= 512 / SHORT_SHARE, "a step beside a long request that decodes is a short one"


def test_one_busy_planner_gets_most_of_what_the_others_leave() -> None:
    allowed = [even_share(512, 4)] * 4
    for _ in range(3):
        allowed = after([allowed[0], 0, 0, 3], allowed)
    assert allowed[0] > 0.85 * 512
    allowed = after([allowed[0], allowed[1], 0, 3], allowed)
    assert allowed[1] == allowed[0], "who begins to run has its share one step later"


def test_no_step_of_a_group_has_more_tokens_than_one_worker_has_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_oracle("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    steps: list[int] = []
    plain = MergedStep.forward

    def forward(self: MergedStep, works: list[ModelInput], hidden: Any = None) -> Any:
        steps.append(sum(work.num_tokens for work in works))
        return plain(self, works, hidden)

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
