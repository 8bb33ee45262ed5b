"""POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/embeddings as plain ASGI.

The order of the steps is that of their cost: key, draining, rate, slot, then body, tokens and worker.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from bus.api_keys import ANONYMOUS, ApiKey
from gateway.errors import JSON, ApiError, wrong_method
from gateway.http.auth import check_api
from gateway.http.body import ClientLeft, Receive, Scope, Send, read_body
from gateway.http.connection import EXTENSION, ClientSocket
from gateway.http.limits import KeyUse, Slot
from gateway.http.sse import HEADERS, EventStream
from gateway.openai.budget import CallBytes
from gateway.openai.call import (
    Completion,
    RankedCompletion,
    StreamedChoices,
    StreamedCompletion,
    StreamedResponse,
    WholeCompletion,
    WholeResponse,
)
from gateway.openai.embeddings import EmbeddingsBody, EmbeddingsCall
from gateway.openai.formats import AnswerHead, Format
from gateway.openai.intake import Prompt
from gateway.openai.params import CallBody, ChatBody, CompletionBody
from gateway.openai.parsing import parse, prompts
from gateway.openai.request_log import CLIENT_LEFT, RequestLog
from gateway.openai.response_format import ResponseHead
from gateway.openai.responses import ResponsesBody
from gateway.state import Gateway

if TYPE_CHECKING:
    from gateway.tracing.tracer import CallTrace

# What a body may ask for. All but the first two stand for one of these.
Asked = CompletionBody | ChatBody | ResponsesBody | EmbeddingsBody

# For a client to take what is left after the last token.
DRAIN_S = 30.0


class CompletionsEndpoint:
    """An ASGI app. It raises refusals as ApiError before anything was sent; `gateway.app` answers them."""

    def __init__(
        self,
        gateway: Gateway,
        form: Format,
        body: type[Asked],
    ) -> None:
        self._gateway, self._format, self._body = gateway, form, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        log: RequestLog = scope["state"]["log"]
        if scope["method"] != "POST":
            raise wrong_method(scope["method"], scope["path"], "POST")
        key = ANONYMOUS
        trace = gateway.tracer.begin(scope, log.arrived) if gateway.tracer is not None else None
        try:
            key = check_api(gateway.keys, scope["headers"], gateway.settings.gateway.cors_origins)
            gateway.refuse_if_closed()
            with gateway.rate.enter(key) as use:
                slot = gateway.admission.reserve(key.id, key.weight)
                try:
                    await self._serve(scope, receive, send, slot, key, use, trace)
                finally:
                    slot.release()
        except ClientLeft:
            log.status = CLIENT_LEFT
        except ApiError as error:
            gateway.stats.admission_rejections[error.code or "other"] += 1
            if key.id:
                gateway.stats.key_rejections[key.name] += 1
            log.refused(error)
            raise
        except Exception:
            log.status = 500
            raise
        finally:
            if trace is not None:
                trace.end(log)

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        slot: Slot,
        key: ApiKey,
        use: KeyUse,
        trace: CallTrace | None,
    ) -> None:
        log = scope["state"]["log"]
        with slot.awaiting_body():
            data = await read_body(scope["headers"], receive, self._gateway.settings.gateway)
        socket: ClientSocket = scope["extensions"][EXTENSION]
        call = log.call = await self._call(data, slot, key, socket, log)
        if trace is not None:
            trace.follow(call.states)
        use.take_prompts(sum(len(state.request.prompt_token_ids) for state in call.states))
        headers = [(name.encode(), value.encode()) for name, value in use.headers.items()]
        if socket.is_lost:  # lost while the prompt was tokenised
            raise ClientLeft
        slot.watch(call.fail)
        socket.on_lost = call.abandon
        try:
            call.submit()
            if isinstance(call, StreamedCompletion):
                await self._stream(call, socket, send, headers)
            elif isinstance(call, WholeCompletion):
                await self._whole(call, send, headers)
        finally:
            socket.release()
            call.abandon()
            use.take_output(call.num_output_tokens)

    async def _call(
        self, data: bytes, slot: Slot, key: ApiKey, socket: ClientSocket, log: RequestLog
    ) -> Completion:
        gateway, form = self._gateway, self._format
        asked: Asked = parse(self._body, data)
        body: CallBody = asked if isinstance(asked, CompletionBody | ChatBody) else asked.as_call()
        card = gateway.models.card(body.model)
        context = gateway.request_builder.context(card)
        given: list[Prompt] = [""]
        if isinstance(body, CompletionBody):
            field = "input" if isinstance(asked, EmbeddingsBody) else "prompt"
            given = prompts(body.prompt, context, field)
        slot.grow(len(given) * body.num_samples)
        tokenizer = await gateway.models.tokenizer(card)
        call_id = form.id_prefix + secrets.token_hex(12)
        build = gateway.request_builder.build
        try:
            requests, form_of_answers = await build(body, given, context, card, tokenizer, call_id, log, key)
        except ApiError as error:
            if not isinstance(asked, CompletionBody | ChatBody):
                error.param = asked.NAMES.get(error.param or "", error.param)
            raise
        if isinstance(asked, ResponsesBody) and form_of_answers is not None:
            form_of_answers = form_of_answers.without_thoughts()
        if isinstance(asked, EmbeddingsBody):
            requests = [replace(one, embeds=True) for one in requests]
        cost = CallBytes.of(requests, body.num_samples, form, is_stream=body.stream)
        cost.refuse_above(gateway.settings.gateway.max_call_mb)
        slot.take_bytes(cost.sure)
        gateway.stats.models[body.model].request_params_n.observe(body.n)
        if isinstance(body, ChatBody):
            gateway.stats.ignored_message_fields += sum(message.num_ignored for message in body.messages)
        options = body.stream_options
        is_running = options.include_usage and options.continuous_usage_stats
        head = form, call_id, int(time.time()), body.model, options.include_usage, is_running
        envelope = ResponseHead(*head, body=asked) if isinstance(asked, ResponsesBody) else AnswerHead(*head)
        needs = envelope, requests, tokenizer.vocabulary, gateway.delivery, slot, form_of_answers
        call: Completion
        if body.stream:
            section = gateway.settings.gateway
            stream = EventStream(socket, section.stream_buffer_tokens, section.max_call_mb)
            kind = StreamedResponse if isinstance(asked, ResponsesBody) else StreamedChoices
            call = kind(stream, *needs)
        elif isinstance(asked, ResponsesBody):
            call = WholeResponse(*needs)
        elif isinstance(asked, EmbeddingsBody):
            call = EmbeddingsCall(asked.encoding_format, *needs)
        elif isinstance(body, CompletionBody) and body.is_ranked:
            call = RankedCompletion(body, *needs)
        else:
            call = WholeCompletion(*needs)
        call.token_bytes = cost.per_token
        call.num_prompt_tokens = sum(len(one.prompt_token_ids) for one in requests[:: body.num_samples])
        return call

    async def _stream(
        self, call: StreamedCompletion, socket: ClientSocket, send: Send, extra: Iterable[tuple[bytes, bytes]]
    ) -> None:
        await call.begun.wait()
        _raise_if_refused(call)
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *extra]})
        call.open()
        with self._gateway.streams.kept_alive(call.stream):
            await call.ended.wait()
            if not await call.stream.drained(DRAIN_S):
                socket.transport.abort()
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, call: WholeCompletion, send: Send, extra: Iterable[tuple[bytes, bytes]]) -> None:
        await call.ended.wait()
        _raise_if_refused(call)
        answer = call.answer()
        headers = [JSON, (b"content-length", b"%d" % len(answer)), *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def _raise_if_refused(call: Completion) -> None:
    """Raise the error of a call that failed before anything was sent; ClientLeft if the client left."""
    if call.error is not None:
        raise call.error
    if call.is_abandoned:
        raise ClientLeft
