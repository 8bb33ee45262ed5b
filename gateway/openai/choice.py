"""The text of one choice, made from its tokens: stop strings, echo, log-probabilities, precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bus.messages import Delta, StepOutput, TokenLogprobs
from gateway.delivery.request import GenerationRequest
from gateway.openai.echo import PromptEcho
from gateway.openai.logprobs import LogprobQueue, ScoredToken
from gateway.openai.tools.answer import AnswerForm
from gateway.openai.tools.call_reader import AnswerPart
from gateway.openai.tools.parser import AnswerParser, merged
from gateway.text.stops import StopMatcher
from gateway.text.vocabulary import TextStream, Vocabulary


class ChoicePiece(NamedTuple):
    """Text with all that may come with it. `is_cut`: a stop string ended it, or the last call that may come.

    `parts`: the text, where thoughts and calls are told from content; `text` is then empty.
    """

    text: str
    tokens: Sequence[ScoredToken] = ()
    finish_reason: str | None = None
    is_cut: bool = False
    parts: Sequence[AnswerPart] = ()


class ChoiceText:
    """The text of one choice. `num_tokens`: to its end, or to the token that completed a stop string."""

    def __init__(
        self, request: GenerationRequest, vocabulary: Vocabulary, form: AnswerForm | None = None
    ) -> None:
        """form: how thoughts and calls are told from content; None: all is content."""
        self.num_tokens = 0
        self._logprob = 0.0  # sum of the tokens that have scores
        # Spans of output tokens [start, end), each with the shape that made it; neighbours differ.
        self.precision: list[dict[str, Any]] | None = [] if request.returns_precision else None
        self._request, self._vocabulary = request, vocabulary
        self._parser = form.parser() if form is not None else None
        spelled = vocabulary if request.skips_special_tokens else vocabulary.spelled
        self._text = TextStream(spelled, form.markers if form is not None else None)
        self._matcher = StopMatcher(request.stop) if request.stop else None
        self._scores = LogprobQueue() if request.sampling.logprobs is not None else None
        echo, prompt = request.echo, request.prompt_token_ids
        self._echo = None if echo is None else PromptEcho(echo, prompt, vocabulary)
        self._num_chars = 0  # decoded so far, the echo included
        self._num_chars_out = 0  # characters given out
        self._is_plain = (
            not self._matcher and self._scores is None and self._echo is None and self._parser is None
        )

    def decode(self, delta: Delta, skip: int, step: StepOutput | None) -> str | ChoicePiece | None:
        """Return what can go out, or None. `skip`: how many tokens of `delta` came before."""
        token_ids = delta.token_ids[skip:] if skip else delta.token_ids
        if self._is_plain and delta.finish_reason is None:
            self.num_tokens += len(token_ids)
            self._note_precision(step)
            feed = self._text.feed
            return feed(token_ids[0]) if len(token_ids) == 1 else "".join(map(feed, token_ids))
        text, is_cut = self._take_echo(delta), False
        finish: str | None = delta.finish_reason
        if self._request.has_output:
            values = delta.logprobs[skip:] if delta.logprobs else []
            more, is_cut = self._decode_scored(token_ids, values, delta)
            text += more
            self._note_precision(step)
            if is_cut:
                finish = "stop"
            elif finish is not None:
                text += self._flush()
        elif finish is not None:
            finish = "length"
        self._num_chars_out += len(text)
        parts: list[AnswerPart] = []
        if self._parser is not None:
            parts, finish, is_cut = self._divide(self._parser, text, finish, is_cut)
            text = ""
        tokens: list[ScoredToken] = []
        if self._scores is not None:
            out = self._num_chars_out
            tokens = self._scores.release(out) if finish is None else self._scores.finish(out, is_cut)
        if not text and not parts and not tokens and finish is None:
            return None
        return ChoicePiece(text, tokens, finish, is_cut, parts)

    def _divide(
        self, parser: AnswerParser, text: str, finish: str | None, is_cut: bool
    ) -> tuple[list[AnswerPart], str | None, bool]:
        """Return (the parts of a text, how the choice ends, whether the rest is cut off)."""
        parts = parser.feed(text)
        if parser.is_done and finish != "stop":
            finish, is_cut = "stop", True
        if finish is not None:
            parts = merged([*parts, *parser.finish()])
        if finish == "stop" and parser.num_calls:
            finish = "tool_calls"
        return parts, finish, is_cut

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens, the end token among them; 0.0 unless they have scores."""
        return self._logprob / max(1, self.num_tokens)

    def _note_precision(self, step: StepOutput | None) -> None:
        """Note that `step` made the tokens that have no span yet."""
        spans = self.precision
        if spans is None or step is None:
            return
        start, end = spans[-1]["end"] if spans else 0, self.num_tokens
        shape = {"layers_below_full": step.layers_below_full, "fingerprint": step.fingerprint}
        if spans and shape.items() <= spans[-1].items():
            spans[-1]["end"] = end
        elif end > start:
            spans.append({"start": start, "end": end} | shape)

    def _decode_scored(
        self, token_ids: list[int], values: list[TokenLogprobs], delta: Delta
    ) -> tuple[str, bool]:
        """Return (text that can go out, whether a stop string cut it). An end token has no text."""
        pieces: list[str] = []
        stop_ids = self._request.sampling.stop_token_ids
        has_end_token = delta.finish_reason == "stop" and token_ids and token_ids[-1] in stop_ids
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            value = values[position] if position < len(values) else None
            if value is not None:
                self._logprob += value.logprob
            if has_end_token and position == len(token_ids) - 1:
                break
            piece = self._text.feed(token_id)
            if self._scores is not None:
                self._scores.add(token_id, value, self._num_chars, self._num_chars + len(piece))
            self._num_chars += len(piece)
            if self._matcher is not None and piece and self.num_tokens > self._request.sampling.min_tokens:
                piece, is_cut = self._matcher.feed(piece)
                if is_cut:
                    return "".join([*pieces, piece]), True
            pieces.append(piece)
        return "".join(pieces), False

    def _flush(self) -> str:
        """Return what was held back: an unfinished character, or the beginning of a stop string."""
        rest = self._text.flush()
        return self._matcher.flush() + rest if self._matcher is not None else rest

    def _take_echo(self, delta: Delta) -> str:
        """Return what comes of the prompt before the first token, "" later."""
        if (echo := self._echo) is None:
            return ""
        text = echo.take(delta.prompt_logprobs or [], self._scores) if self._scores is not None else ""
        if delta.token_ids or delta.finish_reason is not None:
            text += echo.rest(self._scores)
            self._echo = None
            self._num_chars = len(echo.text)
            self._is_plain = self._matcher is None and self._scores is None and self._request.has_output
        return text
