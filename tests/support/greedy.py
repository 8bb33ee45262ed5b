"""What transformers makes of a prompt, token by token, and a check of given tokens against it in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from bench.common.oracles import RoundedCache

MakeCache = Callable[..., Any]  # (config=) -> an empty cache of transformers
BY_LENGTH = ("dynamic", "longrope")  # rotary frequencies that depend on how long the sequence is


def generate(model: Any, prompt: Sequence[int], num: int, make_cache: MakeCache | None = None) -> list[int]:
    """Return the next `num` tokens, each the likeliest one, as transformers' `generate` makes them."""
    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num,
        past_key_values=make_cache(config=model.config) if make_cache else None,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def assert_greedy(
    model: Any,
    prompt: Sequence[int],
    num: int,
    tokens: Sequence[int],
    make_cache: MakeCache | None = None,
    about: str = "",
) -> None:
    """Assert that `tokens` are the `num` ones that `generate` returns.

    One pass over all of them says it in most cases, and takes about as long as one token of `generate`, which
    runs otherwise.
    """
    if len(tokens) == num and are_likeliest(model, prompt, tokens, make_cache):
        return
    assert list(tokens) == generate(model, prompt, num, make_cache), about


def are_likeliest(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], make_cache: MakeCache | None = None
) -> bool:
    """Return whether each token is the likeliest one after the prompt and those before it.

    Then they are those that `generate` makes: the first one is, and each other one if those before it are.
    False where one pass cannot tell.
    """
    scaling = getattr(model.config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in BY_LENGTH:
        return False
    likeliest: list[int] = logits_behind(model, prompt, tokens, make_cache).argmax(-1).tolist()
    return likeliest == list(tokens)


def logits_behind(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], make_cache: MakeCache | None = None
) -> torch.Tensor:
    """Return the logits of each of the tokens [tokens, vocabulary], given those before it."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)[:, :-1]
    cache = make_cache(config=model.config) if make_cache else None
    # From one token to the next the cache may take another form. The prompt is computed as a whole.
    cuts = {max(cut, len(prompt)) for cut in cache.cuts} if isinstance(cache, RoundedCache) else set()
    bounds = [0, *sorted(cut for cut in cuts if cut < ids.shape[1]), ids.shape[1]]
    with torch.no_grad():
        parts = [
            model(ids[:, begin:end], past_key_values=cache, use_cache=cache is not None).logits[0]
            for begin, end in pairwise(bounds)
        ]
    return torch.cat(parts)[len(prompt) - 1 :]
