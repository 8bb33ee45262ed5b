"""PyramidKV as the evaluation has it: budgets, what is kept, and that keeping everything changes nothing."""

from __future__ import annotations

from pathlib import Path

import kernels  # noqa: F401 before torch

# isort: split
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from bench.paper.pyramid import ALPHA, PyramidDecoder, budgets, memory_share, selection


@given(num_layers=st.integers(2, 40), prompt=st.integers(ALPHA, 500), data=st.data())
def test_budgets_fall_with_depth_keep_the_mean_and_never_exceed_the_prompt(
    num_layers: int, prompt: int, data: st.DataObject
) -> None:
    mean = data.draw(st.integers(ALPHA, prompt))
    found = budgets(num_layers, mean, prompt)
    assert found == sorted(found, reverse=True)
    assert found[-1] >= ALPHA and found[0] <= prompt
    assert abs(sum(found) / num_layers - mean) <= 0.5


def test_a_budget_below_the_last_tokens_or_above_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean of 200 tokens"):
        budgets(8, 200, 128)
    with pytest.raises(ValueError, match="between 8"):
        budgets(8, 7, 128)


def test_pruning_to_a_quarter_of_the_prompt_halves_a_request_that_is_two_thirds_prompt() -> None:
    assert memory_share([48, 16], 128, 64) == 0.5


def test_the_last_tokens_are_kept_and_those_they_attend_to_most() -> None:
    attention = torch.zeros(1, 4, 20, 20)
    attention[:, :2, -1, 3] = 0.9  # of the first KV head's queries
    attention[:, 2:, -2, 5] = 0.9
    found = selection(attention, num_kv_heads=2, kept=ALPHA + 1)
    assert found[0].tolist() == [[3, *range(12, 20)], [5, *range(12, 20)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_who_keeps_everything_decodes_as_who_prunes_nothing(folder: Path) -> None:
    windows = torch.randint(64, (3, 30), generator=torch.Generator().manual_seed(1))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(windows).logits
        wanted = [
            float(F.cross_entropy(row[19:29], text[20:])) for row, text in zip(logits, windows, strict=True)
        ]
        greedy = model.generate(
            windows[:, :20],
            attention_mask=torch.ones(3, 20, dtype=torch.int64),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
        )
    for kept in ([], [20, 20, 20]):
        decoder = PyramidDecoder(folder, kept)
        assert decoder.losses(windows, 20) == pytest.approx(wanted, rel=1e-4)
        assert decoder.greedy(windows[:, :20], 6).tolist() == greedy[:, 20:].tolist()


def test_layers_that_keep_less_decode_something_else(folder: Path) -> None:
    windows = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(2))
    whole = PyramidDecoder(folder, []).losses(windows, 30)
    pruned = PyramidDecoder(folder, [12, 10, 8]).losses(windows, 30)
    assert len(pruned) == 2 and pruned != pytest.approx(whole, rel=1e-3)
