"""Choose the next token of every sequence of a step at once; no loop over sequences.

Order: logit bias and penalties on the logits, temperature, top_k, top_p, min_p, draw. Temperature 0 takes the
likeliest after bias and penalties. The repetition penalty p makes a logit x of a token in the prompt or the
output x / p, or p * x if it is negative (CTRL, arXiv:1909.05858, section 4.1, as transformers has it). Then
presence and frequency count output tokens only (OpenAI's formula: frequency times count, plus presence if the
count is not 0). Before `min_tokens` tokens no end token can come, and never one that a grammar forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import SamplingParams, TokenLogprobs
from kernels import choose, least_remaining
from kernels.filters import min_p_threshold, ranked
from kernels.noise import gumbel
from worker.engine import sampling
from worker.engine.grammars import Matcher, TokenMasks
from worker.engine.sampling import token_logprobs

Rows = npt.NDArray[np.int64]

MIN_TEMPERATURE = 1e-5  # below it scores overflow float32 and the draw is greedy anyway


class Sampled(NamedTuple):
    token_ids: Rows  # [R]
    logprobs: dict[int, TokenLogprobs]  # index into the step's R rows -> what it asked for


class ChosenTokens:
    """Tokens chosen on the device, int64 [R], on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._on_host.copy_(tokens, non_blocking=True)
        is_cuda = tokens.is_cuda
        self._come = torch.cuda.current_stream(tokens.device).record_event() if is_cuda else None

    def wait(self) -> Rows:
        """Return the tokens once they have come."""
        if self._come:
            self._come.synchronize()
        token_ids: Rows = self._on_host.numpy()
        return token_ids


