"""The requests of a checked body: prompts to tokens, limits, sampling."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Final, Literal, NamedTuple

from bus.api_keys import ANONYMOUS, ApiKey
from bus.messages import Grammar, InstanceCard, SamplingParams
from bus.precisions import KVPrecision, Precision, is_below, lowest
from bus.shapes import LOSS_ROUNDING
from gateway.delivery.cluster import Cluster
from gateway.delivery.request import GenerationRequest
from gateway.errors import invalid, never_so_precise, never_so_precise_kv, never_within_loss, too_long
from gateway.openai.budget import most_tokens
from gateway.openai.params import CallBody, ChatBody, CompletionBody, SamplingBody
from gateway.openai.request_log import RequestLog
from gateway.openai.structured import grammar_of
from gateway.openai.tools.answer import AnswerForm
from gateway.openai.tools.plan import ToolPlan, formats_of, plan_of
from gateway.text.tokenizer import Tokenizer

_SEED_MASK = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the seeds of n choices

# Parameters that a worker gets as the client sent them. Each choice has a seed of its own.
_PASSED_ON: Final = {one.name for one in fields(SamplingParams)} & SamplingBody.model_fields.keys() - {
    "seed",
    "stop_token_ids",
}

Prompt = str | list[int]


class BuiltCall(NamedTuple):
    """The requests of a call. `form`: how its answers are divided; None: all is content."""

    requests: list[GenerationRequest]
    form: AnswerForm | None = None


class RequestBuilder:
    """Reads the context limit from the ready instances; `max_n_tokens` bounds the tokens of one answer."""

    def __init__(
        self,
        cluster: Cluster,
        max_n_tokens: int,
        default_max_tokens: int,
        max_call_mb: int,
        tool_formats: Sequence[str] = (),
    ) -> None:
        self._cluster, self._max_call_mb = cluster, max_call_mb
        self._formats = formats_of(tool_formats)
        self._max_n_tokens, self._default_max_tokens = max_n_tokens, default_max_tokens

    def context(self, card: InstanceCard) -> int:
        """Return how many tokens the largest shape of the cluster can hold."""
        return self._cluster.longest_tokens(card.model, time.monotonic()) or card.max_model_len

    async def build(
        self,
        body: CallBody,
        given: list[Prompt],
        context: int,
        card: InstanceCard,
        tokenizer: Tokenizer,
        call_id: str,
        log: RequestLog,
        caller: ApiKey = ANONYMOUS,
    ) -> BuiltCall:
        """Return each prompt of a call as often as it is sampled, numbered as OpenAI does.

        Raises ApiError 400.
        """
        plan: ToolPlan | None = None
        text = ""
        if isinstance(body, CompletionBody):
            is_batch = isinstance(body.prompt, list) and isinstance(body.prompt[0], str | list)
            token_ids = [
                await _tokenize(prompt, f"prompt[{i}]" if is_batch else "prompt", context, card, tokenizer)
                for i, prompt in enumerate(given)
            ]
        else:
            plan = plan_of(body, tokenizer.template, self._formats)
            text = await _chat_text(body, plan, context, tokenizer)
            token_ids = [await _tokenize_chat(text, context, tokenizer)]
        max_tokens = self._max_tokens(body, max(map(len, token_ids)), context, card)
        check_ids(list(body.logit_bias), card, "logit_bias")
        for prompt in token_ids:  # the narrower limit, so the one to name first
            if len(prompt) + max_tokens > context:
                raise too_long(len(prompt), context, max_tokens)
        if body.min_tokens > max_tokens:
            raise invalid(f"min_tokens is {body.min_tokens} and max_tokens {max_tokens}", "min_tokens")
        check_ids(body.stop_token_ids, card, "stop_token_ids")
        grammar = await _grammar(body, plan, tokenizer)
        form = None
        if plan is not None:
            form = plan.answer_form(text, tokenizer, has_grammar=grammar is not None)
        own = () if body.ignore_eos and grammar is None else tokenizer.stop_token_ids
        sampling = _sampling(body, max_tokens, tuple(sorted({*own, *body.stop_token_ids})), grammar)
        times = "best_of" if body.num_samples > body.n else "n"
        self._check_total(token_ids, sampling, max_tokens, times)
        best_kv = self._cluster.best_kv(card.model, time.monotonic())
        floor = floor_of(body.min_precision, body.max_loss, card, best_kv)
        requests = [
            GenerationRequest(
                id=f"{call_id}-{i * body.num_samples + choice}",
                index=i * body.num_samples + choice,
                model=body.model,
                prompt_token_ids=token_ids[i],
                sampling=sampling[choice],
                arrived=log.arrived,
                trace_id=log.request_id,
                min_precision=floor,
                waits_for_precision=body.min_precision_wait,
                cache_salt=body.cache_salt,
                key=caller.id,
                weight=caller.weight,
                priority=body.priority,
                stop=tuple(body.stop),
                echo=_echo(body, given[i], token_ids[i], tokenizer),
                has_output=max_tokens > 0,
                returns_precision=body.return_precision,
                skips_special_tokens=body.skip_special_tokens,
            )
            for i in range(len(given))
            for choice in range(body.num_samples)
        ]
        return BuiltCall(requests, form)

    def _check_total(
        self, prompts: list[list[int]], choices: list[SamplingParams], max_tokens: int, times: str
    ) -> None:
        """Raise ApiError 400 if a call asks for too many tokens, or for too many scores of prompt tokens.

        times: the field that says how often each prompt is sampled.
        """
        n = len(choices)
        num_tokens = len(prompts) * n * max_tokens
        if num_tokens > self._max_n_tokens:
            raise invalid(
                f"{len(prompts)} prompts times {times}={n} times max_tokens={max_tokens} is "
                f"{num_tokens} tokens; one call may ask for {self._max_n_tokens} (gateway.max_n_tokens)",
                "max_tokens",
            )
        num_scored = sum(map(len, prompts)) * n
        if choices[0].prompt_logprobs is not None and num_scored + num_tokens > self._max_n_tokens:
            raise invalid(
                f"echo with logprobs of {num_scored // n} prompt tokens times {times}={n}, and "
                f"{num_tokens} new ones, is {num_scored + num_tokens} log-probabilities; one call may "
                f"ask for {self._max_n_tokens} (gateway.max_n_tokens)",
                "logprobs",
            )

    def _max_tokens(self, body: CallBody, num_prompt: int, context: int, card: InstanceCard) -> int:
        """Return what the client asked for, else a default that needs no group beside the prompt."""
        given, default = body.max_tokens, self._default_max_tokens
        if isinstance(body, ChatBody):
            given, default = body.max_completion_tokens or given, max(1, self._max_n_tokens // body.n)
            num_top = body.top_logprobs or 0 if body.logprobs else None
            default = min(default, most_tokens(self._max_call_mb, body.n, num_top, is_chat=True))
        if given is not None:
            return given
        now = time.monotonic()
        ready = self._cluster.ready(card.model)
        usual = max((self._cluster.usual_tokens(one, now) for one in ready), default=0)
        return min(default, (usual if num_prompt < usual else context) - num_prompt)


def floor_of(
    min_precision: Precision | None,
    max_loss: float | None,
    card: InstanceCard,
    best_kv: KVPrecision = "full",
) -> Precision | Literal[""]:
    """Return the precision that no layer and no KV cache may be below; "": any will do.

    best_kv: the most bits that a KV cache of the model comes to (`Cluster.best_kv`). Where both limits are
    given, more bits win.

    Raises ApiError 400 if the model's checkpoint has fewer bits, or its KV cache at every instance.
    """
    if min_precision and is_below(card.best, min_precision):
        raise never_so_precise(card.model, min_precision, card.best)
    if min_precision and is_below(best_kv, min_precision):
        raise never_so_precise_kv(card.model, min_precision, best_kv)
    if max_loss is None:
        return min_precision or ""
    kept = _floor_within(max_loss, card, best_kv)
    return min_precision if min_precision and is_below(kept, min_precision) else kept


def _floor_within(max_loss: float, card: InstanceCard, best_kv: KVPrecision) -> Precision:
    """Return the fewest bits that all layers can be in, and the KV cache in 8 bits, within `max_loss`.

    A precision whose loss was not measured is not among them. Raises ApiError 400 without one.
    """
    by_kv = card.kv_loss
    if by_kv is None:  # no cache is converted by itself, but it may rest in 8 bits
        by_kv = 0.0 if best_kv == card.kv_dtype == "full" else inf
    losses = {one: card.losses.get(one, inf) for one in card.variants} | {card.best: 0.0}
    if card.kv_loss is not None and card.best == "full":
        # Where no layer can be in int8, it is a floor of the KV cache alone.
        losses.setdefault("int8", 0.0)
    lost = {one: loss + (0.0 if is_below("int8", one) else by_kv) for one, loss in losses.items()}
    within = [one for one, loss in lost.items() if loss <= max_loss + LOSS_ROUNDING]
    kept = lowest(within or [card.best])
    if best_kv == "full" or (within and not is_below(best_kv, kept)):
        return kept
    # One floor holds for layers and KV cache: what allows the cache in 8 bits allows all layers in int8.
    least = losses.get(best_kv, 0.0) + by_kv
    raise never_within_loss(card.model, max_loss, best_kv, None if least == inf else least)


def _sampling(
    body: CallBody, max_tokens: int, stop_token_ids: tuple[int, ...], grammar: Grammar | None
) -> list[SamplingParams]:
    """Return the parameters of each sample of a prompt: each has its own seed, the first the client's."""
    logprobs: int | None
    prompt_logprobs: int | None
    if isinstance(body, ChatBody):
        logprobs, prompt_logprobs = (body.top_logprobs or 0) if body.logprobs else None, None
    else:
        logprobs, prompt_logprobs = body.logprobs, body.logprobs if body.echo else None
        if body.is_ranked:
            logprobs = logprobs or 0
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return [
        SamplingParams(
            max_tokens=max(1, max_tokens),
            seed=(seed + choice * _GOLDEN) & _SEED_MASK,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=stop_token_ids,
            grammar=grammar,
            **{name: getattr(body, name) for name in _PASSED_ON},
        )
        for choice in range(body.num_samples)
    ]


