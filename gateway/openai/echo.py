"""The prompt of a choice that echoes it: as a whole, or in parts with the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import TokenLogprobs
from gateway.openai.logprobs import LogprobQueue
from gateway.text.vocabulary import TextStream, Vocabulary


class PromptEcho:
    """The text of a prompt on its way out, as the client wrote it."""

    def __init__(self, text: str, token_ids: Sequence[int], vocabulary: Vocabulary) -> None:
        self.text = text
        self._token_ids, self._vocabulary = token_ids, vocabulary
        self._stream = TextStream(vocabulary)
        self._num_scored = 0  # tokens
        self._num_out = 0  # characters given out, which end with these tokens

    def take(self, values: Sequence[TokenLogprobs | None], scores: LogprobQueue) -> str:
        """Queue the scores of the next tokens, and return their text."""
        begin, first = self._num_out, self._num_scored
        self._num_scored = min(first + len(values), len(self._token_ids))
        for token_id, value in zip(self._token_ids[first : self._num_scored], values, strict=False):
            end = self._end_of(token_id)
            scores.add(token_id, value, self._num_out, end)
            self._num_out = end
        return self.text[begin : self._num_out]

    def rest(self, scores: LogprobQueue | None) -> str:
        """Return the text that is not out yet; tokens without scores have None."""
        begin = self._num_out
        if scores is not None:
            self.take([None] * (len(self._token_ids) - self._num_scored), scores)
        self._num_out = len(self.text)
        return self.text[begin:]

    def _end_of(self, token_id: int) -> int:
        """Return where a token's text ends, which begins at `_num_out`."""
        at, text = self._num_out, self.text
        piece = self._stream.feed(token_id)
        if not piece and text.startswith(label := self._vocabulary.label(token_id), at):
            piece = label  # a special token, which the client wrote out
        if at == 0 and self._vocabulary.is_sentencepiece and not text.startswith(" "):
            piece = piece.removeprefix(" ")  # SentencePiece puts a space before the first word
        return min(at + len(piece), len(text))
