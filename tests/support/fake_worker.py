"""A worker without an engine: it speaks the real bus, answers by a script, and misbehaves on demand.

The answer to a request is a fixed list of tokens, so a continuation (Submit with `sent_token_ids`) is the
rest of it, as it is with the real engine. Times are short: these tests are about the gateway.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from bus.client import Bus, BusUnavailable
from bus.messages import (
    Cancel,
    Delta,
    Drain,
    InstanceCard,
    RejectReason,
    StepOutput,
    Submit,
    TokenLogprobs,
    WorkerCard,
    WorkerTelemetry,
)
from bus.morphs import (
    KIND_OF,
    CancelMorph,
    Command,
    ConvertCache,
    Morph,
    MorphOutcome,
    MorphReport,
    Resize,
    Swap,
    Transform,
)
from bus.policy import Envelope
from bus.precisions import PRECISIONS
from tests.support import metrics_samples
from tests.support.fake_shape import NUM_LAYERS, FakeShape

LEASE_S = 0.8
Reply = Callable[[Submit], list[int]]
Mangle = Callable[[StepOutput], list[StepOutput]]
Embed = Callable[[Submit], bytes]


class FakeWorker:
    """`reply(submit)`: all tokens it would make, cut at max_tokens; a last one from `stop_token_ids` ends
    with "stop". `gate`: clear it to hold requests before their first step. `token_s`: pause between steps;
    `stop_at`: no token from this index on (it hangs there). `mangle` changes what is published.
    `reports_shape`: its reports of an end carry its telemetry. `outcome`, with `numbers`: of every morph it
    is told to make, after a report that it runs; None: no word about any. `morph_gate`: clear it to hold
    morphs before their end; `regroup` changes the cards of all who take part in a transform. Requests whose
    floor its `shape` does not keep are refused. `embed`: the embedding of a request that wants one; None: it
    makes tokens, as one that knows no embeddings."""

    def __init__(
        self, bus: Bus, folder: Path, reply: Reply, *, worker: str = "w0", model: str = "demo"
    ) -> None:
        self.bus, self.folder = bus, folder
        self.id, self.model = worker, model
        self.instance = f"{model}@{worker}"
        self.epoch = 0
        self.pid = os.getpid()  # of each start another
        self.max_model_len, self.vocab_size, self.fingerprint = 512, 1000, "fp-full-tp1"
        self.variants = list(PRECISIONS)
        self.host, self.device, self.dtype = "test", "cpu", "float32"
        self.kv_heads, self.degrees, self.group = 8, [1, 2, 4], [worker]
        self.takes_grammars = True
        self.tokens_at: dict[int, int] = {}
        self.behave(reply)
        self._morphs: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._step = 0

    def behave(self, reply: Reply) -> None:
        """Become as new: no misbehaviour, nothing remembered."""
        self.reply = reply
        self.token_s = 0.0
        self.tokens_per_step = 1
        self.stop_at: int | None = None
        self.mangle: Mangle = lambda step: [step]
        self.gate = asyncio.Event()
        self.gate.set()
        self.submits: list[Submit] = []
        self.cancelled: set[str] = set()
        self.drained = False
        self.embed: Embed | None = embedding_of
        self.shape = FakeShape()
        self.outcome: MorphOutcome | None = "applied"
        self.numbers: dict[str, float] = {}
        self.morph_gate = asyncio.Event()
        self.morph_gate.set()
        self.reports_shape = False
        self.morphs: list[Morph] = []
        self.cancelled_morphs: list[str] = []
        self.envelopes: list[Envelope] = []
        self.regroup: Callable[[Transform], Awaitable[None]] | None = None

    async def start(self, state: str = "serving") -> FakeWorker:
        await self.bus.wait_up()
        self.epoch = max(time.time_ns() // 1_000_000, self.epoch + 1)
        self.pid += 1
        await self.bus.register_worker(self.card(state), LEASE_S)
        self._tasks = [asyncio.create_task(work()) for work in (self._renew, self._read, self._obey)]
        return self

    def card(self, state: str = "serving") -> WorkerCard:
        instance = InstanceCard(
            id=self.instance,
            model=self.model,
            model_path=str(self.folder),
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            num_layers=NUM_LAYERS,
            dtype=self.dtype,
            block_tokens=16,
            tp=len(self.group),
            workers=self.group,
            variants=self.variants,
            order=list(range(NUM_LAYERS)),
            order_name="front-to-back",
            min_blocks=8,
            max_blocks=4096,
            layer_pages={"full": 20, "int8": 10, "int4": 6, "int3": 5},
            kv_heads=self.kv_heads,
            degrees=self.degrees,
            tokens_at=self.tokens_at,
            takes_grammars=self.takes_grammars,
        )
        return WorkerCard(
            id=self.id,
            epoch=self.epoch,
            host=self.host,
            pid=self.pid,
            device=self.device,
            page_bytes=65536,
            state=state,  # type: ignore[arg-type]
            instances=[instance],
            link="127.0.0.1:9",
            link_key=b"s3cret",
        )

    async def join(self, *group: str) -> None:
        """Show another group on its card, itself included, in the order of shards."""
        self.group = list(group)
        assert await self.bus.update_card(self.card())

    async def die(self) -> None:
        """Stop as by kill -9: nothing more is said, the lease runs out by itself."""
        doomed = [*self._tasks, *self._runs.values(), *self._morphs.values()]
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        self._runs.clear()

    async def leave(self) -> None:
        await self.die()
        await self.bus.drop_lease(self.id, self.epoch)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    async def publish(self, gateway: str, *deltas: Delta, epoch: int | None = None) -> None:
        self._step += 1
        step = StepOutput(
            worker=self.id,
            epoch=self.epoch if epoch is None else epoch,
            instance=self.instance,
            step=self._step,
            born_ns=time.time_ns(),
            fingerprint=self.fingerprint,
            deltas=list(deltas),
            layers_below_full=self.shape.num_below_full,
        )
        for output in self.mangle(step):
            await self.bus.publish(self.bus.names.tokens(gateway), output)

    async def _renew(self) -> None:
        while True:
            try:
                if not await self.bus.renew_lease(self.id, self.epoch, LEASE_S):
                    self._fence()
                    await self.bus.register_worker(self.card(), LEASE_S)
            except BusUnavailable:
                await self.bus.wait_up()
            await asyncio.sleep(LEASE_S / 4)

    def _fence(self) -> None:
        self.epoch += 1
        for run in self._runs.values():
            run.cancel()
        self._runs.clear()

    async def _read(self) -> None:
        stream = self.bus.names.requests(self.instance)
        async with self.bus.group_reader(stream, f"{self.id}:{self.epoch}", Submit) as reader:
            await reader.open()
            async for batch in reader:
                await reader.ack([entry_id for entry_id, _ in batch])
                for _, submit in batch:
                    for one in submit.each():
                        self._take(one)

    def _take(self, submit: Submit) -> None:
        if submit.epoch != self.epoch or submit.request_id in self.cancelled:
            return
        self.submits.append(submit)
        if old := self._runs.pop(submit.request_id, None):
            old.cancel()
        run = self._runs[submit.request_id] = asyncio.create_task(self._run(submit))
        run.add_done_callback(lambda task: self._ended(submit.request_id, task))

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._runs.get(request_id) is task:
            del self._runs[request_id]

    async def _obey(self) -> None:
        commands = (Cancel, Drain, Swap, Resize, ConvertCache, Transform, CancelMorph, Envelope)
        async with self.bus.reader(self.bus.names.control(self.id), *commands, start="0") as reader:
            async for batch in reader:
                for _, command in batch:
                    await self._carry_out(command)

    async def _carry_out(self, command: Command | Envelope) -> None:
        if isinstance(command, Envelope):
            self.envelopes.append(command)
        elif isinstance(command, Drain):
            self.drained = True
        elif isinstance(command, Swap | Resize | ConvertCache | Transform):
            await self._morph(command)
        elif command.epoch != self.epoch:
            return
        elif isinstance(command, CancelMorph):
            self.cancelled_morphs.append(command.morph_id)
            if morph := self._morphs.get(command.morph_id):
                morph.cancel()
        elif isinstance(command, Cancel):
            self._cancel(command)

    async def _morph(self, command: Morph) -> None:
        self.morphs.append(command)
        if command.epoch != self.epoch:
            await self.report(command, "stale")
        elif self.outcome:
            await self.report(command, "running")
            self._morphs[command.id] = asyncio.create_task(self._finish(command, self.outcome))

    async def _finish(self, command: Morph, outcome: MorphOutcome) -> None:
        try:
            await self.morph_gate.wait()
        except asyncio.CancelledError:
            outcome = "failed"
        if outcome == "applied":
            self.shape.apply(command)
            if isinstance(command, Transform) and self.regroup:
                await self.regroup(command)
        await self.report(command, outcome, **self.numbers)

    async def report(self, command: Morph, state: MorphOutcome, **numbers: float) -> None:
        now_ms = time.time_ns() // 1_000_000
        report = MorphReport(
            id=command.id,
            kind=KIND_OF[type(command)],
            target=command.instance,
            worker=self.id,
            epoch=self.epoch,
            state=state,
            reason=f"the test says {state}",
            started_ms=now_ms,
            ended_ms=None if state == "running" else now_ms,
            numbers=dict(numbers),
            workers=command.workers if isinstance(command, Transform) else [],
            telemetry=self.telemetry() if self.reports_shape and state != "running" else None,
        )
        await self.bus.publish(self.bus.names.events, report)

    def telemetry(self) -> WorkerTelemetry:
        """Return its numbers now, as a real worker sends them with the end of a morph."""
        sample = metrics_samples.metrics_of(
            self.instance, self.epoch, kv_blocks=self.shape.blocks, layers=self.shape.layers
        )
        (instance,), (worker,) = sample.instances, sample.workers
        return WorkerTelemetry(
            worker=self.id,
            epoch=self.epoch,
            at_ms=sample.at_ms,
            busy=0.0,
            pages=worker.pages,
            instances=[instance.last],
            steps=0,
        )

    def _cancel(self, command: Cancel) -> None:
        for request_id in command.request_ids:
            if command.up_to_attempt is not None:
                newest = max((one.attempt for one in self.submits if one.request_id == request_id), default=0)
                if newest > command.up_to_attempt:
                    continue
            self.cancelled.add(request_id)
            if run := self._runs.pop(request_id, None):
                run.cancel()

    async def _run(self, submit: Submit) -> None:
        await self.gate.wait()
        sent = len(submit.sent_token_ids)
        if submit.min_precision and self.shape.is_below(submit.min_precision):
            error = f"{self.instance} has layers below {submit.min_precision}"
            refusal = self._delta(submit, sent, [], "error", error, RejectReason.PRECISION_FLOOR)
            await self.publish(submit.gateway, refusal)
            return
        if submit.embeds and self.embed is not None:
            await self.publish(submit.gateway, self._delta(submit, 0, []))
            ended = replace(self._delta(submit, 0, [], "stop"), embedding=self.embed(submit))
            await self.publish(submit.gateway, ended)
            return
        tokens = self.reply(submit)[: submit.sampling.max_tokens]
        await self.publish(submit.gateway, self._delta(submit, sent, []))
        for index in range(sent, len(tokens), self.tokens_per_step):
            while self.stop_at is not None and index >= self.stop_at:
                await asyncio.sleep(0.02)
            if self.token_s:
                await asyncio.sleep(self.token_s)
            await self.publish(submit.gateway, self._tokens(submit, tokens, index))

    def _tokens(self, submit: Submit, tokens: list[int], index: int) -> Delta:
        made = tokens[index : index + self.tokens_per_step]
        is_stop = made[-1] in submit.sampling.stop_token_ids
        is_last = index + len(made) == len(tokens) or is_stop
        finish = None if not is_last else "stop" if is_stop else "length"
        return self._delta(submit, index, made, finish)

    def _delta(
        self,
        submit: Submit,
        index: int,
        token_ids: list[int],
        finish: str | None = None,
        error: str | None = None,
        reject_reason: RejectReason | None = None,
    ) -> Delta:
        num_top = submit.sampling.logprobs
        is_first = index == 0 and bool(token_ids)
        scored = submit.sampling.prompt_logprobs is not None and is_first
        return Delta(
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=index,
            token_ids=token_ids,
            finish_reason=finish,  # type: ignore[arg-type]
            error=error,
            reject_reason=reject_reason,
            logprobs=None if num_top is None else [score(token, num_top) for token in token_ids],
            prompt_logprobs=prompt_scores(submit) if scored else None,
        )


def embedding_of(submit: Submit) -> bytes:
    """Four float32, little-endian, that tell prompts apart."""
    ids = submit.prompt_token_ids
    return struct.pack("<4f", len(ids), ids[0], ids[-1], 0.5)


def score(token: int, num_top: int) -> TokenLogprobs:
    """The token itself is the likeliest, its neighbours follow."""
    ids = [token + i for i in range(num_top)]
    return TokenLogprobs(
        token_id=token, logprob=-0.25, top_ids=ids, top_logprobs=[-0.25 - i for i in range(num_top)]
    )


def prompt_scores(submit: Submit) -> list[TokenLogprobs | None]:
    num_top = submit.sampling.prompt_logprobs or 0
    return [None, *(score(token, num_top) for token in submit.prompt_token_ids[1:])]
