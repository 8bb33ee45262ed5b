"""The form of an answer beside its content, and its parts as they are written: whole, and as deltas."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.openai.tools.call_reader import AnswerPart
from gateway.openai.tools.formats import Thought, ToolFormat
from gateway.openai.tools.parser import AnswerParser

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How to divide the answers of one call; the same for all its choices."""

    tools: ToolFormat | None = None  # None: it calls none
    names: frozenset[str] = frozenset()  # of the tools that may be called
    thought: Thought | None = None
    is_thinking: bool = False  # the prompt ended with the marker that begins a thought
    max_calls: int | None = None
    id_chars: int = 24
    markers: Mapping[int, str] = field(default_factory=dict)  # special tokens that the text must keep, by id

    def without_thoughts(self) -> AnswerForm | None:
        """Return the form in which thoughts are content; None if no tools can be called, either."""
        if self.tools is None:
            return None
        markers = {number: text for number, text in self.markers.items() if text in self.tools.markers}
        return replace(self, thought=None, is_thinking=False, markers=markers)

    def parser(self) -> AnswerParser:
        return AnswerParser(
            self.tools, self.names, self.thought, is_thinking=self.is_thinking, max_calls=self.max_calls
        )

    def new_id(self) -> str:
        """Return an id for a call: letters and digits that nobody guesses twice."""
        text = "".join(secrets.choice(_ALPHABET) for _ in range(self.id_chars))
        return text if self.id_chars < 24 else f"call_{text}"


class DeltaWriter:
    """The deltas of one choice: it numbers the calls."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._index = -1

    def delta(self, part: AnswerPart) -> dict[str, Any]:
        """Return the fields of a chunk's delta. A call's id and name come once, before its arguments."""
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.kind == "arguments":
            return {"tool_calls": [{"index": self._index, "function": {"arguments": part.text}}]}
        self._index += 1
        return {"tool_calls": [{"index": self._index} | _call(self._form, part.text)]}


def message_of(parts: Iterable[AnswerPart], form: AnswerForm) -> dict[str, Any]:
    """Return an answer's message. Its content is null if there is none beside calls."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, []))
        elif part.kind == "arguments":
            calls[-1][1].append(part.text)
        else:
            texts[part.kind].append(part.text)
    content, reasoning = "".join(texts["content"]), "".join(texts["reasoning"])
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [_call(form, name, "".join(pieces)) for name, pieces in calls]
    return message


def _call(form: AnswerForm, name: str, arguments: str = "") -> dict[str, Any]:
    return {"id": form.new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
