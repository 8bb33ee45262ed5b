"""Routers count the use of experts, recorded or not, through swaps; older use weighs less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.common.oracles import make_oracle
from tests.support.variant_models import Morphing
from worker.model import recorded
from worker.model.config import Mixture
from worker.model.expert_use import HALF_TOKENS, ExpertUse, decayed, least_used, shares_of

PROMPT = 37
DECODES = 8


def counted(folder: Path, memory: Path) -> tuple[torch.Tensor, int]:
    """Run a prompt and decodes, some with the FFNs in int4; what was counted, and the pairs of a token."""
    made = Morphing(folder, memory)
    made.runner.step({0: list(range(PROMPT))})
    for i in range(DECODES):
        if i == DECODES // 2:
            for layer in range(len(made.model.layers)):
                made.swap(layer, "ffn", "int4")
        made.runner.step({0: [7 * i]})
    assert made.model.use
    shares, counts = made.model.expert_use(), made.model.use.counts.clone()
    mixture = made.model.config.mixture
    made.close()
    assert mixture and len(shares) == len(counts)
    assert all(0 <= quarter <= half <= rest <= 1 for quarter, half, rest in shares)
    return counts, mixture.top_k + mixture.num_shared


@pytest.mark.parametrize("family", ["qwen3 moe", "qwen2 moe"])
def test_every_pair_of_a_token_and_an_expert_is_counted(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_oracle(family, head_dim=32).save_pretrained(tmp_path / "model")
    counts, pairs = counted(tmp_path / "model", tmp_path)
    assert counts.sum(1).tolist() == [(PROMPT + DECODES) * pairs] * len(counts)
    monkeypatch.setattr(recorded, "MOST_TOKENS", 0)
    again, _ = counted(tmp_path / "model", tmp_path)
    assert again.equal(counts), "recorded steps count as those that run call by call"


def test_a_model_without_experts_has_no_use_of_them(tmp_path: Path) -> None:
    make_oracle("llama").save_pretrained(tmp_path / "model")
    made = Morphing(tmp_path / "model", tmp_path)
    made.runner.step({0: [1, 2, 3]})
    assert made.model.use is None and made.model.expert_use() == []
    made.close()


def test_shares_are_known_once_every_layer_has_run() -> None:
    use = ExpertUse(Mixture(num_experts=4, top_k=1, is_normalised=True), 2, torch.device("cpu"))
    assert use.look() == []
    use.counts[0] += torch.tensor([5, 1, 3, 1])
    assert use.look() == []
    use.counts[1] += torch.tensor([0, 0, 10, 0])
    assert use.look() == [[0.1, 0.2, 0.5], [0.0, 0.0, 0.0]]
    assert use.look() == [[0.1, 0.2, 0.5], [0.0, 0.0, 0.0]], "nothing was added"
    assert use.least_used(0, 3) == [1, 3, 2]


def test_use_counts_half_after_as_many_tokens_as_are_said() -> None:
    before = np.array([[8.0, 0.0], [8.0, 0.0]])
    new = np.array([[0, 2 * HALF_TOKENS], [0, 0]])
    assert decayed(before, new, pairs=2).tolist() == [[4.0, 2.0 * HALF_TOKENS], [8.0, 0.0]]


def test_of_experts_with_equal_use_the_first_goes_first() -> None:
    assert least_used([2.0, 0.0, 1.0, 0.0], 3) == [1, 3, 2]
    assert least_used([2.0], 0) == []
    assert shares_of(np.array([[1.0, 1.0, 1.0, 1.0]])) == [[0.25, 0.5, 0.75]]
