"""From a checked body to sequences that a worker can run: prompts to tokens, limits, sampling."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bus.messages import InstanceCard, SamplingParams
from gateway.delivery.cluster import Cluster
from gateway.errors import invalid, too_long
from gateway.openai.params import ChatBody, CompletionBody, SamplingBody
from gateway.text.tokenizer import Tokenizer

_SEED_MASK = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the seeds of n choices


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the client wrote, None where it sent token ids."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True, slots=True)
class Order:
    """All that a call asks of the workers: each prompt `n` times."""

    prompts: list[Prompt]
    n: int
    max_tokens: int
    seed: int
    sampling: SamplingBody
    logprobs: int | None
    has_echo: bool
    stop_token_ids: tuple[int, ...]

    @property
    def wants_output(self) -> bool:
        """False for max_tokens 0: the prompt is scored, and the one token a worker must make is dropped."""
        return self.max_tokens > 0

    def params(self, choice: int) -> SamplingParams:
        """Of the choice-th of `n`: each draws from a seed of its own; the first from the client's."""
        body = self.sampling
        return SamplingParams(
            max_tokens=max(1, self.max_tokens),
            seed=(self.seed + choice * _GOLDEN) & _SEED_MASK,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(0, body.top_k),
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=dict(body.logit_bias),
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.has_echo else None,
            stop_token_ids=self.stop_token_ids,
        )


class Intake:
    """Reads the context limit from what is ready; `max_n_tokens` bounds one call's whole output."""

    def __init__(self, cluster: Cluster, *, max_n_tokens: int, default_max_tokens: int) -> None:
        self._cluster = cluster
        self._max_n_tokens = max_n_tokens
        self._default_max_tokens = default_max_tokens

    async def completion(
        self, body: CompletionBody, texts: list[str | list[int]], card: InstanceCard, tokenizer: Tokenizer
    ) -> Order:
        """Raises ApiError 400."""
        context = self.context(card)
        is_batch = isinstance(body.prompt, list) and isinstance(body.prompt[0], str | list)
        prompts = [
            await self._prompt(text, f"prompt[{i}]" if is_batch else "prompt", context, card, tokenizer)
            for i, text in enumerate(texts)
        ]
        room = self._room(max(len(prompt.token_ids) for prompt in prompts), card)
        default = min(self._default_max_tokens, room)
        max_tokens = default if body.max_tokens is None else body.max_tokens
        return self._order(body, prompts, max_tokens, body.logprobs, body.echo, card, tokenizer)

    async def chat(self, body: ChatBody, card: InstanceCard, tokenizer: Tokenizer) -> Order:
        """Without max_tokens an answer may fill the context, as far as one worker alone holds it: what was
        not asked for is no reason to form a group. Raises ApiError 400."""
        messages = [message.for_template() for message in body.messages]
        context = self.context(card)
        _refuse_if_long(sum(len(message["content"]) for message in messages), context, tokenizer)
        text = await tokenizer.chat_text(messages)
        _refuse_if_long(len(text), context, tokenizer)
        token_ids = await tokenizer.encode(text, special_tokens=False)  # the template wrote them
        _check_length(len(token_ids), context)
        given = body.max_completion_tokens or body.max_tokens
        max_tokens = given or min(self._room(len(token_ids), card), max(1, self._max_n_tokens // body.n))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._order(body, [Prompt(token_ids, None)], max_tokens, logprobs, False, card, tokenizer)

    async def _prompt(
        self, given: str | list[int], where: str, context: int, card: InstanceCard, tokenizer: Tokenizer
    ) -> Prompt:
        if isinstance(given, str):
            _refuse_if_long(len(given), context, tokenizer)
            prompt = Prompt(await tokenizer.encode(given), given)
        else:
            prompt = Prompt(given, None)
            _check_ids(given, card, where)
        _check_length(len(prompt.token_ids), context)
        return prompt

    def context(self, card: InstanceCard) -> int:
        """Tokens that the largest shape of the cluster can hold."""
        return self._cluster.longest_tokens(card.model, time.monotonic()) or card.max_model_len

    def _room(self, num_prompt: int, card: InstanceCard) -> int:
        """Tokens of output that fit beside the prompt where it will run."""
        now = time.monotonic()
        usual = max(
            (self._cluster.usual_tokens(one, now) for one in self._cluster.ready(card.model)), default=0
        )
        return (usual if num_prompt < usual else self.context(card)) - num_prompt

    def _order(
        self,
        body: SamplingBody,
        prompts: list[Prompt],
        max_tokens: int,
        logprobs: int | None,
        has_echo: bool,
        card: InstanceCard,
        tokenizer: Tokenizer,
    ) -> Order:
        _check_ids(list(body.logit_bias), card, "logit_bias")
        _check_room(prompts, max_tokens, self.context(card))  # the narrower limit, so the one to say first
        num_sequences = len(prompts) * body.n
        if num_sequences * max_tokens > self._max_n_tokens:
            raise invalid(
                f"{len(prompts)} prompts times n={body.n} times max_tokens={max_tokens} is "
                f"{num_sequences * max_tokens} tokens; one call may ask for {self._max_n_tokens} "
                "(gateway.max_n_tokens)",
                "max_tokens",
            )
        return Order(
            prompts=prompts,
            n=body.n,
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            sampling=body,
            logprobs=logprobs,
            has_echo=has_echo,
            stop_token_ids=() if body.ignore_eos else tokenizer.stop_token_ids,
        )


def _refuse_if_long(num_chars: int, context: int, tokenizer: Tokenizer) -> None:
    if (fewest := tokenizer.fewest_tokens(num_chars)) > context:
        raise too_long(fewest, context, at_least=True)


def _check_length(num_tokens: int, context: int) -> None:
    if num_tokens == 0:
        raise invalid("prompt is empty: it has no tokens", "prompt", "empty_prompt")
    if num_tokens >= context:  # one token of output must fit, too
        raise too_long(num_tokens, context)


def _check_room(prompts: list[Prompt], max_tokens: int, context: int) -> None:
    for prompt in prompts:
        if (num_tokens := len(prompt.token_ids)) + max_tokens > context:
            raise too_long(num_tokens, context, max_tokens)


def _check_ids(token_ids: Sequence[int], card: InstanceCard, where: str) -> None:
    """`where` the client wrote them, in the body's own terms: prompt[2]."""
    if max(token_ids, default=0) < card.vocab_size:  # at C's speed; which one, at ours
        return
    i = next(i for i, token_id in enumerate(token_ids) if token_id >= card.vocab_size)
    param = where.partition("[")[0]
    at = f"{where}[{i}]" if param == "prompt" else param
    known = f"0 to {card.vocab_size - 1}"
    raise invalid(
        f"{at}: token id {token_ids[i]} is outside the vocabulary of {card.model!r}: {known}", param
    )
