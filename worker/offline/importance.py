"""The importance of a model's layers: Algorithm 1 of MorphServe (appendix A.2) and its scores (section 4.2).

With Q swapped, every layer j outside Q is tried. What layers before j make does not change, so the hidden
states at every layer's entry are kept for the current Q, and a trial runs the layers from j on only.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from bus.messages import PARTS
from worker.model.config import ModelError
from worker.model.layer import Layer
from worker.offline.layerwise import LayerwiseModel

Metric = Literal["cosine", "l2"]


@dataclass(frozen=True, slots=True)
class ScoreWeights:
    """The weights of LIS = lts * LTS + lrs * LRS + mds * MDS (equation 5; the paper's defaults)."""

    lts: float = 0.25
    lrs: float = 0.25
    mds: float = 0.5

    def score(self, lts: float, lrs: float, mds: float) -> float:
        return self.lts * lts + self.lrs * lrs + self.mds * mds


def similarity(reference: torch.Tensor, other: torch.Tensor, metric: Metric) -> float:
    """Return the mean similarity of the rows of two tensors [..., n].

    cosine: of the angle; l2: minus the distance relative to the reference's length, so that hidden states and
    logits can be weighed against each other.
    """
    a, b = reference.flatten(0, -2).float(), other.flatten(0, -2).float()
    if metric == "cosine":
        return float(F.cosine_similarity(a, b, dim=-1).double().mean())
    distances = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-12)
    return float(-distances.double().mean())


@dataclass(slots=True)
class Scores:
    """The scores of a ranking (equations 2-5): lts and lrs by layer; mds and lis by place in the sequence.

    The nearer to 1 (cosine) or 0 (L2, negative), the less a swap of the layer should harm.
    """

    lts: list[float] = field(default_factory=list)  # similarity of a layer's input and output
    lrs: list[float] = field(default_factory=list)  # similarity of a layer's outputs, in full and quantised
    mds: list[float] = field(default_factory=list)  # the model's outputs with Q, and with the layer too
    lis: list[float] = field(default_factory=list)  # the weighted sum


class LayerRanking:
    """The layers of a model, swapped one after the other."""

    def __init__(
        self,
        model: LayerwiseModel,
        layers: Sequence[Layer],
        quantised: Sequence[Layer],
        windows: torch.Tensor,
        metric: Metric,
    ) -> None:
        """layers: in full precision. quantised: the same in fewer bits. windows: int64 [W, T]."""
        self._model, self._quantised = model, quantised
        self._layers = list(layers)  # layers for the current Q
        self._metric, self._windows = metric, windows
        # entries[w][j]: window w at the entry of layer j for the current Q; [L] is what the head reads.
        self._entries = [[model.embed(window)] for window in windows]
        for entries, layer in itertools.product(self._entries, self._layers):
            entries.append(model.run(layer, entries[-1]))
        self.perplexity = [self._perplexity()]  # perplexity of the windows, by number of swapped layers

    def sequence(self, weights: ScoreWeights, advance: Callable[[], None]) -> tuple[list[int], Scores]:
        """Rank all layers by greatest LIS, the lower of equals first.

        `advance` is called once for each of the `num_trials`.
        """
        scores = self._local()
        remaining, order = list(range(len(self._layers))), list[int]()
        while remaining:
            mds = self._degradation(remaining, advance)
            lis = {j: weights.score(scores.lts[j], scores.lrs[j], mds[j]) for j in remaining}
            best = max(remaining, key=lambda j: (lis[j], -j))
            scores.mds.append(mds[best])
            scores.lis.append(lis[best])
            order.append(best)
            remaining.remove(best)
            self.swap(best)
        return order, scores

    def divergences(self, advance: Callable[[], None]) -> dict[str, list[float]]:
        """Return by part what each layer's half alone changes, before any layer is swapped.

        The mean Kullback-Leibler divergence of the logits from those of the full model, in nats per token.
        `advance` is called once for each of the `num_divergences`.
        """
        found: dict[str, list[float]] = {part: [0.0] * len(self._layers) for part in PARTS}
        for entries in self._entries:
            reference = F.log_softmax(self._model.logits(entries[-1]), dim=-1)
            for j, (full, quantised) in enumerate(zip(self._layers, self._quantised, strict=True)):
                mixed = {
                    "attention": replace(full, attention=quantised.attention),
                    "ffn": replace(full, feed_forward=quantised.feed_forward),
                }
                for part, layer in mixed.items():
                    x = self._model.run(layer, entries[j])
                    for later in self._layers[j + 1 :]:
                        x = self._model.run(later, x)
                    logits = F.log_softmax(self._model.logits(x), dim=-1)
                    nats = F.kl_div(logits, reference, reduction="none", log_target=True).sum(-1)
                    found[part][j] += float(nats.double().mean()) / len(self._entries)
                    advance()
        return found

    @property
    def num_divergences(self) -> int:
        return len(PARTS) * len(self._layers) * len(self._entries)

    @property
    def num_trials(self) -> int:
        return len(self._layers) * (len(self._layers) + 1) // 2 * len(self._entries)

    def _local(self) -> Scores:
        """Return LTS and LRS of every layer in the full model."""
        scores = Scores()
        for layer in range(len(self._layers)):
            kept, replaced = [], []
            for entries in self._entries:
                before, after = entries[layer], entries[layer + 1]
                kept.append(similarity(before, after, self._metric))
                swapped = self._model.run(self._quantised[layer], before)
                replaced.append(similarity(after, swapped, self._metric))
            scores.lts.append(statistics.fmean(kept))
            scores.lrs.append(statistics.fmean(replaced))
        return scores

    def _degradation(self, candidates: Sequence[int], advance: Callable[[], None]) -> dict[int, float]:
        """Return the MDS of each candidate."""
        found: dict[int, list[float]] = {j: [] for j in candidates}
        for entries in self._entries:
            reference = self._model.logits(entries[-1])
            for j in candidates:
                x = self._model.run(self._quantised[j], entries[j])
                for layer in self._layers[j + 1 :]:
                    x = self._model.run(layer, x)
                found[j].append(similarity(reference, self._model.logits(x), self._metric))
                advance()
        return {j: statistics.fmean(values) for j, values in found.items()}

    def swap(self, layer: int) -> None:
        """Add the layer to Q, and the perplexity with it."""
        self._layers[layer] = self._quantised[layer]
        for entries in self._entries:
            for later in range(layer, len(self._layers)):
                entries[later + 1] = self._model.run(self._layers[later], entries[later])
        self.perplexity.append(self._perplexity())

    def _perplexity(self) -> float:
        return perplexity(self._model, [entries[-1] for entries in self._entries], self._windows)


def perplexity(
    model: LayerwiseModel, hidden: Iterable[torch.Tensor], windows: Iterable[torch.Tensor]
) -> float:
    """Return the perplexity of every window's tokens after its first.

    hidden: [T, H] behind the last layer, of each window. windows: int64 [T] each. Raises ModelError if it is
    no number.
    """
    nats = [
        float(F.cross_entropy(model.logits(x)[:-1], window[1:]))
        for x, window in zip(hidden, windows, strict=True)
    ]
    return perplexity_of(nats, model.config.folder)


def perplexity_of(nats: Sequence[float], folder: Path) -> float:
    """Return the perplexity of windows with these means of nats per token.

    Raises ModelError if it is no number, which no comparison would notice.
    """
    try:
        found = math.exp(statistics.fmean(nats))
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ModelError(
            f"{folder}: its perplexity on the calibration text is {found}, not a finite number; its weights"
            " are damaged, or values overflow in its dtype or in fewer bits"
        )
    return found
