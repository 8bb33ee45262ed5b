"""A burst as `make demo` has it, which this gateway itself sends to the service.

Its requests go the way of all others behind the checks of keys and bodies: admission, placement, workers.
They compete with those of clients, and are counted with them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any, Final

from bus.burst import (
    MEASURED_S,
    SEED,
    BurstOrder,
    PlannedRequest,
    at_once,
    burst,
    tokens_per_s,
)
from bus.messages import Delta, InstanceCard, SamplingParams, StepOutput
from bus.precisions import is_below
from gateway.delivery.request import Floor, GenerationRequest, RequestState
from gateway.errors import ApiError
from gateway.http.limits import Slot
from gateway.operations.answers import new_id
from gateway.state import Gateway

log = logging.getLogger("gateway")

PAUSE_S: Final = 2.0  # after the measurement, for workers to drop what was cancelled
DRAIN_S: Final = 90.0  # for the requests that run when the last one was sent; then they are cancelled
LOOK_S: Final = 0.1
SERVED, CANCELLED = "served", "cancelled"
RUNNING: Final = ("measuring", "sending", "waiting")


class _NothingMeasured(Exception):
    """No token was generated while the service was measured."""


class SentRequest:
    """One request of a burst, and the sink of its tokens.

    `outcome`: served, cancelled, the code of an error, or "" while it is open.
    """

    def __init__(self, due: float, per_second: list[int] | None = None) -> None:
        """due: seconds of the monotonic clock. per_second: where its tokens are counted, from then on."""
        self.due, self.outcome = due, ""
        self.state: RequestState | None = None
        self._per_second = per_second
        self._slot: Slot | None = None

    @property
    def ttft_s(self) -> float | None:
        """The seconds from when it was due to its first token; None: it has none."""
        return self.state.first_token - self.due if self.state and self.state.first_token else None

    def submit(self, gateway: Gateway, request: GenerationRequest) -> None:
        """Send it, or note why it is refused."""
        try:
            slot = self._slot = gateway.admission.reserve()
            state = self.state = gateway.delivery.new_state(request, self)
            slot.watch(lambda error: gateway.delivery.fail(state, error))
            gateway.delivery.submit(state)
        except ApiError as error:
            self.fail(error)

    def cancel(self, gateway: Gateway) -> None:
        """End it at its worker, unless it has ended."""
        if not self.outcome:
            self._end(CANCELLED)
            if self.state is not None:
                gateway.delivery.cancel(self.state)

    def on_admitted(self) -> None:
        if self._slot is not None:
            self._slot.start_one()

    def on_tokens(self, request: GenerationRequest, delta: Delta, skip: int, step: StepOutput | None) -> bool:
        if self._per_second is not None:
            second = int(time.monotonic() - self.due)
            if second < len(self._per_second):
                self._per_second[second] += len(delta.token_ids) - skip
        return False

    def on_end(self) -> None:
        self._end(SERVED)

    def fail(self, error: ApiError) -> None:
        self._end(error.code or "other")

    def flush(self) -> None:
        """Write nothing: nobody reads the text."""

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        if self._slot is not None:
            self._slot.release()


class Burst:
    """One burst. `state`: measuring, sending, waiting; then ended, stopped or failed, for `reason`."""

    def __init__(self, gateway: Gateway, order: BurstOrder, card: InstanceCard) -> None:
        self.id, self.model, self.reason = new_id(), card.model, ""
        self.state = "sending" if order.tokens_per_s else "measuring"
        self.planned: list[PlannedRequest] = []
        self.requests: list[SentRequest] = []
        self._gateway, self._order, self._card = gateway, order, card
        self._rate = order.tokens_per_s or 0.0
        self._measured: list[SentRequest] = []
        self._rng = random.Random(SEED)
        self._began = 0.0  # when the first request was due, of the monotonic clock
        self._at = time.time()

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING

    @property
    def words(self) -> str:
        """The burst and how far it is, for people."""
        if self.state == "measuring":
            return f"burst {self.id} of {self.model} measures the service"
        sent = f"{len(self.requests)} of its {len(self.planned)} requests are sent"
        return f"burst {self.id} of {self.model} is {self.state}: {sent}"

    async def play(self) -> None:
        """Measure, send and wait. However it ends, none of its requests runs on."""
        self._tell("burst_started", "the dashboard's burst, which this gateway sends itself")
        try:
            self._rate = self._rate or await self._measure()
            self.planned = fitted(burst(self._rate, self._order.seconds), self._context())
            self.state, self._began = "sending", time.monotonic()
            await self._send(self.planned, self.requests)
            self.state = "waiting"
            await self._wait()
            self.state = "ended"
        except asyncio.CancelledError:
            self.state, self.reason = "stopped", "it was stopped by hand, or this gateway ends"
        except (ApiError, _NothingMeasured) as error:
            self.state, self.reason = "failed", str(error)
        except Exception:
            self.state, self.reason = "failed", "an error of this gateway; its log has it"
            log.exception("burst %s failed", self.id)
        finally:
            self._cancel([*self._measured, *self.requests])
            self._tell("burst_ended", f"{self.state}{f': {self.reason}' if self.reason else ''}")

    async def _measure(self) -> float:
        """Return the tokens per second that the service generates in as many bits as it can.

        Raises _NothingMeasured.
        """
        card, gateway = self._card, self._gateway
        best_kv = gateway.cluster.best_kv(card.model, time.monotonic())
        floor: Floor = "" if is_below(best_kv, card.best) else card.best
        per_second = [0] * int(MEASURED_S)
        self._began = time.monotonic()
        await self._send(fitted(at_once(), self._context()), self._measured, floor, per_second)
        await asyncio.sleep(MEASURED_S)
        self._cancel(self._measured)
        if not (rate := tokens_per_s(per_second)):
            refused = ", ".join(sorted({one.outcome for one in self._measured} - {SERVED, CANCELLED}))
            why = f" ({refused})" if refused else ""
            raise _NothingMeasured(f"no token was generated within {MEASURED_S:g} s{why}")
        await asyncio.sleep(PAUSE_S)
        return rate

    async def _send(
        self,
        planned: Sequence[PlannedRequest],
        sent: list[SentRequest],
        floor: Floor = "",
        per_second: list[int] | None = None,
    ) -> None:
        """Send each request when it is due. Raises ApiError while the gateway drains or Redis is away."""
        for one in planned:
            due = self._began + one.at_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._gateway.refuse_if_closed()
            sent.append(SentRequest(due, per_second))
            sent[-1].submit(self._gateway, self._request(one, due, floor))

    async def _wait(self) -> None:
        """Wait until all requests have ended, for DRAIN_S at most. Raises ApiError as `_send` does."""
        deadline = time.monotonic() + DRAIN_S
        while any(not one.outcome for one in self.requests) and time.monotonic() < deadline:
            self._gateway.refuse_if_closed()
            await asyncio.sleep(LOOK_S)

    def _request(self, one: PlannedRequest, due: float, floor: Floor) -> GenerationRequest:
        prompt = self._rng.choices(range(self._card.vocab_size), k=one.prompt_tokens)
        sampling = SamplingParams(
            max_tokens=one.output_tokens, seed=self._rng.getrandbits(62), temperature=0.0
        )
        return GenerationRequest(
            id=f"burst-{secrets.token_hex(12)}",
            model=self.model,
            prompt_token_ids=prompt,
            sampling=sampling,
            arrived=due,
            trace_id=f"burst-{self.id}",
            min_precision=floor,
            cache_salt=self.id,  # its prompts are those of every burst, and find none of the one before
        )

    def _context(self) -> int:
        return self._gateway.request_builder.context(self._card)

    def _cancel(self, requests: Sequence[SentRequest]) -> None:
        for one in requests:
            one.cancel(self._gateway)

    def _tell(self, kind: str, reason: str) -> None:
        numbers: dict[str, float] = {}
        if self.requests:
            numbers |= {"requests": len(self.requests), "served": self._count(SERVED)}
        for name, value in (self._ttft_s() or {}).items():
            numbers[f"ttft_{name}_s"] = value
        self._gateway.publish(kind, self.model, reason, numbers)

    def _count(self, *outcomes: str) -> int:
        return sum(one.outcome in outcomes for one in self.requests)

    def _ttft_s(self) -> dict[str, float] | None:
        """Return exact percentiles, of every first token so far."""
        found = [one.ttft_s for one in self.requests if one.ttft_s is not None]
        if not found:
            return None
        cuts = quantiles(found, n=20, method="inclusive") if len(found) > 1 else found * 19
        return {"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}

    def as_json(self) -> dict[str, Any]:
        """Return what the dashboard draws; of each request when it was due, its TTFT, and its outcome."""
        served = self._count(SERVED)
        is_playing = self.is_running and self.state != "measuring"
        return {
            "id": self.id,
            "model": self.model,
            "state": self.state,
            "reason": self.reason,
            "at": self._at,
            "seconds": self._order.seconds,
            "measured_s": 0.0 if self._order.tokens_per_s else MEASURED_S,
            "tokens_per_s": round(self._rate, 1),
            "planned": len(self.planned),
            "sent": len(self.requests),
            "served": served,
            "lost": len(self.requests) - served - self._count(""),
            "elapsed_s": round(time.monotonic() - self._began, 3) if is_playing else None,
            "ttft_s": self._ttft_s(),
            "requests": [_row(one, self._began) for one in self.requests],
        }


def _row(one: SentRequest, began: float) -> tuple[float, float | None, str]:
    ttft_s = one.ttft_s
    return round(one.due - began, 3), None if ttft_s is None else round(ttft_s, 4), one.outcome


def fitted(planned: Sequence[PlannedRequest], context: int) -> list[PlannedRequest]:
    """Return requests that fit a model whose context holds so many tokens, two at least."""
    prompts = ((one, min(one.prompt_tokens, context // 2)) for one in planned)
    return [PlannedRequest(one.at_s, num, min(one.output_tokens, context - num)) for one, num in prompts]
