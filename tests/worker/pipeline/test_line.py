"""One instance over several workers gives what transformers gives, token for token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from tests.support.engine_toys import expect_no_growth
from tests.support.greedy import assert_greedy, generate
from tests.support.pipeline_workers import LIMITS, Line
from worker.morph.resizer import KVResizer

LAYERS = 5
NUM_NEW = 12
LENGTHS = (1, 3, 17, 40, 65)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return make_oracle("llama", num_hidden_layers=LAYERS, seed=3)


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(oracle: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [generate(oracle, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize(
    ("bounds", "tp"),
    [([0, 1, 5], 1), ([0, 3, 5], 1), ([0, 1, 2, 4, 5], 1), ([0, 4, 5], 2), ([0, 1, 3, 5], 2)],
)
def test_uneven_stages_give_what_generate_gives(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], bounds: list[int], tp: int
) -> None:
    with Line(folder, bounds, tp=tp) as line:
        for i, prompt in enumerate(prompts):
            line.submit(str(i), prompt, NUM_NEW)
        line.leader.wait_ends(*map(str, range(len(prompts))))
        assert line.leader.tokens == {str(i): tokens for i, tokens in enumerate(expected)}
        line.leader.call(line.leader.engine.check_integrity)
        line.end()
        for worker in line.workers[1:]:
            worker.wait(partial(worker.ended.__contains__, line.id), "the end of its stage")
        assert all(worker.is_empty() for worker in line.workers)


@pytest.mark.parametrize("tp", [1, 2])
def test_cancels_and_preemptions_change_no_token(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], tp: int
) -> None:
    with Line(folder, [0, 2, 3, 5], tp=tp, blocks=30, max_blocks=30) as line:
        expect_no_growth(line.instance.scheduler)
        for i, prompt in enumerate(prompts):
            line.submit(str(i), prompt, NUM_NEW)
            line.submit(f"gone {i}", prompt[::-1], 40)
            line.leader.thread.cancel([f"gone {i - 1}"])
        line.leader.thread.cancel([f"gone {len(prompts) - 1}"])
        for i, prompt in enumerate(prompts):
            line.submit(f"again {i}", prompt, NUM_NEW)
        names = [f"{word}{i}" for i in range(len(prompts)) for word in ("", "again ")]
        line.leader.wait_ends(*names)
        assert {name: line.leader.tokens[name] for name in names} == {
            name: expected[int(name.split()[-1])] for name in names
        }
        assert line.instance.scheduler.num_preemptions > 0
        line.leader.call(line.leader.engine.check_integrity)


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_that_move_at_the_leader_move_at_every_stage_behind_what_is_on_its_way(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], tp: int
) -> None:
    with Line(folder, [0, 1, 4, 5], tp=tp) as line:
        resizer = line.target.resizer
        for i, prompt in enumerate(prompts):
            line.submit(str(i), prompt, NUM_NEW)
            line.submit(f"first {i}", prompt, 1)  # it ends soon and leaves a hole below
        moved = 0
        while len(line.leader.ends) < 2 * len(prompts):
            line.leader.call(lambda: _vacate(resizer))
            moved = resizer.num_blocks_moved
        assert moved > 0
        assert {str(i): line.leader.tokens[str(i)] for i in range(len(prompts))} == {
            str(i): tokens for i, tokens in enumerate(expected)
        }


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_beginnings_are_found_behind_batches_in_flight_cancels_preemptions_and_moves(
    folder: Path, oracle: Any, prompts: list[list[int]], tp: int
) -> None:
    beginning = prompts[4][:48]
    asked = {str(i): [*beginning[: 16 * (i % 4)], *prompts[i % 3 + 1]] for i in range(16)}
    limits = replace(LIMITS, prefix_cache=True)
    with Line(folder, [0, 1, 3, 5], tp=tp, blocks=40, max_blocks=40, limits=limits) as line:
        expect_no_growth(line.instance.scheduler)
        resizer = line.target.resizer
        for name, prompt in asked.items():
            line.submit(f"gone {name}", prompt[:-1], 40)
            line.submit(name, prompt, NUM_NEW)
            line.leader.thread.cancel([f"gone {name}"])
            line.leader.call(lambda: _vacate(resizer))
            line.leader.call(line.leader.engine.check_integrity)
        line.leader.wait_ends(*asked)
        for name, prompt in asked.items():
            assert_greedy(oracle, prompt, NUM_NEW, line.leader.tokens[name], about=name)
        assert sum(line.leader.cached[name] for name in asked) > 0
        assert line.instance.scheduler.num_preemptions > 0
        line.leader.call(line.cache.check_integrity)


def _vacate(resizer: KVResizer) -> None:
    """Everything to the low end, as a shrink does before it unmaps."""
    resizer.vacate(resizer.cache.allocator.num_used)


def test_logprobs_do_not_depend_on_where_the_model_is_cut(folder: Path, prompts: list[list[int]]) -> None:
    asked = {"logprobs": 2, "prompt_logprobs": 1}
    answers = []
    for bounds, tp in (([0, 2, 5], 2), ([0, 1, 3, 5], 1)):
        with Line(folder, bounds, tp=tp) as line:
            line.submit("a", prompts[4], 4, **asked)
            line.submit("b", prompts[3], 4, **asked)
            line.leader.wait_ends("a", "b")
            answers.append((line.leader.tokens, line.leader.logprobs))
    (tokens, logprobs), (tokens_again, logprobs_again) = answers
    assert tokens == tokens_again
    for name, told in logprobs.items():  # which chunks share a step is chance, and products round with it
        assert [each and each.token_id for each in told] == [
            each and each.token_id for each in logprobs_again[name]
        ]
        for one, other in zip(told, logprobs_again[name], strict=True):
            if one and other:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert one.top_ids == other.top_ids
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
    own = logprobs["a"]
    assert len(own) == 4 + len(prompts[4])  # None for the first of the prompt


@pytest.mark.parametrize(("bounds", "tp"), [([0, 1, 3, 5], 1), ([0, 2, 5], 2), ([0, 5], 2)])
def test_embeddings_come_from_the_stage_that_has_the_head(
    folder: Path, oracle: Any, prompts: list[list[int]], expected: list[list[int]], bounds: list[int], tp: int
) -> None:
    with Line(folder, bounds, tp=tp) as line:
        line.submit("beside", prompts[2], NUM_NEW)
        for i, prompt in enumerate(prompts):
            line.submit(str(i), prompt, 1, embeds=True)
        line.leader.wait_ends("beside", *map(str, range(len(prompts))))
        assert line.leader.tokens["beside"] == expected[2]
        found = line.leader.embeddings
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            last = oracle.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        got = torch.frombuffer(bytearray(found[str(i)]), dtype=torch.float32)
        torch.testing.assert_close(
            got, torch.nn.functional.normalize(last, dim=0), rtol=1e-3, atol=1e-4, msg=str(i)
        )


def test_a_place_is_free_for_each_stage_and_no_sequence_is_on_its_way_twice(folder: Path) -> None:
    with Line(folder, [0, 1, 2, 5]) as line:
        most = 0
        for i in range(6):
            line.submit(str(i), [i + 1] * 3, 40)
        while len(line.leader.ends) < 6:
            batches = line.leader.call(
                lambda: [{id(chunk.seq) for chunk in batch.chunks} for batch in line.executor._in_flight]
            )
            most = max(most, len(batches))
            assert sum(map(len, batches)) == len(set().union(*batches))
        assert most == 3


def _in_flight(line: Line) -> list[set[int]]:
    return [{id(chunk.seq) for chunk in batch.chunks} for batch in line.executor._in_flight]
