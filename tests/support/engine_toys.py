"""A model that is arithmetic on its KV cache, so that every index of a step matters and the answer is known.

Its cache holds token ids; the next token is a hash of the whole context *as read through the block table*.
A wrong slot, block, position or length gives another token than `continuation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bus.messages import Delta, LayerShape, RejectReason, SamplingParams, Submit
from bus.precisions import KVPrecision
from kernels.plan import AttentionPlan
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.grammars import GrammarCompiler
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Limits
from worker.memory import BlockAllocator

VOCAB = 97


def next_token(context: list[int]) -> int:
    return (sum((i + 1) * (token + 3) for i, token in enumerate(context)) * 31 + 7) % VOCAB


def continuation(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ToyCache:
    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        prefix_cache: bool = False,
        precision: KVPrecision = "full",
    ) -> None:
        self.precision = precision
        self.allocator = BlockAllocator(num_blocks, None if prefix_cache else range(num_blocks))
        self.slots = torch.full((num_blocks * block_tokens,), -1)
        self.block_tokens = block_tokens


class ToyModel:
    """Greedy output is `continuation`. `fail_on`: raise when this token id is in the batch."""

    def __init__(self) -> None:
        self.fail_on: int | None = None
        self.num_tokens: list[int] = []

    def shape(self) -> list[LayerShape]:
        return [LayerShape()] * 2

    def expert_use(self) -> list[list[float]]:
        return []

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        kv: ToyCache,
        logit_rows: torch.Tensor,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert len(plan.slot_mapping.unique()) == len(token_ids)
        if self.fail_on is not None and self.fail_on in token_ids.tolist():
            raise RuntimeError(f"token {self.fail_on} is poison")
        self.num_tokens.append(len(token_ids))
        kv.slots[plan.slot_mapping] = token_ids
        answers = torch.zeros(len(token_ids), VOCAB)
        cu = plan.cu_seqlens_q.tolist()
        for s, context_len in enumerate(plan.context_lens.tolist()):
            blocks = plan.block_table[s].repeat_interleave(kv.block_tokens).long()
            slots = blocks * kv.block_tokens + torch.arange(len(blocks)) % kv.block_tokens
            context = kv.slots[slots[:context_len]].tolist()
            for t in range(cu[s], cu[s + 1]):
                answers[t, next_token(context[: int(plan.positions[t]) + 1])] = 10.0
        if hidden is not None:
            hidden.append(answers[logit_rows])
        return answers[logit_rows]


def toy_instance(
    num_blocks: int = 64,
    *,
    num_seqs: int = 8,
    tokens: int = 16,
    block_tokens: int = 4,
    model_len: int = 200,
    prefix_cache: bool = False,
    kv_dtype: KVPrecision = "full",
    grammars: GrammarCompiler | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    limits = Limits(num_seqs, tokens, model_len, block_tokens, prefix_cache, kv_dtype)
    cache = ToyCache(num_blocks, block_tokens, prefix_cache=prefix_cache, precision=kv_dtype)
    return EngineCore(
        "toy@w0",
        ToyModel(),
        cache,
        limits,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        grammars=grammars,
        clock=clock,
    )


def toy_engine(**changes: Any) -> tuple[Engine, EngineCore]:
    engine, instance = Engine(), toy_instance(**changes)
    engine.add_instance(instance)
    return engine, instance


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    sent: list[int] | None = None,
    min_precision: Any = "",
    embeds: bool = False,
    **sampling: Any,
) -> Submit:
    params = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "temperature": 0.0, **sampling})
    return Submit(
        attempt=1,
        gateway="",
        epoch=0,
        request_id=name,
        prompt_token_ids=prompt,
        sampling=params,
        sent_token_ids=sent or [],
        min_precision=min_precision,
        embeds=embeds,
    )


class Client:
    """Puts deltas together the way a gateway does, and refuses gaps, repeats and anything after the end."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.reject_reasons: dict[str, RejectReason | None] = {}
        self.deltas: list[Delta] = []

    def take(self, results: list[Any]) -> None:
        for result in results:
            for output in result.outputs:
                self._take(output.request, output.delta)

    def _take(self, request: Submit, delta: Delta) -> None:
        name = delta.request_id
        self.deltas.append(delta)
        assert name not in self.ends, f"{name} goes on after its end"
        received = self.tokens.setdefault(name, list(request.sent_token_ids))
        assert delta.index == len(received), f"{name}: index {delta.index}, expected {len(received)}"
        received += delta.token_ids
        if delta.finish_reason:
            self.ends[name] = delta.finish_reason
        if delta.error:
            self.errors[name] = delta.error
            self.reject_reasons[name] = delta.reject_reason


def run(engine: Engine, client: Client, max_steps: int = 2000) -> Client:
    while engine.has_work:
        client.take(engine.step())
        engine.check_integrity()
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
    return client


def expect_no_growth(scheduler: Scheduler) -> None:
    """Let a scheduler admit as if every sequence made one token more, so that it has to preempt some."""
    scheduler.lengths.remaining = lambda made, most: np.minimum(1, most)  # type: ignore[method-assign]
