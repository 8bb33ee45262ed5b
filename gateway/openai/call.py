"""One HTTP call: its choices, and how their text reaches the client, in a stream or as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gateway.delivery.delivery import Delivery
from gateway.delivery.inflight import Flight
from gateway.errors import ApiError, slow_reader
from gateway.http.limits import Slot
from gateway.http.sse import DONE, EventStream, error_event
from gateway.openai.choice import Choice
from gateway.openai.formats import ChunkWriter, Envelope
from gateway.openai.logprobs import Entry
from gateway.text.vocabulary import Vocabulary


class Call:
    """`begun` is set when a worker began any of the choices, `ended` when all have ended; both also on
    failure (`error`) and when the client left (`is_abandoned`)."""

    is_stream = False

    def __init__(self, envelope: Envelope, vocabulary: Vocabulary, delivery: Delivery, slot: Slot) -> None:
        self.envelope = envelope
        self.vocabulary = vocabulary
        self.choices: list[Choice] = []
        self.flights: list[Flight] = []
        self.num_prompt_tokens = 0
        self.fingerprint = ""
        self.error: ApiError | None = None
        self.is_abandoned = False
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._delivery = delivery
        self._slot = slot
        self._num_open = 0

    def submit(self) -> None:
        """All choices, or none. Raises ApiError."""
        self._num_open = len(self.flights)
        try:
            for flight in self.flights:
                self._delivery.submit(flight)
        except ApiError:
            self._cancel_flights()
            raise

    def abandon(self) -> None:
        """The client left."""
        self.is_abandoned = True
        self._cancel_flights()
        self._wake()

    def fail(self, error: ApiError) -> None:
        """One choice failed: the call has."""
        if self.error is None and not self.ended.is_set():
            self.error = error
            self._cancel_flights()
            self.on_failed(error)
            self._wake()

    def on_admitted(self) -> None:
        self._slot.start_one()
        self.begun.set()

    def on_choice_end(self) -> None:
        self._num_open -= 1
        if self._num_open == 0 and self.error is None:
            self.on_all_ended()
            self._wake()

    def use_fingerprint(self, fingerprint: str) -> None:
        if fingerprint != self.fingerprint and fingerprint:
            self.fingerprint = fingerprint
            self.on_fingerprint(fingerprint)

    def usage(self) -> dict[str, int]:
        output = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.num_prompt_tokens + output,
        }

    def _cancel_flights(self) -> None:
        for flight in self.flights:
            self._delivery.cancel(flight)

    def _wake(self) -> None:
        self.begun.set()
        self.ended.set()

    # ------------------------------------------------------------------------------------- by kind

    def emit_text(self, index: int, text: str) -> None:
        """Text of a choice that goes on."""
        raise NotImplementedError

    def emit(self, index: int, text: str, entries: list[Entry], finish_reason: str | None) -> None:
        """The same with all that may come with it."""
        raise NotImplementedError

    def on_fingerprint(self, fingerprint: str) -> None:
        """What follows was made by this shape."""

    def on_all_ended(self) -> None:
        """Properly."""

    def on_failed(self, error: ApiError) -> None:
        """No choice will get any more."""

    def flush(self) -> None:
        """End of a batch of tokens."""


class StreamCall(Call):
    """Server-sent events. Until `open` they wait, so that a refusal can still have its own status."""

    is_stream = True

    def __init__(
        self, envelope: Envelope, vocabulary: Vocabulary, delivery: Delivery, slot: Slot, stream: EventStream
    ) -> None:
        super().__init__(envelope, vocabulary, delivery, slot)
        self.stream = stream
        self._writers: list[ChunkWriter] = []
        self._is_open = False

    def submit(self) -> None:
        self._writers = [ChunkWriter(self.envelope, choice.index) for choice in self.choices]
        for writer in self._writers:
            if (opening := writer.opening()) is not None:
                self.stream.push(opening)
        super().submit()

    def open(self) -> None:
        """The 200 is out."""
        self._is_open = True
        self.stream.open()

    def abandon(self) -> None:
        super().abandon()
        self.stream.on_lost()

    def emit_text(self, index: int, text: str) -> None:
        self.stream.push(self._writers[index].text(text))

    def emit(self, index: int, text: str, entries: list[Entry], finish_reason: str | None) -> None:
        logprobs = self.envelope.format.logprobs(entries, self.vocabulary) if entries else None
        track = self.choices[index].precision
        spans = track.spans() if track is not None and finish_reason is not None else None
        self.stream.push(self._writers[index].rich(text, logprobs, finish_reason, spans))

    def on_fingerprint(self, fingerprint: str) -> None:
        for writer in self._writers:
            writer.use(fingerprint)

    def on_all_ended(self) -> None:
        if self.envelope.has_usage:
            self.stream.push(self.envelope.usage_event(self.usage(), self.fingerprint))
        self.stream.push(DONE)

    def on_failed(self, error: ApiError) -> None:
        if self._is_open:
            self.stream.push(error_event(error))
            self.stream.push(DONE)

    def flush(self) -> None:
        self.stream.flush()
        if self.stream.is_over_limit:
            self.fail(slow_reader(self.stream.max_pending))


@dataclass(slots=True)
class _Whole:
    texts: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None


class WholeCall(Call):
    """One JSON object at the end."""

    def __init__(
        self,
        envelope: Envelope,
        vocabulary: Vocabulary,
        delivery: Delivery,
        slot: Slot,
        *,
        has_logprobs: bool,
    ) -> None:
        super().__init__(envelope, vocabulary, delivery, slot)
        self._has_logprobs = has_logprobs
        self._wholes: list[_Whole] = []

    def submit(self) -> None:
        self._wholes = [_Whole() for _ in self.choices]
        super().submit()

    def emit_text(self, index: int, text: str) -> None:
        self._wholes[index].texts.append(text)

    def emit(self, index: int, text: str, entries: list[Entry], finish_reason: str | None) -> None:
        whole = self._wholes[index]
        whole.texts.append(text)
        whole.entries += entries
        whole.finish_reason = finish_reason

    def answer(self) -> bytes:
        """JSON, once all has ended properly."""
        choices = [self._choice(index, whole) for index, whole in enumerate(self._wholes)]
        return self.envelope.whole(choices, self.usage(), self.fingerprint)

    def _choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        form = self.envelope.format
        logprobs = form.logprobs(whole.entries, self.vocabulary) if self._has_logprobs else None
        rest = {"logprobs": logprobs, "finish_reason": whole.finish_reason}
        track = self.choices[index].precision
        precision = {} if track is None else {"precision": track.spans()}
        return {"index": index} | form.text_field("".join(whole.texts)) | rest | precision
