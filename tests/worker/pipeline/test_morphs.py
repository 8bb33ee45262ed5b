"""Halves of layers and KV blocks change in all stages of a pipeline between the same two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bench.common.oracles import RoundedCache, make_oracle
from bus.messages import LayerShape, Stage
from bus.morphs import ConvertCache, Morph, MorphReport, Resize, Swap
from bus.policy import Envelope, Policy
from bus.precisions import KVPrecision
from tests.support.greedy import assert_greedy, generate
from tests.support.kv_spans import KVSpans
from tests.support.pipeline_workers import LIMITS, Line, StageWorker, load, sampling_of
from worker.distributed.messages import RunStage
from worker.engine.build import instance_of, useful_blocks
from worker.engine.core import EngineCore
from worker.engine.engine import StepResult, result_of
from worker.engine.sequence import own_request
from worker.memory import CpuBackend, PagePool
from worker.morph.manager import MorphManager
from worker.morph.resizer import KVResizer
from worker.morph.target import MemberTarget, Target
from worker.pipeline.split import in_turn

LAYERS, NUM_NEW = 5, 14
FULL = LayerShape()
_ids = count()


@pytest.fixture(scope="module")
def oracle() -> Any:
    return make_oracle("llama", num_hidden_layers=LAYERS, seed=3)


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images serve all tests."""
    return tmp_path_factory.mktemp("host")


def prompt(n: int) -> list[int]:
    drawn: list[int] = torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    return drawn


def swap(instance: str, precision: Any, layers: list[int], **fields: Any) -> Swap:
    return Swap(
        id=f"s{next(_ids)}",
        instance=instance,
        precision=precision,
        layers=layers,
        **{"epoch": 1, "wait_s": 20.0, **fields},
    )


def resize(instance: str, blocks: int) -> Resize:
    return Resize(id=f"r{next(_ids)}", epoch=1, instance=instance, blocks=blocks, wait_s=20.0)


def order(line: Line, command: Morph) -> MorphReport:
    line.leader.thread.morph(command)
    return line.leader.end_of(command.id)


def check_stages(line: Line) -> None:
    """Every stage has the pages of the leader, which allocates its blocks; no page is lost."""

    def pages(worker: StageWorker) -> int:
        worker.pool.check_integrity()
        (target,) = worker.stages.targets or [line.target]
        target.resizer.cache.check_integrity()
        assert target.resizer.cache.form == line.cache.form
        return target.resizer.cache.pages_per_layer

    assert len({worker.call(partial(pages, worker)) for worker in line.workers}) == 1
    line.leader.call(line.leader.engine.check_integrity)


# --------------------------------------------------------------------------- the same tokens


SCRIPT: list[tuple[int, Any, list[int]]] = [
    (3, "int8", [0, 3]),
    (6, "int4", [0, 1, 2, 3, 4]),
    (9, "full", [1, 4]),
    (11, "full", [0, 2, 3]),
]


def by_hand(
    instance: EngineCore, morphs: MorphManager, text: list[int], take: Callable[[StepResult], None]
) -> None:
    """Make the steps of request "a", and each swap of SCRIPT when so many of its tokens are there."""
    instance.submit(own_request("a", text, sampling_of(NUM_NEW)))

    def step(*, may_schedule: bool) -> int:
        time.sleep(0.0005)
        outputs = instance.step(may_schedule=may_schedule)
        take(result_of(instance, outputs))
        return sum(len(output.delta.token_ids) for output in outputs)

    made = 0
    for tokens, precision, layers in SCRIPT:
        while made < tokens:
            made += step(may_schedule=True)
        command = swap(instance.id, precision, layers, epoch=morphs.epoch)
        morphs.begin(command)
        ends: list[MorphReport] = []
        while not ends:
            ends = [one for one in morphs.advance(False) if one.state != "running"]
            assert step(may_schedule=False) == 0
        assert ends[0].state == "applied", ends
        halves = [getattr(instance.shape[layer], part) for layer in layers for part in ("attention", "ffn")]
        assert set(halves) == {precision}


