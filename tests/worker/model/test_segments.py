"""A group's logits are each member's alone, at every degree and at every boundary between two degrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.common.oracles import SPLIT, make_oracle
from tests.support.families import with_slow_ones
from tests.support.group_models import Chunks, Ranks
from tests.support.model_folders import Runner
from tests.support.pairs import pairs
from worker.model import Segment

# Float32 on both sides; the ranks' partial sums are added in another order. Logits are about 1 in size.
EXACT = {"rtol": 1e-4, "atol": 1e-4}
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_oracle("llama", num_hidden_layers=LAYERS).save_pretrained(made)
    return made


def tokens(n: int, seed: int) -> list[int]:
    made: list[int] = torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


def check(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[list[int]]:
    """Check that logits and greedy tokens are alike; return the tokens."""
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, **EXACT)
        assert got.argmax(1).equal(wanted.argmax(1))
    return [got.argmax(1).tolist() for got, _ in pairs]


def check_kv(ranks: Ranks) -> None:
    """Every rank has the keys and values of its shard, where its numbers of blocks say, and no others."""
    for h, rank in enumerate(ranks.ranks):
        for layer, wanted in zip(rank.runner.kv.layers, ranks.expected_kv(h), strict=True):
            torch.testing.assert_close(layer.view(wanted.shape), wanted, **EXACT, equal_nan=True)


def busy(size: int) -> list[Chunks]:
    """Prompts that differ in number and length; the last rank has none."""
    return [
        {seq: tokens(7 + 5 * seq + 3 * h, seed=10 * h + seq) for seq in range(1 + h % 3)}
        for h in range(size - 1)
    ] + [{}]


def next_chunks(before: list[Chunks], made: list[list[int]]) -> list[Chunks]:
    """A decode of every sequence."""
    return [
        {seq: [token] for seq, token in zip(own, mine, strict=True)}
        for own, mine in zip(before, made, strict=True)
    ]


# ---------------------------------------------------------------------------- one degree


@pytest.mark.parametrize(("family", "size"), pairs(with_slow_ones(SPLIT), [2, 4]))
def test_a_group_gives_each_member_what_it_gets_alone(tmp_path: Path, family: str, size: int) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    ranks = Ranks(tmp_path, size)
    chunks = busy(size)
    for _ in range(4):
        made = check(ranks.step(chunks))
        chunks = next_chunks(chunks, made)
    check_kv(ranks)
    ranks.close()


def test_ranks_agree_on_every_bit_of_what_they_compute_together(folder: Path) -> None:
    """Else a token that one of them publishes might not be the one that the others' caches follow from."""
    ranks = Ranks(folder, 4)
    first, *others = ranks.logits(busy(4), [[0, 3], [], [5], []], own=slice(None))
    assert first.shape == (3, 211) and all(other.equal(first) for other in others)
    ranks.close()


# ---------------------------------------------------------------------------- boundaries


DEGREES = [(1, 2), pytest.param(1, 4, marks=[pytest.mark.faults, pytest.mark.slow]), (2, 4)]
DIRECTIONS = [pytest.param(True, id="scale-up"), pytest.param(False, id="scale-down")]


@pytest.mark.parametrize(
    ("low", "size", "is_rising", "boundary"), pairs(DEGREES, DIRECTIONS, range(LAYERS + 1))
)
def test_a_step_across_a_boundary_gives_each_member_what_it_gets_alone(
    folder: Path, low: int, size: int, is_rising: bool, boundary: int
) -> None:
    ranks = Ranks(folder, size, low)
    ranks.reshape(boundary, is_rising=is_rising)
    started = busy(size)
    ranks.prefill(started)
    # Decodes beside chunks of prompts; the rank that was idle begins, another has nothing to do now.
    chunks: list[Chunks] = [
        {0: [5], 7: tokens(11, seed=70)},
        *({seq: [seq] for seq in own} for own in started[1:-1]),
    ]
    chunks.append({3: tokens(6, seed=71)})
    rows: list[list[int]] = [[0, 4, 11], *([*range(len(own))] for own in started[1:-1]), []]
    check(ranks.step(chunks, rows))
    chunks = [{0: [9]}, *({} for _ in started[1:-1]), {3: [4]}]
    made = check(ranks.step(chunks))
    made = check(ranks.step(next_chunks(chunks, made)))
    check_kv(ranks)
    ranks.close()


@pytest.mark.parametrize(("low", "is_rising"), pairs([1, 4], DIRECTIONS))
def test_so_do_eight_ranks(tmp_path: Path, low: int, is_rising: bool) -> None:
    make_oracle("llama, multi-head, tied").save_pretrained(tmp_path)
    ranks = Ranks(tmp_path, 8, low, max_tp=8)
    ranks.reshape(1, is_rising=is_rising)
    started = busy(8)
    ranks.prefill(started)
    made = check(ranks.step([{seq: [seq] for seq in own} for own in started]))
    check(ranks.step(next_chunks(started, made)))
    check_kv(ranks)
    ranks.close()


def test_a_boundary_may_move_between_any_two_steps(folder: Path) -> None:
    """The keys and values move by the twins' here; the exchange has tests of its own."""
    ranks = Ranks(folder, 4)
    started = busy(4)
    ranks.reshape(LAYERS, is_rising=True)
    ranks.prefill(started)
    made = [[1] * len(own) for own in started]
    chunks = started
    for is_rising in (True, False):
        for boundary in range(LAYERS, -1, -1):
            ranks.reshape(boundary, is_rising=is_rising)
            ranks.scatter()
            chunks = next_chunks(chunks, made)
            made = check(ranks.step(chunks))
    check_kv(ranks)
    ranks.close()


# ---------------------------------------------------------------------------- refusals


def test_segments_that_are_not_the_layers_are_refused(folder: Path) -> None:
    runner = Runner(folder)
    plan = runner._plan({0: [1, 2]})
    nothing = torch.zeros(0, dtype=torch.int64)

    def refused(*segments: Segment, because: str) -> None:
        with pytest.raises(ValueError, match=because):
            runner.model.forward_segments(nothing, segments, runner.kv, nothing, slice(None))

    refused(Segment(0, 2, plan), because=f"the segments end at layer 2 of {LAYERS}")
    refused(Segment(0, 2, plan), Segment(3, 4, plan), because=r"layers \[3, 4\); layer 2 is next")
    refused(Segment(0, 0, plan), Segment(0, 4, plan), because=r"layers \[0, 0\); layer 0 is next")
    refused(
        Segment(0, 4, plan, degree=2), because="layer 0 is at Shard.rank=0, size=1.; a segment of degree 2"
    )
    runner.close()
