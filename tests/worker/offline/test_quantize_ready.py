"""Ready AWQ and GPTQ checkpoints, written here as their tools write them, become sets of the full model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.common.oracles import make_oracle
from kernels import quantize_rtn
from tests.support.dense_layers import Named, build_dense, open_layerwise, read_named
from tests.support.model_folders import Runner
from tests.support.ready_models import AWQ_ORDER, words
from tests.support.ready_models import Ready as WholeReady
from tests.support.tiny_model import byte_level
from tests.support.variant_models import Morphing
from worker.model import read_config
from worker.model.quantized_sets import MATRICES, QuantizedMatrix, QuantizedSet, set_path
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline.__main__ import main

CPU = torch.device("cpu")
GROUP = 32
SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def make_full(folder: Path, *, num_kv_heads: int = 8) -> Path:
    make_oracle("llama", num_key_value_heads=num_kv_heads, **SIZES).save_pretrained(folder)
    byte_level(folder)
    return folder


@pytest.fixture(params=[8, 4], ids=["as many KV heads", "fewer KV heads"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_full(tmp_path / "full", num_kv_heads=request.param)


@dataclass
class Ready:
    """A ready checkpoint as it is built: the tensors of its file."""

    folder: Path
    tensors: Named
    config: dict[str, Any]

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps({"quantization_config": self.config}))
        return self.folder

    def add(self, name: str, weight: torch.Tensor, method: str) -> None:
        codes, scales, zeros = quantize_rtn(weight, 4, GROUP)
        if method == "gptq":
            zeros = zeros.clamp(min=1)  # a stored zero is one less
        out_order = AWQ_ORDER if method == "awq" else tuple(range(8))
        stored = zeros if method == "awq" else zeros - 1
        self.tensors[f"{name}.qzeros"] = words(stored.T, 1, out_order)
        self.tensors[f"{name}.scales"] = scales.T
        if method == "awq":
            self.tensors[f"{name}.qweight"] = words(codes.T, 1, AWQ_ORDER)
        else:
            self.tensors[f"{name}.qweight"] = words(codes.T, 0, out_order)
            self.tensors[f"{name}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP


def awq(full: Path) -> tuple[Ready, list[Named]]:
    """Write a checkpoint with scales folded into norms, v and up, as AutoAWQ does; and its dense layers."""
    config = read_config(full)
    generator = torch.Generator().manual_seed(0)
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    ready = Ready(full.parent / "awq", {}, said)
    for i in range(config.num_layers):
        w = read_named(full, i)

        def scale(n: int) -> torch.Tensor:
            return torch.rand(n, generator=generator) * 2 + 0.5

        attention, ffn, down = scale(64), scale(64), scale(192)
        w["input_layernorm.weight"] /= attention
        w["post_attention_layernorm.weight"] /= ffn
        for n in "qkv":
            w[f"self_attn.{n}_proj.weight"] *= attention
        if config.num_heads == config.num_kv_heads:
            mixed = scale(64)
            w["self_attn.v_proj.weight"] /= mixed[:, None]
            w["self_attn.o_proj.weight"] *= mixed
        w["mlp.gate_proj.weight"] *= ffn
        w["mlp.up_proj.weight"] *= ffn / down[:, None]
        w["mlp.down_proj.weight"] *= down
        for name, tensor in w.items():
            if name.removesuffix(".weight") in MATRICES:
                ready.add(f"model.layers.{i}.{name.removesuffix('.weight')}", tensor, "awq")
            else:
                ready.tensors[f"model.layers.{i}.{name}"] = tensor
    return ready, [dense_layer(ready, i) for i in range(config.num_layers)]


def gptq(full: Path) -> Ready:
    config = read_config(full)
    said = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
    ready = Ready(full.parent / "gptq", {}, said)
    for i in range(config.num_layers):
        for name, tensor in read_named(full, i).items():
            if name.removesuffix(".weight") in MATRICES:
                ready.add(f"model.layers.{i}.{name.removesuffix('.weight')}", tensor, "gptq")
            else:
                ready.tensors[f"model.layers.{i}.{name}"] = tensor
    return ready


def dense_layer(ready: Ready, layer: int) -> Named:
    """Return what the checkpoint computes with, unpacked the slow and obvious way (AWQ)."""
    prefix = f"model.layers.{layer}."
    found: Named = {}
    for name in MATRICES:
        packed, zero_words = (ready.tensors[f"{prefix}{name}.{end}"] for end in ("qweight", "qzeros"))
        scales = ready.tensors[f"{prefix}{name}.scales"].float()
        inputs, outputs = packed.shape[0], packed.shape[1] * 8
        weight = torch.empty(inputs, outputs)
        for column in range(outputs):
            shift = 4 * AWQ_ORDER.index(column % 8)
            codes = (packed[:, column // 8].long() >> shift) & 15
            zeros = ((zero_words[:, column // 8].long() >> shift) & 15).repeat_interleave(GROUP)
            weight[:, column] = (codes - zeros) * scales[:, column].repeat_interleave(GROUP)
        found[f"{name}.weight"] = weight.T
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        found[norm] = ready.tensors[prefix + norm]
    return found


def taken(full: Path, method: str) -> QuantizedSet:
    digest = checkpoint_digest(read_config(full), CheckpointWeights(full))
    return QuantizedSet(set_path(full, "int4", method), model=digest)


def take(full: Path, ready: Path, *more: str) -> int:
    return main(["quantize", str(full), "--from", str(ready), *more])


def layer_of(full: Path, made: QuantizedSet, layer: int) -> Named:
    """The full model's norms, the set's matrices."""
    config = read_config(full)
    weights = read_named(full, layer)
    return {**weights, **{f"{n}.weight": m.dense() for n, m in made.layer(config, layer).items()}}


def test_a_ready_awq_checkpoint_computes_the_same_between_the_full_models_norms(full: Path) -> None:
    ready, expected = awq(full)
    assert take(full, ready.write()) == 0
    config, made = read_config(full), taken(full, "awq")
    model = open_layerwise(full)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    for layer in range(config.num_layers):
        ours, theirs = (
            model.run(build_dense(config, layer, w), x)
            for w in (layer_of(full, made, layer), expected[layer])
        )
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)  # scales of v are rounded once more
        x = ours


def test_values_in_the_cache_stay_the_full_models(full: Path) -> None:
    ready, _ = awq(full)
    assert take(full, ready.write()) == 0
    config = read_config(full)
    matrices = taken(full, "awq").layer(config, 0)
    weights = read_named(full, 0)
    for name in ("k", "v"):
        matrix, original = (
            matrices[f"self_attn.{name}_proj"].dense(),
            weights[f"self_attn.{name}_proj.weight"],
        )
        assert float((matrix - original).norm() / original.norm()) < 0.15
        ratio = (matrix * original).sum(1) / (original * original).sum(1)
        assert float((ratio - 1).abs().max()) < 0.1
    is_folded = config.num_heads == config.num_kv_heads
    assert (matrices["self_attn.o_proj"].input_scale is not None) == is_folded


def test_a_ready_gptq_checkpoint_becomes_a_set(full: Path) -> None:
    ready = gptq(full)
    assert take(full, ready.write()) == 0
    config, made = read_config(full), taken(full, "gptq")
    weights = read_named(full, 1)
    for name, matrix in made.layer(config, 1).items():
        codes, scales, zeros = quantize_rtn(weights[f"{name}.weight"], 4, GROUP)
        expected = (
            codes.float() - zeros.clamp(min=1).repeat_interleave(GROUP, 1)
        ) * scales.repeat_interleave(GROUP, 1)
        torch.testing.assert_close(matrix.dense(), expected)
        assert matrix.input_scale is None


def test_gptqs_second_format_stores_zeros_as_they_are(tmp_path: Path) -> None:
    full = make_full(tmp_path / "full")
    ready = gptq(full)
    ready.config["checkpoint_format"] = "gptq_v2"
    for name in ready.tensors:
        if name.endswith(".qzeros"):
            ready.tensors[name] = ready.tensors[name] + 0x11111111
    assert take(full, ready.write()) == 0
    second = taken(full, "gptq").layer(read_config(full), 0)
    first_ready = gptq(full)
    assert take(full, first_ready.write()) == 0
    first = taken(full, "gptq").layer(read_config(full), 0)
    for name in MATRICES:
        assert torch.equal(first[name].dense(), second[name].dense())


def test_one_scale_for_all_inputs_is_repeated(tmp_path: Path) -> None:
    full = make_full(tmp_path / "full")
    ready = gptq(full)
    ready.config["group_size"] = -1
    for name in list(ready.tensors):
        if name.endswith((".scales", ".qzeros")):
            ready.tensors[name] = ready.tensors[name][:1]
        if name.endswith(".scales"):
            ready.tensors[name] = ready.tensors[name] * 0 + 0.03
        if name.endswith(".g_idx"):
            ready.tensors[name] = ready.tensors[name] * 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.offline.ready_checkpoint._MAX_ERROR", 100.0)  # the scales are made up
        assert take(full, ready.write(), "--group", "64") == 0
    matrix: QuantizedMatrix = taken(full, "gptq").layer(read_config(full), 0)["mlp.down_proj"]
    assert matrix.group == 64
    assert matrix.scales.shape == (64, 3)
    assert bool((matrix.scales == torch.tensor(0.03).half()).all())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; supported: awq and",
        ),
        ({"bits": 3}, "gptq with bits 3 is not supported"),
        ({"group_size": 48}, "group_size 48 is not supported"),
        ({"checkpoint_format": "marlin"}, "GPTQ checkpoint_format 'marlin' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ version 'gemv'"),
    ],
)
def test_another_way_of_quantising_is_refused_by_name(
    change: dict[str, Any], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = make_full(tmp_path / "full")
    ready = gptq(full)
    ready.config |= change
    assert take(full, ready.write()) == 2
    assert complaint in capsys.readouterr().err


def test_groups_in_order_of_activations_become_a_set(tmp_path: Path) -> None:
    full = make_full(tmp_path / "full")
    ready = WholeReady(full, is_ordered=True)
    assert take(full, ready.write(tmp_path / "gptq")) == 0
    for name, matrix in taken(full, "gptq").layer(read_config(full), 1).items():
        assert matrix.input_order is not None
        torch.testing.assert_close(matrix.dense(), ready.twin[f"model.layers.1.{name}.weight"])
    made, twin = Morphing(full, tmp_path), Runner(ready.write_twin(tmp_path / "twin"))
    made.swap_all("int4")
    prompt = list(range(40))
    torch.testing.assert_close(made.runner.step({0: prompt}), twin.step({0: prompt}), rtol=2e-4, atol=2e-4)
    made.close()
    twin.close()


def test_groups_in_an_order_that_the_config_denies_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = make_full(tmp_path / "full")
    ready = gptq(full)
    name = "model.layers.1.self_attn.o_proj.g_idx"
    ready.tensors[name] = ready.tensors[name].flip(0)
    assert take(full, ready.write()) == 2
    assert (
        "o_proj.g_idx has groups in the order of activations, and config.json says" in capsys.readouterr().err
    )
    assert not (full / "instar").exists()


def test_a_ready_checkpoint_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, other = make_full(tmp_path / "full"), tmp_path / "other"
    make_oracle("llama", num_key_value_heads=8, seed=1, **SIZES).save_pretrained(other)
    assert take(other, gptq(full).write()) == 2
    assert "it was made from another model" in capsys.readouterr().err


def test_a_ready_checkpoint_of_a_family_with_other_tensors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, other = make_full(tmp_path / "full"), tmp_path / "other"
    make_oracle("phi3", **SIZES).save_pretrained(other)
    assert take(other, gptq(full).write()) == 2
    told = capsys.readouterr().err
    assert "a ready checkpoint of Phi3ForCausalLM cannot be converted; those of LlamaForCausalLM, " in told


def test_a_ready_checkpoint_that_lacks_a_tensor_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = make_full(tmp_path / "full")
    folder = gptq(full).write()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, folder / "model.safetensors")
    assert take(full, folder) == 2
    assert "no tensor model.layers.0.mlp.up_proj.qzeros" in capsys.readouterr().err


def test_a_full_checkpoint_is_not_a_ready_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = make_full(tmp_path / "full")
    shutil.copytree(full, tmp_path / "copy")
    assert take(full, tmp_path / "copy") == 2
    assert "no quantization_config in it: not a quantised checkpoint" in capsys.readouterr().err