def alone(folder: Path, host_dir: Path, text: list[int]) -> list[int]:
    pool = PagePool(CpuBackend(4096), 8 << 20)
    model, cache, variants = load(folder, pool, (0, LAYERS), LIMITS, torch.float32, host_dir=host_dir)
    instance = instance_of("m", model, cache, LIMITS)
    target = Target(
        instance,
        variants,
        KVResizer(instance, cache, reserve_pages=0, useful_blocks=useful_blocks(LIMITS)),
        range(LAYERS),
    )
    tokens: list[int] = []

    def take(result: StepResult) -> None:
        tokens.extend(token for output in result.outputs for token in output.delta.token_ids)

    morphs = MorphManager("alone", {"m": target}, step_share=1.0)
    by_hand(instance, morphs, text, take)
    while instance.has_work:
        take(result_of(instance, instance.step()))
    morphs.close()
    cache.release()
    model.release()
    pool.close()
    return tokens


@pytest.mark.parametrize(("bounds", "tp"), [([0, 2, 5], 1), ([0, 1, 4, 5], 1), ([0, 2, 5], 2)])
def test_swaps_at_the_same_steps_make_the_tokens_of_one_worker(
    folder: Path, host_dir: Path, oracle: Any, bounds: list[int], tp: int
) -> None:
    text = prompt(17)
    with Line(folder, bounds, tp=tp, host_dir=host_dir) as line:
        leader = line.leader
        leader.tokens["a"] = []

        def take(result: StepResult) -> None:
            leader._results(1, [result])

        leader.call(lambda: by_hand(line.instance, leader.morphs, text, take))
        leader.wait_ends("a")
        assert leader.tokens["a"] == alone(folder, host_dir, text)
        assert leader.tokens["a"] != generate(oracle, text, NUM_NEW), (
            "fewer bits change no token: this shows little"
        )
        assert line.instance.shape == [FULL] * LAYERS
        line.submit("b", text, NUM_NEW)
        leader.wait_ends("b")
        assert_greedy(oracle, text, NUM_NEW, leader.tokens["b"])
        check_stages(line)
        line.end()
        for worker in line.workers[1:]:
            worker.wait(partial(worker.ended.__contains__, line.id), "the end of its stage")
        assert all(worker.is_empty() for worker in line.workers)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_stages_swap_between_the_same_two_steps_with_batches_in_flight(
    folder: Path, host_dir: Path, oracle: Any, tp: int
) -> None:
    """Each stage notes the shape that it runs a step in, and the leader that which it sends it for."""
    bounds = [0, 1, 3, 5]
    with Line(folder, bounds, tp=tp, host_dir=host_dir) as line:
        sent: dict[int, list[LayerShape]] = {}
        ran: list[tuple[int, int, list[LayerShape]]] = []
        pipeline: Any = line.executor.pipeline
        send = pipeline.send

        def sending(*args: Any) -> None:
            sent[pipeline._next_step] = line.executor.shape()
            send(*args)

        def running(worker: StageWorker) -> None:
            runner: Any = worker.stages.runners[0]
            run, target = runner._run, runner.stage.target

            def noting(step: RunStage, payload: torch.Tensor) -> None:
                ran.append((step.step, target.first, runner.stage.model.shape()))
                run(step, payload)

            runner._run = noting

        pipeline.send = sending
        for worker in line.workers[1:]:
            worker.call(partial(running, worker))
        names = [str(i) for i in range(8)]
        for name in names:
            line.submit(name, prompt(9 + int(name)), 60)
        for precision in ("int4", "int8", "full"):
            end = order(line, swap(line.id, precision, list(range(LAYERS))))
            assert end.state == "applied", end
        line.leader.wait_ends(*names)
        line.submit("after", prompt(20), NUM_NEW)
        line.leader.wait_ends("after")
        assert_greedy(oracle, prompt(20), NUM_NEW, line.leader.tokens["after"])
        assert len({tuple(shape) for shape in sent.values()}) > 4, "the swaps fell between two steps"
        for step, first, shape in ran:
            assert shape == sent[step][first : first + len(shape)]
        assert {(step, first) for step, first, _ in ran} >= {
            (step, first) for step in sent for first in bounds[1:-1]
        }
        check_stages(line)


