"""A model as the planner sees it: its instances, what waits, what could be made of them. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bus.levers import NEVER_S, CostBasis
from bus.precisions import Precision
from controller.planning.lever_costs import LeverCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRung:
    """One precision below the present one, for each further layer that goes to it."""

    precision: Precision
    layers: int  # that can still go
    begun: int = 0  # those of them of which a half is there already: counted on for nothing
    blocks: float
    loss: float
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInstance:
    """An instance under weighing. Blocks of KV; `needed`: those in use and of the prompts that wait."""

    name: str
    tp: int = 1
    block_tokens: int = 16
    blocks: int
    used: int = 0
    needed: int = 0
    running: float = 0.0
    waiting: float = 0.0
    oldest_wait_s: float = 0.0
    tokens_per_s: float = 0.0  # processed
    speed_basis: CostBasis = "measured"
    spare_blocks: int = 0  # free pages would make
    rungs: Sequence[SwapRung] = ()
    kv_blocks: int = 0  # that a KV cache in 8 bits would bring; 0: it is, or its loss is unknown
    kv_loss: float = 0.0  # by that
    loss_left: float = 0.0
    max_model_len: int = 0  # tokens of one sequence; 0: the KV alone limits it
    weight_bytes: int = 0  # of the model on one worker; 0: unknown
    is_movable: bool = True  # what queues here can run at any other instance of the model

    @property
    def load(self) -> float:
        return self.running + self.waiting

    @property
    def missing(self) -> int:
        """The blocks that requests wait for."""
        return max(0, self.needed - self.blocks) if self.waiting else 0

    def queue_s(self, blocks: float) -> float:
        """Return how long it takes until so many blocks are free, by the work that is done here.

        A token that is processed makes the room of one, sooner or later (Little's law).
        """
        if blocks <= 0:
            return 0.0
        speed = self.tokens_per_s / self.block_tokens
        return min(NEVER_S, blocks / speed) if speed > 0 else NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOffer:
    """Instances that could become one which holds the long request, after a swap to equal layers."""

    instances: tuple[str, ...]
    tp_before: int
    tp: int
    load: float
    blocks: int = 0  # gained
    are_neighbours: bool = True
    holds: int = 1  # long requests at a time
    room_s: float = 0.0  # until what its members hold leaves room for the first of them
    parted: tuple[str, ...] = ()  # members that are a group too small for it, and part first
    halves: int = 0  # that a member swaps before, at most, so that all layers are alike
    loss: float = 0.0  # by that
    is_kv_converted: bool = False  # at some members before, so that all KV caches are alike
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOffer:
    """A group that could part."""

    instances: tuple[str, ...]
    tp_before: int
    tp: int
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNeed:
    """Long requests that no instance takes; `queue_s`: until one has room that could hold them."""

    tokens: int
    count: int = 1
    waited_s: float = 0.0
    queue_s: float = NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """The limits of the policy in force."""

    ttft_slo_s: float = 2.0
    loss_budget: float = 0.0025
    kv_usage_high: float = 0.85  # a move fills no instance beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverSituation:
    """One model: its instances, what waits, and what could be made of them."""

    model: str
    instances: Sequence[ServingInstance] = ()
    long: LongNeed | None = None
    merges: Sequence[MergeOffer] = ()
    parts: Sequence[PartOffer] = ()
    spares: Sequence[str] = ()  # workers on which nothing runs, that could serve the model once more
    no_spare: str = ""  # why there are none
    objectives: Objectives = field(default_factory=Objectives)
    costs: LeverCosts = field(default_factory=LeverCosts)

    @property
    def load(self) -> float:
        return sum(one.load for one in self.instances)

    @property
    def speed(self) -> float:
        """The throughput of all instances, in that of one worker."""
        return sum(self.costs.speed(one.tp)[0] for one in self.instances)
