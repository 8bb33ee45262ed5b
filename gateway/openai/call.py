"""One completion call: its requests, and how their text reaches the client, in a stream or as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bus.messages import Delta, StepOutput
from gateway.delivery.delivery import Delivery
from gateway.delivery.request import GenerationRequest
from gateway.errors import ApiError, slow_reader
from gateway.http.limits import Slot
from gateway.http.sse import DONE, EventStream
from gateway.openai.choice import ChoicePiece, ChoiceText
from gateway.openai.formats import AnswerHead, ChunkWriter, to_json
from gateway.openai.logprobs import chat_logprobs
from gateway.openai.params import CompletionBody
from gateway.openai.response_format import ResponseHead, ResponseWriter
from gateway.openai.tools.answer import AnswerForm, DeltaWriter, message_of
from gateway.openai.tools.call_reader import AnswerPart
from gateway.text.vocabulary import Vocabulary


class Completion:
    """The sink of a call's requests. `begun` and `ended` are also set on failure and when the client left."""

    is_stream = False

    def __init__(
        self,
        envelope: AnswerHead,
        requests: Sequence[GenerationRequest],
        vocabulary: Vocabulary,
        delivery: Delivery,
        slot: Slot,
        form: AnswerForm | None = None,
    ) -> None:
        """form: how thoughts and calls are told from content; None: all is content."""
        self.envelope, self.vocabulary, self.form = envelope, vocabulary, form
        self.choices = [ChoiceText(request, vocabulary, form) for request in requests]
        self.states = [delivery.new_state(request, self) for request in requests]
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.token_bytes = 0  # memory that an output token takes until the end
        self.fingerprint = ""
        self.error: ApiError | None = None
        self.is_abandoned = False
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._delivery, self._slot = delivery, slot
        self._num_open = 0

    def submit(self) -> None:
        """Submit every request, or none. Raises ApiError."""
        self._num_open = len(self.states)
        try:
            for state in self.states:
                self._delivery.submit(state)
        except ApiError:
            self._cancel()
            raise

    def abandon(self) -> None:
        """End everything: the client left, or has its answer."""
        self.is_abandoned = True
        self._cancel()
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Fail the call with the first of its requests that fails."""
        if self.error is None and not self.ended.is_set():
            self.error = error
            self._cancel()
            self._on_failed(error)
            self._wake()

    @property
    def queue_s(self) -> float | None:
        """Seconds from the arrival until a worker began any of the requests."""
        return self._first_s([state.began for state in self.states])

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token of any."""
        return self._first_s([state.first_token for state in self.states])

    def _first_s(self, times: list[float]) -> float | None:
        known = [at for at in times if at]
        return min(known) - self.states[0].request.arrived if known else None

    def usage(self) -> dict[str, Any]:
        """Return the tokens of the call; a prompt counts once, however many choices it has."""
        cached: dict[int, int] = {}
        for state in self.states:
            prompt = id(state.request.prompt_token_ids)
            cached[prompt] = min(cached.get(prompt, state.cached_tokens), state.cached_tokens)
        return self.usage_so_far() | {"prompt_tokens_details": {"cached_tokens": sum(cached.values())}}

    def usage_so_far(self) -> dict[str, Any]:
        """Return the numbers that every event of a stream can have."""
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _cancel(self) -> None:
        for state in self.states:
            self._delivery.cancel(state)

    def _wake(self) -> None:
        self.begun.set()
        self.ended.set()

    def on_admitted(self) -> None:
        self._slot.start_one()
        self.begun.set()

    def on_tokens(self, request: GenerationRequest, delta: Delta, skip: int, step: StepOutput | None) -> bool:
        if step is not None and step.fingerprint not in ("", self.fingerprint):
            self.fingerprint = step.fingerprint
            self._on_fingerprint(step.fingerprint)
        choice = self.choices[request.index]
        before = choice.num_tokens
        made = choice.decode(delta, skip, step)
        self.num_output_tokens += choice.num_tokens - before
        if made:
            self._emit(request.index, made)
        return isinstance(made, ChoicePiece) and made.is_cut

    def on_end(self) -> None:
        self._num_open -= 1
        if self._num_open == 0 and self.error is None:
            self._on_all_ended()
            self._wake()

    def flush(self) -> None:
        """Account for what a batch of tokens brought, and fail the call if that is too much."""
        self._hold(self.token_bytes * self.num_output_tokens)

    def _hold(self, num_bytes: int) -> None:
        try:
            self._slot.hold(num_bytes)
        except ApiError as error:
            self.fail(error)

    def _emit(self, index: int, made: str | ChoicePiece) -> None:
        raise NotImplementedError

    def _on_fingerprint(self, fingerprint: str) -> None:
        """Note the shape that makes what follows."""

    def _on_all_ended(self) -> None:
        """Note that every request ended without an error."""

    def _on_failed(self, error: ApiError) -> None:
        """Note that no choice gets more."""


