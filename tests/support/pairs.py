"""Grids of parameters of which a half runs with the quick tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

PARAM = type(pytest.param())


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Return every combination of parameters, each other one of them slow.

    Of three axes or more the quick half has each pair of values; of two it has each value. An axis is of
    values, of tuples for several arguments, or of what `pytest.param` returns.
    """
    listed = [[_param(one) for one in axis] for axis in axes]
    made = []
    for places in product(*(range(len(axis)) for axis in listed)):
        parts = [axis[place] for axis, place in zip(listed, places, strict=True)]
        marks = [mark for part in parts for mark in part.marks]
        made.append(
            pytest.param(
                *(value for part in parts for value in part.values),
                id="-".join(part.id or "-".join(map(str, part.values)) for part in parts),
                marks=[*marks, pytest.mark.slow] if sum(places) % 2 else marks,
            )
        )
    return made


def _param(one: Any) -> Any:
    if isinstance(one, PARAM):
        return one
    return pytest.param(*one) if isinstance(one, tuple) else pytest.param(one)
