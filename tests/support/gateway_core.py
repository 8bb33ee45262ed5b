"""The gateway's core, without HTTP and Redis: workers that only have cards, a clock that is set by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bus.batch import WriteBatch
from bus.client import Bus, LiveWorker
from bus.messages import (
    SCHEMA_VERSION,
    Cancel,
    Delta,
    FinishReason,
    InstanceCard,
    Metrics,
    RejectReason,
    SamplingParams,
    StepOutput,
    Submit,
    WorkerCard,
)
from bus.names import Names
from bus.settings import GatewaySettings, Settings
from gateway.delivery.request import Floor, GenerationRequest, RequestState
from gateway.errors import ApiError
from gateway.state import Gateway


class DeafBus:
    """Takes what is published, or refuses it with `error`."""

    def __init__(self) -> None:
        self.names, self.fence, self.schema = Names(), None, SCHEMA_VERSION
        self.up = True
        self.error: Exception | None = None
        self.taken: list[Any] = []

    def batch(self) -> DeafBatch:
        return DeafBatch(self)


class DeafBatch(WriteBatch):
    """Encodes as the real one does."""

    def __init__(self, bus: DeafBus) -> None:
        super().__init__(cast(Any, bus))
        self._bus = bus
        self._messages: list[Any] = []

    def publish(self, stream: str, message: object) -> None:
        super().publish(stream, message)
        self._messages.append(message)

    async def send(self) -> None:
        if self._bus.error is not None:
            raise self._bus.error
        self._bus.taken += self._messages


@dataclass(eq=False)
class Ear:
    """A sink that remembers."""

    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False
    error: ApiError | None = None

    def on_admitted(self) -> None:
        pass

    def on_tokens(self, request: GenerationRequest, delta: Delta, skip: int, step: StepOutput | None) -> bool:
        self.tokens += delta.token_ids[skip:]
        return False

    def on_end(self) -> None:
        self.has_ended = True

    def fail(self, error: ApiError) -> None:
        self.error = error

    def flush(self) -> None:
        pass


class Core:
    """`gateway` with its clocks at `now`; `bus` shows what its outbox wrote."""

    def __init__(self, **settings: Any) -> None:
        self.now = time.monotonic()
        self.bus = DeafBus()
        self.gateway = Gateway(Settings(gateway=GatewaySettings(**settings)), cast(Bus, self.bus))
        self.delivery, self.losses = self.gateway.delivery, self.gateway.losses
        self.cluster = self.gateway.cluster
        parts = (self.losses, self.delivery, self.gateway.placement)
        for part in (*parts, self.delivery.attempts, self.delivery.endings):
            part._clock = lambda: self.now
        self.cards: dict[str, WorkerCard] = {}
        self.fingerprint = ""  # of the shape that makes what is delivered
        self.step_s = 0.0  # that its step took

    def worker(self, name: str = "w0", epoch: int = 1, pid: int = 1, max_model_len: int = 100) -> None:
        """Registers; the gateway sees it at the next `poll`."""
        instance = InstanceCard(
            id=f"m@{name}",
            model="m",
            model_path="/nowhere",
            max_model_len=max_model_len,
            vocab_size=10,
            num_layers=1,
            dtype="float32",
            block_tokens=16,
        )
        self.cards[name] = WorkerCard(
            id=name,
            epoch=epoch,
            host="h",
            pid=pid,
            device="cpu",
            page_bytes=1,
            state="serving",
            instances=[instance],
        )

    def poll(self, after_s: float = 0.4) -> None:
        self.now += after_s
        live = [LiveWorker(card, card.epoch, 1000) for card in self.cards.values()]
        self.cluster.update(live, self.now)
        self.losses.on_poll()

    def report(self, metrics: Metrics) -> None:
        self.cluster.add_metrics(metrics, self.now)

    def state(
        self,
        name: str,
        sink: Any = None,
        *,
        prompt: Sequence[int] = (1,),
        min_precision: Floor = "",
        waits_for_precision: bool = True,
        **sampling: Any,
    ) -> RequestState:
        request = GenerationRequest(
            id=name,
            model="m",
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(**{"max_tokens": 50, "seed": 1} | sampling),
            arrived=self.now,
            min_precision=min_precision,
            waits_for_precision=waits_for_precision,
        )
        return RequestState(request, sink or Ear(), self.now + 60)

    def submit(self, *names: str, begun: bool = True) -> list[RequestState]:
        states = [self.state(name) for name in names]
        for state in states:
            self.delivery.submit(state)
            self.sent(state, begun=begun)
        return states

    def sent(self, state: RequestState, *, begun: bool = True) -> None:
        """Redis took it; the worker began it."""
        self.delivery.on_sent(state)
        if begun:
            self.deliver(state, [])

    def deliver(
        self,
        state: RequestState,
        token_ids: list[int],
        at: int | None = None,
        finish: FinishReason | None = None,
        error: str | None = None,
        reject_reason: RejectReason | None = None,
    ) -> None:
        assert state.target is not None
        delta = Delta(
            request_id=state.id,
            attempt=state.attempt,
            index=len(state.received) if at is None else at,
            token_ids=token_ids,
            finish_reason=finish,
            error=error,
            reject_reason=reject_reason,
        )
        step = StepOutput(
            worker=state.target.worker,
            epoch=state.target.epoch,
            instance=state.target.instance,
            step=1,
            born_ns=0,
            fingerprint=self.fingerprint,
            deltas=[delta],
            step_s=self.step_s,
        )
        self.delivery.on_step(step, step.deltas)
        self.delivery.flush()

    def written(self) -> list[Submit | Cancel]:
        """Take out what waits in the outbox, in order."""
        outbox = self.gateway.outbox
        messages = [write.message for write in outbox._queue if not write.is_void]
        outbox._queue.clear()
        return messages

    def cancels(self) -> list[tuple[list[str], int | None]]:
        return [
            (message.request_ids, message.up_to_attempt)
            for message in self.written()
            if isinstance(message, Cancel)
        ]
