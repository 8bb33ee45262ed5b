"""Stages that have some layers each, chained, are the whole model: bit for bit, in every family."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench.common.loading import load_model
from bench.common.oracles import make_oracle
from tests.support.families import EVERY_FAMILY
from tests.support.model_folders import Runner
from worker.model import ModelError

LAYERS = 4
SPLITS = ([0, 1, 4], [0, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4])


class Chain:
    """Stages of one model in one process, each with its own pages and KV."""

    def __init__(self, folder: Path, bounds: list[int]) -> None:
        self.stages = [Runner(folder, layers=part) for part in pairwise(bounds)]

    def step(self, chunks: dict[int, list[int]], rows: list[int]) -> torch.Tensor:
        token_ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        first, last = self.stages[0], self.stages[-1]
        residual = first.model.embed(token_ids)
        for stage in self.stages:
            asked = torch.tensor(rows, dtype=torch.int64) if stage is last else None
            residual = stage.model.run(residual, stage._plan(chunks), stage.kv, asked)
        return first.model.logits(residual)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def prompt(n: int, seed: int) -> list[int]:
    made: list[int] = torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_chain_of_stages_gives_every_bit_that_the_whole_model_gives(tmp_path: Path, family: str) -> None:
    make_oracle(family, num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    whole = Runner(tmp_path)
    chains = [Chain(tmp_path, bounds) for bounds in SPLITS]
    # A prompt in two chunks, of which the first is asked for nothing; beside it another one, then decodes.
    steps: list[tuple[dict[int, list[int]], list[int]]] = [
        ({0: prompt(11, 1)}, []),
        ({0: prompt(6, 2), 1: prompt(17, 3)}, [5, 22]),
        ({1: [7], 0: [9]}, [0, 1]),
        ({0: [3], 2: prompt(5, 4)}, [0, 1, 5]),
    ]
    for chunks, rows in steps:
        wanted = whole.step(chunks, rows)
        for chain in chains:
            assert chain.step(chunks, rows).equal(wanted)
    whole.close()
    for chain in chains:
        chain.close()


def test_a_later_stage_takes_pages_for_its_layers_only(tmp_path: Path) -> None:
    make_oracle("llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    whole, first, rest = (Runner(tmp_path, layers=part) for part in (None, (0, 1), (1, 4)))
    sizes = [runner.model.size for runner in (first, rest)]
    assert sum(size.weights for size in sizes) == whole.model.size.weights
    assert sum(size.mapped for size in sizes) == whole.model.size.mapped
    for runner in (whole, first, rest):
        runner.close()


@pytest.mark.parametrize("layers", [(0, 5), (2, 2), (-1, 2)])
def test_layers_that_there_are_not_are_refused_before_a_page_is_mapped(
    tmp_path: Path, layers: tuple[int, int]
) -> None:
    make_oracle("llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    runner = Runner(tmp_path)
    before = runner.pool.num_free
    with pytest.raises(ModelError, match="the model has 4"):
        load_model(tmp_path, runner.pool, layers=layers)
    assert runner.pool.num_free == before
    runner.close()