class StreamedCompletion(Completion):
    """Server-sent events. They wait until `open`, so that a refusal can still have its own status."""

    is_stream = True

    def __init__(self, stream: EventStream, *args: Any) -> None:
        super().__init__(*args)
        self.stream = stream
        self._is_open = False

    def open(self) -> None:
        """Let events out: the status line and the headers are sent."""
        self._is_open = True
        self.stream.open()

    def abandon(self) -> None:
        super().abandon()
        self.stream.on_lost()

    def flush(self) -> None:
        """Write out what a batch of tokens brought; the client must take it."""
        self.stream.flush()
        if self.stream.is_over_limit:
            self.fail(slow_reader(self.stream.max_pending, self.stream.max_pending_mb))
        self._hold(self.stream.num_pending_bytes)

    def _on_failed(self, error: ApiError) -> None:
        if self._is_open:
            self.stream.push(self._failure(error))

    def _failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream in its middle."""
        raise NotImplementedError


class StreamedChoices(StreamedCompletion):
    """The chunks of completions and chats."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        usage = self.usage_so_far if self.envelope.has_running_usage else None
        self._writers = [ChunkWriter(self.envelope, index, usage) for index in range(len(self.choices))]
        self._deltas = [] if self.form is None else [DeltaWriter(self.form) for _ in self.choices]

    def submit(self) -> None:
        for opening in filter(None, (writer.opening() for writer in self._writers)):
            self.stream.push(opening)
        super().submit()

    def _emit(self, index: int, made: str | ChoicePiece) -> None:
        if isinstance(made, str):
            self.stream.push(self._writers[index].text(made))
            return
        writer = self._writers[index]
        delta: dict[str, Any] | None = None
        if self._deltas:
            *before, delta = [self._deltas[index].delta(part) for part in made.parts] or [{}]
            for one in before:
                self.stream.push(writer.rich("", None, None, delta=one))
        logprobs = self.envelope.format.logprobs(made.tokens, self.vocabulary) if made.tokens else None
        spans = self.choices[index].precision if made.finish_reason is not None else None
        self.stream.push(writer.rich(made.text, logprobs, made.finish_reason, spans, delta))

    def _on_fingerprint(self, fingerprint: str) -> None:
        for writer in self._writers:
            writer.use(fingerprint)

    def _on_all_ended(self) -> None:
        if self.envelope.has_usage:
            self.stream.push(self.envelope.usage_event(self.usage(), self.fingerprint))
        self.stream.push(DONE)

    def _failure(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % error.body() + DONE


class StreamedResponse(StreamedCompletion):
    """The events of /v1/responses. The last one says how it ended, so `[DONE]` does not follow."""

    envelope: ResponseHead

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._writer = ResponseWriter(self.envelope, self.form)

    def submit(self) -> None:
        self.stream.push(self._writer.opening())
        super().submit()

    def _emit(self, index: int, made: str | ChoicePiece) -> None:
        piece = ChoicePiece(made) if isinstance(made, str) else made
        if events := self._writer.take(_parts_of(piece), _scores_of(piece, self.vocabulary)):
            self.stream.push(events)

    def _on_all_ended(self) -> None:
        ended, precision = self.states[0].ended, self.choices[0].precision
        self.stream.push(self._writer.end(ended, self.usage(), self.fingerprint, precision))

    def _failure(self, error: ApiError) -> bytes:
        return self._writer.failure(error)


class WholeCompletion(Completion):
    """One JSON object at the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pieces: list[list[ChoicePiece]] = [[] for _ in self.choices]

    def answer(self) -> bytes:
        """Return the JSON. To be called when every request ended without an error."""
        choices = [self._choice(index, pieces) for index, pieces in enumerate(self._pieces)]
        return self.envelope.whole(choices, self.usage(), self.fingerprint)

    def _emit(self, index: int, made: str | ChoicePiece) -> None:
        self._pieces[index].append(ChoicePiece(made) if isinstance(made, str) else made)

    def _choice(self, index: int, pieces: list[ChoicePiece]) -> dict[str, Any]:
        form, precision = self.envelope.format, self.choices[index].precision
        text, tokens = "".join(one.text for one in pieces), [token for one in pieces for token in one.tokens]
        has_logprobs = self.states[index].request.sampling.logprobs is not None
        logprobs = form.logprobs(tokens, self.vocabulary) if has_logprobs else None
        rest = {"logprobs": logprobs, "finish_reason": pieces[-1].finish_reason if pieces else None}
        spans = {} if precision is None else {"precision": precision}
        fields = form.text_field(text)
        if self.form is not None:
            fields = {"message": message_of((part for one in pieces for part in one.parts), self.form)}
        return {"index": index} | fields | rest | spans


class WholeResponse(WholeCompletion):
    """The answer of /v1/responses, put together as that of a stream is."""

    envelope: ResponseHead

    def answer(self) -> bytes:
        (pieces,) = self._pieces
        writer = ResponseWriter(self.envelope, self.form)
        writer.opening()
        if self.form is None:  # then any division gives the same
            tokens = [token for one in pieces for token in one.tokens]
            pieces = [ChoicePiece("".join(one.text for one in pieces), tokens, pieces[-1].finish_reason)]
        for piece in pieces:
            writer.take(_parts_of(piece), _scores_of(piece, self.vocabulary))
        finish = pieces[-1].finish_reason
        writer.close(finish)
        precision = self.choices[0].precision
        return to_json(writer.ended(finish, self.usage(), self.fingerprint, precision))


class RankedCompletion(WholeCompletion):
    """The best samples of each prompt, by their mean log-probability."""

    def __init__(self, body: CompletionBody, *args: Any) -> None:
        super().__init__(*args)
        self._body = body

    def answer(self) -> bytes:
        body = self._body
        choices: list[dict[str, Any]] = []
        for first in range(0, len(self.choices), body.num_samples):
            samples = range(first, first + body.num_samples)
            best = sorted(samples, key=lambda sample: self.choices[sample].mean_logprob, reverse=True)
            for sample in best[: body.n]:
                choice = self._choice(sample, self._pieces[sample]) | {"index": len(choices)}
                choices.append(choice if body.logprobs is not None else choice | {"logprobs": None})
        return self.envelope.whole(choices, self.usage(), self.fingerprint)


def _parts_of(piece: ChoicePiece) -> Sequence[AnswerPart]:
    """Return a piece as parts: where no form divides an answer, its text is content."""
    return [*piece.parts, AnswerPart("content", piece.text)] if piece.text else piece.parts


def _scores_of(piece: ChoicePiece, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the log-probabilities of a piece's tokens, as a chat has them."""
    content: list[dict[str, Any]] = chat_logprobs(piece.tokens, vocabulary)["content"]
    return content
