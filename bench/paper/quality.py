"""The cost of each way of serving in quality, measured offline on text held out of the training.

The text is cut as it is served: a prompt, then what follows it. Perplexity is of what follows; continuations
are greedy, and all are compared with those of full precision, made by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import kernels

# isort: split
import torch
from tokenizers import Tokenizer

from bench.common.results import DEMO
from bench.paper.loads import OUTPUT_TOKENS, PROMPT_TOKENS
from bench.paper.plan import BITS, Plan, ceiling_bits, plan
from bench.paper.pyramid import PyramidDecoder, budgets
from bench.paper.text import f1, mean_and_error, rouge_l
from bench.quality.perplexity import CorpusText, Evaluator, Losses, difference, perplexity, swapped
from bench.quality.setup import held_out, open_demo
from bus.precisions import QUANTIZED
from worker.offline.calibration import read_calibration

LOW: Final = "int4"  # what the modes swap to
BATCH: Final = 128  # windows at once, of what transformers runs
CALIBRATION_TOKENS: Final = 512
KEPT_SHARE: Final = 0.5  # of a prompt's tokens, by PyramidKV, in the mean of the layers


@dataclass(frozen=True, slots=True)
class Offline:
    """The quality that is measured before the service starts.

    windows are int64 [W, PROMPT + OUTPUT], references the greedy text of each at full precision, truths the
    text that really follows.
    """

    windows: torch.Tensor = field(repr=False)
    references: list[str] = field(repr=False)
    truths: list[str] = field(repr=False)
    sensitivities: list[dict[str, float]]
    plans: dict[str, Plan]
    losses: Losses = field(repr=False)  # of each shape
    kept: list[int]
    pyramid_losses: list[float] = field(repr=False)
    pyramid_texts: list[str] = field(repr=False)

    @property
    def prompts(self) -> list[list[int]]:
        return [[int(token) for token in row[:PROMPT_TOKENS]] for row in self.windows]

    def perplexity_of(self, shape: Plan) -> float:
        return perplexity(self.losses[shape])


def measure(order: Sequence[int], plans: Mapping[str, Sequence[str]], *, is_quick: bool) -> Offline:
    """Measure the quality of all ways; the modes swap layers in `order`.

    `plans` gives the precisions that each plan may choose; each has the bits of the default mode's ceiling.
    """
    kernels.configure(2)
    num_layers = len(order)
    layers, model = _every_precision()
    evaluator = Evaluator(model, layers)
    sensitivities = sensitivity(evaluator, num_windows=2 if is_quick else 16)
    mean_bits = ceiling_bits(num_layers, num_layers // 2, LOW)
    chosen = {
        name: plan([{p: of[p] for p in allowed} for of in sensitivities], mean_bits)
        for name, allowed in plans.items()
    }
    windows = held_out(PROMPT_TOKENS + OUTPUT_TOKENS - 1, 48 if is_quick else 256)
    shapes: list[Plan] = [swapped(order, k, LOW) for k in range(num_layers + 1)] + list(chosen.values())
    losses = evaluator.losses(CorpusText(windows, PROMPT_TOKENS - 1), sorted(set(shapes)))
    kept = budgets(num_layers, round(KEPT_SHARE * PROMPT_TOKENS), PROMPT_TOKENS)
    whole, pyramid = PyramidDecoder(DEMO, []), PyramidDecoder(DEMO, kept)
    return Offline(
        windows=windows,
        references=continuations(whole, windows),
        truths=_texts(windows[:, PROMPT_TOKENS:]),
        sensitivities=sensitivities,
        plans=chosen,
        losses=losses,
        kept=kept,
        pyramid_losses=[
            loss for part in windows.split(BATCH) for loss in pyramid.losses(part, PROMPT_TOKENS)
        ],
        pyramid_texts=continuations(pyramid, windows),
    )


def _every_precision() -> tuple[list[dict[str, Any]], Any]:
    """Return each layer's weights by precision, by the default method, and the model that runs them."""
    models = [open_demo(DEMO, name, method="", name=name) for name in QUANTIZED]
    merged: list[dict[str, Any]] = [{} for _ in models[0].layers]
    for model in models:
        for layer, weights in zip(merged, model.layers, strict=True):
            layer.update(weights)
    return merged, models[0].whole


def sensitivity(evaluator: Evaluator, num_windows: int) -> list[dict[str, float]]:
    """Return [layer][precision]: the nats per token that this layer alone adds, on text of the training.

    A plan made before serving knows no other text. Gains are noise and count as 0.
    """
    tokens = read_calibration(evaluator.model.config, None, num_windows, CALIBRATION_TOKENS).tokens
    num_layers = len(evaluator.layers)
    full: Plan = ("full",) * num_layers
    alone = {
        (layer, name): (*full[:layer], name, *full[layer + 1 :])
        for layer in range(num_layers)
        for name in BITS
    }
    losses = evaluator.losses(CorpusText(tokens), sorted(set(alone.values())))
    return [
        {name: max(0.0, difference(losses[alone[layer, name]], losses[full])[0]) for name in BITS}
        for layer in range(num_layers)
    ]


def continuations(decoder: PyramidDecoder, windows: torch.Tensor) -> list[str]:
    """Return the continuation of each window's prompt."""
    parts = windows[:, :PROMPT_TOKENS].split(BATCH)
    return _texts(torch.cat([decoder.greedy(part, OUTPUT_TOKENS) for part in parts]))


def _texts(tokens: torch.Tensor) -> list[str]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts: list[str] = tokenizer.decode_batch(tokens.tolist(), skip_special_tokens=True)
    return texts


def likeness(texts: Mapping[int, str], wanted: Sequence[str]) -> dict[str, float]:
    """Return how alike texts are to those wanted, as means and standard errors.

    The text of request n is compared with number n modulo their count.
    """
    pairs = [(text, wanted[number % len(wanted)]) for number, text in sorted(texts.items())]
    of_f1 = mean_and_error([f1(*pair) for pair in pairs])
    of_rouge = mean_and_error([rouge_l(*pair) for pair in pairs])
    same = sum(found == want for found, want in pairs)
    names = ("f1", "f1_error", "rouge_l", "rouge_l_error")
    found = {name: round(value, 4) for name, value in zip(names, (*of_f1, *of_rouge), strict=True)}
    return found | {"texts": len(pairs), "same": same}
