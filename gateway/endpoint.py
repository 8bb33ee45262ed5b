"""POST /v1/completions and /v1/chat/completions as plain ASGI.

The order of the steps is the order of their cost: key, draining, rate, slot, and only then body, tokens and
worker. A slot is held from before the body is read until the answer is out.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from gateway.delivery.inflight import Flight
from gateway.errors import JSON, ApiError, wrong_method
from gateway.http.body import ClientLeft, Receive, Scope, Send, check_content_type, read_body
from gateway.http.connection import EXTENSION, Link
from gateway.http.limits import Slot
from gateway.http.sse import HEADERS, EventStream
from gateway.openai.call import Call, StreamCall, WholeCall
from gateway.openai.choice import Choice, Echo
from gateway.openai.ended import CLIENT_LEFT, Ended
from gateway.openai.formats import CHAT, COMPLETION, Envelope, Format
from gateway.openai.intake import Order, Prompt
from gateway.openai.params import ChatBody, CompletionBody, SamplingBody
from gateway.openai.parsing import parse, prompts
from gateway.openai.precision import PrecisionTrack
from gateway.state import Gateway
from gateway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gateway.tracing.tracer import Trace

log = logging.getLogger("gateway")

# For a client to take what is left after the last token.
DRAIN_S = 30.0


class Api(Protocol):
    """What differs between the two calls."""

    format: Format

    async def order(self, gateway: Gateway, data: bytes, slot: Slot) -> tuple[SamplingBody, Order, Tokenizer]:
        """Raises ApiError."""


class Completions:
    format = COMPLETION

    async def order(self, gateway: Gateway, data: bytes, slot: Slot) -> tuple[SamplingBody, Order, Tokenizer]:
        body = parse(CompletionBody, data)
        card = gateway.models.card(body.model)
        texts = prompts(body.prompt, gateway.intake.context(card))
        slot.grow(len(texts) * body.n)
        tokenizer = await gateway.models.tokenizer(card)
        return body, await gateway.intake.completion(body, texts, card, tokenizer), tokenizer


class Chat:
    format = CHAT

    async def order(self, gateway: Gateway, data: bytes, slot: Slot) -> tuple[SamplingBody, Order, Tokenizer]:
        body = parse(ChatBody, data)
        card = gateway.models.card(body.model)
        slot.grow(body.n)
        tokenizer = await gateway.models.tokenizer(card)
        return body, await gateway.intake.chat(body, card, tokenizer), tokenizer


class Endpoint:
    """An ASGI app. Refusals raise ApiError before anything was sent; `gateway.app` makes answers of them."""

    def __init__(self, gateway: Gateway, api: Api) -> None:
        self._gateway = gateway
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        arrived = time.monotonic()
        if scope["method"] != "POST":
            raise wrong_method(scope["method"], scope["path"], "POST")
        trace = gateway.tracer.begin(scope, arrived) if gateway.tracer is not None else None
        ended = Ended(scope["state"]["request_id"], scope["path"], arrived)
        try:
            key = gateway.keys.check(scope["headers"])
            gateway.refuse_if_closed()
            with gateway.rate.enter(key) as rate_headers:
                slot = gateway.admission.reserve()
                try:
                    await self._serve(scope, receive, send, slot, arrived, rate_headers, ended, trace)
                finally:
                    slot.release()
        except ClientLeft:
            ended.status = CLIENT_LEFT
        except ApiError as error:
            gateway.stats.rejections[error.code or "other"] += 1
            ended.refused(error)
            raise
        except Exception:
            ended.status = 500
            raise
        finally:
            ended.log()
            if trace is not None:
                trace.end(ended)

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        slot: Slot,
        arrived: float,
        extra: dict[str, str],
        ended: Ended,
        trace: Trace | None,
    ) -> None:
        gateway = self._gateway
        settings = gateway.settings.gateway
        check_content_type(scope["headers"])
        data = await read_body(
            scope["headers"], receive, max_bytes=settings.max_body_bytes, timeout_s=settings.header_timeout_s
        )
        body, order, tokenizer = await self._api.order(gateway, data, slot)
        link: Link = scope["extensions"][EXTENSION]
        call = self._call(body, order, tokenizer, slot, link)
        self._fill(call, body, order, tokenizer, arrived, scope["state"]["request_id"])
        ended.call = call
        if trace is not None:
            trace.follow(call.flights)
        headers = [(name.encode(), value.encode()) for name, value in extra.items()]
        if link.is_lost:  # while the prompt was tokenised
            raise ClientLeft
        link.on_lost = call.abandon
        try:
            call.submit()
            if isinstance(call, StreamCall):
                await self._stream(call, link, send, headers)
            elif isinstance(call, WholeCall):
                await self._whole(call, send, headers)
        finally:
            link.release()
            call.abandon()

    def _call(self, body: SamplingBody, order: Order, tokenizer: Tokenizer, slot: Slot, link: Link) -> Call:
        gateway = self._gateway
        form = self._api.format
        has_usage = body.stream_options.include_usage
        envelope = Envelope(
            form, form.id_prefix + secrets.token_hex(12), int(time.time()), body.model, has_usage
        )
        vocabulary = tokenizer.vocabulary
        if body.stream:
            stream = EventStream(link, gateway.settings.gateway.stream_buffer_tokens)
            return StreamCall(envelope, vocabulary, gateway.delivery, slot, stream)
        has_logprobs = order.logprobs is not None
        return WholeCall(envelope, vocabulary, gateway.delivery, slot, has_logprobs=has_logprobs)

    def _fill(
        self,
        call: Call,
        body: SamplingBody,
        order: Order,
        tokenizer: Tokenizer,
        arrived: float,
        trace_id: str,
    ) -> None:
        """Choices and flights: of each prompt `n`, numbered as OpenAI does."""
        params = [order.params(choice) for choice in range(order.n)]
        self._gateway.stats.of(body.model).request_params_n.observe(order.n)
        call.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in order.prompts)
        for prompt in order.prompts:
            for sampling in params:
                index = len(call.choices)
                choice = Choice(
                    call,
                    index,
                    tokenizer.vocabulary,
                    stops=body.stop,
                    stop_token_ids=order.stop_token_ids,
                    has_logprobs=order.logprobs is not None,
                    echo=_echo(prompt, tokenizer) if order.has_echo else None,
                    wants_output=order.wants_output,
                    precision=PrecisionTrack() if body.return_precision else None,
                )
                flight = Flight(
                    request_id=f"{call.envelope.id}-{index}",
                    model=body.model,
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    sink=choice,
                    arrived=arrived,
                    deadline=arrived + self._gateway.settings.gateway.queue_timeout_s,
                    trace_id=trace_id,
                    min_precision=body.min_precision or "",
                    waits_for_precision=body.min_precision_wait,
                )
                call.choices.append(choice)
                call.flights.append(flight)

    async def _stream(
        self, call: StreamCall, link: Link, send: Send, extra: Iterable[tuple[bytes, bytes]]
    ) -> None:
        await call.begun.wait()
        _raise_if_refused(call)
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *extra]})
        call.open()
        with self._gateway.streams.kept_alive(call.stream):
            await call.ended.wait()
            if not await call.stream.drained(DRAIN_S):
                link.transport.abort()
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, call: WholeCall, send: Send, extra: Iterable[tuple[bytes, bytes]]) -> None:
        await call.ended.wait()
        _raise_if_refused(call)
        answer = call.answer()
        headers = [JSON, (b"content-length", b"%d" % len(answer)), *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def _raise_if_refused(call: Call) -> None:
    """Raises what failed before anything was sent; ClientLeft where there is nobody to tell."""
    if call.error is not None:
        raise call.error
    if call.is_abandoned:
        raise ClientLeft


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> Echo:
    text = prompt.text if prompt.text is not None else tokenizer.vocabulary.text_of(prompt.token_ids)
    return Echo(text, prompt.token_ids)
