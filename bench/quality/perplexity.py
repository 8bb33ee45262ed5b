"""Perplexity of many shapes of one model over the same windows of text, computed layer by layer.

A shape says for every layer what weights it has. Shapes that begin alike share the work: the layers form a
tree, walked depth first with one hidden state for each depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from worker.model.layer import Layer
from worker.offline.layerwise import LayerwiseModel

Shape = tuple[str, ...]  # the name of each layer's weights
Losses = dict[Shape, list[float]]  # nats per scored token, for each window


@dataclass(frozen=True, slots=True)
class CorpusText:
    """Windows of text, int64 [W, T + 1]; what follows position `scored_from` - 1 of each window is scored."""

    windows: torch.Tensor
    scored_from: int = 0

    @property
    def num_scored(self) -> int:
        return int(self.windows.shape[0] * (self.windows.shape[1] - 1 - self.scored_from))


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Computes losses of shapes; layers[i][name] is layer i with the weights of that name."""

    model: LayerwiseModel
    layers: Sequence[dict[str, Layer]]

    def losses(self, text: CorpusText, shapes: Sequence[Shape]) -> Losses:
        """Return the loss of each window, for each shape."""
        found: Losses = {shape: [] for shape in shapes}
        with torch.inference_mode():
            for window in text.windows:
                x = self.model.embed(window[:-1])
                for shape, loss in self._walk(x, sorted(found), 0, window, text.scored_from):
                    found[shape].append(loss)
        return found

    def mixed_losses(self, text: CorpusText, pieces: Sequence[tuple[int, Shape]]) -> list[float]:
        """Return the losses of windows whose shape changes.

        A piece is (first position, shape from there on).
        """
        found = []
        stops = [start for start, _ in pieces[1:]] + [text.windows.shape[1] - 1]
        with torch.inference_mode():
            for window in text.windows:
                x = self.model.embed(window[:-1])
                for layer, variants in enumerate(self.layers):
                    made = [
                        self.model.run(variants[shape[layer]], x[start:stop], start)
                        for (start, shape), stop in zip(pieces, stops, strict=True)
                    ]
                    x = torch.cat(made)
                found.append(self._loss(x, window, text.scored_from))
        return found

    def _walk(
        self, x: torch.Tensor, shapes: Sequence[Shape], layer: int, window: torch.Tensor, scored_from: int
    ) -> Iterator[tuple[Shape, float]]:
        """Yield each shape with its loss.

        `x` enters `layer` in all of the shapes, which are alike up to there.
        """
        if layer == len(self.layers):
            yield shapes[0], self._loss(x, window, scored_from)
            return
        for name in sorted({shape[layer] for shape in shapes}):
            y = self.model.run(self.layers[layer][name], x)
            alike = [shape for shape in shapes if shape[layer] == name]
            yield from self._walk(y, alike, layer + 1, window, scored_from)

    def _loss(self, x: torch.Tensor, window: torch.Tensor, scored_from: int) -> float:
        logits = self.model.logits(x[scored_from:])
        return float(F.cross_entropy(logits, window[scored_from + 1 :]))


def swapped(order: Sequence[int], count: int, name: str) -> Shape:
    """Return the shape in which the first `count` layers of `order` have the weights `name`."""
    return tuple(name if layer in order[:count] else "full" for layer in range(len(order)))


def perplexity(losses: Sequence[float]) -> float:
    return math.exp(sum(losses) / len(losses))


def difference(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the mean of losses - others, in nats per token, and its standard error.

    Both saw the same windows, so what makes a window hard cancels.
    """
    deltas = [a - b for a, b in zip(losses, others, strict=True)]
    mean = sum(deltas) / len(deltas)
    variance = sum((delta - mean) ** 2 for delta in deltas) / max(1, len(deltas) - 1)
    return mean, math.sqrt(variance / len(deltas))
