"""Likeness of two texts: F1 of their words, and ROUGE-L (Lin, 2004), both 0 to 100.

Words are runs of letters and digits, and every other sign for itself: the demo model writes Python.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

_WORD: Final = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def f1(found: str, wanted: str) -> float:
    """Return the harmonic mean of precision and recall of the words, with repetitions (SQuAD's F1)."""
    a, b = words(found), words(wanted)
    return _f_measure((Counter(a) & Counter(b)).total(), len(a), len(b))


def rouge_l(found: str, wanted: str) -> float:
    """Return the F-measure of the longest common subsequence of words."""
    a, b = words(found), words(wanted)
    return _f_measure(longest_common(a, b), len(a), len(b))


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = row
        row = [0]
        for j, other in enumerate(b):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
    return row[-1]


def _f_measure(common: int, num_found: int, num_wanted: int) -> float:
    if not (num_found and num_wanted):
        return 100.0 if num_found == num_wanted else 0.0
    return 200 * common / (num_found + num_wanted)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, or (nan, nan) if there are no values."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, math.sqrt(variance / len(values))
