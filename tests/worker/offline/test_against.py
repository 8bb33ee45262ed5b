"""What a pruned checkpoint loses against its model: measured, written, and refused."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.common.oracles import make_oracle
from bus.variants import compare
from tests.support.mxfp4_models import write_mxfp4
from tests.support.pruned_models import changed, two_of_four, without_ffn_rows
from tests.support.tiny_model import byte_level
from worker.model import read_config
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest
from worker.offline.__main__ import main
from worker.offline.calibration import read_calibration
from worker.shape.base_loss import BaseLoss, base_loss_path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    make_oracle("llama", vocab_size=400).save_pretrained(folder)
    byte_level(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


def measure(folder: Path, base: Path, text: Path) -> int:
    sizes = ["--windows", "2", "--window-tokens", "48", "--device", "cpu"]
    return main(["profile", str(folder), "--against", str(base), "--calibration", str(text), *sizes])


def written(folder: Path) -> BaseLoss:
    return BaseLoss(**json.loads(base_loss_path(folder).read_text()))


def perplexity(folder: Path, windows: torch.Tensor) -> float:
    """Return the perplexity that transformers computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(windows).logits
    return math.exp(float(F.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())))


def test_it_is_the_perplexity_of_both_on_the_same_tokens(full: Path, text: Path, tmp_path: Path) -> None:
    pruned = without_ffn_rows(full, tmp_path / "pruned", rows=60)
    assert measure(pruned, full, text) == 0
    found = written(pruned)
    digests = [checkpoint_digest(one, open_checkpoint(one)) for one in map(read_config, (pruned, full))]
    assert [found.model, found.base] == digests
    windows = read_calibration(read_config(full), text, 2, 48).tokens
    wanted = [perplexity(one, windows) for one in (full, pruned)]
    assert found.perplexity == pytest.approx(wanted, rel=1e-4)
    assert found.loss == pytest.approx(max(0.0, wanted[1] / wanted[0] - 1), abs=1e-3)
    assert (found.pattern, found.windows) == ("", [2, 48])
    assert compare(pruned, full).pruning.startswith("intermediate_size 60 of ")


def test_the_pattern_of_a_checkpoint_without_a_tag_is_found(full: Path, text: Path, tmp_path: Path) -> None:
    sparse = two_of_four(full, tmp_path / "sparse", quantization_config=None)
    assert compare(sparse, full).pruning == ""
    assert measure(sparse, full, text) == 0
    assert written(sparse).pattern == "2:4"
    assert compare(sparse, full).pruning == "2:4 sparse"


def test_the_pattern_of_stacked_experts_lies_along_their_inputs(text: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    make_oracle("gpt-oss", vocab_size=400).save_pretrained(made)
    byte_level(made)
    attention = two_of_four(made, tmp_path / "attention", quantization_config=None)
    for name, dim, pattern in (("inputs", 1, "2:4"), ("outputs", 2, "")):
        sparse = changed(attention, tmp_path / name, partial(every_other, dim=dim))
        assert measure(sparse, made, text) == 0
        assert written(sparse).pattern == pattern


def every_other(tensors: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """Set every other weight [E, K, N] of stacked experts to zero, along a dimension."""
    for name in (name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        tensors[name].movedim(dim, 0)[::2] = 0
    return tensors


def test_a_model_with_experts_in_mxfp4_is_measured(text: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    write_mxfp4(made, vocab_size=400)
    byte_level(made)
    same = changed(made, tmp_path / "same", lambda tensors: tensors)
    assert measure(same, made, text) == 0
    assert (written(same).loss, written(same).pattern) == (0.0, "")


def test_a_variant_that_computes_no_numbers_has_no_loss(
    full: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = changed(full, tmp_path / "broken", not_a_number)
    assert measure(broken, full, text) == 2
    assert re.search(r"broken: its perplexity .* is nan, not a finite number", capsys.readouterr().err)
    assert not base_loss_path(broken).exists()


def not_a_number(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.0.mlp.down_proj.weight"
    return tensors | {name: torch.full_like(tensors[name], math.nan)}


def test_other_tokens_are_not_compared(
    full: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(full, tmp_path / "other", lambda tensors: tensors)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "0.9"}))
    assert measure(other, full, text) == 2
    assert "tokenizer.json is not that of" in capsys.readouterr().err
    assert not base_loss_path(other).exists()
