"""Model folders: what loads, what it costs, and what every broken one is told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.common.loading import load_model
from bench.common.oracles import FAMILIES, TINY, make_oracle
from tests.support.model_folders import Runner, make_pool
from worker.memory import MappingFailed, PagePool
from worker.model import ModelError, read_config
from worker.model.layout import CheckpointTensor, degrees, plan_model
from worker.model.shard import Shard
from worker.model.sources import DUMMY_STD, PIECE_ELEMENTS, CheckpointWeights, RandomWeights
from worker.shape.copier import GivenUp


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_oracle("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_oracle("llama").save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def config_folder(folder: Path, **changes: Any) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(folder: Path, match: str, pool: PagePool | None = None, **load: Any) -> None:
    """Loading raises a ModelError that says so, and leaves every page free."""
    pool = pool or make_pool()
    with pytest.raises(ModelError, match=match):
        load_model(folder, pool, **load)
    pool.check_integrity()
    assert pool.num_free == pool.num_pages
    pool.close()


# ---------------------------------------------------------------------------- what loads


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_large_tensor_is_filled_in_pieces_and_can_be_stopped_after_each(
    tmp_path: Path, load_format: str, is_transposed: bool
) -> None:
    stored = torch.randn(3000, 900).bfloat16()
    save_file({"w": stored}, tmp_path / "model.safetensors")
    source = CheckpointWeights(tmp_path) if load_format == "safetensors" else RandomWeights()
    tensor = CheckpointTensor("w", (3000, 900), "w", is_transposed=is_transposed)
    wanted = (stored.T if is_transposed else stored).float()
    target, pauses = torch.zeros(wanted.shape), list[int]()
    source.fill([target], tensor, lambda: pauses.append(int(target.count_nonzero())))
    assert len(pauses) == 3 and pauses[0] <= PIECE_ELEMENTS and pauses[-1] > 0.99 * target.numel()
    if load_format == "safetensors":
        assert target.equal(wanted)

    def give_up() -> None:
        raise GivenUp

    stopped = torch.zeros(wanted.shape)
    with pytest.raises(GivenUp):
        source.fill([stopped], tensor, give_up)
    assert int(stopped.count_nonzero()) == pauses[0]


def test_a_file_stays_open_over_the_tensors_of_it_until_it_is_closed(sharded: Path) -> None:
    checkpoint = CheckpointWeights(sharded)
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        assert checkpoint.read(name).numel()
    assert len(open_files(sharded)) == 1
    checkpoint.close()
    assert not open_files(sharded)
    assert checkpoint.read("model.norm.weight").numel() == TINY["hidden_size"]


def open_files(folder: Path) -> set[str]:
    """Return the files of a folder that this process has in its memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition("/")[2] for line in lines if f"{folder}/" in line}


