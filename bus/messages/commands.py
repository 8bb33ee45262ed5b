"""Commands to a worker; stream `control:{worker}`.

Each has an `id` and the `epoch` of the worker that it is for: another incarnation ignores it. A worker
answers a morph with MorphReports that carry the morph's id; at most one of them ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bus.messages.shapes import PARTS, Part, Stage
from bus.precisions import Precision

MorphKind = Literal["swap", "resize", "transform", "deploy", "retire"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop these requests and free their blocks. Unknown ids are not an error."""

    id: str
    epoch: int
    request_ids: list[str]
    up_to_attempt: int | None = None  # later attempts of these requests go on; None: stop all attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Accept nothing new, finish what runs, then exit with status 0."""

    id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Hold layers of an instance in `precision`.

    Give either `layers` or `count`: that many more layers in the instance's order, skipping those that are
    already there. With precision "full", the layers that were swapped last go back first.
    """

    id: str
    epoch: int
    instance: str
    precision: Precision
    layers: list[int] = field(default_factory=list)
    count: int = 0
    parts: list[Part] = field(default_factory=lambda: list(PARTS))
    wait_s: float = 0.0  # how long to wait for free pages before the answer is `deferred`


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Have `blocks` KV blocks, rounded to whole pages."""

    id: str
    epoch: int
    instance: str
    blocks: int
    wait_s: float = 0.0  # as in Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Serve an instance on `workers` at the tensor-parallel degree `tp`; sent to the worker that leads it.

    To scale up, `workers` are whole instances of the same model and degree; they become one group. To scale
    down, `workers` are one group; it splits into groups of degree `tp`. Requests stay with the worker that
    accepted them. A worker whose epoch is not the one in `epochs` makes the answer `stale`.
    """

    id: str
    epoch: int
    instance: str
    workers: list[str]  # in the order of their shards at the higher degree
    epochs: dict[str, int]  # of each worker when this was ordered
    tp: int
    layers_per_step: int = 0  # layers that change between two steps; 0: the worker's setting
    wait_s: float = 0.0  # as in Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Load layers of a model and serve them; sent to the worker of every stage.

    The worker of the first stage leads and gets requests. With one stage it serves alone. The idle KV blocks
    of other models on the worker make room.
    """

    id: str
    epoch: int
    instance: str  # the leader's instance id: "{model}@{worker}"
    model: str
    path: str
    stages: list[Stage]
    stage: int = 0  # the index in `stages` of the worker that gets this
    epochs: dict[str, int] = field(default_factory=dict)  # of the workers of all stages
    precision: Precision = "full"
    blocks: int = 0  # KV blocks to have at least; the other free blocks are shared among the models
    max_model_len: int = 0
    digest: str = ""  # of the checkpoint that was planned with; a worker refuses any other
    wait_s: float = 0.0  # as in Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Accept nothing new for an instance, finish what runs, return all its pages."""

    id: str
    epoch: int
    instance: str
    wait_s: float = 30.0  # for requests to end; the gateway then submits them elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMorph:
    """Give up a morph that is still running. The instance keeps its old shape."""

    id: str
    epoch: int
    morph_id: str


Morph = Swap | Resize | Transform | Deploy | Retire
Command = Cancel | Drain | Morph | CancelMorph