class Sampler:
    """Parameters, penalty counts and biases of the running sequences, one row each, set at admission.

    The counts and biases live on the model's device and exist only once a request has asked for them.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, masks: TokenMasks | None = None
    ) -> None:
        """masks: of the matchers of rows; None where no row has one."""
        self.vocab_size, self.device = vocab_size, device
        self._masks = masks
        self._seed = np.zeros(num_rows, np.uint64)
        self._temperature, self._top_p, self._min_p, self._presence, self._frequency, self._repetition = (
            np.zeros((6, num_rows), np.float32)
        )
        self._top_k, self._min_tokens = np.zeros((2, num_rows), np.int64)
        self._stop_ids = [np.zeros(0, np.int64)] * num_rows
        self._num_logprobs = np.full(num_rows, -1, np.int64)
        self._is_filtered, self._is_penalised, self._is_biased = np.zeros((3, num_rows), bool)
        self._matchers: list[Matcher | None] = [None] * num_rows
        self._has_matcher = np.zeros(num_rows, bool)
        self._counts: torch.Tensor | None = None  # int32 [num_rows, V]
        self._in_prompt: torch.Tensor | None = None  # bool [num_rows, V]
        self._bias_ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        self._bias = torch.zeros(num_rows, 0, device=device)  # padded with 0.0 on token 0: adds nothing

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        output_token_ids: Sequence[int],
        prompt_token_ids: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Give `row` to a sequence that has generated `output_token_ids` (before a replay or preemption).

        matcher: of its grammar; it has accepted all of the output before each `sample`.
        """
        self._seed[row] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        temperature = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
        self._temperature[row], self._top_k[row] = temperature, params.top_k
        self._top_p[row], self._min_p[row] = params.top_p, params.min_p
        self._presence[row], self._frequency[row] = params.presence_penalty, params.frequency_penalty
        self._repetition[row] = params.repetition_penalty
        ends = [one for one in params.stop_token_ids if one < self.vocab_size]
        self._stop_ids[row] = np.array(ends, np.int64)
        self._min_tokens[row] = params.min_tokens if ends else 0
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._is_filtered[row] = params.top_k > 0 or params.top_p < 1
        repeats = params.repetition_penalty != 1
        self._is_penalised[row] = bool(params.presence_penalty or params.frequency_penalty or repeats)
        self._is_biased[row] = bool(params.logit_bias)
        self._matchers[row], self._has_matcher[row] = matcher, matcher is not None
        if self._is_penalised[row]:
            self._count_outputs(row, output_token_ids)
        if repeats:
            self._note_prompt(row, prompt_token_ids)
        if params.logit_bias:
            self._set_bias(row, params.logit_bias)

    def sample(self, logits: torch.Tensor, rows: Rows, positions: Rows) -> Sampled:
        """Choose tokens by logits float32 [R, V], left unchanged, of `rows` [R] at output `positions` [R]."""
        tokens = self._choose(self._adjusted(logits, rows, positions), rows, positions)
        self._count(rows, tokens)
        token_ids = tokens.cpu().numpy()
        return Sampled(token_ids, self._logprobs(logits, rows, token_ids))

    def launch(
        self, logits: torch.Tensor, rows: Rows, positions: Rows, out: torch.Tensor
    ) -> ChosenTokens | None:
        """Choose tokens as `sample` does, into int64 out [R], without a wait for them.

        Returns None for log-probabilities, for which the host must know the tokens first, and for grammars,
        which say on the host what may follow the token before.
        """
        if (self._num_logprobs[rows] >= 0).any() or self._has_matcher[rows].any():
            return None
        tokens = self._choose(self._adjusted(logits, rows, positions), rows, positions, out)
        if tokens is not out:
            out.copy_(tokens)
        self._count(rows, tokens)
        return ChosenTokens(out)

    def _adjusted(self, logits: torch.Tensor, rows: Rows, positions: Rows) -> torch.Tensor:
        biased, penalised = np.flatnonzero(self._is_biased[rows]), np.flatnonzero(self._is_penalised[rows])
        unended = np.flatnonzero(self._min_tokens[rows] > positions)
        formed = np.flatnonzero(self._has_matcher[rows])
        if not len(biased) and not len(penalised) and not len(unended) and not len(formed):
            return logits
        scores = logits.clone()
        if len(biased):
            at, which = self._tensor(biased), self._tensor(rows[biased])
            scores[at] = scores[at].scatter_add_(1, self._bias_ids[which], self._bias[which])
        if len(penalised):
            assert self._counts is not None
            at, which = self._tensor(penalised), self._tensor(rows[penalised])
            counts = self._counts[which]
            repetition = self._repetition[rows[penalised]]
            if (repetition != 1).any():
                scores[at] = self._less_repetitive(scores[at], counts, which, repetition)
            frequency = self._tensor(self._frequency[rows[penalised]]).unsqueeze(1)
            presence = self._tensor(self._presence[rows[penalised]]).unsqueeze(1)
            scores[at] -= frequency * counts + presence * (counts > 0)
        if len(unended):
            ends = [self._stop_ids[row] for row in rows[unended]]
            at = np.repeat(unended, [len(each) for each in ends])
            scores[self._tensor(at), self._tensor(np.concatenate(ends))] = -torch.inf
        if len(formed):
            self._forbid(scores, rows, formed)
        return scores

    def _forbid(self, scores: torch.Tensor, rows: Rows, formed: Rows) -> None:
        """Take from scores [R, V] what the grammars of the rows at `formed` do not allow next."""
        assert self._masks is not None
        matchers = [matcher for row in rows[formed] if (matcher := self._matchers[row])]
        forbidden = self._masks.forbidden(matchers)
        if len(formed) == len(rows):
            scores.masked_fill_(forbidden, -torch.inf)
        else:
            at = self._tensor(formed)
            scores[at] = scores[at].masked_fill_(forbidden, -torch.inf)

    def _less_repetitive(
        self,
        scores: torch.Tensor,
        counts: torch.Tensor,
        which: torch.Tensor,
        repetition: npt.NDArray[np.float32],
    ) -> torch.Tensor:
        """Return scores [R, V] of the rows `which` with repetition penalties [R]; counts: of outputs."""
        assert self._in_prompt is not None
        penalty = self._tensor(repetition).unsqueeze(1)
        known = (counts > 0) | self._in_prompt[which]
        return torch.where(known, torch.where(scores > 0, scores / penalty, scores * penalty), scores)

    def _choose(
        self, scores: torch.Tensor, rows: Rows, positions: Rows, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Choose for filtered rows and the others separately; a kind without rows costs nothing."""
        filtered = (self._temperature[rows] > 0) & self._is_filtered[rows]
        if not filtered.any():
            return self._draw(scores, rows, positions, out)
        if filtered.all():
            return self._draw_filtered(scores, rows, positions)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
        for here, draw in ((filtered, self._draw_filtered), (~filtered, self._draw)):
            at = self._tensor(np.flatnonzero(here))
            tokens[at] = draw(scores[at], rows[here], positions[here])
        return tokens

    def _draw(
        self, scores: torch.Tensor, rows: Rows, positions: Rows, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Take the likeliest at temperature 0, else draw."""
        temperature = self._temperature[rows]
        if not temperature.any():
            return choose(scores, None, out)
        min_p = np.where(temperature > 0, self._min_p[rows], 0.0).astype(np.float32)
        if min_p.any():
            heat = np.where(temperature > 0, temperature, 1.0).astype(np.float32)
            heated = scores / self._tensor(heat).unsqueeze(1)
            threshold = min_p_threshold(heated, self._tensor(min_p))
            scores = scores.masked_fill(heated < threshold, -torch.inf)
        keys = sampling.keys(self._seed[rows], positions)
        draws = np.concatenate([temperature.view(np.int32)[:, None], keys], 1)
        return choose(scores, self._tensor(draws), out)

    def _draw_filtered(self, scores: torch.Tensor, rows: Rows, positions: Rows) -> torch.Tensor:
        """Draw of the likeliest tokens; where these may not be all that remain, of the whole vocabulary."""
        temperature, keys = self._temperature[rows], sampling.keys(self._seed[rows], positions)
        heated = scores / self._tensor(temperature).unsqueeze(1)
        top_k, top_p, min_p = (self._tensor(one[rows]) for one in (self._top_k, self._top_p, self._min_p))
        width = min(sampling.WINDOW, scores.shape[1])
        values, ids, is_enough = ranked(heated, top_k, top_p, min_p, width)
        values += gumbel(self._tensor(keys), ids.to(torch.int32))
        tokens = ids.gather(1, choose(values).unsqueeze(1)).squeeze(1)
        if is_enough.device.type == "cpu" and is_enough.all():  # a GPU is not asked: that would be a wait
            return tokens
        draws = self._tensor(np.concatenate([temperature.view(np.int32)[:, None], keys], 1))
        floors = least_remaining(heated, top_k, top_p, min_p, is_enough)
        return torch.where(is_enough, tokens, choose(scores, draws, None, floors))

    def _logprobs(self, logits: torch.Tensor, rows: Rows, token_ids: Rows) -> dict[int, TokenLogprobs]:
        asked = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not len(asked):
            return {}
        part = logits if len(asked) == len(rows) else logits[self._tensor(asked)]
        found = token_logprobs(part, token_ids[asked], self._num_logprobs[rows[asked]])
        return dict(zip(asked.tolist(), found, strict=True))

    # ----------------------------------------------------------------------------- rows on the device

    def _count(self, rows: Rows, tokens: torch.Tensor) -> None:
        penalised = np.flatnonzero(self._is_penalised[rows])
        if len(penalised):
            assert self._counts is not None
            self._counts[self._tensor(rows[penalised]), tokens[self._tensor(penalised)]] += 1

    def _count_outputs(self, row: int, output_token_ids: Sequence[int]) -> None:
        if self._counts is None:
            shape = (len(self._seed), self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        counts = np.bincount(np.asarray(output_token_ids, np.int64), minlength=self.vocab_size)
        self._counts[row] = torch.from_numpy(counts.astype(np.int32)).to(self.device)

    def _note_prompt(self, row: int, prompt_token_ids: Sequence[int]) -> None:
        if self._in_prompt is None:
            shape = (len(self._seed), self.vocab_size)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        known = np.zeros(self.vocab_size, bool)
        known[np.asarray(prompt_token_ids, np.int64)] = True
        self._in_prompt[row] = torch.from_numpy(known).to(self.device)

    def _set_bias(self, row: int, bias: dict[int, float]) -> None:
        if missing := max(0, len(bias) - self._bias.shape[1]):
            self._bias_ids = torch.nn.functional.pad(self._bias_ids, (0, missing))
            self._bias = torch.nn.functional.pad(self._bias, (0, missing))
        self._bias_ids[row], self._bias[row] = 0, 0.0
        self._bias_ids[row, : len(bias)] = torch.tensor(list(bias), device=self.device)
        self._bias[row, : len(bias)] = torch.tensor(list(bias.values()), device=self.device)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made
