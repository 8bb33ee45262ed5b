"""The input of a step that only decodes equals the one that is made for any step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.support.engine_toys import request
from worker.engine import input_batch
from worker.engine.input_batch import InputBatch, ScheduledBatch, attention_plan
from worker.engine.scheduler import SchedulerOutput
from worker.engine.sequence import Limits, Sequence

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100, block_tokens=4)


def decodes(lengths: list[int]) -> tuple[InputBatch, SchedulerOutput]:
    """Sequences of these lengths, all of whose tokens but the last are computed."""
    batch, scheduled, block = InputBatch(LIMITS), SchedulerOutput(), 50
    for i, length in enumerate(lengths):
        seq = Sequence(request(str(i), list(range(10 * i, 10 * i + 3)), 90))
        seq.token_ids += range(200 + i, 200 + i + length - 3)
        num_blocks = seq.num_blocks_needed(LIMITS.block_tokens)
        seq.block_ids = list(range(block, block - num_blocks, -1))
        block -= num_blocks
        seq.num_computed_tokens = length - 1
        batch.admit(seq)
        scheduled.add(seq, 1)
    return batch, scheduled


def arrays(batch: ScheduledBatch) -> dict[str, list[object]]:
    """The fields of the input, of its attention plan and of what its logits are for."""
    plan = attention_plan(batch.input, LIMITS.block_tokens, torch.device("cpu"))
    both = {name: getattr(batch, name) for name in ("sampling_rows", "output_positions")}
    for part in (batch.input, plan):
        both |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    del both["derived"]
    return {name: [np.asarray(value).dtype, np.asarray(value).tolist()] for name, value in both.items()}


@pytest.mark.parametrize("lengths", [[4], [5], [9, 4, 33], [4, 5, 6, 7, 8, 9, 10, 90]])
def test_a_step_of_decodes_is_made_as_any_other(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, scheduled = decodes(lengths)
    quick = batch.build(scheduled)
    monkeypatch.setattr(input_batch, "_is_plain_decode", lambda chunk: False)
    plain = batch.build(scheduled)
    assert arrays(quick) == arrays(plain)
    assert [chunk.seq for chunk in quick.sampling] == [chunk.seq for chunk in plain.sampling]
    assert quick.prompt_ranges == plain.prompt_ranges == []
