"""The change of a model's outputs by keys and values in 8 bits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from bus.precisions import KV_PRECISIONS, KVPrecision
from worker.model.layer import Layer
from worker.offline.importance import perplexity_of
from worker.offline.layerwise import LayerwiseModel


def measure_kv(
    models: dict[KVPrecision, LayerwiseModel],
    layers: Sequence[Layer],
    windows: torch.Tensor,
    advance: Callable[[], None],
) -> tuple[list[float], float]:
    """Return the perplexity of windows int64 [W, T] by form of the KV cache, and the divergence in 8 bits.

    models: one for each form, of the same layers. The divergence is the mean of Kullback and Leibler of the
    logits from those with a KV cache in full precision, in nats per token. `advance` is called for each
    window of each form. Raises ModelError if a perplexity is no number.
    """
    nats: dict[KVPrecision, list[float]] = {form: [] for form in KV_PRECISIONS}
    divergences: list[float] = []
    for window in windows:
        logits = {}
        for form in KV_PRECISIONS:
            model = models[form]
            x = model.embed(window)
            for layer in layers:
                x = model.run(layer, x)
            logits[form] = F.log_softmax(model.logits(x), dim=-1)
            nats[form].append(float(F.nll_loss(logits[form][:-1], window[1:])))
            advance()
        one = F.kl_div(logits["int8"], logits["full"], reduction="none", log_target=True).sum(-1)
        divergences.append(float(one.double().mean()))
    folder = models["full"].config.folder
    perplexities = [perplexity_of(nats[form], folder) for form in KV_PRECISIONS]
    return perplexities, statistics.fmean(divergences)