def test_one_file_and_many_shards_load_the_same_weights(whole: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    runners = [Runner(whole), Runner(sharded)]
    prompt = list(range(30))
    assert runners[0].step({0: prompt}).equal(runners[1].step({0: prompt}))
    for runner in runners:
        runner.close()


def test_progress_counts_every_byte_once(sharded: Path) -> None:
    pool, seen = make_pool(), list[tuple[int, int]]()
    model = load_model(
        sharded, pool, dtype=torch.bfloat16, progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {model.size.weights} and seen[-1][0] == model.size.weights
    assert (
        model.size.weights
        == sum(t.numel() for f in sharded.glob("*.safetensors") for t in load_file(f).values()) * 2
    )
    pool.close()


def test_the_dtype_is_the_checkpoints_unless_another_is_asked_for(copied: Path) -> None:
    tensors = {
        name: tensor.to(torch.float16) for name, tensor in load_file(copied / "model.safetensors").items()
    }
    save_file(tensors, copied / "model.safetensors")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    pool = make_pool()
    as_stored, widened = load_model(copied, pool), load_model(copied, pool, dtype=torch.float32)
    assert (as_stored.dtype, widened.dtype) == (torch.float16, torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = widened._weights.layers[1].feed_forward.tensors["down"][0]
    assert stored.equal(tensors[name].float().T)
    pool.close()


def test_pages_of_a_model_are_weights_until_it_is_released(whole: Path) -> None:
    pool = make_pool()
    first, second = load_model(whole, pool, max_tp=4), load_model(whole, pool)
    counts = pool.counts()
    assert counts.weights * pool.page_bytes == first.size.mapped + second.size.mapped
    assert first.size.mapped >= first.size.weights + first.size.padding
    first.release()
    assert pool.counts().weights * pool.page_bytes == second.size.mapped
    second.release()
    assert pool.counts().free == pool.num_pages
    pool.close()


def test_padding_is_reported_and_is_zeros(whole: Path) -> None:
    pool = make_pool()
    model = load_model(whole, pool, max_tp=4)
    rows, hidden = TINY["intermediate_size"] // 4, TINY["hidden_size"]
    matrices = 3 * rows * hidden * 4  # of a unit: somewhat more than eight pages
    assert model.size.padding == TINY["num_hidden_layers"] * 4 * (9 * 4096 - matrices)
    loaded = model._weights.layers[0].feed_forward
    assert loaded.tensors["gate_up"].shape == (4, 2, rows, hidden)
    assert loaded.tensors["down"].any(2).all()
    stored = loaded.memory.tensor(torch.uint8, (4, 9 * 4096))
    assert stored[:, :matrices].any() and not stored[:, matrices:].any()
    pool.close()


@pytest.mark.parametrize(
    ("hidden", "intermediate", "max_tp", "pages"),
    [
        (4096, 11008, 4, 33),  # Llama 2 7B: 32.25 pages of gate, up and down to each rank of four
        (4096, 11008, 1, 0),
        (4096, 14336, 4, 42),  # Llama 3 8B: needs no padding
        (3584, 18944, 4, 49),  # Qwen2 7B: 48.56
    ],
)
def test_padding_is_less_than_a_page_to_each_shard(
    tmp_path: Path, hidden: int, intermediate: int, max_tp: int, pages: int
) -> None:
    heads = hidden // 128
    folder = config_folder(
        tmp_path / "m",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=4,
    )
    plan = plan_model(read_config(folder), torch.bfloat16, 2 << 20, max_tp)
    ffn, weights = plan.layers[0][1], 3 * hidden * intermediate * 2
    assert ffn.nbytes == (max_tp * pages * (2 << 20) if pages else weights)
    assert ffn.padding_bytes == ffn.nbytes - weights


def test_degrees_are_those_at_which_every_rank_has_heads(tmp_path: Path) -> None:
    config = read_config(config_folder(tmp_path / "m", num_key_value_heads=2))
    assert degrees(config, 16) == [1, 2, 4, 8] and degrees(config, 1) == [1], "eight heads read two"
    odd = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    assert degrees(read_config(config_folder(tmp_path / "odd", **odd)), 8) == [1]


@pytest.mark.slow
def test_loading_needs_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    folder = config_folder(
        tmp_path / "m", vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=3
    )
    plan = plan_model(read_config(folder), torch.float32, 4096, 1)
    sources = [source for part in plan.ranges() for source in part.sources]
    save_file({s.tensor: torch.ones(s.shape) for s in sources}, folder / "model.safetensors")
    code = f"""
import re, torch
from pathlib import Path
from worker.memory import CpuBackend, PagePool
from bench.common.loading import load_model
def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
small = PagePool(CpuBackend(), 300 << 20)
load_model({str(folder)!r}, small, load_format="dummy", dtype=torch.float16).release()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = kib("VmRSS")
model = load_model({str(folder)!r}, PagePool(CpuBackend(), 300 << 20))
print(model.size.weights // 1024, kib("VmHWM") - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=100, capture_output=True, text=True
    )
    weights, peak = map(int, done.stdout.split())
    largest = 8192 * 768 * 4 // 1024  # one tensor is in the page cache's mapping while it is copied
    assert weights > 90_000
    assert peak < weights + largest + 8_000, f"{peak} KiB at the peak for {weights} KiB of weights"


# ---------------------------------------------------------------------------- dummy weights


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_need_only_a_config(tmp_path: Path, family: str) -> None:
    make_oracle(family).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name, _ = FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [f"{name}ForCausalLM"]}))
    runner = Runner(tmp_path, load_format="dummy", max_tp=2)
    assert runner.step({0: list(range(20))}).isfinite().all()
    runner.close()


def test_dummy_weights_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m")
    prompt = list(range(40))
    a, b = Runner(folder, load_format="dummy", seed=3), Runner(folder, load_format="dummy", seed=3, max_tp=4)
    other = Runner(folder, load_format="dummy", seed=4)
    logits = a.step({0: prompt})
    torch.testing.assert_close(logits, b.step({0: prompt}), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, other.step({0: prompt}), atol=0.1)
    for runner in (a, b, other):
        runner.close()


def test_dummy_weights_have_the_deviation_that_keeps_greedy_text_alive(tmp_path: Path) -> None:
    pool = make_pool()
    model = load_model(config_folder(tmp_path / "m"), pool, dtype=torch.float32, load_format="dummy")
    layer, embedding, head = model._weights.layers[0], model._weights.embedding, model._weights.head
    assert embedding and head
    for weight in (layer.attention.tensors["qkv"], embedding.tensors["embedding"]):
        assert weight.std().item() == pytest.approx(DUMMY_STD, rel=0.05)
        assert weight.mean().abs().item() < 0.005
    assert layer.attention.tensors["input_norm"].eq(1).all() and head.tensors["norm"].eq(1).all()
    pool.close()


# ---------------------------------------------------------------------------- what is refused


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: there is no such model folder")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(
        tmp_path / "model.gguf", "model.gguf: a file; a model is a folder, and `instar convert` makes one"
    )


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json in it")


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "cannot be read as JSON"), ("[1]", "holds a list, not an object")]
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, reason)


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", architectures=["GPT2LMHeadModel"])
    refused(folder, "GPT2LMHeadModel is not supported; these are: LlamaForCausalLM, .*Qwen3ForCausalLM")
    folder = config_folder(tmp_path / "m", architectures=None, model_type="bloom")
    refused(folder, "architecture bloom is not supported")


def test_an_architecture_is_known_by_its_model_type_too(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", architectures=None, model_type="qwen2")
    assert read_config(folder).architecture == "Qwen2ForCausalLM"


def test_other_ways_of_quantising_are_refused_by_their_method(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", quantization_config={"quant_method": "fp8"})
    refused(folder, r"config\.json: quant_method 'fp8' is not supported; supported: awq and gptq")
    refused(
        config_folder(tmp_path / "n", quantization_config="awq"),
        "quantization_config is a str, not an object",
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"num_key_value_heads": 3}, "8 heads are not a multiple of 3 KV heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"head_dim": 5}, "even"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "config.json"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial",
        ),
    ],
)
def test_a_config_that_cannot_be_served_says_why(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    refused(config_folder(tmp_path / "m", **changes), reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; the model has 8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0; the model has 8 experts"),
        ({"num_experts": 0}, "the model has 0 experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; it must be positive"),
        (
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "model_type": "qwen2_moe",
                "moe_intermediate_size": 0,
                "shared_expert_intermediate_size": 64,
            },
            "moe_intermediate_size is 0; it must be positive",
        ),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step gives some layers no experts"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers .* gives some layers no experts"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}},
            "quantised weights of Qwen3MoeForCausalLM are not supported; serve the model in full precision",
        ),
    ],
)
def test_a_mixture_of_experts_that_cannot_be_served_says_why(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    refused(mixture_folder(tmp_path / "m", **changes), reason)


def mixture_folder(folder: Path, **changes: Any) -> Path:
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return config_folder(folder, **(names | mixture | changes))


def test_experts_are_divided_only_by_degrees_that_divide_them(tmp_path: Path) -> None:
    assert degrees(read_config(mixture_folder(tmp_path / "m", num_key_value_heads=8)), 8) == [1, 2, 4, 8]
    assert degrees(read_config(mixture_folder(tmp_path / "m", num_experts=6)), 4) == [1, 2]
    with pytest.raises(ModelError, match=r"degree of 4 cannot be: 6 experts .* these can be: 1, 2$"):
        read_config(tmp_path / "m").of_rank(Shard(0, 4))


@pytest.mark.parametrize("max_tp", [4, 8])
@pytest.mark.parametrize(
    ("experts", "hidden", "width"), [(128, 2048, 768), (8, 4096, 14336), (128, 4096, 1536)], ids=str
)
def test_experts_of_real_models_are_hardly_padded(
    tmp_path: Path, experts: int, hidden: int, width: int, max_tp: int
) -> None:
    """The sizes are of Qwen3-30B-A3B, Mixtral 8x7B and Qwen3-235B-A22B, in pages of 2 MiB."""
    changes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_key_value_heads": 8}
    config = read_config(mixture_folder(tmp_path / "m", num_experts=experts, **changes))
    plan = plan_model(config, torch.bfloat16, 2 << 20, max_tp)
    assert plan.padding_bytes < 0.01 * plan.weight_bytes
    ffn = plan.layers[0][1]
    shards = [ffn.at(Shard(rank, max_tp)).pages(2 << 20) for rank in range(max_tp)]
    assert (
        max(int(each.sum()) for each in shards) == -(-3 * experts * hidden * width // max_tp // (1 << 20)) + 1
    )


def test_a_dtype_that_no_kernel_has_is_refused(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", dtype="float64")
    refused(folder, r"dtype torch\.float64 is not supported; these are: torch\.float32", load_format="dummy")


def test_a_folder_without_safetensors_is_refused(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    refused(copied, "neither model.safetensors nor model.safetensors.index.json")


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    gone = sorted(folder.glob("*.safetensors"))[2]
    gone.unlink()
    refused(folder, f"shard {gone.name} is missing")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named(copied: Path) -> None:
    change_tensors(copied, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(copied, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(copied: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    change_tensors(copied, lambda tensors: tensors.update({name: torch.zeros(16, 64)}))
    refused(copied, rf"model\.safetensors: tensor {name} has shape \[16, 64\]; config.json says \[32, 64\]")


def test_a_tensor_that_is_not_floating_point_is_refused(copied: Path) -> None:
    name = "model.norm.weight"
    change_tensors(copied, lambda tensors: tensors.update({name: torch.zeros(64, dtype=torch.int8)}))
    refused(copied, f"tensor {name} is I8; supported: F32, BF16, F16")


def test_a_damaged_file_is_named(copied: Path) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(copied, r"model\.safetensors: not a readable safetensors file")


def test_an_index_that_is_none_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weights": {}}')
    refused(folder, "not an index of shards")
    index.write_text(
        json.dumps({"weight_map": {"model.norm.weight": min(folder.glob("*.safetensors")).name}})
    )
    refused(folder, r"no tensor model\.embed_tokens\.weight, .* and \d+ more")


def test_a_model_too_big_for_the_budget_is_refused_before_it_is_loaded(whole: Path) -> None:
    seen: list[int] = []
    pool = make_pool(megabytes=1)
    size = load_model(whole, make_pool()).size
    refused(
        whole,
        rf"too big for the device's budget: it needs {size.mapped / 2**20:.1f} MiB .* 0\.5 of 0\.5 MiB",
        pool=PagePool(pool.backend, 1 << 19),
        progress=lambda done, _: seen.append(done),
    )
    assert not seen


def test_a_load_that_fails_half_way_gives_every_page_back(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    real, calls = pool.backend.map, []

    def fails_late(*args: Any, zeroed: bool) -> None:
        calls.append(args)
        if len(calls) == 5:
            raise MappingFailed("mmap: no")
        real(*args, zeroed=zeroed)

    monkeypatch.setattr(pool.backend, "map", fails_late)
    with pytest.raises(MappingFailed):
        load_model(whole, pool)
    pool.check_integrity()
    assert pool.num_free == pool.num_pages
    pool.close()
