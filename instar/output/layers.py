"""The layers of an instance in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def layers_text(layers: Sequence[Mapping[str, str]]) -> str:
    """Return `5 full, 3 int4 ffn (5-7)`. The most frequent shape goes without numbers."""
    numbers: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        numbers.setdefault(_shape(layer), []).append(number)
    shapes = sorted(numbers, key=lambda shape: -len(numbers[shape]))
    return ", ".join(
        f"{len(numbers[shape])} {shape}" + (f" ({ranges_text(numbers[shape])})" if place else "")
        for place, shape in enumerate(shapes)
    )


def degrees_text(degrees: Sequence[int]) -> str:
    """Return `0-1 at tp1, 2 at tp2` for [1, 1, 2]."""
    numbers: dict[int, list[int]] = {}
    for number, degree in enumerate(degrees):
        numbers.setdefault(degree, []).append(number)
    return ", ".join(f"{ranges_text(layers)} at tp{degree}" for degree, layers in numbers.items())


def _shape(layer: Mapping[str, str]) -> str:
    attention, ffn = layer.get("attention", "?"), layer.get("ffn", "?")
    if attention == ffn:
        return ffn
    below = [f"{half} {part}" for part, half in (("attention", attention), ("ffn", ffn)) if half != "full"]
    return " + ".join(below)


def ranges_text(numbers: Iterable[int]) -> str:
    """Return `0,4-6` for [0, 4, 5, 6]."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, one)) for one in ranges)
