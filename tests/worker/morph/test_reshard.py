"""Layers from one tensor-parallel degree to another: which pages go, what comes back, and what can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.common.oracles import SPLIT, make_oracle
from bus.messages import PARTS, LayerShape, Part
from bus.precisions import BITS, ENTRIES, PRECISIONS, QUANTIZED, Precision
from tests.support.families import EVERY_FAMILY, QUICK
from tests.support.group_models import Ranks
from tests.support.model_folders import Runner
from tests.support.variant_models import Morphing
from worker.memory import MappingFailed, OutOfPages
from worker.memory.backend import Finish
from worker.model import Shard, read_config
from worker.model.layout import RangePlan, degrees, plan_model
from worker.model.linear import DenseLinear, TransposedLinear
from worker.model.quantized_layout import plan_quantized
from worker.model.quantized_sets import round_to_nearest
from worker.model.row_units import full_units, quantized_units
from worker.model.weights import tensors_in
from worker.morph.reshard import Resharder, make_resharder
from worker.morph.variants import NoVariants
from worker.shape.checks import WrongVariant
from worker.shape.copier import CopyJob, GivenUp
from worker.shape.ranges import products_of

EXACT = {"rtol": 2e-4, "atol": 2e-4}
WIDE = {"head_dim": 32}  # o has enough inputs to be quantised at degree 4
SHARDS = [Shard(rank, size) for size in (1, 2, 4) for rank in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_oracle("llama", **WIDE).save_pretrained(made)
    return made


class Resharding:
    """A model with or without variants in host memory, and the images of what its ranges hold when whole."""

    def __init__(self, folder: Path, host_dir: Path | None, **load: Any) -> None:
        load = {"max_tp": 4} | load
        self.made = Morphing(folder, host_dir, **load) if host_dir else None
        self.runner = self.made.runner if self.made else Runner(folder, **load)
        self.model, self.pool = self.runner.model, self.runner.pool
        self.weights: Resharder = make_resharder(
            self.model, self.pool, self.made.variants if self.made else NoVariants()
        )

    def bytes(self, layer: int = 1, part: Part = "ffn") -> torch.Tensor:
        """Return the bytes of the mapped half."""
        ranges, place = self.weights._ranges, self.weights._resident(layer, part)
        return ranges.memory(place).tensor(torch.uint8, (ranges.plans[place[1:]].nbytes,)).clone()

    def widen(self, shard: Shard, layer: int = 1) -> None:
        self.weights.map(layer, shard)
        self.weights.fill(layer, shard)(lambda: True)
        self.weights.widen(layer, shard)

    def close(self) -> None:
        if self.made:
            self.made.variants.release()
        self.runner.close()


@pytest.fixture(params=["host images", "checkpoint", "dummy"])
def resharding(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Resharding]:
    has_images, load_format = request.param == "host images", "safetensors"
    if request.param == "dummy":
        load_format = "dummy"
    made = Resharding(folder, tmp_path if has_images else None, load_format=load_format)
    yield made
    made.close()


def random_input(config: Any) -> torch.Tensor:
    return torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------------- which pages


def layouts(folder: Path, page_bytes: int) -> dict[Precision, tuple[RangePlan, RangePlan]]:
    config = read_config(folder)
    plan = plan_model(config, torch.float32, page_bytes, 4)
    made: dict[Precision, tuple[RangePlan, RangePlan]] = {"full": plan.layers[1]}
    for precision in QUANTIZED:
        for group, has_input_scale in ((64, False), (32, True)):
            made[precision] = plan_quantized(
                config, plan, page_bytes, precision, group=group, has_input_scale=has_input_scale
            )
    return made


@pytest.mark.parametrize("page_bytes", [4096, 65536])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_the_shards_of_a_degree_share_the_pages_of_an_ffn_between_them(
    tmp_path: Path, family: str, page_bytes: int
) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    for attention, ffn in layouts(tmp_path, page_bytes).values():
        for size in degrees(config, 4):
            pages = [ffn.at(Shard(rank, size)).pages(page_bytes) for rank in range(size)]
            assert len(pages[0]) == -(-ffn.nbytes // page_bytes)
            # Every rank has biases and a router whole, in pages of their own behind the matrices.
            whole = [param.offset_bytes for param in ffn.params.values() if param.split is None]
            end = min(whole) // page_bytes if whole else len(pages[0])
            owners = np.sum(pages, axis=0)
            assert (owners[:end] == 1).all() and (owners[end:] == size).all()
            assert len({int(each.sum()) for each in pages}) == 1
            assert attention.at(Shard(size - 1, size)).pages(page_bytes).all()


def test_shards_nest() -> None:
    assert [shard for shard in SHARDS if Shard(1, 2).has(shard)] == [Shard(1, 2), Shard(2, 4), Shard(3, 4)]
    assert all(Shard().has(shard) for shard in SHARDS)
    assert [shard for shard in SHARDS if shard.has(Shard(2, 4))] == [Shard(), Shard(1, 2), Shard(2, 4)]
    assert not Shard(0, 2).has(Shard(0, 3))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_products_of_all_degrees_are_known_before_a_layer_takes_them(
    folder: Path, tmp_path: Path, precision: Precision
) -> None:
    """So their kernels are measured when the model is loaded."""
    resharding = Resharding(folder, tmp_path)
    assert resharding.made
    resharding.made.swap_all(precision)
    plans, layer = resharding.made.variants.ranges.plans, resharding.model.layers[1]
    seen = []
    for shard in (Shard(), Shard(1, 2), Shard(3, 4)):
        resharding.weights.narrow(1, shard)
        known = set(products_of(resharding.model, plans, [Shard(0, shard.size)]))
        linears = [*layer.attention.linears, *layer.feed_forward.linears]
        seen.append({product for each in linears for product in each.products()})
        assert seen[-1] <= known
    assert seen[0] != seen[1] != seen[2]
    resharding.close()


# ---------------------------------------------------------------------------- there and back


def test_a_narrower_layer_frees_the_pages_it_says_and_copies_nothing(resharding: Resharding) -> None:
    pool, weights, model = resharding.pool, resharding.weights, resharding.model
    before, kept = pool.counts(), resharding.bytes()
    for shard in (Shard(1, 2), Shard(2, 4)):
        now, pages = pool.counts(), weights.pages(1, weights.shard(1))
        freed = weights.narrow(1, shard)
        assert freed == pages - weights.pages(1, shard) > 0
        assert pool.counts().free == now.free + freed and pool.counts().kv == before.kv
        assert weights.shard(1) == model.layers[1].shard == shard
        assert model.layers[1].attention.qkv[0].num_outputs == model.config.q_size // shard.size
        pool.check_integrity()
        assert weights.narrow(1, shard) == 0  # once more is harmless
    gate_up, down = model.layers[1].feed_forward.linears
    units = tensors_in(kept, model.plan.layers[1][1])
    assert isinstance(gate_up, DenseLinear) and isinstance(down, TransposedLinear)
    assert gate_up.weight.equal(units["gate_up"][2].flatten(0, 1)) and down.weight.equal(units["down"][2])


@pytest.mark.parametrize("last", SHARDS[1:], ids=str)
def test_layers_come_back_byte_for_byte(resharding: Resharding, last: Shard) -> None:
    pool, weights = resharding.pool, resharding.weights
    before, whole = pool.counts(), [resharding.bytes(1, part) for part in PARTS]
    path = [shard for shard in SHARDS if shard.has(last)]
    prompt = [5, 6, 7, 8]
    wanted = resharding.runner.step({0: prompt})
    for shard in path[1:]:
        weights.narrow(1, shard)
    for shard in reversed(path[:-1]):
        now = pool.num_free
        pages = weights.map(1, shard)
        assert pages == now - pool.num_free == weights.pages(1, shard) - weights.pages(1, weights.shard(1))
        job = weights.fill(1, shard)
        assert 0 <= pages * 4096 - job.nbytes < 4096
        job(lambda: True)
        weights.widen(1, shard)
        pool.check_integrity()
    assert pool.counts() == before
    for part, image in zip(PARTS, whole, strict=True):
        assert resharding.bytes(1, part).equal(image)
    assert resharding.runner.step({1: prompt}).equal(wanted)


@pytest.mark.parametrize("path", [[Shard(1, 2), Shard(3, 4), Shard(1, 2), Shard()], [Shard(2, 4), Shard()]])
@pytest.mark.parametrize("precision", QUANTIZED)
def test_quantised_layers_come_back_byte_for_byte(
    folder: Path, tmp_path: Path, precision: Precision, path: list[Shard]
) -> None:
    resharding = Resharding(folder, tmp_path)
    assert resharding.made
    resharding.made.swap_all(precision)
    before, whole = resharding.pool.counts(), [resharding.bytes(1, part) for part in PARTS]
    for shard in path:
        if resharding.weights.shard(1).has(shard):
            assert resharding.weights.narrow(1, shard) > 0
        else:
            resharding.widen(shard)
    assert resharding.pool.counts() == before
    for part, image in zip(PARTS, whole, strict=True):
        assert resharding.bytes(1, part).equal(image)
    resharding.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", ["llama with rows that fit no page", "qwen2", "gemma3", "gpt-j", "falcon, new decoder"]
)
def test_a_checkpoint_is_read_again_as_it_was_at_load(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    resharding = Resharding(tmp_path, None, dtype=dtype)
    whole = resharding.bytes()
    resharding.weights.narrow(1, Shard(1, 4))
    resharding.widen(Shard(0, 2))
    resharding.widen(Shard())
    assert resharding.bytes().equal(whole)
    resharding.close()


def test_biases_of_an_ffn_are_on_every_rank_and_never_sent(tmp_path: Path) -> None:
    make_oracle("gpt-j").save_pretrained(tmp_path)
    resharding = Resharding(tmp_path, None)
    weights, plan = resharding.weights, resharding.model.plan.layers[1][1]
    sent = [weights.spans(1, Shard(rank, 2)) for rank in range(2)]
    ends = [end for spans in sent for _, end in spans]
    assert max(ends) == plan.params["up_bias"].offset_bytes  # what lies before it is sent, once
    assert sum(end - begin for spans in sent for begin, end in spans) == max(ends)
    weights.narrow(1, Shard(1, 2))
    up_bias = resharding.model.layers[1].feed_forward.gate_up.bias  # type: ignore[union-attr]
    whole = resharding.runner.model.source.read("transformer.h.1.mlp.fc_in.bias")  # type: ignore[attr-defined]
    units = full_units(len(whole), plan.params["up_bias"].shape[0])
    own = range(units.count // 2, units.count)
    for unit, part in zip(own, up_bias.unflatten(0, (-1, units.size)), strict=True):
        rows = units.rows(unit)
        assert part[: len(rows)].equal(whole[rows.start : rows.stop]) and not part[len(rows) :].any()
    resharding.close()


# ---------------------------------------------------------------------------- what a group computes


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama", 4),
        *(
            pytest.param(family, 2, marks=[] if family in QUICK else [pytest.mark.slow])
            for family in SPLIT
            if " with" not in family
        ),
    ],
)
def test_a_resharded_group_gives_each_member_what_it_gets_alone(
    tmp_path: Path, family: str, size: int
) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    ranks = Ranks(tmp_path, size)
    ranks.reshape(0, is_rising=False)  # all layers alone
    for h, rank in enumerate(ranks.ranks):
        weights = make_resharder(rank.runner.model, rank.runner.pool, NoVariants())
        for layer in range(ranks.num_layers):
            weights.narrow(layer, Shard(h, size))
    ranks.use_degrees(0, is_rising=True)
    for got, wanted in ranks.step([{0: [3, 4, 5]}, *({h: [h, 7]} for h in range(1, size))]):
        torch.testing.assert_close(got, wanted, **EXACT)
    ranks.close()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_swapped_at_a_shard_is_that_shard_of_the_rounded_matrices(
    folder: Path, tmp_path: Path, precision: Precision, size: int
) -> None:
    """Against plain torch: the rows of the twin's FFN that this rank has."""
    resharding = Resharding(folder, tmp_path)
    made, weights, model = resharding.made, resharding.weights, resharding.model
    assert made
    source, prefix, twin = model.source, "model.layers.1.mlp.", {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        matrix = source.read(f"{prefix}{name}.weight")  # type: ignore[attr-defined]
        twin[name] = (
            matrix
            if precision == "full"
            else round_to_nearest(matrix, BITS[precision], ENTRIES[precision].group).dense()
        )
    shard = Shard(size - 2, size)
    x = random_input(model.config)
    weights.narrow(1, shard)
    if precision == "full":
        made.swap(1, "ffn", "int4")
    now, full = resharding.pool.num_free, made.variants.pages(1, "ffn", model.shape()[1].ffn)
    made.swap(1, "ffn", precision)
    pages = made.variants.pages(1, "ffn", precision)
    assert resharding.pool.num_free == now + full - pages
    plan = made.variants.ranges.plans["ffn", precision]
    assert pages * size * 4096 == plan.nbytes  # a part of the FFN is all there is of it
    rows_of = full_units if precision == "full" else partial(quantized_units, group=ENTRIES[precision].group)
    units = rows_of(model.config.intermediate_size, 4)
    own = shard.part(4, "units")
    rows = slice(units.rows(own.start).start, units.rows(own.stop - 1).stop)
    hidden = F.silu(x @ twin["gate_proj"][rows].T) * (x @ twin["up_proj"][rows].T)
    wanted = hidden @ twin["down_proj"][:, rows].T
    torch.testing.assert_close(model.layers[1].feed_forward(x), wanted, **EXACT)
    resharding.close()


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_group_that_swapped_its_layers_gives_what_a_member_alone_gives_with_them_swapped(
    folder: Path, tmp_path: Path, precision: Precision
) -> None:
    ranks = Ranks(folder, 2)
    ranks.reshape(0, is_rising=False)
    made = []
    for h, rank in enumerate(ranks.ranks):
        alone, member = Morphing(rank.twin, tmp_path), Morphing(rank.runner, tmp_path)
        made += [alone, member]
        weights = make_resharder(member.model, rank.runner.pool, member.variants)
        for layer in range(ranks.num_layers):
            weights.narrow(layer, Shard(h, 2))
        for each in (alone, member):
            for layer in (0, 2):
                for part in PARTS:
                    each.swap(layer, part, precision)
    ranks.use_degrees(0, is_rising=True)
    swapped = LayerShape(attention=precision, ffn=precision)
    assert [layer == swapped for layer in made[-1].model.shape()] == [True, False, True]
    for got, wanted in ranks.step([{0: [3, 4, 5], 1: [9]}, {0: [8, 1]}]):
        torch.testing.assert_close(got, wanted, **EXACT)
    for each in made:
        each.variants.release()
    ranks.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_swaps_and_degrees_keeps_every_page_and_every_byte(
    folder: Path, tmp_path: Path, seed: int
) -> None:
    """Layers on their own ways, with copies that were stopped and undone between."""
    resharding = Resharding(folder, tmp_path)
    made, pool, weights = resharding.made, resharding.pool, resharding.weights
    assert made
    random, last = Random(seed), Shard(seed, 4)
    path = [shard for shard in SHARDS if shard.has(last)]
    before, layers = pool.counts(), range(len(made.model.layers))
    ends = before.weights - sum(weights.pages(layer, Shard()) for layer in layers)
    whole = {(layer, part): resharding.bytes(layer, part) for layer in layers for part in PARTS}
    for _ in range(60):
        layer, now = random.choice(layers), pool.num_free
        shard, target = weights.shard(layer), random.choice(path)
        match random.choice(("swap", "go", "undo")):
            case "swap":
                made.swap(layer, random.choice(PARTS), random.choice(PRECISIONS))
            case "go" if shard.has(target):
                freed = weights.narrow(layer, target)
                assert pool.num_free == now + freed
            case "go":
                resharding.widen(target, layer)
            case "undo" if target.has(shard):
                weights.map(layer, target)
                stop_after(random.randrange(4), weights.fill(layer, target))
                weights.unmap_extra(layer)
                assert pool.num_free == now
        pool.check_integrity()
        resident = sum(weights.pages(layer, weights.shard(layer)) for layer in layers)
        assert pool.counts().weights == resident + ends
    for layer in layers:
        resharding.widen(Shard(), layer)
        for part in PARTS:
            made.swap(layer, part, "full")
            assert resharding.bytes(layer, part).equal(whole[layer, part])
    assert pool.counts() == before
    resharding.close()


# ---------------------------------------------------------------------------- what can fail


def test_a_map_that_finds_no_pages_maps_none(resharding: Resharding) -> None:
    pool, weights = resharding.pool, resharding.weights
    weights.narrow(1, Shard(1, 2))
    hog = pool.reserve(pool.num_free * pool.page_bytes, kind="kv", owner="hog")
    hog.map(0, pool.num_free - 3)
    with pytest.raises(OutOfPages):
        weights.map(1, Shard())
    assert pool.num_free == 3 and weights.shard(1) == Shard(1, 2)
    pool.check_integrity()
    with pytest.raises(ValueError, match=r"pages of .*size=1.* are not mapped"):
        weights.widen(1, Shard())
    assert weights.shard(1) == Shard(1, 2)
    hog.release()


@pytest.mark.parametrize("which", [1, 2])
def test_what_the_system_refuses_half_way_is_undone_or_done_again(
    resharding: Resharding, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The rows of others lie before the rank's part and behind it: two calls each way."""
    pool, weights = resharding.pool, resharding.weights
    before, whole, backend = pool.counts(), resharding.bytes(), pool.backend
    for call in ("unmap", "map"):
        real, calls = getattr(backend, call), iter(range(1, 100))

        def refuse(*args: Any, real: Any = real, calls: Any = calls, **kwargs: Any) -> None:
            if next(calls) == which:
                raise MappingFailed("no")
            real(*args, **kwargs)

        monkeypatch.setattr(backend, call, refuse)
        if call == "unmap":
            with pytest.raises(MappingFailed):
                weights.narrow(1, Shard(1, 4))
            assert weights.shard(1) == Shard(1, 4) and weights.narrow(1, Shard(1, 4)) > 0
            narrow = pool.counts()
        else:
            with pytest.raises(MappingFailed):
                weights.map(1, Shard())
            assert pool.counts() == narrow
        pool.check_integrity()
    resharding.widen(Shard())
    assert pool.counts() == before and resharding.bytes().equal(whole)


def stop_after(chunks: int, job: CopyJob) -> None:
    """Run the job, and stop it behind the chunk after so many."""
    asked = iter(range(chunks))

    def pause() -> None:
        if next(asked, None) is None:
            raise GivenUp

    with suppress(GivenUp):
        job(pause)


def test_what_was_mapped_is_unmapped_again_whether_its_copy_ended_or_not(
    resharding: Resharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.shape.copier._CPU_CHUNK_BYTES", 4096)
    pool, weights = resharding.pool, resharding.weights
    whole = resharding.bytes()
    weights.narrow(1, Shard(1, 2))
    narrow, prompt = pool.counts(), resharding.model.layers[1].feed_forward
    weights.unmap_extra(1)  # nothing was mapped
    assert pool.counts() == narrow
    for chunks in (0, 1, 5):
        assert weights.map(1, Shard()) > 0
        stop_after(chunks, weights.fill(1, Shard()))
        weights.unmap_extra(1)
        assert pool.counts() == narrow and resharding.model.layers[1].feed_forward is prompt
    resharding.widen(Shard())
    assert resharding.bytes().equal(whole)


def test_a_page_that_does_not_hold_what_was_copied_stops_the_fill(
    resharding: Resharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, memory = resharding.weights, resharding.weights._ranges.memory((1, "ffn", "full"))
    weights.narrow(1, Shard(0, 2))
    weights.map(1, Shard())
    real = memory.begin_write

    def damage(offset_bytes: int, source: torch.Tensor, then: Callable[[int, int], object]) -> Finish:
        def spoil(first: int, end: int) -> None:
            memory.tensor(torch.uint8, (1,), offset_bytes=first).add_(1)
            then(first, end)

        return real(offset_bytes, source, spoil)

    monkeypatch.setattr(memory, "begin_write", damage)
    with pytest.raises(WrongVariant, match="ffn of layer 1 in full: 1 of"):
        weights.fill(1, Shard())(lambda: True)
    weights.unmap_extra(1)


def test_shards_that_a_rank_cannot_go_to_are_refused_and_nothing_changes(resharding: Resharding) -> None:
    pool, weights = resharding.pool, resharding.weights
    weights.narrow(1, Shard(1, 2))
    before = pool.counts()
    with pytest.raises(ValueError, match=r"rank=1, size=4.* is no part of .*rank=1, size=2"):
        weights.narrow(1, Shard(1, 4))
    for refused in (weights.map, weights.widen):
        with pytest.raises(ValueError, match=r"rank=1, size=2.* is no part of .*rank=0, size=2"):
            refused(1, Shard(0, 2))
    with pytest.raises(ValueError, match=r"not laid out for degree 8; they are for 1, 2, 4 .*max_tp"):
        weights.narrow(1, Shard(4, 8))
    assert pool.counts() == before and weights.shard(1) == Shard(1, 2)
    assert weights.shard(0) == Shard()


# ---------------------------------------------------------------------------- rows from other ranks


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shard", [Shard(1, 2), Shard()], ids=str)
def test_what_the_parts_of_a_shard_read_makes_it_whole(
    folder: Path, tmp_path: Path, precision: Precision, shard: Shard
) -> None:
    """Ranks of degree 4, one after the other: all that they have is put into the last one's pages."""
    resharding = Resharding(folder, tmp_path)
    assert resharding.made
    resharding.made.swap_all(precision)
    weights, whole = resharding.weights, resharding.bytes()
    parts = [Shard(rank, 4) for rank in range(4) if shard.has(Shard(rank, 4))]
    theirs = [
        [(begin, whole[begin:end]) for begin, end in weights.spans(1, part)]
        for part in parts
        if part != parts[-1]
    ]
    weights.narrow(1, parts[-1])
    for begin, end in weights.spans(1, parts[-1]):
        assert weights.ffn(1).read(begin, end).equal(whole[begin:end])
    weights.map(1, shard)
    for begin, source in (piece for part in theirs for piece in part):
        weights.ffn(1).put(begin, source)
    weights.widen(1, shard)
    for begin, end in weights.spans(1, shard):
        assert weights.ffn(1).read(begin, end).equal(whole[begin:end])
    resharding.close()


def test_rows_that_came_damaged_are_found_where_their_sums_are_known(resharding: Resharding) -> None:
    weights, whole = resharding.weights, resharding.bytes()
    weights.narrow(1, Shard(1, 2))
    weights.map(1, Shard())
    begin, end = weights.spans(1, Shard(0, 2))[0]
    came = whole[begin:end]
    came[5000] ^= 4
    if resharding.made:
        with pytest.raises(WrongVariant, match=r"ffn of layer 1 in full: 1 of .* or the link between them"):
            weights.ffn(1).put(begin, came)
    else:
        weights.ffn(1).put(begin, came)
    weights.unmap_extra(1)


def test_a_rehearsal_fills_nothing_and_reads_what_any_fill_must(resharding: Resharding) -> None:
    before, whole = resharding.pool.counts(), resharding.bytes()
    job = resharding.weights.rehearsal()
    job(lambda: True)
    assert job.nbytes == 0 and job.read_bytes == (0 if resharding.made else len(whole))
    assert resharding.pool.counts() == before and resharding.bytes().equal(whole)