def _echo(body: CallBody, given: Prompt, token_ids: list[int], tokenizer: Tokenizer) -> str | None:
    """Return the prompt's text as the client wrote it, or the text of its token ids; None without echo."""
    if isinstance(body, ChatBody) or not body.echo:
        return None
    if isinstance(given, str):
        return given
    vocabulary = tokenizer.vocabulary
    return (vocabulary if body.skip_special_tokens else vocabulary.spelled).text_of(token_ids)


async def _grammar(body: CallBody, plan: ToolPlan | None, tokenizer: Tokenizer) -> Grammar | None:
    """Return the form that the answer must have; None for any. Raises ApiError 400."""
    grammar = await grammar_of(body, tokenizer.stop_token_ids)
    if plan is None or not plan.offered:
        return grammar
    if grammar is not None:
        why = "an answer that is held to a form can call no tool: leave out the form"
        raise invalid(f"{why}, leave out tools, or send tool_choice 'none'", "tools")
    return await plan.grammar(tokenizer.stop_token_ids)


async def _chat_text(body: ChatBody, plan: ToolPlan, context: int, tokenizer: Tokenizer) -> str:
    messages = [message.for_template() for message in body.messages]
    refuse_if_long(sum(len(message["content"]) for message in messages), context, tokenizer)
    return await tokenizer.chat_text(messages, plan.for_template)


