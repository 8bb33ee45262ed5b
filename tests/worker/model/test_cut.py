"""Ranks of a fixed degree hold a part of everything large, and together are the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

import kernels
from bench.common.loading import load_model
from bench.common.oracles import make_oracle
from tests.support.families import EVERY_FAMILY
from tests.support.group_models import TIMEOUT_S, together
from tests.support.model_folders import Runner
from worker.distributed.communicator import connect
from worker.model import ModelError, read_config
from worker.model.cut import Cut, CutSizes
from worker.model.layout import plan_model, whole_sources
from worker.model.shard import Shard

VOCAB = 211
SHARING = ("llama with biases", "falcon, new decoder", "gpt-oss")  # of these eight ranks share four KV heads

kernels.configure(1)


class CutModel:
    """One model over the ranks of this process, a thread each."""

    def __init__(self, folder: Path, size: int, **load: Any) -> None:
        self.runners = [Runner(folder, rank=Shard(rank, size), **load) for rank in range(size)]
        store = HashStore()
        self.groups = together(
            lambda rank: connect(PrefixStore("cut", store), rank, size, timeout_s=TIMEOUT_S), size
        )

    def step(self, chunks: dict[int, list[int]], rows: Sequence[int]) -> torch.Tensor:
        """Return the logits that the first rank has."""
        token_ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        plans = [runner._plan(chunks) for runner in self.runners]

        def run(rank: int) -> torch.Tensor:
            model, group = self.runners[rank].model, self.groups[rank]
            wanted = torch.tensor(rows, dtype=torch.int64)
            residual = model.embed(token_ids, group)
            residual = model.run(residual, plans[rank], self.runners[rank].kv, wanted, group)
            return model.logits(residual, group)

        return together(run, len(self.runners))[0]

    def close(self) -> None:
        for group, runner in zip(self.groups, self.runners, strict=True):
            group.close()
            runner.close()


def prompt(n: int, seed: int) -> list[int]:
    made: list[int] = torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


STEPS: list[tuple[dict[int, list[int]], list[int]]] = [
    ({0: prompt(11, 1)}, []),
    ({0: prompt(6, 2), 1: prompt(17, 3)}, [5, 22]),
    ({1: [7], 0: [9]}, [0, 1]),
    ({0: [VOCAB - 1], 2: prompt(5, 4)}, [0, 1, 5]),
]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_the_ranks_of_a_degree_give_what_the_whole_model_gives(tmp_path: Path, family: str) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    sizes = read_config(tmp_path).cut_sizes
    degrees = [2, 8] if family in SHARING else [2]
    assert not any(map(sizes.why_not, degrees))
    whole = Runner(tmp_path)
    cuts = [CutModel(tmp_path, degree) for degree in degrees]
    for chunks, rows in STEPS:
        wanted = whole.step(chunks, rows)
        for cut in cuts:
            torch.testing.assert_close(cut.step(chunks, rows), wanted, rtol=1e-4, atol=1e-4)
    whole.close()
    for cut in cuts:
        cut.close()


def test_ranks_share_one_kv_head_evenly_or_not(tmp_path: Path) -> None:
    make_oracle("falcon with one KV head").save_pretrained(tmp_path)
    whole, cut = Runner(tmp_path), CutModel(tmp_path, 3)
    configs = [runner.model.config for runner in cut.runners]
    assert [(one.num_heads, one.num_kv_heads) for one in configs] == [(2, 1), (3, 1), (3, 1)]
    for chunks, rows in STEPS:
        torch.testing.assert_close(cut.step(chunks, rows), whole.step(chunks, rows), rtol=1e-4, atol=1e-4)
    whole.close()
    cut.close()


@pytest.mark.parametrize("family", ["llama with biases", "gpt-oss", "falcon with biases"])
@pytest.mark.parametrize("degree", [2, 4])
def test_all_ranks_together_load_every_element_once(tmp_path: Path, family: str, degree: int) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    whole = read_config(tmp_path)
    parts = [whole.of_rank(Shard(rank, degree)) for rank in range(degree)]
    plans = [plan_model(part, torch.float32, 4096, 1) for part in parts]
    repeated = {}  # by tensor: elements that every rank has
    loaded = dict[str, int]()
    for plan in plans:
        for source in (each for one in plan.ranges() for each in one.sources):
            loaded[source.tensor] = loaded.get(source.tensor, 0) + source.numel
            if "norm" in source.tensor or "router" in source.tensor or ".ln_" in source.tensor:
                repeated[source.tensor] = degree
    there = {source.tensor: source.shape for source in whole_sources(whole)}
    assert loaded == {
        name: int(torch.Size(shape).numel()) * repeated.get(name, 1) for name, shape in there.items()
    }


def test_a_rank_has_a_part_of_attention_embedding_and_head_too(tmp_path: Path) -> None:
    make_oracle("llama").save_pretrained(tmp_path)
    whole = plan_model(read_config(tmp_path), torch.float32, 64, 1)
    part = plan_model(read_config(tmp_path).of_rank(Shard(1, 4)), torch.float32, 64, 1)
    for large, small in zip(whole.ranges(), part.ranges(), strict=True):
        assert small.nbytes <= 0.28 * large.nbytes, large.name
    assert part.padding_bytes == 0


@pytest.mark.parametrize(
    ("family", "degree", "why"),
    [
        ("llama", 3, "4 KV heads, which 8 heads read, cannot be dealt out"),
        ("llama", 16, "4 KV heads, which 8 heads read, cannot be dealt out"),
        ("llama", 128, "a degree is 1 to 16"),
        ("mixtral", 8, "4 experts cannot be dealt out evenly"),
    ],
)
def test_a_degree_that_cannot_be_is_named_with_those_that_can(
    tmp_path: Path, family: str, degree: int, why: str
) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    runner = Runner(tmp_path)
    before = runner.pool.num_free
    with pytest.raises(ModelError, match=why) as refused:
        load_model(tmp_path, runner.pool, rank=Shard(0, degree))
    possible = "1, 2, 4" if family == "mixtral" else "1, 2, 4, 8"
    assert str(refused.value).endswith(f"these can be: {possible}")
    assert runner.pool.num_free == before
    runner.close()


@pytest.mark.parametrize("rows", [11008, 14336, 18944, 28672, 172])
@pytest.mark.parametrize("degree", [2, 3, 4, 6, 8])
def test_the_rows_of_an_ffn_are_dealt_out_nearly_evenly(rows: int, degree: int) -> None:
    sizes = CutSizes(heads=24, kv_heads=24, ffn_rows=rows, experts=0, vocab=1000)
    parts = [Cut.of(sizes, Shard(rank, degree)) for rank in range(degree)]
    assert [row for part in parts for row in part.ffn_rows] == list(range(rows))
    assert [token for part in parts for token in part.vocab] == list(range(1000))
    assert max(len(part.ffn_rows) for part in parts) <= max(1.01 * rows / degree, rows // degree + 1)
    if rows > 1000 and degree in (2, 4, 8):
        assert all(part.ffn_rows.start % 32 == 0 for part in parts)
