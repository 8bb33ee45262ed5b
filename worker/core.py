"""Nouns that the scheduler, the sampler and the engine share. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bus.messages import SamplingParams, TokenLogprobs
from bus.precisions import Precision


class BlockPool(Protocol):
    """What the scheduler needs of `worker.memory.BlockAllocator`."""

    @property
    def num_free(self) -> int: ...

    @property
    def num_used(self) -> int: ...

    @property
    def capacity(self) -> int:
        """The most that one sequence could ever have."""

    def allocate(self, n: int, /) -> list[int]: ...

    def free(self, blocks: Seq[int], /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One continuation of one prompt. `sent_token_ids` are outputs that the client already has."""

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sent_token_ids: list[int] = field(default_factory=list)
    attempt: int = 1
    min_precision: Precision | Literal[""] = ""  # no layer may be below it while this runs; "": any will do
    gateway: str = ""  # opaque to the engine: comes back with the results


class Sequence:
    """A request being served: its tokens, how many of them are in the KV cache, and where.

    ::

        token_ids: | prompt ............ | sent ...... | generated .... |
                   0        num_computed ^ (anywhere)                   len(token_ids)

    `num_computed` and `block_ids` are written by the scheduler, `token_ids` by the instance, `row` (place
    in the batch tables, -1 while waiting) and `num_exits` by the batch. In a pipeline a step counts as
    computed when it is on its way: nothing remains of a sequence then whose next token is to come back with
    it.
    """

    __slots__ = (
        "arrived",
        "block_ids",
        "last_token_at",
        "num_computed",
        "num_exits",
        "num_prompt",
        "num_prompt_counted",
        "prompt_logprobs",
        "request",
        "row",
        "started_at",
        "token_ids",
    )

    def __init__(self, request: Request, arrived: float = 0.0) -> None:
        self.request = request
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.sent_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.row = -1
        self.num_exits = 0  # how often it has lost its row: what was planned before is void
        self.arrived = arrived  # monotonic seconds, as the next two; 0.0: not yet
        self.started_at = 0.0
        self.last_token_at = 0.0
        self.num_prompt_counted = 0  # prompt tokens in the statistics: a recomputed one counts once
        # Collected while prefilling, sent with the first token; [0] is None. Stays empty if nobody asked.
        self.prompt_logprobs: list[TokenLogprobs | None] = []

    @property
    def num_output(self) -> int:
        """Output tokens so far, those sent in earlier attempts included: the next token's index."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Known tokens that are not in the KV cache: 1 while decoding, more while prefilling; 0 while the
        next token is on its way."""
        return len(self.token_ids) - self.num_computed

    def num_blocks_needed(self, block_tokens: int) -> int:
        return -(-len(self.token_ids) // block_tokens)

    def advance(self, num_tokens: int, block_tokens: int) -> None:
        """`num_tokens` more are in the KV cache. The one place where the invariant is asserted."""
        self.num_computed += num_tokens
        assert 0 < self.num_computed <= len(self.token_ids), (self.request.id, self.num_computed)
        assert self.num_computed <= len(self.block_ids) * block_tokens, (self.request.id, self.block_ids)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one instance may do in one step, and how long a sequence may become."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_tokens: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(slots=True)
class Chunk:
    """`num_tokens` tokens of `seq` from `seq.num_computed` on run in this step."""

    seq: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The chunk ends at the last known token, so its logits choose the next."""
        return self.num_tokens == self.seq.num_remaining


@dataclass(slots=True)
class StepPlan:
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # need a row before the step
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks; wait at the head again
    rejected: list[tuple[Sequence, str]] = field(default_factory=list)  # left the scheduler, with the reason
    num_tokens: int = 0

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.chunks.append(Chunk(seq, num_tokens))
        self.num_tokens += num_tokens
