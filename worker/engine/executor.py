"""The interface that runs a scheduled batch, whichever devices run it.

`LocalExecutor` is this device alone, `worker.parallel.TensorParallelExecutor` a group that runs one merged
batch, `worker.pipeline.PipelineExecutor` stages that run layers one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bus.messages import LayerShape
from kernels.plan import AttentionPlan
from worker.engine.input_batch import Ints, ModelInput, ScheduledBatch, attention_plan, to_tensor
from worker.engine.recorded_batches import RecordedBatches
from worker.engine.sampler import ChosenTokens
from worker.engine.scheduler import ScheduledChunk

BlockCounter = Callable[[], Generator[bool, None, list[list[int]]]]


class ExecutorLost(Exception):
    """The devices behind an executor are gone: no batch in flight will come back."""


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """A batch that has run, and its logits: float32 [R + P, vocab]."""

    batch: ScheduledBatch
    logits: torch.Tensor
    token_ids: Ints | None = None  # [R] chosen already; None: by the logits
    hidden: torch.Tensor | None = None  # [R + P, H] before the head, where a request embeds

    def only(self, chunks: list[ScheduledChunk]) -> FinishedBatch:
        """Return this without the sequences of all other chunks."""
        kept = {id(chunk.seq) for chunk in chunks}
        batch, rows = self.batch.only(lambda seq: id(seq) in kept)
        at, logits, token_ids, hidden = torch.from_numpy(rows), self.logits, self.token_ids, self.hidden
        if token_ids is None:
            logits = logits[at.to(logits.device)]
        else:
            token_ids = token_ids[rows]
        if hidden is not None:
            hidden = hidden[at.to(hidden.device)]
        return FinishedBatch(batch, logits, token_ids, hidden)


class Executor(ABC):
    """Runs batches in the order in which they are executed. Only the engine's thread calls it."""

    max_concurrent_batches = 1
    runs_ahead = False  # a decode may follow another one before the host has its tokens
    num_in_flight = 0  # batches that were executed and not collected
    num_steps = 0  # batches run, since this executor was made
    tp = 1  # degree of tensor parallelism; while that changes, the old one
    num_members = 1  # members that share each layer
    has_peers = False  # other members call steps: `collect` is due whenever something was heard of them

    # One action of a morph at this member, its status, its KV blocks in use (True: or to be found): set by
    # `worker.morph.target`.
    carry_out: Callable[[Any], None]
    status: Callable[[], Any]
    counted_blocks: Callable[[bool], list[int]]

    @abstractmethod
    def execute(self, batch: ScheduledBatch) -> None:
        """Start `batch`; it may run on after this returns. Raises ExecutorLost."""

    @abstractmethod
    def collect(self) -> list[FinishedBatch]:
        """Return the batches that have finished since the last call. Raises ExecutorLost."""

    @abstractmethod
    def shape(self) -> list[LayerShape]:
        """Return the precision of each layer's halves, now."""

    @property
    def has_news(self) -> bool:
        """True if `collect` has something to return or to raise."""
        return False

    @property
    def has_room(self) -> bool:
        """True if one more batch may be executed now."""
        return self.num_in_flight < self.max_concurrent_batches

    @property
    def newest(self) -> ScheduledBatch | None:
        """The newest batch in flight, if a decode may follow it before its tokens are known."""
        return None

    @property
    def max_tokens(self) -> int | None:
        """The token budget of the next batch; None: that of the instance."""
        return None

    @property
    def num_blocks_used_elsewhere(self) -> int:
        """KV blocks in use by other schedulers on the same cache."""
        return 0

    def complete(self) -> None:  # noqa: B027 an optional step
        """Carry out the changes that are due after the batches just collected and before the next."""

    def recover(self, error: Exception) -> bool:
        """Go on after a step failed. Returns False if the error is the caller's to handle."""
        return False

    def collective(self, action: Any) -> int:
        """Have every member carry out `action` between the same two steps. Returns a ticket for `is_done`."""
        self.carry_out(action)
        return 0

    def is_done(self, ticket: int) -> bool:
        """Return whether every member has carried out the action of `ticket`, and `statuses` shows it."""
        return True

    @property
    def knows_members(self) -> bool:
        """True if this worker leads the instance and every member has reported its status."""
        return True

    def statuses(self) -> list[Any]:
        """Return the latest status of every member, by rank."""
        return [self.status()]

    @contextmanager
    def counting_blocks(self, *, with_found: bool = False) -> Iterator[BlockCounter]:
        """Hold all schedulers until the context ends or the next `collective`, so that none takes a block.

        Yields a generator function whose result is the blocks in use, by rank. with_found: also the free ones
        whose contents the prefix cache finds.
        """

        def count() -> Generator[bool, None, list[list[int]]]:
            yield from ()
            return [self.counted_blocks(with_found)]

        yield count

    @property
    def is_lost(self) -> bool:
        """True if the members are no longer together."""
        return False

    def raise_lost(self) -> None:  # noqa: B027 an optional step
        """Raise if the members are no longer together."""

    def close(self, reason: str) -> None:  # noqa: B027 an optional step
        """Tell the other devices that no batch follows."""


