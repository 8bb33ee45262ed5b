"""Log-probabilities beside the text they belong to.

Text is held back for unfinished characters and possible stop strings; the entries of its tokens wait with it.
`offset` counts characters of the choice's text, the echoed prompt included, so that `text[offset:]` begins
with the token (with the character it is part of, where a character spans several tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from bus.messages import TokenLogprobs
from gateway.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Entry:
    """`values` is None for the first token of a prompt, which nothing precedes."""

    token_id: int
    values: TokenLogprobs | None
    offset: int
    end: int  # offset behind its last whole character


class LogprobTrack:
    """Entries in order, given out when the text of their tokens is."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()

    def add(self, token_id: int, values: TokenLogprobs | None, offset: int, end: int) -> None:
        self._waiting.append(Entry(token_id, values, offset, end))

    def release(self, num_chars_out: int) -> list[Entry]:
        """Of the tokens whose text is out."""
        out: list[Entry] = []
        while self._waiting and self._waiting[0].end <= num_chars_out:
            out.append(self._waiting.popleft())
        return out

    def finish(self, num_chars_out: int, is_cut: bool) -> list[Entry]:
        """All the rest; where a stop string cut the text, without the tokens behind the cut."""
        rest = [entry for entry in self._waiting if not is_cut or entry.offset < num_chars_out]
        self._waiting.clear()
        return rest


def completion_logprobs(entries: list[Entry], vocabulary: Vocabulary) -> dict[str, Any]:
    """The shape of /v1/completions: four parallel lists."""
    return {
        "tokens": [vocabulary.label(entry.token_id) for entry in entries],
        "token_logprobs": [entry.values.logprob if entry.values else None for entry in entries],
        "top_logprobs": [_by_label(entry.values, vocabulary) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_label(values: TokenLogprobs | None, vocabulary: Vocabulary) -> dict[str, float] | None:
    if values is None:
        return None
    pairs = zip(values.top_ids, values.top_logprobs, strict=True)
    found = {vocabulary.label(token_id): logprob for token_id, logprob in pairs}
    found.setdefault(vocabulary.label(values.token_id), values.logprob)
    return found


def chat_logprobs(entries: list[Entry], vocabulary: Vocabulary) -> dict[str, Any]:
    """The shape of /v1/chat/completions: a list of objects with the token's exact bytes."""
    return {
        "content": [_chat_entry(entry.values, vocabulary) for entry in entries if entry.values],
        "refusal": None,
    }


def _chat_entry(values: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    pairs = zip(values.top_ids, values.top_logprobs, strict=True)
    top = [_chat_token(token_id, logprob, vocabulary) for token_id, logprob in pairs]
    return _chat_token(values.token_id, values.logprob, vocabulary) | {"top_logprobs": top}


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.bytes_of(token_id)
    return {"token": vocabulary.label(token_id), "logprob": logprob, "bytes": list(data)}
