"""The model families that tests run with: some in the quick suite, the others with the fault suite.

Each of the quick ones has something that others lack: biases, rows that fit no page, a window, one KV head,
norms on both sides, fused weights, experts, sinks, a shared expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from bench.common.oracles import FAMILIES

QUICK = (
    "llama with biases",
    "llama with rows that fit no page",
    "mistral with a sliding window",
    "phi3",
    "gemma3",
    "falcon with one KV head",
    "falcon, new decoder",
    "gpt-oss",
    "qwen2 moe",
)
assert set(QUICK) <= set(FAMILIES)


def with_slow_ones(names: Iterable[str]) -> list[Any]:
    """Return families as parameters of a test; all but the quick ones run with the fault suite."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


EVERY_FAMILY = with_slow_ones(FAMILIES)
