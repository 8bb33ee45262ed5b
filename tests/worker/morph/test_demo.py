"""Morphs of the demo model on the real engine: what is exact stays exact.

The oracle is transformers' generate, in float32. Runs on the GPU where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.engines import fill_cache, make_instance
from bench.common.loading import load_model
from bus.messages import LayerShape
from bus.morphs import MorphReport, Resize, Swap
from bus.precisions import QUANTIZED, Precision
from tests.support.engine_toys import Client, request, run
from tests.support.greedy import generate
from tests.support.paths import DEMO_MODEL
from tests.worker.engine.test_oracle import DEVICE
from worker.engine.build import make_cache, make_pool, useful_blocks
from worker.engine.engine import Engine
from worker.engine.sequence import Limits
from worker.memory import VirtualRange
from worker.memory.backend import Finish
from worker.morph.manager import MorphManager
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.morph.variants import reserve_pages
from worker.shape.host_store import HostMemory
from worker.shape.variants import LayerVariants

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    # What the module shares takes most of the time: imports, images of all variants, the oracle's answers.
    pytest.mark.timeout(func_only=True),
]

PROMPTS = [[(i * 37 + j * 11) % 4000 for j in range(n)] for i, n in enumerate((5, 90, 33))]
NUM_NEW = 48
NO_LIMIT_S = 1e6  # a morph waits for requests, however slow the machine is
MEMORY_BYTES = (64 if DEVICE.type == "cpu" else 256) << 20


@dataclass
class Oracle:
    model: Any
    expected: list[list[int]]  # of PROMPTS


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval().to(DEVICE)
    return Oracle(model, [generate(model, prompt, NUM_NEW) for prompt in PROMPTS])


class Morphing:
    """The demo model with its variants, served by an engine that can morph."""

    def __init__(self, host_dir: Path) -> None:
        self.pool = make_pool(DEVICE, MEMORY_BYTES)
        self.model = load_model(DEMO_MODEL, self.pool, dtype=torch.float32, max_tp=2)
        self.variants = LayerVariants(self.model, self.pool, method="rtn", memory=HostMemory(host_dir))
        self.num_layers = self.model.config.num_layers
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024, block_tokens=16)
        self.cache = make_cache(self.pool, self.model, limits, "test")
        reserve = reserve_pages(self.variants, self.num_layers)
        fill_cache(self.pool, self.cache, self.model, limits, reserve)
        self.instance = make_instance("m@w0", self.model, self.cache, limits, bits=(8, 4, 3))
        self.engine = Engine(DEVICE)
        self.engine.add_instance(self.instance)
        resizer = KVResizer(
            self.instance, self.cache, reserve_pages=reserve, useful_blocks=useful_blocks(limits)
        )
        self.executor = MorphManager(
            "w0", {"m@w0": Target(self.instance, self.variants, resizer)}, step_share=1.0
        )
        self.woken = threading.Event()
        self.executor.wake = self.woken.set
        self.client = Client()
        self.num_commands = 0
        self.ends: dict[str, MorphReport] = {}

    def swap(self, precision: Precision, **fields: Any) -> str:
        self.num_commands += 1
        name = f"m{self.num_commands}"
        fields = {"id": name, "epoch": 0, "instance": "m@w0", "wait_s": NO_LIMIT_S, **fields}
        self.executor.begin(Swap(precision=precision, **fields))
        return name

    def resize(self, blocks: int) -> str:
        self.num_commands += 1
        name = f"m{self.num_commands}"
        self.executor.begin(Resize(id=name, epoch=0, instance="m@w0", blocks=blocks))
        return name

    def submit(self, name: str, prompt: list[int], num_new: int = NUM_NEW) -> None:
        self.engine.submit("m@w0", request(name, prompt, num_new))

    def boundary(self) -> None:
        """Carry on the morphs. Without a step to run, sleep until a copy ends, as a worker's engine does."""
        if self.executor.num_running and not self.engine.has_work:
            self.woken.wait(self.executor.patience_s)
        self.woken.clear()
        for report in self.executor.advance(self.engine.has_work):
            if report.state != "running":
                assert report.id not in self.ends
                self.ends[report.id] = report

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.boundary()
            self.client.take(self.engine.step())

    def finish(self) -> None:
        """Until every stream and every morph is at its end."""
        while self.engine.has_work or self.executor.num_running:
            self.steps(1)
        self.instance.check_integrity()
        self.cache.check_integrity()
        self.pool.check_integrity()

    def now(self, precision: Precision, **fields: Any) -> MorphReport:
        name = self.swap(precision, **fields)
        while name not in self.ends:
            self.boundary()
        assert self.ends[name].state == "applied", self.ends[name]
        return self.ends[name]

    def close(self) -> None:
        self.executor.close()
        self.cache.release()
        self.model.release()
        self.pool.check_integrity()
        self.pool.close()


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Held by one of its own, so that the variants are made once and not for each test."""
    folder = tmp_path_factory.mktemp("host")
    holder = Morphing(folder)
    yield folder
    holder.close()


@pytest.fixture
def morphing(host_dir: Path) -> Iterator[Morphing]:
    made = Morphing(host_dir)
    yield made
    made.close()


def test_with_all_layers_back_a_later_stream_equals_the_oracle(morphing: Morphing, oracle: Oracle) -> None:
    for precision in ("int4", "int8", "int3"):
        morphing.submit(precision, PROMPTS[1], 20)
        morphing.swap(precision, count=5)
        morphing.steps(30)
        morphing.swap("full", count=8)
        morphing.finish()
    assert {report.state for report in morphing.ends.values()} == {"applied"}
    assert morphing.instance.shape == [LayerShape()] * morphing.num_layers
    for i, prompt in enumerate(PROMPTS):
        morphing.submit(str(i), prompt)
    morphing.finish()
    assert [morphing.client.tokens[str(i)] for i in range(len(PROMPTS))] == oracle.expected


def test_a_stream_across_resizes_equals_the_oracle(morphing: Morphing, oracle: Oracle) -> None:
    before = morphing.cache.num_blocks
    morphing.submit("early", [7] * 980, 8)  # leaves a hole below those that come later
    for i, prompt in enumerate(PROMPTS):
        morphing.submit(str(i), prompt)
    while "early" not in morphing.client.ends:
        morphing.steps(1)
    moved = 0
    for turn in range(9):
        used = morphing.cache.allocator.num_used
        name = morphing.resize([max(used, 64) + 1, before, 66][turn % 3])
        while name not in morphing.ends:
            morphing.steps(1)
        moved += int(morphing.ends[name].numbers["blocks_moved"])
        assert morphing.ends[name].state == "applied"
    morphing.finish()
    assert moved > 0
    assert [morphing.client.tokens[str(i)] for i in range(len(PROMPTS))] == oracle.expected


def test_the_tokens_before_a_swap_equal_the_oracles_and_the_stream_goes_on(
    morphing: Morphing, oracle: Oracle
) -> None:
    for i, prompt in enumerate(PROMPTS):
        morphing.submit(str(i), prompt)
    morphing.steps(12)
    exact = {name: len(tokens) for name, tokens in morphing.client.tokens.items()}
    assert min(exact.values()) >= 8 and morphing.instance.layers_below_full == 0
    morphing.swap("int3", count=8)
    morphing.finish()
    for i, expected in enumerate(oracle.expected):
        tokens = morphing.client.tokens[str(i)]
        assert tokens[: exact[str(i)]] == expected[: exact[str(i)]]
        assert len(tokens) == NUM_NEW
    assert morphing.instance.shape_id == f"tp1-int3x{morphing.num_layers}"


@pytest.mark.parametrize("precision", QUANTIZED)
def test_layers_swapped_while_others_decode_give_what_layers_swapped_at_rest_give(
    host_dir: Path, precision: Precision
) -> None:
    streams = []
    for is_busy in (False, True):
        morphing = Morphing(host_dir)
        if is_busy:
            for i, prompt in enumerate(PROMPTS):
                morphing.submit(f"other {i}", prompt, 60)
            morphing.steps(5)
        morphing.swap("int8", count=3)
        morphing.swap(precision, layers=list(range(8)) if precision != "int8" else [3, 4, 5, 6, 7])
        morphing.finish()
        morphing.now(precision, layers=list(range(8)))
        morphing.submit("probe", PROMPTS[2])
        morphing.finish()
        streams.append(morphing.client.tokens["probe"])
        morphing.close()
    assert streams[0] == streams[1]


def test_memory_shrinks_by_the_ratio_and_becomes_blocks(morphing: Morphing) -> None:
    before, blocks = morphing.pool.counts(), morphing.cache.num_blocks
    report = morphing.now("int4", count=8)
    after = morphing.pool.counts()
    layers = sum(morphing.variants.pages(i, part, "full") for i in range(8) for part in ("attention", "ffn"))
    assert before.weights - after.weights > 0.8 * layers
    assert after.kv - before.kv > 0.75 * layers
    assert morphing.cache.num_blocks == report.numbers["blocks_after"] > blocks
    morphing.now("full", count=8)
    assert (morphing.pool.counts(), morphing.cache.num_blocks) == (before, blocks)


def test_weights_that_were_damaged_on_the_way_are_found_and_never_serve(
    morphing: Morphing, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VirtualRange.begin_write

    def all_but_a_byte(target: VirtualRange, offset: int, source: torch.Tensor, then: Any) -> Finish:
        finish = real(target, offset, source)
        target.tensor(torch.uint8, [1], offset_bytes=offset + 12345)[:] += 1
        then(offset, offset + len(source))
        return finish

    monkeypatch.setattr(VirtualRange, "begin_write", all_but_a_byte)
    morphing.submit("0", PROMPTS[0])
    morphing.steps(3)
    name = morphing.swap("int4", count=2)
    morphing.finish()
    assert morphing.ends[name].state == "failed" and "WrongVariant" in morphing.ends[name].reason
    assert morphing.client.tokens["0"] == oracle.expected[0]
    assert morphing.instance.shape_id == "tp1-full"
    run(morphing.engine, morphing.client)
