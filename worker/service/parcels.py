"""The size of outputs on the bus, and outputs too large for one entry in parts. Pure.

An entry takes at most MOST_ENTRY_BYTES. So Redis, the gateway's event loop and its memory never meet one that
is larger, whatever a request asks for: log-probabilities of a prompt take 340 bytes a token with 20
alternatives, 11 MB for 32k tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from bus.messages import Delta, TokenLogprobs

MOST_ENTRY_BYTES: Final = 256 * 1024
ENTRY_BYTES: Final = 1024  # of an entry without deltas, at most
MOST_ERROR_CHARS: Final = 4096
# In msgpack, of a delta and of a token's scores without their lists, of a token id and of a float.
DELTA_BYTES, SCORE_BYTES, ID_BYTES, FLOAT_BYTES = 256, 80, 5, 9


def bytes_of(delta: Delta) -> int:
    """Return how many bytes a delta takes in an entry, at most."""
    texts = len(delta.request_id) + 4 * len(delta.error or "") + len(delta.embedding or b"")
    scores = bytes_of_scores(delta.logprobs or ()) + bytes_of_scores(delta.prompt_logprobs or ())
    return DELTA_BYTES + texts + ID_BYTES * len(delta.token_ids) + scores


def bytes_of_scores(scores: Sequence[TokenLogprobs | None]) -> int:
    """Return how many bytes log-probabilities take in an entry, at most."""
    num_top = sum(len(one.top_ids) for one in scores if one is not None)
    return SCORE_BYTES * len(scores) + (ID_BYTES + FLOAT_BYTES) * num_top


def parts_of(delta: Delta, most_bytes: int = MOST_ENTRY_BYTES - ENTRY_BYTES) -> Iterator[Delta]:
    """Yield a delta in parts of at most `most_bytes`: scores of the prompt first, the end with the last.

    An error's text is cut at MOST_ERROR_CHARS. One token and what belongs to it stay whole.
    """
    if delta.error is not None and len(delta.error) > MOST_ERROR_CHARS:
        delta = replace(delta, error=delta.error[:MOST_ERROR_CHARS])
    scores = delta.prompt_logprobs or []
    if bytes_of(delta) <= most_bytes or not scores:
        yield delta
        return
    bare = replace(delta, token_ids=[], finish_reason=None, error=None, logprobs=None, reject_reason=None)
    rest, room = replace(delta, prompt_logprobs=None, cached_tokens=0), most_bytes - DELTA_BYTES
    bare = replace(bare, prompt_logprobs=None, embedding=None)
    begin, size = 0, len(delta.request_id)
    for i, score in enumerate(scores):
        more = bytes_of_scores([score])
        if i > begin and size + more > room:
            yield _scored(bare, scores[begin:i], delta.prompt_index + begin)
            bare, begin, size = replace(bare, cached_tokens=0), i, len(delta.request_id)
        size += more
    yield _scored(bare, scores[begin:], delta.prompt_index + begin)
    yield replace(rest, prompt_index=delta.prompt_index + len(scores))


def _scored(bare: Delta, scores: Sequence[TokenLogprobs | None], index: int) -> Delta:
    return replace(bare, prompt_logprobs=list(scores), prompt_index=index)
