"""Variants of layers: what each computes, what it costs, and what happens when one is damaged."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import TINY, make_oracle
from bus.messages import PARTS, LayerShape, Part
from bus.precisions import BITS, ENTRIES, PRECISIONS, QUANTIZED, Precision
from tests.support.families import EVERY_FAMILY
from tests.support.model_folders import Runner
from tests.support.pairs import pairs
from tests.support.variant_models import Morphing, write_sets
from worker.memory import OutOfPages, VirtualRange
from worker.memory.backend import Finish
from worker.model import ModelConfig, ModelError, Shard, read_config
from worker.model.cut import heads_of
from worker.model.layer import build_attention, build_feed_forward
from worker.model.layout import plan_model
from worker.model.quantized_layout import plan_quantized
from worker.model.quantized_sets import (
    round_to_nearest,
    set_path,
)
from worker.model.weights import tensors_of
from worker.shape import checks, host_images
from worker.shape.checks import WrongVariant, check_outputs
from worker.shape.copier import GivenUp
from worker.shape.host_images import MatrixSource, find_matrices
from worker.shape.host_store import HostMemory
from worker.shape.ranges import VariantKey
from worker.shape.variants import LayerVariants

# Float32 on both sides; only the order of sums differs.
EXACT = {"rtol": 2e-4, "atol": 2e-4}
# o of the tiny families has 64 inputs, or 16 of a shard of four: wide heads make it quantisable there too.
WIDE = {"head_dim": 32}


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    oracle = make_oracle(request.param)
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder)
    return oracle, folder


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    make_oracle("llama", **WIDE).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.fixture
def morphing(wide: Path, tmp_path: Path) -> Iterator[Morphing]:
    made = Morphing(wide, tmp_path, max_tp=4)
    yield made
    made.close()


def tokens(n: int, seed: int = 0) -> list[int]:
    made: list[int] = torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


def rounded_twin(oracle: Any, precision: Precision, config: ModelConfig, *, keeps_o: bool = False) -> Any:
    """transformers with every matrix of every layer in place of which its rounded values stand.

    Rows are rounded one by one, so that a fused tensor has what its parts have. Routers are not rounded, the
    gate of a shared expert included, and a shared expert is rounded in slices as wide as an expert.
    """
    twin = copy.deepcopy(oracle)
    with torch.no_grad():
        for name, module in twin.get_submodule(config.names.layer).named_modules():
            if name.endswith("shared_expert_gate"):
                continue
            width = config.intermediate_size if name.endswith("shared_expert.down_proj") else 0
            for weight in matrices_of(module, keeps_o and name.endswith(config.names.o), width):
                weight.copy_(round_to_nearest(weight, BITS[precision], ENTRIES[precision].group).dense())
    return twin


def matrices_of(module: Any, is_kept: bool, width: int) -> Iterator[torch.Tensor]:
    """Yield what is rounded of a module of transformers, `width` inputs at a time; experts are stacked."""
    if isinstance(module, torch.nn.Linear) and not is_kept:
        yield from module.weight.split(width or module.in_features, dim=1)
    elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
        is_transposed = hasattr(module, "gate_up_proj_bias")  # GPT-OSS
        for matrices in zip(module.gate_up_proj, module.down_proj, strict=True):
            yield from (matrix.T if is_transposed else matrix for matrix in matrices)


def logits_of(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0].float()
    return logits


# ---------------------------------------------------------------------------- what variants compute


@pytest.mark.parametrize(("precision", "max_tp"), pairs(QUANTIZED, [1, 4]))
def test_a_swapped_model_gives_the_logits_of_its_rounded_twin(
    saved: tuple[Any, Path], tmp_path: Path, precision: Precision, max_tp: int
) -> None:
    oracle, folder = saved
    made = Morphing(folder, tmp_path, max_tp=max_tp)
    made.swap_all(precision)
    assert made.model.shape() == [LayerShape(attention=precision, ffn=precision)] * 3
    kept = "o" in plan_quantized(made.model.config, made.model.plan, 4096, precision)[0].params
    twin = rounded_twin(oracle, precision, made.model.config, keeps_o=kept)
    prompt = tokens(31)
    got = torch.cat([made.runner.step({0: prompt[:20]}), made.runner.step({0: prompt[20:]})])
    torch.testing.assert_close(got, logits_of(twin, prompt), **EXACT)
    assert not torch.allclose(got, logits_of(oracle, prompt), **EXACT)
    made.close()


def test_back_at_full_precision_the_logits_are_the_same_to_the_bit(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    _, folder = saved
    made = Morphing(folder, tmp_path, max_tp=2)
    prompt = tokens(40)
    before = made.runner.step({0: prompt})
    for precision in (*QUANTIZED, "full"):
        made.swap_all(precision)
    assert made.model.shape() == [LayerShape()] * 3
    assert made.runner.step({1: prompt}).equal(before)
    made.close()


def test_halves_swap_by_themselves_and_between_any_two_variants(wide: Path, tmp_path: Path) -> None:
    made, plain = Morphing(wide, tmp_path), Runner(wide)
    prompt = tokens(25)
    full = plain.step({0: prompt})
    seen = [full]
    for step, (layer, part, precision) in enumerate(
        [
            (1, "ffn", "int4"),
            (1, "ffn", "int3"),
            (0, "attention", "int8"),
            (1, "ffn", "int8"),
            (1, "attention", "int3"),
        ]
    ):
        made.swap(layer, part, precision)  # type: ignore[arg-type]
        seen.append(made.runner.step({step: prompt}))
    assert made.model.shape() == [
        LayerShape(attention="int8"),
        LayerShape(attention="int3", ffn="int8"),
        LayerShape(),
    ]
    distances = torch.tensor([[float((a - b).abs().max()) for b in seen] for a in seen])
    assert (distances + torch.eye(len(seen)) > 1e-3).all()  # each swap changed what is computed
    for layer in (0, 1):
        for part in PARTS:
            made.swap(layer, part, "full")
    assert made.runner.step({9: prompt}).equal(full)
    made.close()
    plain.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_variants_pass_their_check_in_half_precision(
    wide: Path, tmp_path: Path, dtype: torch.dtype, precision: Precision
) -> None:
    made = Morphing(wide, tmp_path, max_tp=4, dtype=dtype)
    if precision == "full":
        made.swap_all("int8")
    made.swap_all(precision)
    assert made.runner.step({0: tokens(20)}).isfinite().all()
    made.close()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-j", "falcon with biases"])
def test_the_sum_over_the_shards_of_a_variant_is_the_whole_half(
    tmp_path: Path, family: str, precision: Precision, size: int
) -> None:
    make_oracle(family, **(WIDE if family == "llama" else {})).save_pretrained(tmp_path / "model")
    made = Morphing(tmp_path / "model", tmp_path, max_tp=4)
    made.swap_all(precision)
    model, runner = made.model, made.runner
    config, layer = model.config, model.layers[1]
    memory = {part: made.variants.ranges.memory((1, part, precision)) for part in PARTS}
    plans = {part: made.variants.ranges.plans[part, precision] for part in PARTS}
    x = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))
    plan = runner._plan({0: tokens(9)})
    whole_kv = torch.zeros(128, *runner.kv.block_shape)
    cos_sin = model._transformer.cos_sin[layer.attention.rope]
    whole = layer.attention(x, plan, whole_kv, cos_sin)
    attended, fed = [], []
    for rank in range(size):
        shard = Shard(rank, size)
        _, heads = heads_of(config.num_heads, config.num_kv_heads, shard)
        kv = torch.zeros(128, len(heads), *runner.kv.block_shape[1:])
        tensors = {part: tensors_of(memory[part], plans[part].at(shard)) for part in PARTS}
        window = config.sliding_windows[1]
        part = build_attention(config, tensors["attention"], shard, window, precision)
        attended.append(part(x, plan, kv, cos_sin))
        torch.testing.assert_close(kv, whole_kv[:, heads.start : heads.stop], **EXACT)
        fed.append(build_feed_forward(config, tensors["ffn"], precision, shard)(x))
    torch.testing.assert_close(sum(attended), whole, **EXACT)
    torch.testing.assert_close(sum(fed), layer.feed_forward(x), **EXACT)
    made.close()


# ---------------------------------------------------------------------------- sets made offline


@pytest.mark.parametrize("max_tp", [1, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_set_made_offline_is_what_the_variant_computes(
    tmp_path: Path, group: int, is_scaled: bool, max_tp: int
) -> None:
    oracle = make_oracle("llama", **WIDE)
    oracle.save_pretrained(tmp_path / "m")
    dense = write_sets(tmp_path / "m", "awq", group, is_scaled=is_scaled)
    made = Morphing(tmp_path / "m", tmp_path, max_tp=max_tp)
    made.swap_all("int4")
    with torch.no_grad():
        for name, matrix in dense.items():
            oracle.get_submodule(name).weight.copy_(matrix)
    prompt = tokens(30)
    torch.testing.assert_close(made.runner.step({0: prompt}), logits_of(oracle, prompt), **EXACT)
    made.close()


def test_the_method_of_a_set_can_be_chosen_and_must_then_be_there(wide: Path, tmp_path: Path) -> None:
    write_sets(wide, "awq", 64, is_scaled=True)
    write_sets(wide, "gptq", 64, is_scaled=False)
    chosen = {}
    for method in ("", "awq", "gptq", "rtn"):
        runner = Runner(wide)
        if method in ("awq", "gptq"):
            with pytest.raises(ModelError, match=rf"int8-{method}\.safetensors is missing and .*'{method}'"):
                LayerVariants(runner.model, runner.pool, method=method, memory=HostMemory(tmp_path))
        precisions: list[Precision] = ["int4"]
        variants = LayerVariants(
            runner.model, runner.pool, method=method, memory=HostMemory(tmp_path), precisions=precisions
        )
        chosen[method] = variants.store.image((0, "ffn", "int4", "weights")).clone()
        variants.release()
        runner.close()
    assert chosen[""].equal(chosen["awq"])
    assert not chosen["awq"].equal(chosen["gptq"]) and chosen["gptq"].equal(chosen["rtn"])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("cut", "damaged or truncated"), ("flipped", "checksum does not match"), ("foreign", "another model")],
)
def test_a_set_that_cannot_be_used_is_refused_by_name(
    wide: Path, tmp_path: Path, damage: str, reason: str
) -> None:
    write_sets(wide, "awq", 64, is_scaled=False)
    path = set_path(wide, "int4", "awq")
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        whole[-100] ^= 1
        path.write_bytes(whole)
    else:
        make_oracle("llama", seed=1, **WIDE).save_pretrained(tmp_path / "other")
        write_sets(tmp_path / "other", "awq", 64, is_scaled=False)
        shutil.copy(set_path(tmp_path / "other", "int4", "awq"), path)
    runner = Runner(wide)
    with pytest.raises(ModelError, match=rf"int4-awq\.safetensors: .*{reason}"):
        LayerVariants(runner.model, runner.pool, memory=HostMemory(tmp_path))
    assert list(tmp_path.glob("*.images")) == []
    runner.close()


# ---------------------------------------------------------------------------- pages


def test_a_swap_costs_the_pages_it_says_and_gives_back_the_old_ones(morphing: Morphing) -> None:
    pool, variants = morphing.runner.pool, morphing.variants
    before = pool.counts()
    for precision in QUANTIZED:
        for part in PARTS:
            full, few = variants.pages(1, part, "full"), variants.pages(1, part, precision)
            morphing.swap(1, part, precision)
            assert few < full and pool.counts().free == before.free + full - few
            assert pool.counts().kv == before.kv
            morphing.swap(1, part, "full")
            assert pool.counts() == before
    pool.check_integrity()


def test_a_variant_that_finds_no_pages_leaves_the_old_one_serving(morphing: Morphing) -> None:
    pool = morphing.runner.pool
    prompt = tokens(20)
    before = morphing.runner.step({0: prompt})
    hog = pool.reserve(pool.num_free * pool.page_bytes, kind="kv", owner="hog")
    hog.map(0, pool.num_free - 1)
    with pytest.raises(OutOfPages):
        morphing.variants.map(0, "ffn", "int4")
    assert pool.num_free == 1 and morphing.runner.step({1: prompt}).equal(before)
    hog.release()


def test_every_shard_of_a_variants_ffn_is_a_run_of_pages(morphing: Morphing) -> None:
    for precision in QUANTIZED:
        plan = morphing.variants.ranges.plans["ffn", precision]
        units = plan.params["down.codes"].shape[0]
        assert units == 4 and plan.nbytes % (units * 4096) == 0
        for param in plan.params.values():
            unit_bytes = param.strides[0] * param.dtype.itemsize
            assert unit_bytes == plan.nbytes // units
            end = (
                param.offset_bytes
                + param.shape[1] * (param.strides[1] if len(param.shape) == 3 else 1) * param.dtype.itemsize
            )
            assert end <= unit_bytes


@pytest.mark.parametrize("page_kib", [16, 64, 2048])
def test_memory_shrinks_by_the_ratio_of_the_bits(tmp_path: Path, page_kib: int) -> None:
    """Sizes of an 8B model: codes, scales and zeros of 64 inputs, and nothing else worth mentioning."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, page = read_config(tmp_path), page_kib * 1024
    plan = plan_model(read, torch.bfloat16, page, 4)
    full = sum(-(-part.nbytes // page) for part in plan.layers[0])
    for precision in QUANTIZED:
        few = sum(-(-part.nbytes // page) for part in plan_quantized(read, plan, page, precision))
        per_weight = BITS[precision] + 24 / ENTRIES[precision].group
        assert few / full < 1.01 * per_weight / 16 + 8 / full, (precision, few, full)


# ---------------------------------------------------------------------------- damage


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("part", PARTS)
def test_a_page_that_was_not_copied_is_found(morphing: Morphing, part: Part, precision: Precision) -> None:
    variants = morphing.variants
    if precision == "full":
        morphing.swap(1, part, "int8")
    norms = [param for name, param in variants.ranges.plans[part, precision].params.items() if "norm" in name]
    norms_at = min((param.offset_bytes for param in norms), default=1 << 40)  # no product reads them
    variants.map(1, part, precision)
    job = variants.copy_job(1, part, precision)
    for page in range(variants.pages(1, part, precision)):
        job(lambda: True)
        variants._proven.clear()
        variants.check(1, part, precision)
        target = morphing.bytes(1, part, precision)[page * 4096 : (page + 1) * 4096]
        if not target.any() or page * 4096 >= norms_at:
            continue
        target.zero_()
        variants.check(1, part, precision)  # its products were right once; the bytes are the copy's to check
        variants._proven.clear()
        with pytest.raises(WrongVariant, match=f"{part} of layer 1 in {precision}: product"):
            variants.check(1, part, precision)
    variants.unmap(1, part, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("part", PARTS)
def test_a_single_bit_that_was_lost_is_found(
    morphing: Morphing, monkeypatch: pytest.MonkeyPatch, part: Part, precision: Precision
) -> None:
    variants, real, bits = morphing.variants, VirtualRange.begin_write, random.Random(0)
    if precision == "full":
        morphing.swap(1, part, "int8")
    variants.map(1, part, precision)
    job = variants.copy_job(1, part, precision)
    for _ in range(20):
        at, bit = bits.randrange(job.nbytes), 1 << bits.randrange(8)

        def write(
            target: VirtualRange, offset: int, source: torch.Tensor, then: Any, at: int = at, bit: int = bit
        ) -> Finish:
            finish = real(target, offset, source)
            target.tensor(torch.uint8, [1], offset_bytes=at)[:] ^= bit
            then(offset, offset + len(source))
            return finish

        monkeypatch.setattr(VirtualRange, "begin_write", write)
        with pytest.raises(
            WrongVariant,
            match=f"{part} of layer 1 in {precision}: 1 of .* the first at byte {at // 4096 * 4096};",
        ):
            job(lambda: True)
    monkeypatch.undo()
    job(lambda: True)
    variants.unmap(1, part, precision)


def test_numbers_that_are_none_are_found(morphing: Morphing) -> None:
    variants = morphing.variants
    variants.map(0, "ffn", "int4")
    variants.copy_job(0, "ffn", "int4")(lambda: True)
    tensors_of(variants.ranges.memory((0, "ffn", "int4")), variants.ranges.plans["ffn", "int4"])[
        "down.scales"
    ][2, 3] = torch.nan
    with pytest.raises(WrongVariant):
        variants.check(0, "ffn", "int4")
    variants.unmap(0, "ffn", "int4")


def test_a_reference_that_is_damaged_itself_lets_nothing_pass(morphing: Morphing) -> None:
    variants = morphing.variants
    place: VariantKey = (0, "attention", "int4")
    variants.map(*place)
    half, expected = (
        variants._resident(place),
        torch.zeros(variants.store.image((*place, "outputs")).numel() // 4),
    )
    for damaged in (1e38, torch.inf, torch.nan):
        expected[3] = damaged
        with pytest.raises(WrongVariant):
            check_outputs("it", half, expected, torch.float32)
    variants.unmap(*place)


def test_a_copy_stops_when_it_is_told_to(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.shape.copier._CPU_CHUNK_BYTES", 4096)
    made = Morphing(wide, tmp_path)
    made.variants.map(0, "ffn", "int8")
    job, asked = made.variants.copy_job(0, "ffn", "int8"), list[None]()

    def twice() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise GivenUp

    with pytest.raises(GivenUp):
        job(twice)
    assert len(asked) == 2 and job.nbytes > 3 * 4096
    copied = made.bytes(0, "ffn", "int8")
    image = made.variants.image(0, "ffn", "int8")
    assert copied[:8192].equal(image[:8192]) and not copied[8192:].any()
    made.variants.unmap(0, "ffn", "int8")
    made.close()


# ---------------------------------------------------------------------------- host images


def test_workers_of_a_host_share_the_images_of_a_model(wide: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(wide, tmp_path / "copied"))  # the same weights elsewhere
    runners = [Runner(folder) for folder in (wide, copied)]
    told: list[tuple[int, int]] = []
    first = LayerVariants(
        runners[0].model, runners[0].pool, memory=HostMemory(tmp_path), progress=lambda *at: told.append(at)
    )
    made = len(told)
    assert told[-1][0] == told[-1][1] and made == 3 * len(PARTS) * len(PRECISIONS) + 1
    second = LayerVariants(
        runners[1].model, runners[1].pool, memory=HostMemory(tmp_path), progress=lambda *at: told.append(at)
    )
    assert len(told) == made and len(list(tmp_path.glob("*.images"))) == 1
    first.release()
    second.map(2, "ffn", "int3")
    second.copy_job(2, "ffn", "int3")(lambda: True)
    second.check(2, "ffn", "int3")
    second.release()
    assert list(tmp_path.glob("*.images")) == []
    for runner in runners:
        runner.close()


def test_making_the_images_can_be_given_up_within_a_half(wide: Path, tmp_path: Path) -> None:
    runner, told, pauses = Runner(wide), list[tuple[int, int]](), list[None]()
    found = find_matrices(runner.model.config, runner.model.source, "int4", "rtn")
    matrices: dict[Precision, MatrixSource] = {"int4": found}
    variants = LayerVariants(runner.model, runner.pool, matrices=matrices, precisions=["int4"])

    def pause() -> None:
        pauses.append(None)
        if len(pauses) == 5:
            raise GivenUp

    with pytest.raises(GivenUp):
        variants.open(HostMemory(tmp_path), lambda *at: told.append(at), pause)
    assert len(told) < 3 and list(tmp_path.glob("*.images")) == []
    variants.open(HostMemory(tmp_path), lambda *at: told.append(at), lambda: pauses.append(None))
    assert len(pauses) > 3 * len(told)
    variants.release()
    runner.close()


def test_images_do_not_depend_on_how_much_is_rounded_at_a_time(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for elements in (1 << 9, 1 << 22):
        monkeypatch.setitem(host_images._ROUNDED_ELEMENTS, "cpu", elements)
        monkeypatch.setitem(checks._REFERENCE_ELEMENTS, "cpu", elements)
        runner = Runner(wide)
        variants = LayerVariants(runner.model, runner.pool, memory=HostMemory(tmp_path))
        places = [(0, part, precision) for part in PARTS for precision in variants.precisions]
        outputs = [variants.store.image((*place, "outputs")).view(torch.float32) for place in places]
        made.append(
            ([variants.image(*place).clone() for place in places], [each.clone() for each in outputs])
        )
        variants.release()
        runner.close()
    (images, outputs), (others, other_outputs) = made
    assert len(images) == len(PARTS) * len(PRECISIONS)
    assert all(map(torch.equal, images, others))
    torch.testing.assert_close(outputs, other_outputs)


def test_other_layouts_and_weights_have_images_of_their_own(wide: Path, tmp_path: Path) -> None:
    made = [Runner(wide), Runner(wide, max_tp=4), Runner(wide, dtype=torch.bfloat16)]
    made += [Runner(wide, load_format="dummy", seed=seed) for seed in (1, 2)]
    variants = [LayerVariants(runner.model, runner.pool, memory=HostMemory(tmp_path)) for runner in made]
    assert len(list(tmp_path.glob("*.images"))) == len(made)
    for each, runner in zip(variants, made, strict=True):
        each.release()
        runner.close()


def test_only_the_variants_that_were_asked_for_are_kept(wide: Path, tmp_path: Path) -> None:
    runner = Runner(wide)
    variants = LayerVariants(runner.model, runner.pool, memory=HostMemory(tmp_path), precisions=["int4"])
    assert variants.precisions == ["full", "int4"]
    variants.release()
    runner.close()


@pytest.mark.parametrize("part", PARTS)
def test_pages_that_are_only_taken_are_mapped_by_the_copy(morphing: Morphing, part: Part) -> None:
    pool, variants = morphing.runner.pool, morphing.variants
    with ThreadPoolExecutor(1) as pool.beside:
        before = pool.counts()
        variants.map(1, part, "int4")
        memory = variants.ranges.memory((1, part, "int4"))
        num_pages = variants.pages(1, part, "int4")
        assert memory.num_mapped == 0 and pool.counts().weights == before.weights + num_pages
        pool.check_integrity()
        variants.copy_job(1, part, "int4")(lambda: None)
        variants.check(1, part, "int4")
        variants.install(1, part, "int4")
        assert memory.num_mapped == num_pages
        pool.check_integrity()
        variants.install(1, part, "full")
        variants.unmap(1, part, "int4")
        assert pool.counts() == before
        variants.map(1, part, "int4")
        variants.unmap(1, part, "int4")  # its copy was given up before it began
        assert pool.counts() == before
        pool.check_integrity()
    pool.beside = None
