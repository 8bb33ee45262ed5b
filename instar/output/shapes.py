"""The shape of an instance in few words: layers by precision, and by degree while one changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def layers_text(layers: Sequence[Mapping[str, str]]) -> str:
    """Return `5 full, 3 int4 ffn (5-7)`. The most frequent shape goes without numbers."""
    groups = sorted(_grouped(map(_layer_shape, layers)).items(), key=lambda group: -len(group[1]))
    return ", ".join(
        f"{len(numbers)} {shape}" + (f" ({ranges_text(numbers)})" if place else "")
        for place, (shape, numbers) in enumerate(groups)
    )


def degrees_text(degrees: Sequence[int]) -> str:
    """Return `0-1 at tp1, 2 at tp2` for [1, 1, 2]."""
    return ", ".join(f"{ranges_text(layers)} at tp{degree}" for degree, layers in _grouped(degrees).items())


def ranges_text(numbers: Iterable[int]) -> str:
    """Return `0,4-6` for [0, 4, 5, 6]."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, one)) for one in ranges)


def _grouped(values: Iterable[T]) -> dict[T, list[int]]:
    """Return the positions of each value."""
    found: dict[T, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return found


def _layer_shape(layer: Mapping[str, str]) -> str:
    attention, ffn = layer.get("attention", "?"), layer.get("ffn", "?")
    if attention == ffn:
        return ffn
    return " + ".join(f"{half} {part}" for part, half in layer.items() if half != "full")
