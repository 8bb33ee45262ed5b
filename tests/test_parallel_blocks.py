"""Blocks of a group: lent, counted and moved while planners go on, and each belongs to one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.group_workers import BLOCK_TOKENS, transform, workers
from tests.model_folders import make_oracle
from tests.test_parallel_workers import oracle, prompt


@pytest.fixture(scope="module")
def model() -> Any:
    return make_oracle("llama", num_hidden_layers=3, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made


def test_nothing_is_lent_while_subgroups_number_their_blocks_apart(folder: Path, model: Any) -> None:
    """One has a queue that does not fit, the other is idle: its blocks have the same numbers."""
    with workers(folder, 2, megabytes=1.2) as each:
        idle, busy = each
        tokens = busy.instance.scheduler.blocks.capacity * BLOCK_TOKENS
        prompts = {name: prompt(i, tokens * 2 // 5) for i, name in enumerate(("a", "b", "c"))}
        for name, asked in prompts.items():
            busy.submit(name, asked, 40)
        busy.wait(lambda: bool(busy.tokens["a"]), "the first token")
        assert idle.end_of(transform(each, 2)).state == "applied"
        busy.check()
        busy.wait_ends(*prompts)
        for name, asked in prompts.items():
            assert busy.tokens[name] == oracle(model, asked, 40)
