"""PyramidKV (Cai et al., 2024) in a simple form, to measure its quality with transformers.

After prefill each layer keeps the keys and values of some tokens of the prompt only, the fewer the deeper it
is; tokens that are decoded later are all kept. A layer keeps the last ALPHA tokens of the prompt and those to
which these attend most, for each KV head, without the pooling of the original. The engine does not implement
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache

ALPHA: Final = 8  # tokens at the prompt's end that are always kept, and that choose the others
STEEPNESS: Final = 20  # the paper's beta: the top layer keeps the mean by it, besides the last ALPHA


def budgets(num_layers: int, mean: int, prompt_tokens: int) -> list[int]:
    """Return the tokens that each layer keeps of a prompt: an arithmetic series, most in the bottom layer.

    Raises ValueError if the mean is not between ALPHA and the prompt.
    """
    if not ALPHA <= mean <= prompt_tokens:
        raise ValueError(f"a mean of {mean} tokens must be between {ALPHA} and the prompt's {prompt_tokens}")
    spare = mean - ALPHA
    top = max(spare // STEEPNESS, 2 * spare - (prompt_tokens - ALPHA))  # the bottom keeps no more than all
    step = 2 * (spare - top) / max(1, num_layers - 1)
    return [ALPHA + round(2 * spare - top - step * layer) for layer in range(num_layers)]


def memory_share(kept: Sequence[int], prompt_tokens: int, output_tokens: int) -> float:
    """Return the share of a whole request's KV memory that a request with these budgets needs."""
    mean = sum(kept) / len(kept)
    return (mean + output_tokens) / (prompt_tokens + output_tokens)


class PyramidDecoder:
    """A model in float32; `kept` are the tokens of the prompt that each layer keeps, by default all."""

    def __init__(self, folder: Path, kept: Sequence[int]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._kept = list(kept)

    def greedy(self, prompts: torch.Tensor, num: int) -> torch.Tensor:
        """Decode `num` tokens, int64 [B, P] to [B, num]; the model's end of text does not end it."""
        made: list[torch.Tensor] = []
        with torch.inference_mode():
            for logits in self._steps(prompts, num, lambda: made[-1]):
                made.append(logits.argmax(-1))
        return torch.stack(made, 1)

    def losses(self, windows: torch.Tensor, prompt_tokens: int) -> list[float]:
        """Return the nats per token after the prompt of each window, int64 [B, T], fed the text itself."""
        after = windows[:, prompt_tokens:].unbind(1)
        fed = iter(after)
        with torch.inference_mode():
            found = [
                F.cross_entropy(logits, token, reduction="none")
                for token, logits in zip(
                    after, self._steps(windows[:, :prompt_tokens], len(after), lambda: next(fed)), strict=True
                )
            ]
        return [float(value) for value in torch.stack(found).mean(0)]

    def _steps(
        self, prompts: torch.Tensor, num: int, following: Callable[[], torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Yield logits [B, vocab] of `num` positions from the prompt's last on.

        `following()` are tokens [B].
        """
        batch, prompt_tokens = prompts.shape
        cache = DynamicCache()
        first = self._model(
            prompts, past_key_values=cache, output_attentions=bool(self._kept), logits_to_keep=1
        )
        for layer, kept in enumerate(self._kept):
            _prune(cache.layers[layer], first.attentions[layer], kept)
        yield first.logits[:, -1]
        # The mask of one token that sees all that is kept. Layers keep different numbers, so one serves all.
        mask = torch.zeros(batch, 1, 1, 1)
        for position in range(prompt_tokens, prompt_tokens + num - 1):
            yield self._model(
                following()[:, None],
                past_key_values=cache,
                attention_mask=mask,
                position_ids=torch.full((batch, 1), position),
            ).logits[:, -1]


def _prune(layer: Any, attention: torch.Tensor, kept: int) -> None:
    """Prune a layer by the prompt's attention [B, heads, P, P].

    Keys are rotated, so their places do not matter.
    """
    chosen = selection(attention, layer.keys.shape[1], kept)
    index = chosen[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
    layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


def selection(attention: torch.Tensor, num_kv_heads: int, kept: int) -> torch.Tensor:
    """Return the positions to keep [B, KV heads, kept], ascending, from attention [B, heads, P, P]."""
    batch, heads, prompt, _ = attention.shape
    seen = attention[:, :, -ALPHA:, : prompt - ALPHA].sum(2)
    by_head = seen.view(batch, num_kv_heads, heads // num_kv_heads, -1).mean(2)
    best = by_head.topk(kept - ALPHA, -1).indices
    last = torch.arange(prompt - ALPHA, prompt).expand(batch, num_kv_heads, ALPHA)
    return torch.cat([best, last], -1).sort(-1).values
