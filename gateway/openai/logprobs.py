"""Log-probabilities, released together with the text they belong to.

`offset` counts characters of the choice's text: `text[offset:]` begins with the token, echoes included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bus.messages import TokenLogprobs
from gateway.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its scores: None for the first token of a prompt, which nothing precedes."""

    token_id: int
    values: TokenLogprobs | None
    offset: int
    end: int  # offset after its last whole character


class LogprobQueue:
    """Scored tokens in order, whose text is not out yet."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[ScoredToken] = deque()

    def add(self, token_id: int, values: TokenLogprobs | None, offset: int, end: int) -> None:
        self._waiting.append(ScoredToken(token_id, values, offset, end))

    def release(self, num_chars_out: int) -> list[ScoredToken]:
        """Return the tokens whose text is out."""
        out: list[ScoredToken] = []
        while self._waiting and self._waiting[0].end <= num_chars_out:
            out.append(self._waiting.popleft())
        return out

    def finish(self, num_chars_out: int, is_cut: bool) -> list[ScoredToken]:
        """Return the rest; if a stop string cut the text, without the tokens after the cut."""
        rest = [token for token in self._waiting if not is_cut or token.offset < num_chars_out]
        self._waiting.clear()
        return rest


def completion_logprobs(tokens: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the object of /v1/completions: four parallel lists."""
    return {
        "tokens": [vocabulary.label(token.token_id) for token in tokens],
        "token_logprobs": [token.values.logprob if token.values else None for token in tokens],
        "top_logprobs": [_by_label(token.values, vocabulary) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_label(values: TokenLogprobs | None, vocabulary: Vocabulary) -> dict[str, float] | None:
    if values is None:
        return None
    pairs = zip(values.top_ids, values.top_logprobs, strict=True)
    found = {vocabulary.label(token_id): logprob for token_id, logprob in pairs}
    found.setdefault(vocabulary.label(values.token_id), values.logprob)
    return found


def chat_logprobs(tokens: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the object of /v1/chat/completions: a list of objects with each token's exact bytes."""

    def scored(token_id: int, logprob: float) -> dict[str, Any]:
        data = list(vocabulary.bytes_of(token_id))
        return {"token": vocabulary.label(token_id), "logprob": logprob, "bytes": data}

    content = [
        scored(one.token_id, one.logprob) | {"top_logprobs": list(map(scored, one.top_ids, one.top_logprobs))}
        for one in (token.values for token in tokens)
        if one is not None
    ]
    return {"content": content, "refusal": None}
