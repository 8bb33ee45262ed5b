"""Recorded decodes give the very bits of steps that run call by call, whatever changes between them."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
import torch

from bench.common.oracles import make_oracle
from kernels.cpu.bytes_tile import CAN_DOT
from tests.support.model_folders import Runner
from tests.support.pairs import pairs
from tests.support.variant_models import Morphing
from worker.model import recorded
from worker.model.linear import TransposedLinear

WHOLE_VECTORS = {"intermediate_size": 192, "head_dim": 32}  # so that all of a step are kernels


def save(folder: Path, family: str = "llama", **options: int) -> Path:
    make_oracle(family, **(WHOLE_VECTORS | options)).save_pretrained(folder)
    return folder


def run(runner: Runner, steps: list[dict[int, list[int]]]) -> list[torch.Tensor]:
    return [runner.step(step).clone() for step in steps]  # the next step may write to the same memory


def programs(runner: Runner) -> dict[int, bool]:
    """Return the numbers of tokens that were recorded, and whether they could be."""
    steps = runner.model._transformer._recorded._steps
    return {tokens: step.program is not None for tokens, step in steps.items()}


def conversation() -> list[dict[int, list[int]]]:
    """Prompts of four sequences, decodes of changing sets of them, and one past the room of a recording."""
    prompts: dict[int, list[int]] = {seq: list(range(3 + 20 * seq)) for seq in range(4)}
    sets = [(0, 1, 2, 3), (2,), (0, 3), (3, 0), (1, 2, 0), (0,), (2,)]
    decodes = [{seq: [7 * i + seq] for seq in sets[i % len(sets)]} for i in range(20)]
    return [prompts, *decodes, *({1: [i % 200]} for i in range(150))]


FAMILIES = (
    *("llama", "qwen3 with biases", "mistral with a sliding window", "gemma2", "gemma3"),
    *("mixtral", "qwen2 moe", "qwen3 moe", "gpt-oss"),
)


@pytest.mark.parametrize(("dtype", "family"), pairs([torch.float32, torch.bfloat16], FAMILIES))
def test_a_recorded_decode_equals_one_that_runs_call_by_call(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, family)
    fast, plain = Runner(tmp_path, dtype=dtype), Runner(tmp_path, dtype=dtype)
    found = run(fast, conversation())
    assert programs(fast) == {1: True, 2: True, 3: True, 4: True}
    monkeypatch.setattr(recorded, "MOST_TOKENS", 0)
    for got, wanted in zip(found, run(plain, conversation()), strict=True):
        assert got.equal(wanted)
    assert not programs(plain)
    for runner in (fast, plain):
        runner.close()


def test_a_recorded_decode_reads_and_writes_a_cache_in_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    found = []
    for most in (recorded.MOST_TOKENS, 0):
        monkeypatch.setattr(recorded, "MOST_TOKENS", most)
        runner = Runner(tmp_path, block_tokens=16, kv_precision="int8")
        found.append(run(runner, conversation()))
        assert programs(runner) == (dict.fromkeys((1, 2, 3, 4), True) if most else {})
        runner.close()
    assert all(map(torch.equal, *found))


@pytest.mark.skipif(not CAN_DOT, reason="this processor has no product of bytes, which attention needs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3 moe", "gpt-oss"])
def test_a_recorded_decode_reads_quantised_experts(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model", family)
    found = []
    for most in (recorded.MOST_TOKENS, 0):
        monkeypatch.setattr(recorded, "MOST_TOKENS", most)
        made = Morphing(tmp_path / "model", tmp_path, dtype=dtype)
        made.swap_all("int4")
        found.append(run(made.runner, conversation()[:21]))
        assert programs(made.runner) == (dict.fromkeys((1, 2, 3, 4), True) if most else {})
        made.close()
    assert all(map(torch.equal, *found))


def test_a_replaced_layer_is_recorded_again(tmp_path: Path) -> None:
    runner = Runner(save(tmp_path))
    before = run(runner, [{0: [1, 2, 3]}, {0: [4]}])[-1]
    half = copy(runner.model.layers[0].feed_forward)
    assert isinstance(half.down, TransposedLinear)
    half.down = TransposedLinear(half.down.weight * 3)
    runner.model.install(0, half)
    after = run(runner, [{1: [1, 2, 3]}, {1: [4]}])[-1]
    other = Runner(tmp_path)
    other.model.install(0, half)
    assert after.equal(run(other, [{0: [1, 2, 3]}, {0: [4]}])[-1])
    assert not after.equal(before)


def test_a_step_of_which_torch_computes_a_part_runs_call_by_call(tmp_path: Path) -> None:
    runner = Runner(save(tmp_path, intermediate_size=172))
    whole = Runner(tmp_path).step({0: [1, 2, 3, 4]})
    found = run(runner, [{0: [1, 2, 3]}, {0: [4]}])[-1]
    torch.testing.assert_close(found, whole[-1:], rtol=1e-4, atol=1e-4)
    assert programs(runner) == {1: False}


def test_logits_outlive_the_next_step(tmp_path: Path) -> None:
    runner = Runner(save(tmp_path))
    _, first, second = run(runner, [{0: [1, 2, 3]}, {0: [4]}, {0: [5]}])
    assert not first.equal(second)


def test_a_step_that_wants_fewer_logits_than_tokens_runs_call_by_call(tmp_path: Path) -> None:
    runner = Runner(save(tmp_path))
    runner.step({0: [1, 2], 1: [3]})
    assert runner.step({0: [4], 1: [5]}, rows=[1]).shape[0] == 1
    assert not programs(runner)