async def _tokenize_chat(text: str, context: int, tokenizer: Tokenizer) -> list[int]:
    refuse_if_long(len(text), context, tokenizer)
    token_ids = await tokenizer.encode(text, special_tokens=False)  # the template wrote them
    _check_length(len(token_ids), context)
    return token_ids


async def _tokenize(
    given: Prompt, where: str, context: int, card: InstanceCard, tokenizer: Tokenizer
) -> list[int]:
    if isinstance(given, str):
        refuse_if_long(len(given), context, tokenizer)
        token_ids = await tokenizer.encode(given)
    else:
        token_ids = given
        check_ids(token_ids, card, where)
    _check_length(len(token_ids), context)
    return token_ids


def refuse_if_long(num_chars: int, context: int, tokenizer: Tokenizer) -> None:
    """Raise ApiError 400 for a text of so many characters that it has more tokens than the context."""
    if (fewest := tokenizer.fewest_tokens(num_chars)) > context:
        raise too_long(fewest, context, at_least=True)


def _check_length(num_tokens: int, context: int) -> None:
    if num_tokens == 0:
        raise invalid("prompt is empty: it has no tokens", "prompt", "empty_prompt")
    if num_tokens >= context:  # one token of output must fit, too
        raise too_long(num_tokens, context)


def check_ids(token_ids: Sequence[int], card: InstanceCard, where: str) -> None:
    """Refuse ids outside the vocabulary. `where`: their place in the body, as prompt[2]."""
    if max(token_ids, default=0) < card.vocab_size:  # fast; the search for the culprit is not
        return
    i = next(i for i, token_id in enumerate(token_ids) if token_id >= card.vocab_size)
    param = where.partition("[")[0]
    at = f"{where}[{i}]" if param == "prompt" else param
    known = f"0 to {card.vocab_size - 1}"
    raise invalid(
        f"{at}: token id {token_ids[i]} is outside the vocabulary of {card.model!r}: {known}", param
    )
