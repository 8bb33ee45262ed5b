"""Families as data: tensors that a layout takes, the table of docs/models.md, what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bench.common.oracles import FAMILIES as TINY_FAMILIES
from bench.common.oracles import make_oracle
from bus.checkpoints import BadCheckpoint, read_checkpoint
from bus.families import FAMILIES, LLAMA
from tests.support.model_folders import Runner
from worker.model import ModelConfig, ModelError, read_config
from worker.model.layout import degrees, plan_model
from worker.model.sources import CheckpointWeights, checkpoint_digest

ROOT = Path(__file__).parents[3]

# The sizes of real models, as their config.json has them.
REAL: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {
        "model_type": "llama",
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "rope_scaling": None,
    },
    "Llama 3.1 8B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "CodeLlama 34B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 48,
        "max_position_embeddings": 16384,
        "rope_theta": 1000000,
        "rope_scaling": None,
    },
    "Vicuna 7B 16k": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
    "Mistral 7B": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "Mixtral 8x7B": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "GPT-OSS 20B": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Phi-3 mini 128k": {
        "model_type": "phi3",
        "num_hidden_layers": 32,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": 32,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "sliding_window": 262144,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / 40 for i in range(48)],
            "long_factor": [1.0 + i for i in range(48)],
        },
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    },
    "Phi-4 mini": {
        "model_type": "phi3",
        "num_hidden_layers": 32,
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + i for i in range(48)],
        },
    },
    "Gemma 2 9B": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 42,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 224,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    "Gemma 3 1B": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 26,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
    },
    "GPT-J 6B": {
        "model_type": "gptj",
        "vocab_size": 50400,
        "n_embd": 4096,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 28,
        "n_positions": 2048,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
    },
    "Falcon 7B": {
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "bias": False,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
    },
    "Falcon 40B": {
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "bias": False,
        "new_decoder_architecture": True,
        "parallel_attn": True,
    },
    "Qwen2.5 7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "Qwen1.5 MoE A2.7B": {
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 24,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "Qwen3 8B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
    },
    "Qwen3 30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
}
ARCHITECTURES = {family.model_type: name for name, family in FAMILIES.items()}


def real_config(folder: Path, model: str) -> ModelConfig:
    raw = REAL[model]
    architecture = ARCHITECTURES[raw["model_type"]]
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **raw}))
    return read_config(folder)


@cache
def theirs(model: str) -> tuple[Any, Any]:
    """Return transformers' config and model, without memory."""
    config = transformers.AutoConfig.for_model(**REAL[model])
    with torch.device("meta"):
        return config, getattr(transformers, ARCHITECTURES[REAL[model]["model_type"]])(config)


def as_saved(name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a checkpoint's tensors for a parameter of transformers, which stacks experts when it loads."""
    is_stacked = not config.mixture or config.names.experts_gate_up
    layer, is_mixture, part = name.partition("nowhere" if is_stacked else ".mlp.")
    names, inputs = config.names, shape[-1]
    if not is_mixture:
        yield name, shape
    elif part == "gate.weight":
        yield f"{layer}.{names.router}.weight", shape
    elif part.startswith("shared_expert"):
        yield name, shape
    else:
        modules = [names.gate, names.up] if part == "experts.gate_up_proj" else [names.down]
        for expert, module in product(range(shape[0]), modules):
            outputs = shape[1] // len(modules)
            yield f"{layer}.{names.experts}.{expert}.{module}.weight", (outputs, inputs)


@pytest.mark.parametrize("model", REAL)
def test_the_layout_of_a_real_model_takes_the_very_tensors_that_transformers_has(
    tmp_path: Path, model: str
) -> None:
    config = real_config(tmp_path, model)
    _, made = theirs(model)
    loaded = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    wanted = {saved: shape for item in loaded.items() for saved, shape in as_saved(*item, config)}
    plan = plan_model(config, torch.bfloat16, 2 << 20, 8)
    sources = [source for part in plan.ranges() for source in part.sources]
    assert {source.tensor: source.shape for source in sources} == wanted
    assert plan.weight_bytes == 2 * sum(parameter.numel() for parameter in made.parameters())
    assert read_checkpoint(tmp_path).num_layers == config.num_layers


@pytest.mark.parametrize("model", [model for model in REAL if model != "GPT-J 6B"])
def test_rotary_frequencies_of_a_real_model_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    config, (hf, made) = real_config(tmp_path, model), theirs(model)
    kind = next(type(each) for each in made.modules() if type(each).__name__.endswith("RotaryEmbedding"))
    wanted = kind(hf)
    if config.local_rope is None:
        assert config.rope.inv_freq == tuple(wanted.inv_freq.tolist())
        assert config.rope.factor == wanted.attention_scaling
    else:
        assert config.rope.inv_freq == tuple(wanted.full_attention_inv_freq.tolist())
        assert config.local_rope.inv_freq == tuple(wanted.sliding_attention_inv_freq.tolist())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_row_of_every_tensor_goes_to_one_place(tmp_path: Path, family: str) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    plan = plan_model(read_config(tmp_path), torch.float32, 4096, 4)
    for part in plan.ranges():
        taken: dict[str, list[int]] = {}
        filled: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for source in part.sources:
            key = f"{source.tensor} {source.expert}"
            lines = source.columns or source.rows or range(source.shape[0])
            taken.setdefault(key, []).extend(lines)
            rows = source.part_shape[1] if source.is_transposed else source.num_rows
            target = filled.setdefault((source.param, source.index), [])
            target.extend(range(source.row, source.row + rows))
        assert all(sorted(rows) == list(range(len(rows))) for rows in (*taken.values(), *filled.values()))


# ---------------------------------------------------------------------------- the table of docs/models.md


def rows_of_page() -> list[dict[str, str]]:
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| architecture |"))
    end = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:end]]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_the_page_says_of_every_family_what_holds(tmp_path: Path) -> None:
    table = rows_of_page()
    assert {row["architecture"].strip("`") for row in table} == FAMILIES.keys()
    tested = {f"{name}ForCausalLM" for name, _ in TINY_FAMILIES.values()}
    for row in table:
        architecture = row["architecture"].strip("`")
        config = real_config(tmp_path, row["for example"])
        assert config.architecture == architecture
        assert row["degrees"] == ", ".join(map(str, degrees(config, 8)))
        fixed = [degree for degree in config.cut_sizes.degrees() if degree <= 8]
        assert row["fixed"] == ", ".join(map(str, fixed))
        assert (row["AWQ, GPTQ"] == "yes") == (config.names == LLAMA)
        # Each test over the oracles swaps every layer to every precision, and runs every split into stages.
        assert (row["swaps"], row["pipelines"]) == ("yes", "yes") and architecture in tested


