"""The model families that tests run with: some in the quick suite, the others with the fault suite.

Each of the quick ones has something that others lack: biases, rows that fit no page, a window, one KV head,
norms on both sides, fused weights, experts, sinks, a shared expert.
"""

from __future__ import annotations

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

EVERY_FAMILY = [
    name if name in QUICK else pytest.param(name, marks=[pytest.mark.faults, pytest.mark.slow])
    for name in FAMILIES
]
