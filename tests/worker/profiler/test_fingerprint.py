"""Fingerprints: what is loaded of a model, what is measured of it, and that nothing of it stays."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.loading import load_fingerprint, load_model
from bench.common.oracles import make_oracle
from bus.deployments import LinkSample, MemorySample
from bus.messages import PARTS
from bus.precisions import PRECISIONS, QUANTIZED, Precision
from tests.support.model_folders import Runner, make_pool
from tests.support.variant_models import Morphing
from worker.memory import PagePool
from worker.model import read_config
from worker.model.layout import CheckpointTensor
from worker.model.shard import Shard
from worker.model.sources import PIECE_ELEMENTS, CheckpointWeights
from worker.profiler.device_memory import peak_memory
from worker.profiler.fingerprint import CutPlan, Fingerprint
from worker.profiler.grid import Grid, Point, is_settled
from worker.profiler.measurer import with_shapes
from worker.profiler.profiler import NotEnoughPages, Profiler
from worker.shape.copier import GivenUp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fingerprints") / "tiny"
    make_oracle("llama", num_hidden_layers=5).save_pretrained(path)
    return path


def plan_of(folder: Path, precisions: Sequence[Precision] = PRECISIONS, **changes: Any) -> CutPlan:
    fields: dict[str, Any] = {"dtype": torch.float32, "page_bytes": 4096, **changes}
    return CutPlan(read_config(folder), precisions, **fields)


def grid_of(precisions: Sequence[Precision] = ("full", "int4"), rounds: int = 1) -> Grid:
    points = [Point(name, tokens, size) for name in precisions for tokens, size in ((6, 1), (20, 3))]
    return Grid(points=points, block_tokens=4, max_num_batched_tokens=32, rounds=rounds, max_rounds=rounds)


def profiler_of(folder: Path, pool: PagePool, **changes: Any) -> Profiler:
    return Profiler(plan_of(folder, ("full", "int4")), grid_of(), pool, **changes)


def assert_all_free(pool: PagePool) -> None:
    pool.check_integrity()
    assert pool.num_free == pool.num_pages


def test_of_the_checkpoint_only_tensors_of_the_first_layers_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    fill = CheckpointWeights.fill

    def seen(self: CheckpointWeights, target: torch.Tensor, source: CheckpointTensor, *pause: Any) -> None:
        names.append(source.tensor)
        fill(self, target, source, *pause)

    monkeypatch.setattr(CheckpointWeights, "fill", seen)
    pool = make_pool()
    fingerprint = load_fingerprint(plan_of(folder, ["full"]), pool)
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    assert layers == {"0", "1"}
    assert len(names) == len(set(names)) == 2 * 9 + 3
    assert pool.num_pages - pool.num_free == fingerprint.plan.num_pages
    fingerprint.release()
    assert_all_free(pool)


def test_it_can_be_stopped_within_a_large_tensor(tmp_path: Path) -> None:
    make_oracle("llama", num_hidden_layers=1, vocab_size=2 * PIECE_ELEMENTS // 64).save_pretrained(tmp_path)

    def give_up() -> None:
        raise GivenUp

    pool = make_pool(32)
    fingerprint = Fingerprint(plan_of(tmp_path, ["full"]), pool)
    assert all(fingerprint.map())
    with pytest.raises(GivenUp):
        fingerprint.fill(pause=give_up)
    embedding = fingerprint._full[0][0].tensors["embedding"]
    assert embedding[0].any() and not embedding[-1].any()
    fingerprint.release()
    assert_all_free(pool)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_one_and_two_layers_compute_what_those_layers_of_the_model_do(folder: Path, load_format: Any) -> None:
    pool = make_pool()
    fingerprint = load_fingerprint(plan_of(folder, load_format=load_format), pool)
    for num_layers in (2, 1):
        runner = Runner(folder, load_format=load_format, layers=(0, num_layers))
        tokens = {0: [5, 9, 200, 7]}
        expected = runner.step(tokens)
        fingerprint.use(num_layers, "full")
        runner.model = fingerprint.model
        runner._lengths.clear()
        runner._blocks.clear()
        assert torch.equal(runner.step(tokens), expected)
        runner.kv.release()
    fingerprint.release()
    assert_all_free(pool)


def test_halves_of_fewer_bits_are_those_that_a_swap_would_bring(folder: Path, tmp_path: Path) -> None:
    pool = make_pool()
    fingerprint = load_fingerprint(plan_of(folder), pool)
    swapped = Morphing(folder, tmp_path)
    for precision in QUANTIZED:
        for layer, part in itertools.product((0, 1), PARTS):
            swapped.variants.map(layer, part, precision)
            swapped.variants.copy_job(layer, part, precision)(lambda: True)
            memory = fingerprint._ranges.memory((layer, part, precision))
            assert torch.equal(
                memory.tensor(torch.uint8, (memory.nbytes,)), swapped.bytes(layer, part, precision)
            )
    assert pool.num_pages - pool.num_free == fingerprint.plan.num_pages
    swapped.close()
    fingerprint.release()
    assert_all_free(pool)


def test_layers_that_caches_would_hold_take_turns(folder: Path) -> None:
    """Three of the five fit in full precision, and all in fewer bits, where each is smaller."""
    of_layer = sum(part.nbytes for part in plan_of(folder).layer_ranges("full"))
    plan = plan_of(folder, ("full", "int4"), cache_bytes=3 * of_layer)
    assert plan.turns == {"full": 3, "int4": 5}
    pool = make_pool()
    fingerprint = load_fingerprint(plan, pool)
    assert pool.num_pages - pool.num_free == plan.num_pages
    for precision, turns in plan.turns.items():
        fingerprint.use(1, precision)
        taken = [fingerprint.model.layers[0]]
        for _ in range(turns):
            fingerprint.turn()
            assert len(fingerprint.model.layers) == 1
            taken += fingerprint.model.layers
        assert len(set(map(id, taken))) == turns
        assert taken[0] is taken[turns]
    fingerprint.release()
    assert_all_free(pool)


def test_weights_are_told_in_the_pages_that_the_model_takes(folder: Path, tmp_path: Path) -> None:
    plan, whole = plan_of(folder, max_tp=2), Morphing(folder, tmp_path, max_tp=2)
    pool = whole.runner.pool
    for precision in PRECISIONS:
        whole.swap_all(precision)
        taken = pool.counts().weights * pool.page_bytes
        assert plan.weight_bytes(whole.model.config.num_layers, precision) == taken
    whole.close()


def test_ranks_repeat_all_but_the_ffn_and_stages_repeat_nothing(folder: Path) -> None:
    plan = plan_of(folder, max_tp=2)
    page = plan.page_bytes
    attention, ffn = (-(-part.nbytes // page) * page for part in plan.model.layers[0])
    assert plan.degrees == [1, 2]
    alone, both = plan.weight_bytes(2, "full"), plan.weight_bytes(2, "full", 2)
    ends = alone - 2 * (attention + ffn)
    assert both == 2 * ends + 2 * (2 * attention + ffn)
    for precision in plan.all_precisions:  # what a worker unmaps at that degree
        parts = plan.layer_ranges(precision)
        kept = [part.at(Shard(rank, 2)).pages(page).sum() for part in parts for rank in (0, 1)]
        assert plan.weight_bytes(1, precision, 2) == 2 * ends + page * sum(kept)


def test_a_profile_has_every_point_of_both_depths_and_lengths(folder: Path) -> None:
    pool = make_pool()
    profiler = Profiler(plan_of(folder), grid_of(PRECISIONS, rounds=2), pool)
    for _ in profiler.steps():
        pass
    profile = profiler.profile(model="tiny", digest="d", device="cpu", version="1")
    assert profile.num_layers == 5
    assert profile.block_bytes_per_layer == 2 * 4 * 8 * 4 * 4
    keys = {
        (one.configuration.precision, one.prompt_tokens, one.batch_size, one.num_layers, one.output_tokens)
        for one in profile.latency
    }
    points = [(6, 1, 1), (6, 1, 9), (20, 3, 3), (20, 3, 11)]
    assert keys == {
        (name, tokens, size, layers, length)
        for name in PRECISIONS
        for tokens, size, length in points
        for layers in (1, 2)
    }
    assert all(len(one.seconds) == 2 and min(one.seconds) > 0 for one in profile.latency)
    assert 0 < sum(map(min, (one.seconds for one in profile.latency))) < profile.device_seconds
    assert_all_free(pool)


def test_one_run_tells_both_lengths_also_where_prompts_take_several_steps(folder: Path) -> None:
    """Measure by a clock whose every step takes a second."""
    profiler = Profiler(
        plan_of(folder), grid_of(rounds=1), make_pool(), clock=map(float, itertools.count()).__next__
    )
    for _ in profiler.steps():
        pass
    seconds = {(one.prompt_tokens, one.output_tokens): one.seconds for one in profiler.latency}
    assert seconds == {(6, 1): [1.0], (6, 9): [9.0], (20, 3): [4.0], (20, 11): [12.0]}


SHAPES = ((6, 1), (20, 1), (6, 3), (20, 3))


def shared_grid(precisions: Sequence[Precision]) -> Grid:
    points = [Point(name, tokens, size) for name in precisions for tokens, size in SHAPES]
    return replace(grid_of(), points=points)


def test_a_rank_is_measured_with_each_prompt_and_with_each_batch(folder: Path) -> None:
    pool = make_pool()
    profiler = Profiler(plan_of(folder, ("full", "int4"), max_tp=2), shared_grid(("full", "int4")), pool)
    for _ in profiler.steps():
        pass
    shapes = {
        (one.configuration.precision, one.configuration.tp): set[tuple[int, int]]()
        for one in profiler.latency
    }
    for one in profiler.latency:
        shapes[one.configuration.precision, one.configuration.tp].add((one.prompt_tokens, one.batch_size))
    assert shapes == {(name, tp): set(SHAPES[: 5 - tp]) for name in ("full", "int4") for tp in (1, 2)}
    assert {one.num_layers for one in profiler.latency if one.configuration.tp == 2} == {1, 2}
    profile = profiler.profile(model="tiny", digest="d", device="cpu", version="1")
    assert (profile.row_bytes, profile.max_num_batched_tokens) == (64 * 4, 32)
    assert_all_free(pool)


def test_two_ranks_have_more_activations_than_one_worker_and_less_each(folder: Path) -> None:
    plan = plan_of(folder, ("full",), max_tp=2)
    profiler = Profiler(plan, shared_grid(["full"]), make_pool())
    for _ in profiler.steps():
        pass
    sizes = {(one.configuration.tp, one.num_layers): one for one in profiler.memory}
    assert sizes.keys() == {(1, 1), (1, 2), (2, 1), (2, 2)}
    alone, both = (sizes[tp, 2].activation_bytes or 0 for tp in (1, 2))
    assert alone < both < 2 * alone
    assert sizes[2, 2].weight_bytes == plan.weight_bytes(2, "full", 2)
    shaped = with_shapes(profiler.profile(model="", digest="", device="", version=""), plan, profiler.grid)
    assert len([one for one in shaped.memory if one.configuration.tp == 2]) == 2  # none twice


@pytest.mark.parametrize("precision", ["full", "int4"])
def test_what_ranks_make_adds_up_to_what_the_layers_do(folder: Path, precision: Precision) -> None:
    pool = make_pool()
    fingerprint = load_fingerprint(plan_of(folder, max_tp=2), pool)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    fingerprint.use(2, precision)
    whole = [layer.feed_forward(x) for layer in fingerprint.model.layers]
    fingerprint.use(2, precision, 2)
    own = list(fingerprint.model.layers)
    fingerprint.turn()  # the other rank's, as if they were this one's
    for all_of_it, one, other in zip(whole, own, fingerprint.model.layers, strict=True):
        assert one.shard == other.shard == Shard(0, 2)
        parts = one.feed_forward(x) + other.feed_forward(x)
        torch.testing.assert_close(parts, all_of_it, rtol=1e-4, atol=1e-5)
        assert one.attention.o(torch.zeros(1, 32)).shape == (1, 64)  # of half of the heads
    fingerprint.release()
    assert_all_free(pool)


def test_what_workers_say_to_each_other_is_measured_in_a_thread(folder: Path) -> None:
    go, samples = threading.Event(), [LinkSample(kind="hop", nbytes=4, seconds=[1.0])]

    def probe() -> list[LinkSample]:
        assert go.wait(10)
        return samples

    profiler = profiler_of(folder, make_pool(), probe=probe)
    for can_go_on in profiler.steps():
        if profiler.progress == "links between workers" and not can_go_on:
            go.set()
    assert go.is_set()
    assert profiler.profile(model="", digest="", device="", version="").links == samples


def test_memory_of_a_step_is_that_of_the_whole_model(folder: Path) -> None:
    pool = make_pool()
    profiler = profiler_of(folder, pool)
    for _ in profiler.steps():
        pass
    runner = Runner(folder, block_tokens=4)
    with peak_memory(torch.device("cpu")) as peak:
        chunks = {0: list(range(20)), 1: list(range(12))}
        runner.step(chunks, [19])
    runner.close()
    sample: MemorySample = profiler.memory[0]
    assert sample.activation_bytes == pytest.approx(peak.nbytes, rel=0.05)


def test_pauses_between_its_steps_do_not_count(folder: Path) -> None:
    now = itertools.count(0.0, 1.0)
    profiler = profiler_of(folder, make_pool(), clock=lambda: next(now))
    for _ in profiler.steps():
        next(now)  # a step of something else
    (alone,) = {tuple(one.seconds) for one in profiler.latency if one.output_tokens == 1}
    assert alone == (1.0,)
    assert {tuple(one.seconds) for one in profiler.latency if one.output_tokens == 9} == {(9.0,)}


@pytest.mark.parametrize("num_steps", [0, 1, 5, 20, 40, 80, 100])
def test_wherever_it_is_given_up_all_pages_come_back(folder: Path, num_steps: int) -> None:
    pool = make_pool()
    steps = profiler_of(folder, pool).steps()
    done = 0
    while done < num_steps:
        done += next(steps)  # waiting for a compiler is none
    steps.close()
    assert_all_free(pool)


def test_without_room_it_says_what_is_needed_and_loads_nothing(folder: Path) -> None:
    pool = make_pool()
    with pytest.raises(NotEnoughPages, match=r"needs .* MiB of pages \(\d+\), and 0\.1 \(20\) are available"):
        next(profiler_of(folder, pool, max_pages=20).steps())
    assert_all_free(pool)


def test_a_model_of_one_layer_is_measured_whole(folder: Path, tmp_path: Path) -> None:
    make_oracle("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    profiler = profiler_of(tmp_path, make_pool())
    for _ in profiler.steps():
        pass
    assert {one.num_layers for one in profiler.latency} == {1}
    assert {one.num_layers for one in profiler.memory} == {1}


def test_a_model_of_the_same_shape_needs_no_more_room_however_deep(folder: Path, tmp_path: Path) -> None:
    make_oracle("llama", num_hidden_layers=12).save_pretrained(tmp_path)
    assert plan_of(tmp_path).num_pages == plan_of(folder).num_pages
    pool = make_pool()
    whole = load_model(tmp_path, pool, dtype=torch.float32)
    assert pool.num_pages - pool.num_free > 2 * plan_of(tmp_path, ["full"]).num_pages
    whole.release()


def test_points_are_measured_again_until_the_whole_model_is_known() -> None:
    quiet, loud = [1.0, 1.01, 0.99, 1.0], [1.95, 2.05, 2.0, 2.1]
    assert is_settled([quiet, loud], 2)
    assert not is_settled([quiet, loud], 32)
    assert is_settled([quiet, [2.0, 2.0, 2.0, 9.0]], 32)  # something else disturbed the last one
    assert is_settled([loud], 1)


def test_a_slow_device_is_measured_less_often(folder: Path) -> None:
    pool = make_pool()
    grid = replace(grid_of(rounds=100), max_seconds=0.0)
    profiler = Profiler(plan_of(folder, ("full", "int4")), grid, pool)
    for _ in profiler.steps():
        pass
    assert {len(one.seconds) for one in profiler.latency} == {3}
