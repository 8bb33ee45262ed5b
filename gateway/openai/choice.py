"""One choice of an answer: from tokens to text, with stop strings, echo and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.messages import Delta, StepOutput, TokenLogprobs
from gateway.errors import ApiError
from gateway.openai.logprobs import Entry, LogprobTrack
from gateway.openai.precision import PrecisionTrack
from gateway.text.stops import StopMatcher
from gateway.text.vocabulary import TextStream, Vocabulary

if TYPE_CHECKING:
    from gateway.openai.call import Call


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, to be given out before the text."""

    text: str
    token_ids: list[int]


class Choice:
    """A `gateway.delivery.inflight.Sink`. `num_tokens` is what the client is charged: to the end, or to
    the token that completed a stop string."""

    __slots__ = (
        "_call",
        "_echo",
        "_is_plain",
        "_matcher",
        "_num_chars",
        "_num_chars_out",
        "_stop_token_ids",
        "_text",
        "_track",
        "_vocabulary",
        "_wants_output",
        "index",
        "num_tokens",
        "precision",
    )

    def __init__(
        self,
        call: Call,
        index: int,
        vocabulary: Vocabulary,
        *,
        stops: list[str],
        stop_token_ids: tuple[int, ...],
        has_logprobs: bool,
        echo: Echo | None,
        wants_output: bool = True,
        precision: PrecisionTrack | None = None,
    ) -> None:
        """`wants_output` False: the prompt is echoed and scored, nothing else (max_tokens 0). `precision`:
        where it is asked for."""
        self.index = index
        self.num_tokens = 0
        self.precision = precision
        self._call = call
        self._vocabulary = vocabulary
        self._text = TextStream(vocabulary)
        self._matcher = StopMatcher(stops) if stops else None
        self._track = LogprobTrack() if has_logprobs else None
        self._stop_token_ids = stop_token_ids
        self._echo = echo
        self._wants_output = wants_output
        self._num_chars = 0  # decoded so far, the echo included
        self._num_chars_out = 0  # of those, given out
        self._is_plain = not (stops or has_logprobs or echo)

    # ------------------------------------------------------------------------------------- as a sink

    def on_admitted(self) -> None:
        self._call.on_admitted()

    def on_tokens(self, token_ids: list[int], delta: Delta, skip: int, step: StepOutput | None) -> bool:
        if step is not None:
            self._call.use_fingerprint(step.fingerprint)
        if not self._is_plain or delta.finish_reason is not None:
            return self._on_any_tokens(token_ids, delta, skip, step)
        self.num_tokens += len(token_ids)
        if self.precision is not None and step is not None:
            self.precision.add(self.num_tokens, step)
        feed = self._text.feed
        text = feed(token_ids[0]) if len(token_ids) == 1 else "".join(map(feed, token_ids))
        if text:
            self._call.emit_text(self.index, text)
        return False

    def on_end(self) -> None:
        self._call.on_choice_end()

    def on_error(self, error: ApiError) -> None:
        self._call.fail(error)

    def flush(self) -> None:
        self._call.flush()

    # ------------------------------------------------------------------------------------- the general case

    def _on_any_tokens(self, token_ids: list[int], delta: Delta, skip: int, step: StepOutput | None) -> bool:
        text = self._echoed(delta)
        finish: str | None = delta.finish_reason
        is_cut = False
        if self._wants_output:
            values = delta.logprobs[skip:] if delta.logprobs else []
            more, is_cut = self._texts_of(token_ids, values, delta)
            text += more
            if self.precision is not None and step is not None:
                self.precision.add(self.num_tokens, step)
        if is_cut:
            finish = "stop"
        elif finish is not None and self._wants_output:
            text += self._rest()
        elif not self._wants_output and finish is not None:
            finish = "length"
        self._num_chars_out += len(text)
        entries = self._entries(is_cut, has_ended=finish is not None)
        if text or entries or finish is not None:
            self._call.emit(self.index, text, entries, finish)
        return is_cut

    def _texts_of(self, token_ids: list[int], values: list[TokenLogprobs], delta: Delta) -> tuple[str, bool]:
        """(text that can go out, whether a stop string cut it). A token that ended the text has no text
        of its own, whatever the tokenizer thinks of it."""
        pieces = []
        has_end_token = delta.finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_token_ids
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if has_end_token and position == len(token_ids) - 1:
                break
            piece = self._text.feed(token_id)
            if self._track is not None:
                value = values[position] if position < len(values) else None
                self._track.add(token_id, value, self._num_chars, self._num_chars + len(piece))
            self._num_chars += len(piece)
            is_cut = False
            if self._matcher is not None and piece:
                piece, is_cut = self._matcher.feed(piece)
            pieces.append(piece)
            if is_cut:
                return "".join(pieces), True
        return "".join(pieces), False

    def _rest(self) -> str:
        """What was held back: an unfinished character, the beginning of a stop string that did not come."""
        rest = self._text.flush()
        return self._matcher.flush() + rest if self._matcher is not None else rest

    def _echoed(self, delta: Delta) -> str:
        """The prompt, before the first token; its log-probabilities came with that one."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ""
        self._is_plain = self._matcher is None and self._track is None and self._wants_output
        if self._track is not None:
            self._track_prompt(self._track, echo, delta.prompt_logprobs or [])
        self._num_chars = len(echo.text)
        return echo.text

    def _track_prompt(self, track: LogprobTrack, echo: Echo, values: list[TokenLogprobs | None]) -> None:
        stream = TextStream(self._vocabulary)
        at = 0
        for position, token_id in enumerate(echo.token_ids):
            piece = stream.feed(token_id)
            if at == 0 and self._vocabulary.is_sentencepiece and not echo.text.startswith(" "):
                piece = piece.removeprefix(" ")  # SentencePiece puts a space before the first word
            end = min(at + len(piece), len(echo.text))
            track.add(token_id, values[position] if position < len(values) else None, at, end)
            at = end

    def _entries(self, is_cut: bool, has_ended: bool) -> list[Entry]:
        if self._track is None:
            return []
        if has_ended:
            return self._track.finish(self._num_chars_out, is_cut)
        return self._track.release(self._num_chars_out)
