"""A worker that does no work: it uses the real bus and makes one token per stream and step, at a pace.

A request's `seed` sets the pace of everything that runs, in steps per second. At exit the worker writes the
birth of each step and each request's first step, so that the way of every token is known.

    BENCH_MODEL=FOLDER BENCH_LOG=FILE python -m bench.gateway.road_worker     # the bus from INSTAR_*
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bus.client import Bus, BusUnavailable
from bus.messages import Cancel, Delta, InstanceCard, StepOutput, Submit, WorkerCard
from bus.service import run
from bus.settings import Settings
from gateway.text.vocabulary import Vocabulary

WORKER, MODEL = "road", "road"
LEASE_S = 10.0
CONTEXT = 1 << 20


@dataclass(slots=True)
class RunningRequest:
    submit: Submit
    made: int
    first_step: int


class RoadWorker:
    def __init__(self, bus: Bus, folder: Path, log: Path) -> None:
        self.bus, self.folder, self.log = bus, folder, log
        self.epoch = time.time_ns() // 1_000_000
        self.tokens = some_tokens(folder)
        self.running: dict[str, RunningRequest] = {}
        self.steps_per_s = 50.0
        self.births: list[int] = []
        self.first_steps: dict[str, int] = {}

    async def work(self, stop: asyncio.Event) -> None:
        await self.bus.register_worker(self.card(), LEASE_S)
        tasks = [asyncio.create_task(one()) for one in (self.renew, self.read, self.obey, self.steps)]
        await asyncio.wait([*tasks, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.log.write_text(json.dumps({"births_ns": self.births, "first_steps": self.first_steps}))

    def card(self) -> WorkerCard:
        instance = InstanceCard(
            id=f"{MODEL}@{WORKER}",
            model=MODEL,
            model_path=str(self.folder),
            max_model_len=CONTEXT,
            vocab_size=1 << 17,
            num_layers=1,
            dtype="float32",
            block_tokens=16,
            workers=[WORKER],
        )
        return WorkerCard(
            id=WORKER,
            epoch=self.epoch,
            host="bench",
            pid=os.getpid(),
            device="none",
            page_bytes=65536,
            state="serving",
            instances=[instance],
        )

    async def renew(self) -> None:
        while True:
            await self.bus.renew_lease(WORKER, self.epoch, LEASE_S)
            await asyncio.sleep(LEASE_S / 3)

    async def read(self) -> None:
        stream = self.bus.names.requests(f"{MODEL}@{WORKER}")
        async with self.bus.group_reader(stream, WORKER, Submit) as reader:
            await reader.open()
            async for batch in reader:
                await reader.ack([entry_id for entry_id, _ in batch])
                for _, submit in batch:
                    self.steps_per_s = float(submit.sampling.seed)
                    self.running[submit.request_id] = RunningRequest(submit, 0, -1)

    async def obey(self) -> None:
        async with self.bus.reader(self.bus.names.control(WORKER), Cancel) as reader:
            async for batch in reader:
                for request_id in itertools.chain.from_iterable(cancel.request_ids for _, cancel in batch):
                    self.running.pop(request_id, None)

    async def steps(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + 1 / self.steps_per_s, time.perf_counter() - 1.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self.running:
                await self.step()

    async def step(self) -> None:
        step = len(self.births)
        self.births.append(time.time_ns())
        by_gateway: dict[str, list[Delta]] = {}
        for one in list(self.running.values()):
            by_gateway.setdefault(one.submit.gateway, []).append(self.delta(one, step))
        batch = self.bus.batch()
        for gateway, deltas in by_gateway.items():
            output = StepOutput(
                worker=WORKER,
                epoch=self.epoch,
                instance=f"{MODEL}@{WORKER}",
                step=step,
                born_ns=self.births[-1],
                fingerprint="road",
                deltas=deltas,
            )
            batch.publish(self.bus.names.tokens(gateway), output)
        try:
            await batch.send()
        except BusUnavailable as error:
            sys.exit(f"the bench lost its Redis: {error}")

    def delta(self, one: RunningRequest, step: int) -> Delta:
        submit, index = one.submit, one.made
        if index == 0:
            one.first_step = self.first_steps[submit.request_id] = step
        one.made += 1
        is_last = one.made >= submit.sampling.max_tokens
        if is_last:
            del self.running[submit.request_id]
        return Delta(
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=index,
            token_ids=[self.tokens[(index + one.first_step) % len(self.tokens)]],
            finish_reason="length" if is_last else None,
        )


def some_tokens(folder: Path) -> list[int]:
    """Return tokens of real text, each of whole characters, so that one token is one event."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = Vocabulary(tokenizer, 0)
    ids = tokenizer.encode(Path(json.__file__).read_text(encoding="utf-8"), add_special_tokens=False).ids
    return [token_id for token_id in ids if vocabulary.texts[token_id]]


async def main(_: Settings, bus: Bus, stop: asyncio.Event) -> None:
    await RoadWorker(bus, Path(os.environ["BENCH_MODEL"]), Path(os.environ["BENCH_LOG"])).work(stop)


if __name__ == "__main__":
    sys.exit(run("worker", main))
