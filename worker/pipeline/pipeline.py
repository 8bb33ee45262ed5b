"""The leader's end of a pipeline: connections to the stages behind it, and what is on its way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from bus.messages import LayerShape
from worker.engine.work import Work
from worker.model import ModelConfig
from worker.parallel.links import knock
from worker.pipeline.hop import Hop, to_host
from worker.pipeline.wire import Broken, Done, Join, Joined, Leave, Messages, Move, Start, Started, pack


class PipelineLost(Exception):
    """A stage is gone, or does not answer: nothing that is on its way will come back."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A stage behind the leader's: layers [first, end) at a worker, and its door."""

    worker: str
    epoch: int
    address: str
    key: bytes
    first: int
    end: int


class Pipeline:
    """The engine's thread owns it; connections put what comes into its mail and `wake` it.

    `join`, then, when `is_joined`, `start`, then, when `is_started`, `send` and `take_done`: what is sent
    first comes back first. After PipelineLost there is only `close`.
    """

    def __init__(
        self,
        pipeline: str,
        leader: str,
        behind: Sequence[Behind],
        *,
        timeout_s: float,
        wake: Callable[[], None],
        is_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: for a connection that is silent, and for a step to come back."""
        self.id, self.leader, self.behind, self.timeout_s = pipeline, leader, list(behind), timeout_s
        self._wake, self._is_gpu, self._clock = wake, is_gpu, clock
        self._mail: SimpleQueue[tuple[Hop, Messages | str, torch.Tensor]] = SimpleQueue()
        self._hops: list[Hop] = []
        self._joined: dict[int, Joined] = {}
        self._started: set[int] = set()
        self._sent: deque[tuple[int, float]] = deque()  # step, when
        self._done: deque[torch.Tensor] = deque()
        self._next_step = 0
        self._lost = ""

    @property
    def num_stages(self) -> int:
        return 1 + len(self.behind)

    # ----------------------------------------------------------------------------- coming together

    def join(self, config: ModelConfig, dtype: torch.dtype, block_tokens: int, digest: str = "") -> None:
        """Ask them all, each for its layers of this model. A stage that is still being loaded answers when it
        is there."""
        for stage, each in enumerate(self.behind, start=1):
            then = self.behind[stage] if stage < len(self.behind) else None
            hop = Hop(
                knock(each.address, each.key),
                self.timeout_s,
                self._take,
                self._lose,
                is_pinned=self._is_gpu,
                on_beat=self._wake,  # to see what is overdue
            )
            self._hops.append(hop)
            hop.send(
                Join(
                    pipeline=self.id,
                    leader=self.leader,
                    stage=stage,
                    epoch=each.epoch,
                    first=each.first,
                    end=each.end,
                    hidden_size=config.hidden_size,
                    dtype=str(dtype),
                    block_tokens=block_tokens,
                    digest=digest,
                    next_address=then.address if then else "",
                    next_key=then.key if then else b"",
                )
            )

    @property
    def is_joined(self) -> bool:
        """All stand by. Raises PipelineLost."""
        self._read()
        return len(self._joined) == len(self.behind)

    @property
    def num_blocks_possible(self) -> int:
        """Of the stage that has the least room; all have joined."""
        return min(joined.blocks for joined in self._joined.values())

    @property
    def shape(self) -> list[LayerShape]:
        """Of the layers behind the leader's; all have joined."""
        return [layer for stage in sorted(self._joined) for layer in self._joined[stage].shape]

    def start(self, blocks: int) -> None:
        """Let all have so many."""
        for hop in self._hops:
            hop.send(Start(pipeline=self.id, blocks=blocks))

    @property
    def is_started(self) -> bool:
        """All have their blocks. Raises PipelineLost."""
        self._read()
        return len(self._started) == len(self.behind)

    # ----------------------------------------------------------------------------- steps

    @property
    def num_on_their_way(self) -> int:
        return len(self._sent)

    @property
    def has_news(self) -> bool:
        """`take_done` has something to give, or to raise."""
        return bool(self._done or self._lost) or not self._mail.empty() or self._is_overdue

    def send(self, work: Work, residual: torch.Tensor) -> None:
        """What this stage made of a step: residual [T, H], which nobody writes to any more."""
        self._hops[0].send(pack(self.id, self._next_step, work), to_host(residual))
        self._sent.append((self._next_step, self._clock()))
        self._next_step += 1

    def move(self, moved: Mapping[int, int]) -> None:
        """KV blocks (from -> to), behind all steps that were sent."""
        self._hops[0].send(Move(pipeline=self.id, sources=list(moved), targets=list(moved.values())))

    def take_done(self) -> torch.Tensor | None:
        """uint8 in host memory: the residual [R, H] of the step that was sent first of those on their way;
        None: it is not there yet. Raises PipelineLost."""
        self._read()
        if self._is_overdue:
            self._lost = f"a step did not come back within {self.timeout_s:g} s"
            raise PipelineLost(self._lost)
        if not self._done:
            return None
        self._sent.popleft()
        return self._done.popleft()

    def close(self, reason: str) -> None:
        """Everybody behind hears it and gives its pages back. Repeating it is harmless."""
        for hop in self._hops:
            hop.send(Leave(pipeline=self.id, reason=reason))
            hop.close()

    @property
    def _is_overdue(self) -> bool:
        return bool(self._sent) and not self._done and self._clock() > self._sent[0][1] + self.timeout_s

    def _read(self) -> None:
        while not self._lost:
            try:
                hop, message, behind = self._mail.get_nowait()
            except Empty:
                return
            self._lost = self._note(hop, message, behind)
        raise PipelineLost(self._lost)

    def _note(self, hop: Hop, message: Messages | str, behind: torch.Tensor) -> str:
        """Why it is lost; empty: it goes on."""
        stage = 1 + self._hops.index(hop)
        where = f"stage {stage} at {self.behind[stage - 1].worker}"
        match message:
            case str():
                return f"{where} is gone: {message}"
            case Joined(reason="") | Started():
                if isinstance(message, Joined):
                    self._joined[stage] = message
                else:
                    self._started.add(stage)
            case Joined():
                return f"{where} does not join: {message.reason}"
            case Broken():
                return f"{where} has ended: {message.reason}"
            case Done():
                expected = self._sent[len(self._done)][0] if len(self._sent) > len(self._done) else None
                if message.step != expected:
                    return f"{where} answers step {message.step}, {expected} is the next"
                self._done.append(behind)
            case _:
                return f"{where} says {type(message).__name__}"
        return ""

    # ----------------------------------------------------------------------------- threads of connections

    def _take(self, hop: Hop, message: Messages, behind: torch.Tensor) -> None:
        self._mail.put((hop, message, behind))
        self._wake()

    def _lose(self, hop: Hop, reason: str) -> None:
        self._mail.put((hop, reason, torch.empty(0)))
        self._wake()
