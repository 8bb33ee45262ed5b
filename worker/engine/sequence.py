"""The state of one request in the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Literal, Self

from bus.messages import SamplingParams, Submit, TokenLogprobs
from bus.precisions import KVPrecision, Precision
from bus.prefix_keys import first_key, next_key
from worker.engine.grammars import Matcher


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one instance: tokens and sequences in one step, and the length of a sequence.

    prefix_cache: whether sequences share the full KV blocks of equal beginnings. kv_dtype: what the KV cache
    is held in. short_context: the most tokens of a sequence that turns by the rows of the rotary tables from
    `short_rope_row` on, not by those from 0 on (longrope); 0: all turn by the same. cuda_graphs: whether
    decodes on a GPU are recorded.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_tokens: int
    prefix_cache: bool = False
    kv_dtype: KVPrecision = "full"
    cuda_graphs: Literal["auto", "off"] = "auto"
    short_context: int = 0
    short_rope_row: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def of(
        cls, settings: object, *, max_model_len: int, short_context: int = 0, short_rope_row: int = 0
    ) -> Self:
        """Return the limits that `settings` has under the same names, and these of the model."""
        of_model = ("max_model_len", "short_context", "short_rope_row")
        names = (one.name for one in fields(cls) if one.name not in of_model)
        return cls(
            max_model_len=max_model_len,
            short_context=short_context,
            short_rope_row=short_rope_row,
            **{name: getattr(settings, name) for name in names},
        )

    def is_long(self, num_tokens: int) -> bool:
        """Return True for a sequence of so many tokens that turns by the long frequencies of two."""
        return 0 < self.short_context < num_tokens


class Sequence:
    """A request being served: its tokens, how many of them are in the KV cache, and in which blocks.

    ::

        token_ids: | prompt ............ | sent ...... | generated .... |
                   0        num_computed_tokens ^ (anywhere)            len(token_ids)

    The scheduler writes `num_computed_tokens` and what is known of the blocks, the engine core `token_ids`,
    and the input batch `row` (-1 while waiting) and `generation`. Where several batches may be in flight a
    token counts as computed as soon as its batch is executed, so a sequence whose next token is in flight has
    nothing left to compute.
    """

    __slots__ = (
        "arrived",
        "block_ids",
        "block_keys",
        "generation",
        "is_long",
        "last_token_at",
        "matcher",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_lost_tokens",
        "num_prompt",
        "num_prompt_counted",
        "num_prompt_scored",
        "num_unreported_cached",
        "precision",
        "prompt_logprobs",
        "request",
        "row",
        "started_at",
        "token_ids",
    )

    def __init__(self, request: Submit, arrived: float = 0.0) -> None:
        self.request = request
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.sent_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []  # keys of the first full blocks, as far as needed
        self.is_long = False  # its KV turns by the long frequencies of two (`Limits.is_long`)
        self.num_indexed_blocks = 0
        self.num_lost_tokens = 0  # tokens computed before it gave up its blocks; 0 while it runs
        self.num_unreported_cached = 0  # cached prompt tokens that no delta has reported yet
        self.precision: Precision = "full"  # the lowest that its KV was computed in
        self.matcher: Matcher | None = None  # where its output stands in its grammar
        self.row = -1
        self.generation = 0  # times it has lost its row: batches scheduled before that are void for it
        self.arrived = arrived  # monotonic seconds, as the next two; 0.0: not yet
        self.started_at = 0.0
        self.last_token_at = 0.0
        self.num_prompt_counted = 0  # prompt tokens in the statistics: a recomputed one counts once
        self.num_prompt_scored = 0  # prompt tokens with a log-probability, the first counts too; 0: not asked
        self.prompt_logprobs: list[TokenLogprobs | None] = []  # of these, what no delta has; the first: None

    @property
    def num_output(self) -> int:
        """Output tokens so far, those sent in earlier attempts included: the next token's index."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not in the KV cache.

        1 while decoding, more while prefilling, and 0 while the next token is in flight.
        """
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """True while log-probabilities of its prompt are asked for and not all known."""
        return 0 < self.num_prompt_scored < self.num_prompt

    def score(self, logprobs: Seq[TokenLogprobs | None]) -> None:
        """Note the log-probabilities of the next prompt tokens."""
        self.prompt_logprobs += logprobs
        self.num_prompt_scored += len(logprobs)

    @property
    def is_prompt_counted(self) -> bool:
        """True if it has started, and its whole prompt is in the statistics."""
        return self.num_prompt_counted == self.num_prompt and self.started_at > 0

    def most_tokens(self, limits: Limits) -> int:
        """Return the tokens, prompt and output, that it may come to."""
        return min(self.num_prompt + self.request.sampling.max_tokens, limits.max_model_len)

    def num_blocks_needed(self, block_tokens: int) -> int:
        """KV blocks that hold all known tokens."""
        return -(-len(self.token_ids) // block_tokens)

    def keys(self, num_blocks: int, block_tokens: int) -> list[bytes]:
        """Return the keys of the first `num_blocks` blocks, all of whose tokens must be known."""
        keys, tokens = self.block_keys, self.token_ids
        while len(keys) < num_blocks:
            begin = len(keys) * block_tokens
            salt = self.request.cache_salt
            key = keys[-1] if keys else first_key(f"{salt}\0long" if self.is_long else salt)
            keys.append(next_key(key, tokens[begin : begin + block_tokens]))
        return keys[:num_blocks]

    def advance(self, num_tokens: int, block_tokens: int) -> None:
        """Count `num_tokens` more as computed. The one place where the invariant is asserted."""
        self.num_computed_tokens += num_tokens
        assert 0 < self.num_computed_tokens <= len(self.token_ids), (
            self.request.request_id,
            self.num_computed_tokens,
        )
        assert self.num_computed_tokens <= len(self.block_ids) * block_tokens, (
            self.request.request_id,
            self.block_ids,
        )


def own_request(name: str, prompt_token_ids: list[int], sampling: SamplingParams) -> Submit:
    """Make a request of the worker's own: no gateway waits for it, and it shares no prefix with another."""
    return Submit(
        request_id=name,
        attempt=1,
        gateway="",
        epoch=0,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        cache_salt=f"own {name}",
    )
