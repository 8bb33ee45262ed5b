"""What one worker runs for leaders elsewhere, and the door at which they come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from worker.distributed.messages import (
    EndPipeline,
    JoinPipeline,
    ProbeMessage,
    StageFailed,
)
from worker.parallel.links import Door, Opening
from worker.pipeline.follower import Follower, Part
from worker.pipeline.hop import Hop, Received
from worker.pipeline.probe import Probed

MAX_EARLY = 64  # leaders that came before their stage was loaded


class Stages:
    """`address` and `key` are for the card. The engine's thread owns the followers; whatever comes for one is
    put into its mail by the threads of the connections."""

    def __init__(
        self, host: str, timeout_s: float, *, is_gpu: bool, device: torch.device | None = None
    ) -> None:
        """device: None: where this thread makes its tensors. Raises OSError where the host cannot be listened
        on."""
        self.wake: Callable[[], None] = lambda: None  # a follower can step, perhaps; in any thread
        # In the engine's thread: the pipeline, and why; its pages are given back.
        self.on_ended: Callable[[str, str], None] = lambda pipeline, reason: None
        self.host, self.timeout_s, self.is_gpu = host, timeout_s, is_gpu
        self._lock = threading.Lock()  # of the next three
        self._followers: dict[str, Follower] = {}
        self._early: dict[str, tuple[Hop, JoinPipeline]] = {}
        self._hops: set[Hop] = set()
        self._probed = Probed(host, device or torch.empty(0).device)
        self._door = Door(host, self._knocked)

    @property
    def address(self) -> str:
        return self._door.address

    @property
    def key(self) -> bytes:
        return self._door.key

    @property
    def followers(self) -> list[Follower]:
        with self._lock:
            return list(self._followers.values())

    # ----------------------------------------------------------------------------- the engine's thread

    def add(self, part: Part, join_within_s: float) -> Follower:
        """From here on a leader may have it; it may be there already. ValueError for one that is here."""
        follower = Follower(
            part,
            host=self.host,
            timeout_s=self.timeout_s,
            join_within_s=join_within_s,
            wake=lambda: self.wake(),
            on_frame=self._take,
            on_ended=self._ended,
        )
        with self._lock:
            if part.pipeline in self._followers:
                raise ValueError(f"a stage of {part.pipeline} is here already")
            self._followers[part.pipeline] = follower
            early = self._early.pop(part.pipeline, None)
        if early:
            follower.put(*early, torch.empty(0))
        return follower

    @property
    def has_ranks(self) -> bool:
        """A stage here waits for other ranks within its steps (`worker.pipeline.ranks`)."""
        return any(each.part.shard.size > 1 and not each.is_over for each in self.followers)

    @property
    def can_step(self) -> bool:
        return any(follower.can_step for follower in self.followers)

    def step(self) -> None:
        """One for each that has something to do: none can starve another."""
        for follower in self.followers:
            if follower.can_step:
                follower.step()

    def end(self, pipeline: str, reason: str) -> bool:
        """False if there is no such stage here."""
        with self._lock:
            follower = self._followers.get(pipeline)
        if follower:
            follower.end(reason)
        return follower is not None

    def ask_to_end(self, reason: str) -> None:
        """The worker is to leave: leaders let their requests end, and then all of it."""
        for follower in self.followers:
            follower.ask_to_end(reason)

    def fence(self) -> None:
        """Their leaders were told of an epoch that is over."""
        for follower in self.followers:
            follower.end("its worker has lost its lease")

    def close(self) -> None:
        """The worker leaves: leaders hear it, every page is given back."""
        self._door.close()
        for follower in self.followers:
            follower.end("the worker leaves")
        for hop in list(self._hops):
            hop.close()

    # ----------------------------------------------------------------------------- threads of connections

    def _knocked(self, open_: Opening) -> None:
        hop = Hop(open_, self.timeout_s, self._take, self._lost, is_pinned=self.is_gpu)
        with self._lock:
            self._hops = {each for each in self._hops if not each.is_closed} | {hop}

    def _take(self, hop: Hop, message: Received, behind: torch.Tensor) -> None:
        if isinstance(message, ProbeMessage):
            self._probed.take(hop, message, behind)
            return
        with self._lock:
            follower = self._followers.get(message.pipeline)
            if follower is None and isinstance(message, JoinPipeline) and len(self._early) < MAX_EARLY:
                self._early[message.pipeline] = hop, message
                return
            if follower is None and isinstance(message, EndPipeline):
                self._early.pop(message.pipeline, None)
        if follower:
            follower.put(hop, message, behind)
        elif not isinstance(message, StageFailed | EndPipeline):
            hop.send(
                StageFailed(pipeline=message.pipeline, stage=-1, reason="there is no such stage any more")
            )

    def _lost(self, hop: Hop, reason: str) -> None:
        with self._lock:
            self._hops.discard(hop)
            self._early = {name: early for name, early in self._early.items() if early[0] is not hop}
            followers = list(self._followers.values())
        for follower in followers:
            follower.lose(hop, reason)

    def _ended(self, pipeline: str, reason: str) -> None:
        with self._lock:
            self._followers.pop(pipeline, None)
        self.on_ended(pipeline, reason)
