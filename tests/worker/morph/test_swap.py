"""Swaps of layers and halves, on a toy model over real pages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bus.logs import Text, extras
from bus.messages import PARTS, LayerShape, Number
from bus.morphs import CancelMorph, HalfOrder, MorphReport, Swap
from bus.precisions import PRECISIONS, Precision
from tests.support.engine_toys import Client, continuation, request, run
from tests.support.morph_toys import PAGE, Rig
from worker.engine.sequence import Sequence
from worker.morph.manager import MorphManager
from worker.morph.run import Run, Steps
from worker.morph.swap import halves_text
from worker.shape.copier import Pace

LOW = LayerShape(attention="int4", ffn="int4")
FULL = LayerShape()


@pytest.fixture(params=["alone", "with a thread that maps"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(beside=None if request.param == "alone" else ThreadPoolExecutor(1))
    yield made
    made.check_integrity()
    made.close()


def swap(rig: Rig, precision: Any, name: str = "m", **fields: Any) -> None:
    command: dict[str, Any] = {"id": name, "epoch": 0, "instance": "toy@w0", "precision": precision}
    rig.executor.begin(Swap(**{**command, **fields}))


def ended(rig: Rig) -> MorphReport:
    (report,) = rig.settle()
    return report


def applied(rig: Rig, precision: Precision, **fields: Any) -> MorphReport:
    swap(rig, precision, name=f"m{time.perf_counter_ns()}", **fields)
    report = ended(rig)
    assert report.state == "applied", report
    return report


def fill(rig: Rig, num_free: int = 0) -> Sequence:
    """A sequence that holds all blocks but so many; no step may run before it is released."""
    hog = Sequence(request("hog", [1], 0))
    blocks = rig.cache.allocator.allocate(rig.cache.allocator.num_free - num_free)
    rig.instance.scheduler._hold(hog, blocks)
    rig.instance._sequences["hog"] = hog
    rig.instance.scheduler.running.append(hog)
    return hog


def release(rig: Rig, hog: Sequence) -> None:
    rig.engine.cancel([hog.request.request_id])


# ------------------------------------------------------------------------------------- the time it takes


def test_a_busy_worker_takes_its_time_unless_something_waits_for_the_swap(rig: Rig) -> None:
    for urgency, goes_on in ((0.0, False), (1.0, True)):
        hurried = Rig()
        hurried.executor = MorphManager("w0", {"toy@w0": hurried.target}, step_share=1e-9, copy_share=1e-9)
        swap(hurried, "int4", layers=[1], urgency=urgency)
        deadline = time.monotonic() + (5.0 if goes_on else 0.3)
        while hurried.executor.num_running and time.monotonic() < deadline:
            hurried.executor.advance(is_busy=True)
            time.sleep(0.001)
        assert bool(hurried.executor.num_running) != goes_on
        hurried.close()


@pytest.mark.parametrize("comes", ["an idle boundary", "the time for it"])
def test_what_a_check_under_load_leaves_out_is_made_up_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    checks, check = list[bool](), rig.target.check_integrity

    def noted(is_brief: bool = False) -> None:
        checks.append(is_brief)
        check(is_brief)

    monkeypatch.setattr(rig.target, "check_integrity", noted)
    rig.engine.submit("toy@w0", request("r", [1, 2, 3], 100))
    for precision in ("int8", "int4"):
        swap(rig, precision, name=precision, count=1)
        while rig.executor.num_running:
            rig.engine.step()
            rig.advance()
    rig.advance()
    assert rig.engine.has_work and checks == [True, True]
    if comes == "an idle boundary":
        while rig.engine.has_work:
            rig.engine.step()
        assert rig.executor.patience_s == 0.0, "the engine's thread would sleep on"
    else:
        monkeypatch.setattr("worker.morph.manager.time", SimpleNamespace(monotonic=lambda: math.inf))
    rig.advance()
    rig.advance()
    assert rig.engine.has_work == (comes == "the time for it") and checks == [True, True, False]


# ------------------------------------------------------------------------------------- the way down


@pytest.mark.parametrize(
    "urgencies",
    [{"toy@w0": 0.0}, {"another@w0": 1.0}, {"toy@w0": 1.0}, {"toy@w0": 0.25}],
    ids=["at leisure", "another is urgent", "urgent", "for a quarter of the time"],
)
def test_an_urgent_swap_waits_for_its_copies_between_two_steps(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, urgencies: dict[str, float]
) -> None:
    """Else each half would take the time of a step, which prompts make long, while others wait for blocks."""
    now, copier, blocks = 0.0, rig.executor._copier, rig.cache.num_blocks
    rig.executor._pace, rig.executor.urgencies = Pace(0.02, lambda: now), urgencies
    wait = copier.wait

    def waited(within_s: float) -> bool:
        rig.variants.hold.set()
        assert copier._share() == 1.0, "nobody steps meanwhile"
        has_ended = wait(10.0)
        rig.variants.hold.clear()
        return has_ended

    monkeypatch.setattr(copier, "wait", waited)
    rig.variants.hold.clear()  # no copy ends unless somebody waits for it
    rig.engine.submit("toy@w0", request("r", [1, 2, 3], 20))
    rig.engine.step()
    swap(rig, "int4", layers=[0, 1])
    now += 0.03  # a step
    reports = rig.advance()
    if not urgencies.get("toy@w0"):
        assert [one.state for one in reports] == ["running"] and rig.cache.num_blocks == blocks
        rig.variants.hold.set()
        ended(rig)
        return
    begun, *_, report = reports
    assert (begun.state, report.state) == ("running", "applied")
    assert report.numbers["halves_applied"] == 4 and rig.instance.shape == [LOW, LOW]
    assert rig.cache.num_blocks == report.numbers["blocks_after"] > blocks
    assert 0 < report.numbers["blocks_seconds"] <= report.numbers["seconds"]


def test_what_follows_is_expected_while_a_half_is_copied_and_nothing_after_a_cancel() -> None:
    rig = Rig(num_layers=4, order=[2, 0, 3, 1])
    rig.variants.hold.clear()
    swap(rig, "int4", count=4)
    for _ in range(20):
        rig.advance()
    prepared = [(*half, each.precision) for half, each in rig.target.prepared.items()]
    halves = [(layer, part, "int4") for layer in (2, 0, 3, 1) for part in PARTS]
    assert prepared == halves[: len(prepared)] and len(prepared) > 1
    assert rig.variants.expected[-len(prepared) :] == halves[1 : len(prepared) + 1]
    rig.executor.cancel(next(iter(rig.executor._jobs)))
    assert rig.variants.expected == []
    rig.variants.hold.set()
    assert ended(rig).state == "failed"
    swap(rig, "int4", "again", count=4)
    assert ended(rig).state == "applied" and set(rig.variants.expected) < set(halves[1:])
    rig.close()


def test_a_layer_goes_down_and_its_pages_become_blocks(rig: Rig) -> None:
    blocks, pages = rig.cache.num_blocks, rig.pool.counts()
    rig.variants.hold.clear()  # the copy may not end within the first boundary
    swap(rig, "int4", layers=[1])
    (begun,) = rig.advance()
    assert (begun.state, begun.ended_ms) == ("running", None)
    rig.variants.hold.set()
    report = ended(rig)
    assert (report.state, report.reason, report.kind, report.target) == ("applied", "", "swap", "toy@w0")
    assert rig.instance.shape == [FULL, LOW]
    assert (rig.instance.shape_id, rig.instance.layers_below_full) == ("tp1-int4x1", 1)
    freed, after = (6 + 2) - (2 + 1), rig.pool.counts()
    assert after.weights == pages.weights - freed
    assert after.kv == pages.kv + freed // 2 * 2 and after.free >= rig.reserve
    assert rig.cache.num_blocks > blocks
    assert report.numbers["blocks_before"] == blocks
    assert report.numbers["blocks_after"] == rig.cache.num_blocks
    assert report.numbers["bytes_copied"] == 3 * PAGE
    assert report.numbers["halves_applied"] == report.numbers["halves"] == 2
    assert (report.numbers["pages_mapped"], report.numbers["pages_unmapped"]) == (3, 8)
    assert report.ended_ms is not None and report.ended_ms >= report.started_ms


def test_either_half_goes_on_its_own_and_a_half_counts_half(rig: Rig) -> None:
    applied(rig, "int8", layers=[0], parts=["ffn"])
    assert rig.instance.shape == [LayerShape(ffn="int8"), FULL]
    assert (rig.instance.shape_id, rig.instance.layers_below_full) == ("tp1-int8x0.5", 1)
    applied(rig, "int3", layers=[0], parts=["attention"])
    assert rig.instance.shape_id == "tp1-int8x0.5-int3x0.5"


def test_a_layer_goes_between_any_two_precisions(rig: Rig) -> None:
    weights = rig.pool.counts().weights
    for precision in ("int8", "int3", "int4", "int8", "int4", "full", "int3", "full"):
        applied(rig, precision, layers=[0, 1])
        assert {layer.ffn for layer in rig.instance.shape} == {precision}
        rig.check_integrity()
    assert rig.pool.counts().weights == weights
    assert rig.instance.shape_id == "tp1-full"


def test_all_layers_go_down_through_a_reserve_of_one() -> None:
    rig = Rig(num_layers=6, num_pages=200)
    report = applied(rig, "int4", count=6)
    assert report.numbers["halves_applied"] == 12
    assert rig.instance.shape == [LOW] * 6
    assert rig.pool.num_free - rig.reserve < 6, "all but what does not make a page of every layer is KV"
    rig.check_integrity()
    rig.close()


def test_a_count_takes_layers_in_order_and_the_last_comes_back_first() -> None:
    rig = Rig(num_layers=4, num_pages=150, order=(2, 0, 3, 1))
    applied(rig, "int4", count=2)
    assert rig.instance.shape == [LOW, FULL, LOW, FULL]
    applied(rig, "int4", layers=[1])
    applied(rig, "int4", count=1)
    assert rig.instance.shape == [LOW] * 4, "those that are there already are skipped"
    applied(rig, "full", count=1)
    assert rig.instance.shape == [LOW, LOW, LOW, FULL]
    applied(rig, "full", count=2)
    assert rig.instance.shape == [FULL, FULL, LOW, FULL]
    applied(rig, "full", count=9)
    assert rig.instance.shape == [FULL] * 4
    rig.close()


def test_what_is_so_already_is_applied_and_copies_nothing(rig: Rig) -> None:
    report = applied(rig, "full", layers=[0])
    assert (report.reason, report.numbers["bytes_copied"]) == ("already at full; nothing changed", 0)


# ------------------------------------------------------------------------------------- the way back


def test_there_and_back_again_leaves_the_same_blocks_and_pages(rig: Rig) -> None:
    before, pages = rig.cache.num_blocks, rig.pool.counts()
    applied(rig, "int3", count=2)
    assert rig.cache.num_blocks > before
    applied(rig, "full", count=2)
    assert (rig.cache.num_blocks, rig.pool.counts()) == (before, pages)


def test_an_end_is_a_line_of_the_log_with_its_numbers(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "worker.morph.manager")
    swap(rig, "int4", "mine", count=2)
    rig.settle()
    (line,) = [record for record in caplog.records if record.name == "worker.morph.manager"]
    assert line.getMessage() == "swap mine of toy@w0 applied"
    assert {"halves": 4, "halves_applied": 4}.items() <= extras(line).items()
    assert "halves=4 halves_applied=4" in Text("worker").format(line)


def test_a_swap_tells_now_and_then_how_far_it_is(rig: Rig) -> None:
    swap(rig, "int4", "mine", count=2)
    rig.settle()
    reports = [report for report in rig.reports if report.id == "mine"]
    assert [report.reason for report in reports] == [
        "begun",
        *(f"{n} of 4 halves of layers" for n in (1, 2, 3)),
        "",
    ]
    assert [report.numbers["halves_applied"] for report in reports[1:]] == [1, 2, 3, 4]
    assert [halves_text(done, 160) for done in (0, 15, 16, 40, 159, 160)] == [
        "",
        "",
        "16 of 160 halves of layers",
        "32 of 160 halves of layers",
        "144 of 160 halves of layers",
        "144 of 160 halves of layers",
    ]


def test_streams_go_on_unchanged_while_layers_go_down_and_come_back(rig: Rig) -> None:
    client = Client()
    prompts = {str(i): [i * 7 + j for j in range(3 + 5 * i)] for i in range(6)}
    for name, prompt in prompts.items():
        rig.engine.submit("toy@w0", request(name, prompt, 40))
    for turn in range(12):
        swap(rig, ("int4", "int8", "full")[turn % 3], f"m{turn}", count=2, wait_s=5.0)
        for _ in range(4):
            client.take(rig.engine.step())
            rig.advance()
            rig.check_integrity()
    rig.settle()
    run(rig.engine, client)
    assert client.tokens == {name: continuation(prompt, 40) for name, prompt in prompts.items()}
    outcomes = {report.state for report in rig.reports}
    assert outcomes == {"running", "applied"} or "conflict" in outcomes
    assert len({str(shape) for shape in rig.model.shapes}) > 2, "steps ran in several shapes"
    assert rig.cache.allocator.num_used == 0


def test_the_way_back_moves_live_blocks_and_takes_none(rig: Rig) -> None:
    applied(rig, "int3", count=2)
    client = Client()
    for name in "ab":
        rig.engine.submit("toy@w0", request(name, list(range(30)), 60))
    for _ in range(8):
        client.take(rig.engine.step())
    rig.engine.cancel(["a"])
    allocator = rig.cache.allocator  # the stream that is left grows at the far end of the cache
    blocks = allocator.allocate(allocator.num_free)
    allocator.free(blocks[-8:])
    while rig.instance.scheduler.running[0].block_ids[-1] < rig.cache.num_blocks - 8:
        client.take(rig.engine.step())
    allocator.free(blocks[:-8])
    report = applied(rig, "full", count=2)
    assert report.numbers["blocks_moved"] > 0
    run(rig.engine, client)
    assert client.tokens["b"] == continuation(list(range(30)), 60)
    assert rig.instance.scheduler.num_preemptions == 0


def test_blocks_in_use_defer_the_way_back_with_the_numbers(rig: Rig) -> None:
    applied(rig, "int3", count=2)
    hog = fill(rig)
    shape, blocks = rig.instance.shape, rig.cache.num_blocks
    swap(rig, "full", layers=[0])
    report = ended(rig)
    assert report.state == "deferred" and "must stay" in report.reason
    assert report.numbers["blocks"] == report.numbers["blocks_used"] == blocks
    assert report.numbers["pages_needed"] > report.numbers["pages_free"]
    assert (rig.instance.shape, rig.cache.num_blocks) == (shape, blocks)
    release(rig, hog)


def test_it_waits_for_blocks_as_long_as_it_may(rig: Rig) -> None:
    applied(rig, "int3", count=2)
    hog = fill(rig)
    swap(rig, "full", count=2, wait_s=5.0)
    for _ in range(5):
        rig.executor.advance(is_busy=False)
    assert rig.executor.num_running == 1 and 4 < (rig.executor.patience_s or 0) <= 5
    release(rig, hog)
    report = ended(rig)
    assert report.state == "applied" and report.numbers["wait_seconds"] > 0
    applied(rig, "int3", count=1)
    hog = fill(rig)
    swap(rig, "full", "late", count=2, wait_s=0.03)
    assert ended(rig).state == "deferred"
    release(rig, hog)


def test_the_longest_sequence_always_fits() -> None:
    rig = Rig(model_len=140, num_pages=44)
    assert rig.resizer.min_blocks == min(35, rig.cache.num_blocks)
    applied(rig, "int3", count=2)
    rig.resizer.min_blocks = rig.cache.num_blocks
    swap(rig, "full", count=2)
    report = ended(rig)
    assert report.state == "deferred"
    assert report.numbers["min_blocks"] == report.numbers["blocks_needed"] == rig.cache.num_blocks
    rig.close()


def test_running_streams_keep_room_to_grow(rig: Rig) -> None:
    applied(rig, "int3", count=2)
    for name in "abcd":
        rig.engine.submit("toy@w0", request(name, list(range(10)), 100))
    while len(rig.instance.scheduler.running) < 4:
        rig.engine.step()
    used = rig.cache.allocator.num_used
    assert rig.resizer.needed_blocks() >= used + 4 * 15, "64 tokens each"
    hog = fill(rig, num_free=20)
    swap(rig, "full", count=2)
    assert ended(rig).state == "deferred"
    release(rig, hog)


# ------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("stage", ["map", "copy_job", "copy", "check", "install"])
@pytest.mark.parametrize("way", ["int4", "full"])
def test_a_failure_at_any_stage_leaves_the_old_variant_serving(rig: Rig, stage: str, way: Any) -> None:
    if way == "full":
        applied(rig, "int8", count=2)
    shape, pages = rig.instance.shape, rig.pool.counts()
    rig.variants.fail_on = {stage}
    swap(rig, way, layers=[0, 1])
    report = ended(rig)
    assert report.state == "failed" and f"{stage} was told to fail" in report.reason
    assert report.numbers["halves_applied"] == 0
    assert rig.instance.shape == shape and rig.pool.counts().weights == pages.weights
    rig.check_integrity()
    rig.variants.fail_on = set()
    applied(rig, way, layers=[0, 1])


def test_halves_that_were_done_before_a_failure_stay(rig: Rig) -> None:
    install = rig.variants.install

    def install_the_first(*place: Any) -> None:
        install(*place)
        rig.variants.fail_on = {"check"}

    rig.variants.install = install_the_first  # type: ignore[assignment,method-assign]
    swap(rig, "int4", layers=[0, 1])
    report = ended(rig)
    assert report.state == "failed" and 0 < report.numbers["halves_applied"] < 4
    halves = sum((layer.attention == "int4") + (layer.ffn == "int4") for layer in rig.instance.shape)
    assert halves == report.numbers["halves_applied"]
    rig.variants.fail_on = set()


def test_an_old_variant_that_cannot_be_unmapped_is_told(rig: Rig) -> None:
    rig.variants.fail_on = {"unmap"}
    swap(rig, "int4", layers=[0], parts=["ffn"])
    report = ended(rig)
    assert report.state == "failed" and report.numbers["halves_applied"] == 1
    assert rig.instance.shape[0].ffn == "int4"
    rig.pool.check_integrity()
    rig.variants.fail_on = set()
    rig.variants.unmap(0, "ffn", "full")


@pytest.mark.parametrize("when", ["waiting", "copying", "copied"])
def test_a_cancelled_swap_leaves_the_old_variant_serving(rig: Rig, when: str) -> None:
    applied(rig, "int8", count=2)
    hog = fill(rig) if when == "waiting" else None
    shape, pages = rig.instance.shape, rig.pool.counts()
    if when != "waiting":
        rig.variants.hold.clear()
    swap(rig, "full" if when == "waiting" else "int3", count=2, wait_s=5.0)
    for _ in range(3 if when == "waiting" else 1):
        rig.advance()
    if when == "copied":
        rig.variants.hold.set()
        time.sleep(0.05)
    rig.executor.cancel(CancelMorph(id="c", epoch=0, morph_id="m").morph_id)
    report = ended(rig)
    assert (report.state, report.reason) == ("failed", "cancelled")
    assert rig.instance.shape == shape and rig.pool.counts() == pages
    rig.executor.cancel("m")
    rig.executor.cancel("unheard of")
    assert rig.settle() == []
    if hog:
        release(rig, hog)
    rig.variants.hold.set()


def test_each_half_goes_to_its_own_precision(rig: Rig) -> None:
    orders = [
        HalfOrder(layer=1, part="ffn", precision="int8"),
        HalfOrder(layer=0, part="attention", precision="int4"),
        HalfOrder(layer=0, part="ffn", precision="full"),
    ]
    rig.executor.begin(Swap(id="m", epoch=0, instance="toy@w0", halves=orders))
    report = ended(rig)
    assert (report.state, report.numbers["halves"]) == ("applied", 2)  # one was there already
    assert rig.instance.shape == [LayerShape(attention="int4"), LayerShape(ffn="int8")]


def test_halves_beside_layers_are_refused(rig: Rig) -> None:
    orders = [HalfOrder(layer=1, part="ffn", precision="int8")]
    rig.executor.begin(Swap(id="m", epoch=0, instance="toy@w0", halves=orders, count=1))
    (report,) = rig.advance()
    assert report.state == "failed" and "layers, halves, or a count" in report.reason


def test_a_new_epoch_gives_up_what_the_old_one_began(rig: Rig) -> None:
    rig.variants.hold.clear()
    swap(rig, "int4", count=2)
    rig.advance()
    rig.executor.fence(7)
    report = ended(rig)
    assert (report.state, report.epoch) == ("failed", 0) and "lease" in report.reason
    assert rig.instance.shape_id == "tp1-full"
    rig.variants.hold.set()
    swap(rig, "int4", "old", count=1)
    stale = ended(rig)
    assert (stale.state, stale.epoch) == ("stale", 7) and "it is for epoch 0; this is 7" in stale.reason
    applied(rig, "int4", count=1, epoch=7)


# ------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"instance": "other@w0", "count": 1}, "there is no instance other@w0; there are toy@w0"),
        ({"layers": [0, 2]}, "there is no layer 2; the layers are 0 to 1"),
        ({"layers": [-1]}, "there is no layer -1"),
        ({"precision": "int2", "count": 1}, f"no int2 variant; it has {', '.join(PRECISIONS)}"),
        ({}, "a swap names layers, halves, or a count of 1 or more"),
        ({"layers": [0], "count": 1}, "this one has 1 layers, 0 halves and the count 1"),
        ({"count": -1}, "the count -1"),
        ({"count": 1, "parts": []}, "the parts are []; name some of attention, ffn"),
    ],
)
def test_what_the_instance_does_not_have_is_refused_by_name(
    rig: Rig, fields: dict[str, Any], says: str
) -> None:
    swap(rig, **{"precision": "int4", **fields})
    report = ended(rig)
    assert report.state == "failed" and says in report.reason
    assert rig.instance.shape_id == "tp1-full"


def test_a_morph_that_waits_for_another_goes_on_when_that_has_ended(rig: Rig) -> None:
    """Nothing else would wake the engine's thread: the end of a morph is no copy's."""

    class Ends(Run):
        touches = frozenset({"one"})

        def numbers(self) -> dict[str, Number]:
            return {}

        def steps(self) -> Steps:
            yield False
            yield False

    class Waits(Ends):
        touches = frozenset({"another"})

        def steps(self) -> Steps:
            while rig.executor.num_running > 1:
                yield False

    runs = iter([Waits(1.0), Ends(1.0)])
    rig.executor.starters[Swap] = lambda *_: next(runs)
    swap(rig, "int4", "waits", count=1)
    swap(rig, "int4", "ends", count=1)
    for _ in range(3):
        rig.advance()
    assert [one.id for one in rig.reports if one.state == "applied"] == ["ends"]
    assert rig.executor.patience_s == 0.0
    rig.advance()
    assert rig.executor.num_running == 0 and rig.executor.patience_s is None


def test_two_swaps_of_one_half_conflict_and_of_others_do_not(rig: Rig) -> None:
    rig.variants.hold.clear()
    swap(rig, "int4", "first", layers=[0])
    swap(rig, "int8", "second", layers=[1, 0], parts=["ffn"])
    swap(rig, "int8", "third", layers=[1])
    rig.advance()
    conflict = next(report for report in rig.reports if report.id == "second" and report.state != "running")
    assert conflict.state == "conflict" and conflict.reason == "morph first is changing the ffn of layer 0"
    rig.variants.hold.set()
    assert {(report.id, report.state) for report in rig.settle()} == {
        ("first", "applied"),
        ("third", "applied"),
    }
    assert rig.instance.shape == [LOW, LayerShape(attention="int8", ffn="int8")]


def test_a_command_that_comes_twice_is_carried_out_and_answered_once(rig: Rig) -> None:
    swap(rig, "int4", count=1)
    swap(rig, "int4", count=1)
    assert len(rig.settle()) == 1
    swap(rig, "int4", count=1)
    assert rig.settle() == [] and rig.instance.layers_below_full == 1


# ------------------------------------------------------------------------------------- floors


def test_a_request_with_a_floor_holds_swaps_below_it_back(rig: Rig) -> None:
    rig.engine.submit("toy@w0", request("a", [1, 2, 3], 30, min_precision="int8"))
    client = Client()
    client.take(rig.engine.step())
    swap(rig, "int4", "low", count=1)
    report = ended(rig)
    assert report.state == "deferred" and report.reason == "held by 1 requests that take no layer in int4"
    assert report.numbers["requests_holding"] == 1
    applied(rig, "int8", count=1)
    swap(rig, "int4", "patient", count=1, wait_s=5.0)
    run(rig.engine, client)
    assert ended(rig).state == "applied"
    assert client.ends == {"a": "length"}


def test_the_end_of_the_last_request_wakes_who_waited_for_it(rig: Rig) -> None:
    rig.engine.submit("toy@w0", request("a", [1, 2, 3], 4, min_precision="full"))
    swap(rig, "int4", count=1, wait_s=60.0)
    while rig.engine.has_work:
        rig.advance()
        rig.engine.step()
    began = time.monotonic()
    while rig.executor.num_running:
        assert time.monotonic() < began + 5
        assert (rig.executor.patience_s or 0) < 1, "the engine's thread would sleep on"
        rig.advance()
    assert rig.reports[-1].state == "applied"


def test_a_floor_that_comes_while_a_layer_is_copied_is_kept(rig: Rig) -> None:
    rig.variants.hold.clear()
    swap(rig, "int4", layers=[0])
    rig.advance()
    rig.engine.submit("toy@w0", request("a", [1, 2, 3], 5, min_precision="full"))
    client = Client()
    client.take(rig.engine.step())
    rig.variants.hold.set()
    report = ended(rig)
    assert report.state == "deferred" and "held by 1" in report.reason
    run(rig.engine, client)
    assert client.ends == {"a": "length"} and rig.instance.shape_id == "tp1-full"


def test_a_request_below_whose_floor_the_shape_is_may_go_elsewhere(rig: Rig) -> None:
    applied(rig, "int4", layers=[1], parts=["ffn"])
    rig.engine.submit("toy@w0", request("no", [1, 2, 3], 5, min_precision="int8"))
    rig.engine.submit("toy@w0", request("yes", [1, 2, 3], 5, min_precision="int4"))
    client = run(rig.engine, Client())
    assert client.ends == {"no": "error", "yes": "length"}
    assert client.errors["no"] == ("ffn of layer 1 is in int4; the request takes no less than int8")
