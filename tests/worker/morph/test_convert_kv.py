"""The KV cache of the demo model goes to 8 bits and back while sequences live in it.

The oracle is transformers' generate, whose cache is rounded at the same tokens and layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from bench.common.engines import fill_cache, make_instance
from bench.common.loading import load_model
from bench.common.oracles import RoundedCache
from bus.messages import Event
from bus.morphs import ConvertCache, Retire
from bus.policy import Envelope, Policy
from bus.precisions import KVPrecision
from tests.support.engine_toys import Client, expect_no_growth, request
from tests.support.greedy import assert_greedy
from tests.support.paths import DEMO_MODEL
from tests.worker.engine.test_oracle import DEVICE
from worker.engine.build import make_cache, make_pool, useful_blocks
from worker.engine.engine import Engine
from worker.engine.sequence import Limits
from worker.morph.convert_kv import ConvertKVRun
from worker.morph.manager import MorphManager
from worker.morph.reflex_loop import ReflexLoop
from worker.morph.resizer import KVResizer
from worker.morph.run import NotApplied
from worker.morph.target import Target
from worker.morph.variants import NoVariants

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built")

PROMPTS = [[(i * 37 + j * 11) % 4000 for j in range(n)] for i, n in enumerate((5, 40, 33))]
LATE = list(range(900, 950))
NUM_NEW = 120


class Converting:
    """The demo model, served by an engine whose cache is converted by hand, some steps between two layers."""

    def __init__(self, kv_dtype: KVPrecision = "full", *, pages: int = 0, max_model_len: int = 256) -> None:
        self.pool = make_pool(DEVICE, (48 if DEVICE.type == "cpu" else 256) << 20)
        self.model = load_model(DEMO_MODEL, self.pool, dtype=torch.float32, max_tp=2)
        limits = Limits(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            block_tokens=16,
            prefix_cache=True,
            kv_dtype=kv_dtype,
        )
        self.cache = make_cache(self.pool, self.model, limits, "test")
        fill_cache(self.pool, self.cache, self.model, limits)
        if pages:
            self.cache.shrink(self.cache.pages_per_layer - pages)
        self.instance = make_instance("m@w0", self.model, self.cache, limits)
        self.engine = Engine(DEVICE)
        self.engine.add_instance(self.instance)
        resizer = KVResizer(self.instance, self.cache, reserve_pages=0, useful_blocks=useful_blocks(limits))
        self.target = Target(self.instance, NoVariants(), resizer)
        self.manager = MorphManager("w0", {"m@w0": self.target}, step_share=1.0)
        self.client = Client()
        self.spans: dict[str, list[tuple[int, float]]] = {}  # by request, those of `RoundedCache`

    def submit(self, name: str, prompt: list[int], **changes: Any) -> None:
        self.engine.submit("m@w0", request(name, prompt, NUM_NEW, **changes))

    def steps(self, n: int = 1) -> None:
        for _ in range(n):
            self.client.take(self.engine.step())

    def run(self, kv_dtype: KVPrecision, wait_s: float = 0.0) -> ConvertKVRun:
        command = ConvertCache(id="m", epoch=0, instance="m@w0", kv_dtype=kv_dtype, wait_s=wait_s)
        return ConvertKVRun(command, self.target)

    def convert(self, kv_dtype: KVPrecision, steps_between: int = 1) -> ConvertKVRun:
        """Convert the cache, and note the tokens that each sequence had when each layer was converted."""
        run = self.run(kv_dtype)
        counts: list[dict[str, int]] = []
        for can_go_on in run.steps():
            if can_go_on:
                counts.append(
                    {
                        seq.request.request_id: seq.num_computed_tokens
                        for seq in self.instance.scheduler.running
                    }
                )
                self.check()
                self.steps(steps_between)
        for name in counts[0] if counts else ():
            at = [count[name] for count in counts]
            if kv_dtype == "int8":
                self.spans[name] = [(first, float("inf")) for first in at]
            else:
                self.spans[name] = [
                    (first, end) for (first, _), end in zip(self.spans[name], reversed(at), strict=True)
                ]
        return run

    def finish(self) -> dict[str, list[int]]:
        while self.engine.has_work:
            self.steps()
        self.check()
        return self.client.tokens

    def check(self) -> None:
        self.target.check_integrity()

    def close(self) -> None:
        self.manager.close()
        self.cache.release()
        self.model.release()
        self.pool.check_integrity()
        self.pool.close()


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval().to(DEVICE)


@pytest.fixture
def converting() -> Iterator[Converting]:
    made = Converting()
    yield made
    made.close()


def test_every_token_before_during_and_after_is_that_of_the_form_its_context_had(
    converting: Converting, oracle: Any
) -> None:
    blocks = converting.cache.num_blocks
    useful_before = converting.target.resizer.useful_pages_per_layer
    for i, prompt in enumerate(PROMPTS):
        converting.submit(str(i), prompt)
    converting.steps(20)
    run = converting.convert("int8", steps_between=2)
    assert run.numbers()["layers_done"] == converting.cache.num_layers
    ratio = 32 * 4 / (32 + 2)
    resizer = converting.target.resizer
    assert resizer.useful_pages_per_layer == converting.cache.pages_for(8 * 256 // 16) < useful_before
    assert converting.cache.num_blocks == converting.instance.scheduler.blocks.capacity
    assert int(blocks * ratio) <= converting.cache.num_blocks <= (blocks + 1) * ratio
    assert converting.instance.shape_id == "tp1-full-kv8"
    converting.submit("late", LATE)
    converting.steps(20)
    before_return = dict(converting.spans)
    converting.spans["late"] = [(0, float("inf"))] * converting.cache.num_layers
    converting.convert("full", steps_between=2)
    assert converting.cache.num_blocks == blocks and converting.instance.shape_id == "tp1-full"
    tokens = converting.finish()
    assert set(converting.client.ends.values()) == {"length"}
    assert before_return.keys() == {"0", "1", "2"} and converting.spans.keys() == {*before_return, "late"}
    for name, spans in converting.spans.items():
        prompt = LATE if name == "late" else PROMPTS[int(name)]
        cache = partial(RoundedCache, spans=spans)
        assert_greedy(oracle, prompt, NUM_NEW, tokens[name], cache, name)
    scheduler = converting.instance.scheduler
    assert (scheduler.num_preemptions, scheduler.num_recomputed) == (0, 0)


@pytest.mark.slow
def test_a_cache_that_is_full_holds_several_times_as_many_blocks_at_once(oracle: Any) -> None:
    """Blocks in use at the very end of the pages are converted in place too."""
    case = Converting(pages=20, max_model_len=1024)
    expect_no_growth(case.instance.scheduler)
    blocks = case.cache.num_blocks
    tokens = 16 * (blocks // 2)
    long = [[(i * 13 + j * 7) % 4000 for j in range(tokens - NUM_NEW - 20)] for i in range(3)]
    for i, prompt in enumerate(long):
        case.submit(str(i), prompt)
    while not all(case.client.tokens.get(name) for name in ("0", "1")):
        case.steps()
    assert case.instance.scheduler.waiting and case.cache.allocator.num_free < blocks // 3
    case.convert("int8")
    case.steps(2)
    assert not case.instance.scheduler.waiting
    found = case.finish()
    for i in range(2):
        cache = partial(RoundedCache, spans=case.spans[str(i)])
        assert_greedy(oracle, long[i], NUM_NEW, found[str(i)], cache)
    assert_greedy(oracle, long[2], NUM_NEW, found["2"], RoundedCache)
    case.close()


def test_what_was_rounded_is_found_again_by_those_who_may_have_it(converting: Converting) -> None:
    prompt = PROMPTS[1]
    converting.submit("first", prompt)
    converting.finish()
    converting.convert("int8")
    converting.convert("full")

    def cached(name: str, **changes: Any) -> int:
        converting.submit(name, prompt, **changes)
        converting.finish()
        return sum(one.cached_tokens for one in converting.client.deltas if one.request_id == name)

    index = converting.instance.scheduler.blocks.index
    assert {index.precision_of(block) for block in index.blocks} == {"int8"}
    assert cached("exact", min_precision="full") == 0
    assert cached("again", min_precision="full") == 32, "the exact blocks have replaced the others"


def test_requests_that_insist_on_full_precision_hold_it_back(converting: Converting) -> None:
    converting.submit("exact", PROMPTS[0], min_precision="full")
    converting.steps(2)
    with pytest.raises(NotApplied, match="held by 1 requests that take no KV cache in int8") as caught:
        list(converting.run("int8").steps())
    assert caught.value.state == "deferred" and converting.cache.precision == "full"
    steps = converting.run("int8", wait_s=60.0).steps()
    while converting.engine.has_work:
        next(steps)
        converting.steps()
    assert converting.client.ends == {"exact": "length"}
    assert all(steps) and converting.instance.shape_id == "tp1-full-kv8"
    converting.submit("refused", PROMPTS[0], min_precision="full")
    converting.finish()
    assert "the KV cache is in int8" in converting.client.errors["refused"]


def test_it_goes_back_only_where_the_blocks_in_use_fit() -> None:
    case = Converting("int8", pages=6)
    full = case.cache.blocks_as("full")
    for i in range(3):
        case.submit(str(i), [(i * 31 + j) % 4000 for j in range(16 * (full // 2 - 3))])
    while not all(case.client.tokens.get(str(i)) for i in range(3)):
        case.steps()
    with pytest.raises(NotApplied, match="in full its pages hold") as caught:
        list(case.run("full").steps())
    assert caught.value.state == "deferred" and caught.value.numbers["blocks_asked"] == full
    case.finish()
    case.convert("full")
    assert case.cache.num_blocks == full and case.instance.shape_id == "tp1-full"
    case.close()

    small = Converting("int8", pages=2)
    with pytest.raises(NotApplied, match="needs at least 16, since the longest sequence must fit"):
        small.run("full")
    small.close()


def test_a_cache_that_is_so_already_is_left_alone(converting: Converting) -> None:
    run = converting.run("full")
    assert list(run.steps()) == [] and run.already == "a KV cache in full"


def test_after_one_that_failed_between_layers_the_rest_is_converted_and_counted(
    converting: Converting, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, blocks = converting.cache.convert, converting.cache.num_blocks

    def failing(index: int, *args: Any) -> None:
        if index == 3:
            raise RuntimeError("no memory left")
        convert(index, *args)

    goals: list[tuple[KVPrecision, int]] = [("int8", 3 * blocks), ("full", blocks)]
    for kv_dtype, least in goals:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory left"):
            patch.setattr(converting.cache, "convert", failing)
            converting.convert(kv_dtype)
        assert converting.cache.num_blocks == blocks
        run = converting.convert(kv_dtype)
        assert not run.already and run.numbers()["layers_done"] == converting.cache.num_layers
        assert converting.cache.precision == kv_dtype and converting.cache.num_blocks >= least
    assert converting.cache.num_blocks == blocks


def test_the_manager_runs_it_beside_no_other_morph_and_tells_how_far_it_is(
    converting: Converting,
) -> None:
    compiled: list[str] = []
    converted: list[KVPrecision] = []
    converting.target.compile_kv = lambda: compiled.append("once")
    converting.target.on_kv_converted = lambda: converted.append(converting.cache.precision)
    for name in ("one", "two"):
        command = ConvertCache(id=name, epoch=0, instance="m@w0", kv_dtype="int8")
        converting.manager.begin(command)
    reports = []
    while converting.manager.num_running:
        reports += converting.manager.advance(is_busy=False)
    ends = {report.id: report for report in reports if report.state != "running"}
    assert ends["two"].state == "conflict" and "morph one, a kv, is running" in ends["two"].reason
    assert ends["one"].state == "applied" and ends["one"].numbers["layers_done"] == 8
    assert ends["one"].numbers["blocks_after"] > 3 * ends["one"].numbers["blocks_before"]
    assert (compiled, converted) == (["once"], ["int8"])


def test_a_conversion_of_an_instance_that_is_lost_ends_half_way_and_is_in_nobodys_way(
    converting: Converting, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, convert = converting.manager, converting.cache.convert
    converted: list[int] = []

    def three(index: int, *args: Any) -> None:
        convert(index, *args)
        converted.append(index)
        if len(converted) == 3:
            manager._pace._credit_s = -1.0  # the time of this boundary is used up

    monkeypatch.setattr(converting.cache, "convert", three)
    manager.begin(ConvertCache(id="one", epoch=0, instance="m@w0", kv_dtype="int8"))
    while not converted:
        manager.advance(is_busy=False)
    assert len(converted) == 3 and manager.num_running == 1
    manager.give_up("m@w0", "its stage w1 is lost")
    assert manager.num_running == 0
    manager.begin(Retire(id="two", epoch=0, instance="m@w0", wait_s=0.0))
    reports = manager.advance(is_busy=False)
    assert [(one.id, one.state, one.reason) for one in reports if one.id == "one"] == [
        ("one", "failed", "its stage w1 is lost")
    ]
    assert not any(one.state == "conflict" for one in reports)


def test_under_pressure_the_reflex_takes_8_bits_and_gives_them_back() -> None:
    case = Converting(pages=20, max_model_len=1024)
    expect_no_growth(case.instance.scheduler)
    case.target.kv_loss, case.target.resizer.reserve_pages = 0.0001, case.pool.num_free
    loop, events, blocks = ReflexLoop(case.manager), list[Event](), case.cache.num_blocks
    policy = Policy(cooldown_s=0.0).in_force()
    assert policy
    loop.grant(Envelope(id="e", epoch=0, instance="m@w0", policy=policy, kv_precisions=["int8"]))

    def boundary() -> None:
        events.extend(loop.act())
        loop.hear(case.manager.advance(case.engine.has_work))
        case.check()

    tokens = 16 * (blocks // 2) - NUM_NEW - 20
    for i in range(3):
        case.submit(str(i), [(i * 13 + j * 7) % 4000 for j in range(tokens)])
    forms = set()
    deadline = time.monotonic() + 60
    while (case.engine.has_work or case.cache.form != "full") and time.monotonic() < deadline:
        boundary()
        case.steps()
        forms.add(case.cache.form)
    assert "int8" in forms and case.cache.form == "full" and case.cache.num_blocks == blocks
    assert set(case.client.ends.values()) == {"length"} and len(case.client.ends) == 3
    there, *_, back = (event for event in events if event.kind == "morph_decided")
    assert "the KV cache to int8" in there.reason and there.numbers["loss"] == 0.0001
    assert (back.cause, back.numbers["blocks_after"]) == ("ease", blocks)
    scheduler = case.instance.scheduler
    assert (scheduler.num_preemptions, scheduler.num_recomputed) == (0, 0)
    case.close()
