"""GPT-OSS whose experts are in MXFP4: what it computes, and what is refused before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.model_folders import Runner
from tests.support.mxfp4_models import QUANTIZATION, change_config, write_mxfp4
from tests.worker.model.test_families import REAL
from worker.model import ModelError, read_config
from worker.model.layout import plan_model
from worker.model.mxfp4 import VALUES, Mxfp4Checkpoint, dequantize, memory_notice
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest

EXACT = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [int(i) for i in torch.randint(211, (37,), generator=torch.Generator().manual_seed(2))]
Folder = tuple[Any, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("mxfp4")
    return write_mxfp4(folder), folder


def expected(oracle: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([PROMPT])).logits[0].float()
    return logits


@pytest.mark.parametrize("max_tp", [1, 4])
def test_logits_equal_those_of_the_model_that_transformers_dequantised(saved: Folder, max_tp: int) -> None:
    oracle, folder = saved
    runner = Runner(folder, max_tp=max_tp)
    logits = torch.cat([runner.step({0: part}) for part in (PROMPT[:20], PROMPT[20:36], PROMPT[36:])])
    torch.testing.assert_close(logits, expected(oracle), **EXACT)
    runner.close()


def test_transformers_reads_the_same_folder_as_the_same_model(saved: Folder) -> None:
    """Else the folder would not be what is released."""
    oracle, folder = saved
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    torch.testing.assert_close(expected(theirs), expected(oracle), **EXACT)


def test_a_later_stage_reads_its_own_layers(saved: Folder) -> None:
    oracle, folder = saved
    config = read_config(folder).part(1, 2)
    plan = plan_model(config, torch.float32, 4096, 1)
    source = open_checkpoint(config)
    (gate, up) = (
        each for each in plan.layers[0][1].sources if each.param == "gate_up" and each.index[0] == 5
    )
    made = torch.empty(2, 96, 64)
    source.fill([made[0]], gate)
    source.fill([made[1]], up)
    theirs = oracle.model.layers[1].mlp.experts.gate_up_proj[5]
    assert made[0].equal(theirs[:, ::2].T) and made[1].equal(theirs[:, 1::2].T)


def test_every_code_at_every_scale_is_its_value() -> None:
    blocks = (torch.arange(16) + 16 * torch.arange(16).flip(0)).to(torch.uint8).expand(255, 1, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    made = dequantize(blocks, scales)
    for exponent in (0, 1, 100, 126, 127, 128, 200, 252):
        for k, value in enumerate(made[exponent].tolist()):
            code = k // 2 if k % 2 == 0 else 15 - k // 2
            assert value == VALUES[code] * 2.0 ** (exponent - 127)


def test_the_notice_says_what_the_experts_take(tmp_path: Path) -> None:
    raw = REAL["GPT-OSS 20B"] | {"architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZATION}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    assert config.has_mxfp4_experts and config.fixed_precision is None
    notice = memory_notice(config, plan_model(config, torch.bfloat16, 2 << 20, 1))
    # 24 layers of 32 experts of 3 x 2880 x 2880: 4.25 bits each, and 16.
    assert "in MXFP4 (9682 MiB) and served in bfloat16 (36450 MiB)" in notice


def test_a_config_without_a_dtype_means_bfloat16(tmp_path: Path) -> None:
    """The released GPT-OSS names no dtype."""
    raw = REAL["GPT-OSS 20B"] | {"architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZATION}
    for said, dtype in (
        ({}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | said))
        assert read_config(tmp_path).dtype == dtype


def test_the_digest_changes_with_codes_and_scales(tmp_path: Path, saved: Folder) -> None:
    _, folder = saved
    config = read_config(folder)
    digests = {checkpoint_digest(config, open_checkpoint(config))}
    for ending in ("blocks", "scales"):
        changed = copied(folder, tmp_path / ending)
        tensors = load_file(changed / "model.safetensors")
        tensors[f"{EXPERTS}.down_proj_{ending}"][0, 0, 0] += 1
        save_file(tensors, changed / "model.safetensors")
        config = read_config(changed)
        digests.add(checkpoint_digest(config, open_checkpoint(config)))
    assert len(digests) == 3


# ---------------------------------------------------------------------------- what is refused

EXPERTS = "model.layers.1.mlp.experts"
BLOCKS = f"{EXPERTS}.gate_up_proj_blocks"
SCALES = f"{EXPERTS}.down_proj_scales"
Tensors = dict[str, torch.Tensor]


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


REFUSED: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda tensors: tensors.pop(SCALES), f"the checkpoint has no tensor {SCALES}"),
    (lambda tensors: tensors.pop(BLOCKS), f"the checkpoint has no tensor {BLOCKS}"),
    (
        lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS][:, :, :1].contiguous()}),
        rf"{BLOCKS} has shape \[8, 192, 1, 16\]; config\.json says \[8, 192, 2, 16\]",
    ),
    (lambda tensors: tensors.update({SCALES: tensors[SCALES].float()}), f"{SCALES} is F32; supported: U8"),
    (
        lambda tensors: tensors.update({f"{EXPERTS}.down_proj": torch.zeros(8, 96, 64)}),
        rf"the checkpoint has {EXPERTS}\.down_proj, of which config\.json says nothing",
    ),
]


@pytest.mark.parametrize(("spoil", "complaint"), REFUSED, ids=[complaint[:40] for _, complaint in REFUSED])
def test_tensors_that_do_not_fit_are_refused_before_a_page_is_taken(
    spoil: Callable[[Tensors], object], complaint: str, saved: Folder, tmp_path: Path
) -> None:
    folder = copied(saved[1], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = read_config(folder)
    plan = plan_model(config, torch.float32, 4096, 1)
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(config).check([source for part in plan.ranges() for source in part.sources])


def test_a_scale_that_is_no_number_is_refused(saved: Folder, tmp_path: Path) -> None:
    folder = copied(saved[1], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors[SCALES][3, 7, 1] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{SCALES} has a scale of 255, .* in expert 3"):
        Runner(folder)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": 80}, "hidden_size 80 with MXFP4 is not supported; supported: multiples of 32"),
        ({"intermediate_size": 48}, "intermediate_size 48 with MXFP4 is not supported"),
        (
            {
                "quantization_config": QUANTIZATION
                | {"modules_to_not_convert": ["model.layers.2.mlp.experts"]}
            },
            r"'model\.layers\.2\.mlp\.experts', which leaves .*\.2\.mlp\.experts in full precision",
        ),
        (
            {"quantization_config": QUANTIZATION | {"modules_to_not_convert": ["model.layers.[0"]}},
            "is no regular expression",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "quant_method 'mxfp4' is not supported; supported: awq and gptq, and mxfp4 for the experts",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], complaint: str, saved: Folder, tmp_path: Path
) -> None:
    folder = copied(saved[1], tmp_path / "m")
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=complaint):
        read_config(folder)


def test_the_checkpoint_of_a_full_model_is_opened_as_one(tmp_path: Path, saved: Folder) -> None:
    folder = copied(saved[1], tmp_path / "m")
    assert isinstance(open_checkpoint(read_config(folder)), Mxfp4Checkpoint)
    change_config(folder, quantization_config=None)
    config = read_config(folder)
    plan = plan_model(config, torch.float32, 4096, 1)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        open_checkpoint(config).check([source for part in plan.ranges() for source in part.sources])
