"""Perplexity of the demo model with 0, 1, ... all layers swapped, on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import kernels

# isort: split

from bench.quality.measure import shape_of
from bench.quality.perplexity import Evaluator, Text, perplexity
from bench.quality.setup import DEMO, held_out, open_demo

WINDOW_TOKENS = 512  # the longest sequence that the burst's service takes


def perplexities(order: Sequence[int], precision: str, num_windows: int) -> list[float]:
    """[k]: of the first k layers of `order` in `precision`, by the method that workers use when they are not
    told another."""
    kernels.configure(2)
    model = open_demo(DEMO, precision, method="", name=precision)
    shapes = [shape_of(order[:k], precision, len(order)) for k in range(len(order) + 1)]
    losses = Evaluator(model.ends, model.layers).losses(Text(held_out(WINDOW_TOKENS, num_windows)), shapes)
    return [perplexity(losses[shape]) for shape in shapes]
