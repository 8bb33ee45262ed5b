"""The two shapes of answer: completions and chat completions, whole and in chunks.

A chunk of plain text is what the gateway writes most, so everything around the text is put together once per
choice and fingerprint; per token only the text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.openai.logprobs import Entry, chat_logprobs, completion_logprobs
from gateway.text.vocabulary import Vocabulary

to_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Format:
    """`text_field` and `chunk_field` wrap a choice's text; `opening` is what a chunk carries before any
    text; `empty` a chunk that has none."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    logprobs: Callable[[list[Entry], Vocabulary], dict[str, Any]]
    text_field: Callable[[str], dict[str, Any]]
    chunk_before: bytes
    chunk_after: bytes
    empty: bytes
    opening: bytes | None


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


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of a call repeats."""

    format: Format
    id: str
    created: int
    model: str
    has_usage: bool  # chunks then carry "usage": null, and the last one the numbers

    def start(self, fingerprint: str) -> bytes:
        fields = {
            "id": self.id,
            "object": self.format.chunk_object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint or None,
        }
        return b"data: " + to_json(fields)[:-1]

    def usage_event(self, usage: dict[str, int], fingerprint: str) -> bytes:
        return self.start(fingerprint) + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int], fingerprint: str) -> bytes:
        fields = {
            "id": self.id,
            "object": self.format.whole_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": fingerprint or None,
        }
        return to_json(fields)


class ChunkWriter:
    """Events of one choice."""

    __slots__ = (
        "_after",
        "_before",
        "_empty",
        "_envelope",
        "_event_end",
        "_plain_end",
        "_start",
        "fingerprint",
        "index",
    )

    def __init__(self, envelope: Envelope, index: int) -> None:
        self._envelope = envelope
        self.index = index
        self._event_end = b'}],"usage":null}\n\n' if envelope.has_usage else b"}]}\n\n"
        self._after = envelope.format.chunk_after
        self._plain_end = self._after + b',"logprobs":null,"finish_reason":null' + self._event_end
        self.use(fingerprint="")

    def use(self, fingerprint: str) -> None:
        """From now on chunks name this shape."""
        self.fingerprint = fingerprint
        self._start = self._envelope.start(fingerprint) + b',"choices":[{"index":%d,' % self.index
        self._before = self._start + self._envelope.format.chunk_before

    def text(self, text: str) -> bytes:
        return self._before + to_json(text) + self._plain_end

    def opening(self) -> bytes | None:
        """Chat: the role."""
        opening = self._envelope.format.opening
        return opening and self._start + opening + b',"logprobs":null,"finish_reason":null' + self._event_end

    def rich(
        self,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        precision: list[dict[str, Any]] | None = None,
    ) -> bytes:
        """Any combination. At a finish without text a chat's delta is empty."""
        has_text = text or (finish_reason is None)
        body = (
            self._before + to_json(text) + self._after
            if has_text
            else self._start + self._envelope.format.empty
        )
        rest = b',"logprobs":' + to_json(logprobs) + b',"finish_reason":' + to_json(finish_reason)
        if precision is not None:
            rest += b',"precision":' + to_json(precision)
        return body + rest + self._event_end
