"""The formats of completions and chat completions, whole and in chunks.

Everything around the text is built once per choice and fingerprint; per token only text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.openai.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from gateway.text.vocabulary import Vocabulary

to_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Format:
    """The format of one endpoint's answers."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    logprobs: Callable[[Sequence[ScoredToken], Vocabulary], dict[str, Any]]
    text_field: Callable[[str], dict[str, Any]]  # field for a choice's whole text
    chunk_before: bytes  # the text of a chunk
    chunk_after: bytes
    empty: bytes  # field of a chunk without text
    opening: bytes | None  # field of the chunk before any text


COMPLETION = Format(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    logprobs=completion_logprobs,
    text_field=lambda text: {"text": text},
    chunk_before=b'"text":',
    chunk_after=b"",
    empty=b'"text":""',
    opening=None,
)
CHAT = Format(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    logprobs=chat_logprobs,
    text_field=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    chunk_before=b'"delta":{"content":',
    chunk_after=b"}",
    empty=b'"delta":{}',
    opening=b'"delta":{"role":"assistant","content":""}',
)
# A chat with one choice, whose answer `gateway.openai.response_format` has in another form.
RESPONSE = replace(CHAT, id_prefix="resp_", whole_object="response")
# Prompts without choices, whose answer `gateway.openai.embeddings` writes.
EMBEDDING = replace(COMPLETION, id_prefix="embd-", whole_object="list")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every chunk of a call repeats."""

    format: Format
    id: str
    created: int
    model: str
    has_usage: bool  # chunks then carry "usage": null, and the last one the numbers
    has_running_usage: bool = False  # chunks carry the numbers so far

    def _fields(self, kind: str, fingerprint: str) -> dict[str, Any]:
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return fields | {"system_fingerprint": fingerprint or None}

    def start(self, fingerprint: str) -> bytes:
        return b"data: " + to_json(self._fields(self.format.chunk_object, fingerprint))[:-1]

    def usage_event(self, usage: dict[str, Any], fingerprint: str) -> bytes:
        return self.start(fingerprint) + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], fingerprint: str) -> bytes:
        fields = self._fields(self.format.whole_object, fingerprint)
        return to_json(fields | {"choices": choices, "usage": usage})


class ChunkWriter:
    """Writes the events of one choice."""

    def __init__(
        self, envelope: AnswerHead, index: int, usage: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """usage: the numbers so far, which every event then has."""
        self._envelope, self._index, self._usage = envelope, index, usage
        self._event_end = b'}],"usage":null}\n\n' if envelope.has_usage else b"}]}\n\n"
        self._after = envelope.format.chunk_after
        self._plain = self._after + b',"logprobs":null,"finish_reason":null'
        self.use(fingerprint="")

    def _end(self) -> bytes:
        return b'}],"usage":' + to_json(self._usage()) + b"}\n\n" if self._usage else self._event_end

    def use(self, fingerprint: str) -> None:
        """Name this shape in the chunks from now on."""
        self._start = self._envelope.start(fingerprint) + b',"choices":[{"index":%d,' % self._index
        self._before = self._start + self._envelope.format.chunk_before

    def text(self, text: str) -> bytes:
        return self._before + to_json(text) + self._plain + self._end()

    def opening(self) -> bytes | None:
        """Return a chat's first event, with the role; None for completions."""
        opening = self._envelope.format.opening
        return opening and self._start + opening + b',"logprobs":null,"finish_reason":null' + self._end()

    def rich(
        self,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        precision: list[dict[str, Any]] | None = None,
        delta: dict[str, Any] | None = None,
    ) -> bytes:
        """Return an event with any combination. At a finish without text a chat's delta is empty.

        delta: a chat's, instead of one with the text.
        """
        body = self._start + self._envelope.format.empty
        if delta is not None:
            body = self._start + b'"delta":' + to_json(delta)
        elif text or finish_reason is None:
            body = self._before + to_json(text) + self._after
        rest = b',"logprobs":' + to_json(logprobs) + b',"finish_reason":' + to_json(finish_reason)
        if precision is not None:
            rest += b',"precision":' + to_json(precision)
        return body + rest + self._end()