class RunnableModel(Protocol):
    """The part of `worker.model.Model` that `LocalExecutor` needs."""

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        kv: Any,
        logit_rows: torch.Tensor,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor: ...

    def shape(self) -> list[LayerShape]: ...

    def expert_use(self) -> list[list[float]]: ...


@dataclass(slots=True)
class Flight:
    """A batch that was launched, and what comes of it."""

    batch: ScheduledBatch
    logits: torch.Tensor
    choice: ChosenTokens | None  # None: the host chooses by the logits
    hidden: torch.Tensor | None = None


# Launches the choice of a batch's tokens by its logits [R, V], into int64 [R]; None: the host takes part.
Choose = Callable[[ScheduledBatch, torch.Tensor, torch.Tensor], ChosenTokens | None]


class LocalExecutor(Executor):
    """Runs each batch on this device.

    It runs ahead once `run_ahead` was called: the tokens of a recorded step are chosen behind it, and the
    decode that follows may be launched before the host has them, so that the device need not wait for the
    host. `collect` waits for the oldest batch.
    """

    def __init__(self, model: RunnableModel, kv: Any, block_tokens: int, device: torch.device) -> None:
        self._model, self._kv, self._block_tokens, self._device = model, kv, block_tokens, device
        self._flights: deque[Flight] = deque()
        self._choose: Choose | None = None
        self.recorded: RecordedBatches | None = None  # set where steps can be recorded

    def run_ahead(self, choose: Choose | None) -> None:
        """Run ahead from now on; None: no more. Nothing is in flight."""
        self._choose, self.runs_ahead = choose, choose is not None

    @property
    def num_in_flight(self) -> int:  # type: ignore[override]
        return len(self._flights)

    @property
    def has_news(self) -> bool:
        return bool(self._flights)

    @property
    def newest(self) -> ScheduledBatch | None:
        """The batch in flight whose tokens stay on the device: a decode may follow it."""
        return self._flights[-1].batch if self._flights and self._flights[-1].choice else None

    def execute(self, batch: ScheduledBatch) -> None:
        hidden = batch.hidden_states()
        recorded = self.recorded if hidden is None else None  # a recording keeps no hidden states
        made = recorded.run(batch.input, batch.follows) if recorded else None
        assert made is not None or batch.follows is None, "only recordings read tokens on the device"
        choice = None
        if recorded and made is not None and self._choose:
            choice = self._choose(batch, made, recorded.sampled(len(made)))
        logits = self._run(batch.input, hidden) if made is None else made
        self._flights.append(Flight(batch, logits, choice, hidden[0] if hidden else None))
        self.num_steps += 1

    def collect(self) -> list[FinishedBatch]:
        if not self._flights:
            return []
        one = self._flights.popleft()
        token_ids = one.choice.wait() if one.choice else None
        return [FinishedBatch(one.batch, one.logits, token_ids, one.hidden)]

    def shape(self) -> list[LayerShape]:
        return self._model.shape()

    def _run(self, given: ModelInput, hidden: list[torch.Tensor] | None) -> torch.Tensor:
        step = (
            to_tensor(given.token_ids, self._device),
            attention_plan(given, self._block_tokens, self._device),
            self._kv,
            to_tensor(given.logit_rows, self._device),
        )
        return self._model.forward(*step) if hidden is None else self._model.forward(*step, hidden)