# --------------------------------------------------------------------------- KV blocks


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_kv_of_all_stages_grows_and_shrinks_under_requests_whose_tokens_stay(
    folder: Path, oracle: Any, tp: int
) -> None:
    with Line(folder, [0, 1, 4, 5], tp=tp) as line:
        before = line.cache.num_blocks
        names = [str(i) for i in range(6)]
        for name in names:
            line.submit(name, prompt(5 + 9 * int(name)), 60)
            line.submit(f"first {name}", prompt(30), 1)  # it ends soon and leaves a hole below
        line.leader.wait(lambda: line.leader.tokens["5"] != [], "a token of the last")
        for blocks in (before // 2, 200, before, 170):
            end = order(line, resize(line.id, blocks))
            assert end.state == "applied", end
            assert blocks <= line.cache.num_blocks < blocks + 32, "whole pages"
            check_stages(line)
        line.leader.wait_ends(*names)
        for name in names:
            assert_greedy(oracle, prompt(5 + 9 * int(name)), 60, line.leader.tokens[name])
        most = order(line, resize(line.id, 100_000))
        assert most.state == "deferred" and "at most" in most.reason, most


def convert(instance: str, kv_dtype: KVPrecision) -> ConvertCache:
    return ConvertCache(id=f"k{next(_ids)}", epoch=1, instance=instance, kv_dtype=kv_dtype, wait_s=20.0)


@pytest.mark.parametrize(
    ("bounds", "tp"),
    [
        ([0, 2, 5], 1),
        pytest.param([0, 1, 4, 5], 1, marks=pytest.mark.slow),
        pytest.param([0, 2, 5], 2, marks=pytest.mark.slow),
    ],
)
def test_the_kv_of_all_stages_is_converted_between_the_same_two_batches(
    folder: Path, oracle: Any, bounds: list[int], tp: int
) -> None:
    through, long = [str(i) for i in range(3)], 200
    with Line(folder, bounds, tp=tp) as line:
        leader, before = line.leader, line.cache.num_blocks
        spans: KVSpans = leader.call(lambda: KVSpans(line.target))
        for name in through:
            line.submit(name, prompt(5 + 9 * int(name)), long)
        leader.wait(lambda: all(leader.tokens[name] for name in through), "their first tokens")
        there = order(line, convert(line.id, "int8"))
        assert there.state == "applied" and there.numbers["layers_done"] == LAYERS, there
        assert there.numbers["blocks_after"] == line.cache.num_blocks > 2 * before
        assert line.instance.shape_id.endswith("-kv8")
        check_stages(line)
        line.submit("late", prompt(20), 2 * NUM_NEW)
        leader.wait(lambda: leader.tokens["late"] != [], "a token of the late one")
        back = order(line, convert(line.id, "full"))
        assert back.state == "applied" and back.numbers["blocks_after"] == before, back
        assert line.instance.shape_id == f"tp{tp}-full"
        check_stages(line)
        line.submit("after", prompt(21), NUM_NEW)
        leader.wait_ends(*through, "late", "after")
        assert all(spans.was_there(name) for name in through), "they are to outlast both conversions"
        for name in through:
            cache = partial(RoundedCache, spans=spans.of(name))
            assert_greedy(oracle, prompt(5 + 9 * int(name)), long, leader.tokens[name], cache, name)
        late = partial(RoundedCache, spans=spans.of("late"))
        assert_greedy(oracle, prompt(20), 2 * NUM_NEW, leader.tokens["late"], late)
        assert_greedy(oracle, prompt(21), NUM_NEW, leader.tokens["after"])
        assert line.instance.scheduler.num_recomputed == 0
        line.end()
        for worker in line.workers[1:]:
            worker.wait(partial(worker.ended.__contains__, line.id), "the end of its stage")
        assert all(worker.is_empty() for worker in line.workers)


def test_freed_pages_become_kv_after_each_layer_as_many_as_the_fewest_give(
    folder: Path, host_dir: Path
) -> None:
    workers = [StageWorker(f"w{i}", megabytes=megabytes) for i, megabytes in enumerate((0.8, 1.0))]
    with Line(folder, [0, 2, 5], workers=workers, host_dir=host_dir) as line:
        before, pages = line.cache.num_blocks, line.cache.pages_per_layer
        capacities: list[int] = []
        line.leader.call(lambda: _note_growth(line, capacities))
        end = order(line, swap(line.id, "int4", list(range(LAYERS))))
        assert end.state == "applied", end
        assert end.numbers["blocks_after"] == line.cache.num_blocks > before
        assert 0 < end.numbers["blocks_seconds"] < end.numbers["seconds"]
        assert len(set(capacities)) > 2, "after several layers, not at the end"
        check_stages(line)
        (behind,) = workers[1].stages.targets
        left = [
            worker.call(partial(_left, target))
            for worker, target in zip(workers, (line.target, behind), strict=True)
        ]
        assert min(left) == 0, "the stage with the fewest has given all"
        end = order(line, swap(line.id, "full", list(range(LAYERS))))
        assert end.state == "applied", end
        assert line.cache.pages_per_layer == pages
        check_stages(line)


def _left(target: MemberTarget) -> int:
    """Pages of each layer that are the KV's own and free."""
    return target.resizer.own_pages // target.resizer.num_layers


def _note_growth(line: Any, capacities: list[int]) -> None:
    grow = line.cache.grow

    def growing(pages: int) -> None:
        grow(pages)
        capacities.append(line.cache.num_blocks)

    line.cache.grow = growing


def test_a_stage_without_room_for_a_variant_says_so_and_the_pipeline_goes_on(
    folder: Path, host_dir: Path, oracle: Any
) -> None:
    with Line(folder, [0, 2, 5], host_dir=host_dir) as line:
        worker = line.workers[1]
        (target,) = worker.stages.targets
        changed: Any = target

        def fill() -> Any:
            """Another model takes all free pages between the status and the action."""
            prepare = target._prepare

            def late(*args: Any) -> None:
                taken = worker.pool.reserve(worker.pool.num_free * 4096, kind="weights", owner="another")
                taken.map(0, worker.pool.num_free)
                try:
                    prepare(*args)
                finally:
                    taken.release()

            changed._prepare = late

        worker.call(fill)
        line.submit("a", prompt(12), NUM_NEW)
        end = order(line, swap(line.id, "int4", [3]))
        assert (end.state, "pages" in end.reason) == ("failed", True), end
        line.leader.wait_ends("a")
        assert_greedy(oracle, prompt(12), NUM_NEW, line.leader.tokens["a"])
        assert line.instance.shape == [FULL] * LAYERS
        check_stages(line)


def test_orders_that_come_in_any_sequence_leave_every_page_and_block_where_it_belongs(
    folder: Path, host_dir: Path, oracle: Any
) -> None:
    workers = [StageWorker(f"w{i}", megabytes=megabytes) for i, megabytes in enumerate((0.5, 0.7, 0.8))]
    with Line(folder, [0, 1, 3, 5], workers=workers, host_dir=host_dir) as line:
        for seed in range(4):
            random = Random(seed)
            for i in range(4):
                line.submit(f"{seed} {i}", prompt(random.randrange(1, 60)), random.randrange(1, 40))
            commands: list[Morph] = []
            for _ in range(6):
                layers = random.sample(range(LAYERS), random.randrange(1, LAYERS + 1))
                precision = random.choice(["full", "int8", "int4"])
                command: Morph = swap(line.id, precision, layers)
                if random.random() < 0.4:
                    command = resize(line.id, random.randrange(64, 120))
                line.leader.thread.morph(command)
                if random.random() < 0.3:
                    line.leader.thread.cancel_morph(command.id)
                commands.append(command)
            for command in commands:
                line.leader.end_of(command.id)
            line.leader.wait_ends(*(f"{seed} {i}" for i in range(4)))
            check_stages(line)
        assert order(line, swap(line.id, "full", list(range(LAYERS)))).state in ("applied", "deferred")
        assert line.instance.shape == [FULL] * LAYERS
        line.submit("after", prompt(20), NUM_NEW)
        line.leader.wait_ends("after")
        assert_greedy(oracle, prompt(20), NUM_NEW, line.leader.tokens["after"])
        line.end()
        for worker in workers[1:]:
            worker.wait(partial(worker.ended.__contains__, line.id), "the end of its stage")
        assert all(worker.is_empty() for worker in workers)


# --------------------------------------------------------------------------- the reflex


@pytest.mark.slow
def test_a_burst_makes_the_leader_swap_layers_of_all_stages_and_return_them(
    folder: Path, host_dir: Path, oracle: Any
) -> None:
    limits = replace(LIMITS, max_num_seqs=16)
    workers = [StageWorker(f"w{i}", megabytes=megabytes) for i, megabytes in enumerate((0.8, 1.0))]
    with Line(folder, [0, 2, 5], workers=workers, host_dir=host_dir, limits=limits) as line:
        before = line.cache.num_blocks
        policy = Policy(mode="performance", loss_budget=1.0, cooldown_s=0.2)
        envelope = Envelope(
            id="e", epoch=1, instance=line.id, policy=policy.in_force() or policy, precisions=["int8", "int4"]
        )
        line.leader.thread.grant(envelope)
        names = [str(i) for i in range(16)]
        for name in names:
            line.submit(name, prompt(60), 120)
        line.leader.wait(lambda: any(one != FULL for one in line.instance.shape[2:]), "layers of stage 1")
        line.leader.wait(lambda: line.cache.num_blocks > before, "more blocks")
        line.leader.wait_ends(*names)
        line.leader.wait(lambda: line.instance.shape == [FULL] * LAYERS, "all layers back")
        line.leader.wait(lambda: not line.leader.morphs.num_running, "the end of the last")
        ends = [one for one in line.leader.reports if one.state != "running"]
        assert {one.state for one in ends} == {"applied"}, ends
        line.submit("after", prompt(20), NUM_NEW)
        line.leader.wait_ends("after")
        assert_greedy(oracle, prompt(20), NUM_NEW, line.leader.tokens["after"])
        check_stages(line)


def test_no_worker_of_a_pipeline_counts_as_idle_between_two_batches(folder: Path) -> None:
    with Line(folder, [0, 2, 5]) as line:

        def look(worker: StageWorker) -> tuple[bool, bool]:
            return worker.thread._may_step, worker.engine.busy_until > time.monotonic()

        assert line.leader.call(partial(look, line.leader)) == (False, False)
        line.submit("a", prompt(20), 80)
        line.leader.wait(lambda: bool(line.leader.tokens["a"]), "the first token")
        seen: dict[str, list[tuple[bool, bool]]] = {worker.name: [] for worker in line.workers}
        while "a" not in line.leader.ends:
            for worker in line.workers:
                seen[worker.name].append(worker.call(partial(look, worker)))
        for looks in seen.values():
            before_the_end = looks[:-2]
            assert any(not may_step for may_step, _ in before_the_end)
            assert all(is_busy for _, is_busy in before_the_end)
        for worker in line.workers:
            worker.wait(lambda worker=worker: not worker.call(partial(look, worker))[1], "rest")  # type: ignore[misc]


def test_stages_lose_bits_in_turn_by_the_share_of_their_layers() -> None:
    for seed in range(50):
        random = Random(seed)
        cuts = sorted(random.sample(range(1, 40), random.randrange(0, 6)))
        bounds = [0, *cuts, 40]
        stages = [Stage(workers=[], first=a, end=b) for a, b in pairwise(bounds)]
        given = random.sample(range(40), 40)
        turn = in_turn(given, stages)
        assert sorted(turn) == list(range(40))
        for n in range(41):
            lead = [sum(one.first <= layer < one.end for layer in turn[:n]) for one in stages]
            sizes = [one.end - one.first for one in stages]
            shares = list(zip(lead, sizes, strict=True))
            assert all(
                a / of - b / other <= 0.5 / of + 0.5 / other + 1e-9 for a, of in shares for b, other in shares
            )
        for one in stages:
            own = [layer for layer in turn if one.first <= layer < one.end]
            assert own == [layer for layer in given if layer in own]
