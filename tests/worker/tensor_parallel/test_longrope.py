"""A model whose rotary frequencies go by a sequence's length, in groups: each planner says which rows of the
rotary tables its sequences take, so all members need the same tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.group_workers import model_fixtures, transform, workers
from tests.worker.model.test_oracle import LONGROPE
from tests.worker.tensor_parallel.test_workers import Load

SHORT = LONGROPE["original_max_position_embeddings"]

model, folder = model_fixtures(
    "phi3",
    num_hidden_layers=3,
    rope_parameters=LONGROPE,
    original_max_position_embeddings=SHORT,
    sliding_window=None,
)


def test_sequences_outgrow_the_short_frequencies_before_in_and_behind_a_group(
    folder: Path, model: Any
) -> None:
    with workers(folder, 2) as each:
        load = Load(each, model)
        for tp in (2, 1):
            assert load.during(each[0], transform(each, tp)).state == "applied"
        load.check()
        ends = {name: len(tokens) + n for name, (_, tokens, n) in load.asked.items()}
        outgrown = sum(
            len(tokens) <= SHORT < ends[name] - 1 and name not in load.cancelled
            for name, (_, tokens, _) in load.asked.items()
        )
        assert outgrown > 0
        assert sum(worker.instance.scheduler.num_recomputed for worker in each) >= outgrown * SHORT


def test_workers_that_serve_sequences_of_other_lengths_do_not_become_one(folder: Path) -> None:
    with workers(folder, 1) as one, workers(folder, 1, first=1, context=512) as other:
        each = [*one, *other]
        report = each[0].end_of(transform(each, 2))
        assert report.state != "applied"
        assert "w1: it serves sequences of up to 512 tokens, and w0 of up to 1024" in report.reason
