"""The check of tokens in one pass says what transformers' generate says."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from bench.common.oracles import RoundedCache, make_oracle
from tests.support.greedy import MakeCache, are_likeliest, assert_greedy, generate, logits_behind
from tests.worker.model.test_oracle import LONGROPE

PROMPT, NUM, VOCAB = [5, 17, 101, 3, 44, 90, 7], 30, 211


def in_8_bits(*spans: tuple[int, float]) -> MakeCache:
    return partial(RoundedCache, spans=spans)


@pytest.mark.parametrize(
    ("family", "make_cache"),
    [
        ("gemma3", None),
        ("mixtral", None),
        ("llama", RoundedCache),
        ("llama", in_8_bits((12, math.inf), (12, math.inf), (12, math.inf))),
        ("llama", in_8_bits((4, 15), (10, 18), (17, 25))),
    ],
)
def test_one_pass_confirms_what_generate_makes_and_nothing_else(
    family: str, make_cache: MakeCache | None
) -> None:
    model = make_oracle(family, seed=3)
    tokens = generate(model, PROMPT, NUM, make_cache)
    torch.testing.assert_close(
        logits_behind(model, PROMPT, tokens, make_cache),
        logits_one_by_one(model, tokens, make_cache or DynamicCache),
        rtol=0,
        atol=1e-4,
    )
    assert_greedy(model, PROMPT, NUM, tokens, make_cache)
    for place in (0, 11, NUM - 1):
        wrong = [*tokens[:place], (tokens[place] + 1) % VOCAB, *tokens[place + 1 :]]
        assert not are_likeliest(model, PROMPT, wrong, make_cache)
    with pytest.raises(AssertionError):
        assert_greedy(model, PROMPT, NUM, wrong, make_cache)
    with pytest.raises(AssertionError):
        assert_greedy(model, PROMPT, NUM, tokens[:-1], make_cache)


def logits_one_by_one(model: Any, tokens: list[int], make_cache: MakeCache) -> torch.Tensor:
    cache = make_cache(config=model.config)
    with torch.no_grad():
        rows = [
            model(torch.tensor([part]), past_key_values=cache).logits[0, -1]
            for part in (PROMPT, *([token] for token in tokens[:-1]))
        ]
    return torch.stack(rows)


def test_frequencies_that_go_by_the_length_are_left_to_generate() -> None:
    """A sequence that outgrows the short ones has been computed with both."""
    model = make_oracle(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window=None
    )
    tokens = generate(model, PROMPT, 70)
    assert not are_likeliest(model, PROMPT, tokens)
    assert_greedy(model, PROMPT, 70, tokens)
