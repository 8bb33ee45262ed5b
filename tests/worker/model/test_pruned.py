"""Checkpoints that are pruned: fewer heads and FFN rows than their family has, and 2:4 sparse ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common.oracles import make_oracle, options_of
from tests.support.model_folders import Runner
from tests.support.pruned_models import changed, two_of_four
from worker.model import ModelError, read_config
from worker.model.layout import plan_model
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest
from worker.model.sparse_weights import has_pattern, unpack

SIZES = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2}
PROMPT = [int(i) for i in torch.randint(211, (31,), generator=torch.Generator().manual_seed(2))]
EXACT = {"rtol": 2e-4, "atol": 2e-4}


def logits(folder: Path) -> torch.Tensor:
    runner = Runner(folder)
    found = torch.cat([runner.step({0: PROMPT[:20]}), runner.step({0: PROMPT[20:]})])
    runner.close()
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    make_oracle("llama", **SIZES).save_pretrained(folder)
    return folder


def test_fewer_heads_and_ffn_rows_compute_what_transformers_does(tmp_path: Path) -> None:
    """Heads of 16 that no longer fill the hidden size, and an FFN of an odd size."""
    sizes = SIZES | {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 37}
    config = LlamaConfig(**options_of("llama", **sizes))
    config.num_attention_heads = 3  # its constructor refuses it, and what saves it; its model does not
    torch.manual_seed(0)
    oracle = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        wanted = oracle(torch.tensor([PROMPT])).logits[0]
    config.num_attention_heads = 4
    oracle.save_pretrained(tmp_path / "pruned")
    path = tmp_path / "pruned" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 3}))
    torch.testing.assert_close(logits(tmp_path / "pruned"), wanted, **EXACT)


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", ""])
def test_a_checkpoint_without_its_zeros_computes_what_the_one_with_them_does(
    place: str, full: Path, tmp_path: Path
) -> None:
    dense = two_of_four(full, tmp_path / "dense")
    packed = two_of_four(full, tmp_path / "packed", is_packed=True)
    if place != "quantization_config":
        path = packed / "config.json"
        config = json.loads(path.read_text())
        said = config.pop("quantization_config")
        config |= {place: said} if place else {"sparsity_config": said["sparsity_config"]}
        path.write_text(json.dumps(config))
    assert (packed / "model.safetensors").stat().st_size < 0.8 * (dense / "model.safetensors").stat().st_size
    torch.testing.assert_close(logits(packed), logits(dense), rtol=0, atol=0)
    assert not torch.allclose(logits(packed), logits(full), **EXACT)


def test_a_rank_reads_its_columns_of_a_checkpoint_without_its_zeros(full: Path, tmp_path: Path) -> None:
    dense = two_of_four(full, tmp_path / "dense")
    packed = two_of_four(full, tmp_path / "packed", is_packed=True)
    name, where = "model.layers.0.self_attn.o_proj.weight", (slice(3, 40), slice(5, 33))
    found = []
    for folder in (dense, packed):
        with open_checkpoint(read_config(folder)).opened(name) as stored:
            found.append(stored[where])
    assert torch.equal(*found) and found[0].shape == (37, 28)


def test_its_digest_changes_with_what_is_kept(full: Path, tmp_path: Path) -> None:
    packed = two_of_four(full, tmp_path / "packed", is_packed=True)
    other = changed(packed, tmp_path / "other", lambda tensors: tensors | _negated(tensors))
    configs = [read_config(one) for one in (packed, other)]
    assert len({checkpoint_digest(one, open_checkpoint(one)) for one in configs}) == 2


def _negated(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(name for name in tensors if name.endswith(".compressed"))
    return {name: -tensors[name]}


def test_the_pattern_is_found_in_the_weights(full: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    sparse = two_of_four(full, tmp_path / "sparse")
    assert has_pattern(load_file(sparse / "model.safetensors")[name])
    assert not has_pattern(load_file(full / "model.safetensors")[name])
    assert not has_pattern(torch.zeros(4, 6)), "rows of no whole fours"
    almost = torch.zeros(2, 8)
    almost[1, 4:7] = 1
    assert not has_pattern(almost)


def test_a_bitmask_that_does_not_fit_its_values_is_refused(full: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not mark 2 weights in each row"):
        unpack(torch.ones(1, 2), torch.tensor([[0b0111]], dtype=torch.uint8))
    packed = two_of_four(full, tmp_path / "packed", is_packed=True)

    def damaged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if name.endswith("down_proj.bitmask"))
        return tensors | {name: tensors[name] | 1 | 2 | 4 | 8}

    broken = changed(packed, tmp_path / "broken", damaged)
    with pytest.raises(ModelError, match=r"down_proj.*damaged"):
        logits(broken)


def test_a_part_of_the_packing_that_is_missing_or_misshapen_is_refused(full: Path, tmp_path: Path) -> None:
    packed = two_of_four(full, tmp_path / "packed", is_packed=True)
    name = "model.layers.0.mlp.up_proj"

    def refusal(folder: str, tensors: dict[str, torch.Tensor | None]) -> str:
        made = changed(
            packed,
            tmp_path / folder,
            lambda there: {key: one for key, one in (there | tensors).items() if one is not None},
        )
        config = read_config(made)
        plan = plan_model(config, torch.float32, 4096, 1)
        with pytest.raises(ModelError) as refused:
            open_checkpoint(config).check([one for part in plan.ranges() for one in part.sources])
        return str(refused.value)

    assert f"has no tensor {name}.bitmask" in refusal("a", {f"{name}.bitmask": None})
    narrow = torch.zeros(SIZES["intermediate_size"], 8)
    assert f"tensor {name}.compressed has shape [100, 8]" in refusal("b", {f"{name}.compressed": narrow})
    norm = "model.layers.0.input_layernorm"
    vector: dict[str, torch.Tensor | None] = {f"{norm}.weight": None, f"{norm}.compressed": torch.zeros(32)}
    assert f"has no tensor {norm}.weight" in refusal("c", vector)


def test_layers_of_different_sizes_are_refused(full: Path, tmp_path: Path) -> None:
    sizes = [SIZES["intermediate_size"], 64]
    folder = changed(full, tmp_path / "uneven", lambda tensors: tensors, intermediate_size=sizes)
    with pytest.raises(ModelError, match="intermediate_size"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "format 'sparse-bitmask' is not supported"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "unstructured"}},
            "sparsity_structure 'unstructured' is not supported; supported: 2:4",
        ),
        (
            {"sparsity_config": {"format": "dense"}, "config_groups": {"group_0": {}}},
            "compressed-tensors with config_groups is not supported",
        ),
        ({}, "quant_method 'compressed-tensors' is not supported"),
    ],
)
def test_other_formats_are_refused_by_name(
    changes: dict[str, Any], words: str, full: Path, tmp_path: Path
) -> None:
    said = {"quant_method": "compressed-tensors"} | changes
    folder = changed(full, tmp_path / "other", lambda tensors: tensors, quantization_config=said)
    with pytest.raises(ModelError, match=words):
        read_config(folder)