# ---------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("model")
            make_oracle(family).save_pretrained(made[family])
        return made[family]

    return folder


def refused(folder: Path, reason: str) -> None:
    """Loading raises a ModelError before a page is mapped."""
    with pytest.raises(ModelError, match=reason):
        checkpoint = CheckpointWeights(folder)
        plan = plan_model(read_config(folder), torch.float32, 4096, 1)
        checkpoint.check([source for part in plan.ranges() for source in part.sources])


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """Return a copy of a folder with another config."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def with_tensors(folder: Path, target: Path, **tensors: tuple[int, ...]) -> Path:
    """Return a copy of a folder with more, or other, tensors; __ stands for a dot."""
    shutil.copytree(folder, target)
    found = load_file(target / "model.safetensors")
    found |= {name.replace("__", "."): torch.zeros(shape) for name, shape in tensors.items()}
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "gemma2",
            {"hidden_activation": "relu"},
            "hidden_activation 'relu' is not supported; these are: silu",
        ),
        (
            "gpt-j",
            {"activation_function": "tanh"},
            "activation_function 'tanh' is not .*; these are: gelu, gel",
        ),
        (
            "falcon, new decoder",
            {"activation": "silu"},
            "activation 'silu' is not supported; these are: gelu",
        ),
        ("falcon, new decoder", {"alibi": True}, "alibi is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gpt-j", {"rotary_dim": 12}, "12 dimensions of a head turn, and it has 8"),
        ("llama", {"num_hidden_layers": 4}, r"no tensor model\.layers\.3\."),
        ("llama", {"attention_bias": True}, r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("llama with biases", {"attention_bias": False}, r"has model\.layers\.\d.*bias.*says nothing"),
        ("llama", {"intermediate_size": 160}, r"gate_proj\.weight has shape \[172, 64\]; .* \[160, 64\]"),
        ("phi3", {"num_key_value_heads": 2}, r"qkv_proj\.weight has shape \[128, 64\]; .* says \[96, 64\]"),
        (
            "falcon, new decoder",
            {"num_ln_in_parallel_attn": 1},
            r"no tensor transformer\.h\.0\.input_layernorm",
        ),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, r"layers\.0\.self_attn\.[kq]_norm.*says nothing"),
    ],
)
def test_a_config_that_does_not_fit_its_family_or_its_tensors_is_refused(
    tmp_path: Path, folders: Callable[[str], Path], family: str, changes: dict[str, Any], reason: str
) -> None:
    refused(changed(folders(family), tmp_path / "m", **changes), reason)


def test_tensors_that_the_config_does_not_know_are_refused_and_tables_are_not(
    tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    table = {"model__layers__0__self_attn__rotary_emb__inv_freq": (4,)}
    assert read_config(with_tensors(folders("llama"), tmp_path / "table", **table)).num_layers == 3
    runner = Runner(tmp_path / "table")
    runner.close()
    norm = {"model__layers__1__pre_feedforward_layernorm__weight": (64,)}
    refused(
        with_tensors(folders("llama"), tmp_path / "norm", **norm),
        r"the checkpoint has model\.layers\.1\.pre_feedforward_layernorm\.weight, of which config\.json says",
    )
    bias = {"lm_head__bias": (211,)}
    refused(with_tensors(folders("llama"), tmp_path / "bias", **bias), r"the checkpoint has lm_head\.bias")


def test_code_beside_a_model_is_never_run(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    code = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Config"}
    known = changed(folders("phi3"), tmp_path / "known", auto_map=code)
    (known / "modeling_own.py").write_text("raise SystemExit('it ran')")
    runner = Runner(known)  # its tensors are all that is read
    assert runner.step({0: [1, 2, 3]}).isfinite().all()
    runner.close()
    unknown = changed(known, tmp_path / "unknown", architectures=["OwnForCausalLM"], model_type="own")
    needs = r"OwnForCausalLM is not supported; these are: .*; it needs code of its own \(auto_map\)"
    refused(unknown, needs)
    with pytest.raises(BadCheckpoint, match=needs):
        read_checkpoint(unknown)


def test_options_that_are_no_tensors_are_part_of_the_digest(
    tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    """Else quantised sets, and images that workers share, would be taken for another model's."""
    changes: list[dict[str, Any]] = [
        {},
        {"attn_logit_softcapping": 4.0},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
        {"hidden_activation": "silu"},
        {"sliding_window": 9},
    ]
    digests = []
    for number, change in enumerate(changes):
        folder = changed(folders("gemma2"), tmp_path / str(number), **change)
        digests.append(checkpoint_digest(read_config(folder), CheckpointWeights(folder)))
    assert len(set(digests)) == len(changes)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
