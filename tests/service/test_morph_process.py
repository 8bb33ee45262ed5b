"""A worker process with the demo model is morphed over Redis while its streams run."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from bench.common.oracles import RoundedCache
from bus.client import Bus
from bus.messages import SamplingParams, StepOutput, Submit, WorkerTelemetry
from bus.morphs import ConvertCache, MorphReport, Resize, Swap
from bus.policy import Envelope, Policy
from bus.precisions import PRECISIONS, QUANTIZED
from bus.settings import RedisSettings
from tests.service.test_worker_process import DEMO, start
from tests.support.greedy import generate
from worker.model import read_config
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest
from worker.shape.kv_profile import KVProfile, kv_profile_path, write_kv_profile

pytestmark = pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built")

INSTANCE = "demo@w0"
PROMPTS = {str(i): [(i * 37 + j * 11) % 4000 for j in range(n)] for i, n in enumerate((5, 90, 33, 200))}


@dataclass
class Hands:
    """A gateway's ears and an operator's hands."""

    bus: Bus
    epoch: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str | None] = field(default_factory=dict)
    shapes: list[tuple[str, int]] = field(default_factory=list)
    morphs: dict[str, MorphReport] = field(default_factory=dict)
    last: WorkerTelemetry | None = None
    is_over: bool = False

    async def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        submit = Submit(
            request_id=name,
            attempt=1,
            gateway="g0",
            epoch=self.epoch,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0),
        )
        await self.bus.publish(self.bus.names.requests(INSTANCE), submit)

    async def morph(self, kind: Any, name: str, **fields: Any) -> MorphReport:
        command = kind(id=name, epoch=self.epoch, instance=INSTANCE, wait_s=10.0, **fields)
        await self.bus.publish(self.bus.names.control("w0"), command)
        while name not in self.morphs:
            await asyncio.sleep(0.01)
        return self.morphs[name]

    async def streams(self, prefix: str, max_tokens: int) -> dict[str, list[int]]:
        """One for each prompt, to their ends."""
        for name, prompt in PROMPTS.items():
            await self.submit(prefix + name, prompt, max_tokens)
        while not all(prefix + name in self.ended for name in PROMPTS):
            await asyncio.sleep(0.01)
        return {name: self.tokens[prefix + name] for name in PROMPTS}

    async def keep_busy(self) -> None:
        """Streams after streams, until it is over."""
        turn = 0
        while not self.is_over:
            await self.streams(f"busy {turn} ", 100)
            turn += 1

    async def listen(self) -> None:
        names = self.bus.names
        await asyncio.gather(
            self._read(names.tokens("g0"), StepOutput, self._take_tokens),
            self._read(names.events, MorphReport, self._take_report),
            self._read(names.telemetry, WorkerTelemetry, lambda report: setattr(self, "last", report)),
        )

    async def _read(self, stream: str, kind: Any, take: Any) -> None:
        async with self.bus.reader(stream, kind, start="0") as reader:
            async for batch in reader:
                for _, message in batch:
                    take(message)

    def _take_tokens(self, output: StepOutput) -> None:
        self.shapes.append((output.fingerprint, output.layers_below_full))
        for delta in output.deltas:
            received = self.tokens.setdefault(delta.request_id, [])
            assert delta.index == len(received) and delta.error is None, delta
            received += delta.token_ids
            if delta.finish_reason:
                self.ended[delta.request_id] = delta.finish_reason

    def _take_report(self, report: MorphReport) -> None:
        if report.state != "running":
            assert report.id not in self.morphs
            self.morphs[report.id] = report


@asynccontextmanager
async def hands(bus: Bus, process: subprocess.Popen[bytes], log: Path) -> AsyncIterator[Hands]:
    while not (live := [w for w in await bus.workers() if w.card.state == "serving"]):
        assert process.poll() is None, log.read_text()
        await asyncio.sleep(0.05)
    await bus.renew_gateway("g0", 60.0)
    made = Hands(bus, live[0].epoch)
    listener = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        listener.cancel()


@pytest.mark.slow
async def test_streams_run_through_conversions_of_the_kv_cache_to_their_ends(
    bus: Bus, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start(
        redis_settings,
        log,
        f'["demo={DEMO}"]',
        memory_mb="64",
        host_dir=str(tmp_path),
        prefix_cache="false",  # what was computed before and rounded later is neither oracle's
    )

    async def most_blocks() -> int:
        (live,) = await bus.workers()
        return live.card.instances[0].max_blocks

    try:
        async with asyncio.timeout(100), hands(bus, process, log) as hand:
            most = await most_blocks()
            expected = await hand.streams("before ", 60)
            busy = asyncio.create_task(hand.keep_busy())
            while "busy 0 0" not in hand.tokens:
                await asyncio.sleep(0.01)
            there = await hand.morph(ConvertCache, "there", kv_dtype="int8")
            assert there.state == "applied" and there.numbers["layers_done"] == 8, there
            assert there.numbers["blocks_after"] > 3.7 * there.numbers["blocks_before"]
            while await most_blocks() < 3.7 * most:
                await asyncio.sleep(0.05)
            rounded = await hand.streams("rounded ", 60)
            back = await hand.morph(ConvertCache, "back", kv_dtype="full")
            assert back.state == "applied" and back.numbers["blocks_after"] == there.numbers["blocks_before"]
            hand.is_over = True
            await busy
            assert set(hand.ended.values()) == {"length"}
            assert {"tp1-full", "tp1-full-kv8"} == {shape for shape, _ in hand.shapes}
            assert hand.last and hand.last.instances[0].recomputed_tokens == 0
            assert await asyncio.to_thread(oracle_tokens, RoundedCache) == rounded
            assert await asyncio.to_thread(oracle_tokens, DynamicCache) == expected
            while await most_blocks() != most:
                await asyncio.sleep(0.05)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(10)


def demo_with_kv_profile(folder: Path) -> Path:
    """Return a folder of the demo model, the loss of whose KV cache in 8 bits is known."""
    (folder / "instar").mkdir(parents=True)
    for path in DEMO.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    config = read_config(folder)
    made = KVProfile(
        model=checkpoint_digest(config, open_checkpoint(config)),
        calibration="of a test",
        windows=[1, 8],
        perplexity=[30.0, 30.003],
        divergence=1e-5,
    )
    write_kv_profile(kv_profile_path(folder), made)
    return folder


@pytest.mark.slow
async def test_an_envelope_lets_a_worker_take_8_bits_under_pressure_and_go_back(
    bus: Bus, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    log, folder = tmp_path / "log", demo_with_kv_profile(tmp_path / "demo")
    process = start(
        redis_settings,
        log,
        f'["demo={folder}"]',
        memory_mb="64",
        host_dir=str(tmp_path),
        prefix_cache="false",
    )
    policy = Policy(kv_usage_high=0.01, kv_usage_low=0.005, cooldown_s=0.0).in_force()  # a few blocks in use
    assert policy
    try:
        async with asyncio.timeout(100), hands(bus, process, log) as hand:
            (live,) = await bus.workers()
            assert live.card.instances[0].kv_loss == pytest.approx(0.0001)
            envelope = Envelope(
                id="e", epoch=hand.epoch, instance=INSTANCE, policy=policy, kv_precisions=["int8"]
            )
            await bus.publish(bus.names.control("w0"), envelope)
            await hand.streams("policy ", 200)
            while len(done := [one for one in hand.morphs.values() if one.kind == "kv"]) < 2:
                await asyncio.sleep(0.01)
            there, *_, back = done
            assert there.state == back.state == "applied", done
            assert there.numbers["blocks_after"] > 3.7 * there.numbers["blocks_before"]
            assert back.numbers["blocks_after"] == there.numbers["blocks_before"]
            assert set(hand.ended.values()) == {"length"}
            assert {"tp1-full", "tp1-full-kv8"} == {shape for shape, _ in hand.shapes}
            assert hand.last and hand.last.instances[0].recomputed_tokens == 0
    finally:
        process.kill()
        process.wait(10)


def oracle_tokens(cache: Any) -> dict[str, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    return {name: generate(model, prompt, 60, cache) for name, prompt in PROMPTS.items()}


async def test_streams_run_through_swaps_and_resizes_to_their_ends(
    bus: Bus, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start(
        redis_settings, log, f'["demo={DEMO}"]', memory_mb="64", host_dir=str(tmp_path), quantization="rtn"
    )
    try:
        async with asyncio.timeout(100), hands(bus, process, log) as hand:
            (live,) = await bus.workers()
            (card,) = live.card.instances
            assert card.variants == list(PRECISIONS) and sorted(card.order) == list(range(8))
            assert not card.losses.keys() & card.losses_assumed.keys()
            assert card.losses.keys() | card.losses_assumed.keys() == set(QUANTIZED)
            assert "measured with awq, and rtn is served" in card.losses_assumed["int4"]
            assert card.layer_pages["full"] > card.layer_pages["int8"] > card.layer_pages["int4"]
            expected = await hand.streams("before ", 60)
            busy = asyncio.create_task(hand.keep_busy())
            while "busy 0 0" not in hand.tokens:
                await asyncio.sleep(0.01)
            assert (await hand.morph(Swap, "down", precision="int4", count=6)).state == "applied"
            report = await hand.morph(Swap, "half", precision="int8", layers=[0, 7], parts=["ffn"])
            assert report.numbers["halves_applied"] == 2
            blocks = int(report.numbers["blocks_after"])
            report = await hand.morph(Resize, "shrink", blocks=blocks - 100)
            assert report.state == "applied" and report.numbers["blocks_after"] < blocks
            assert (await hand.morph(Swap, "up", precision="full", count=8)).state == "applied"
            hand.is_over = True
            await busy
            assert set(hand.ended.values()) == {"length"}
            assert len(set(hand.shapes)) > 3, (hand.shapes[::50], hand.morphs, log.read_text())
            assert await hand.streams("after ", 60) == expected
            assert hand.shapes[-1] == ("tp1-full", 0)
            pages = hand.last.pages if hand.last else None
            assert pages and pages.budget == pages.weights + pages.kv + pages.free
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0, log.read_text()
        assert "serving demo on cpu" in log.read_text()
        assert await bus.workers() == []
        assert not list(tmp_path.glob("*.images")), "the last worker takes the host images with it"
    finally:
        process.kill()
        process.wait(10)
