"""The messages of deploying by intent (iServe): intents, profiles, estimates, records, orders.

The controller owns registered models and deployments, which are keys of the catalogue. Gateways send orders
and read the records; workers measure, load and retire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from bus.fields import Field, declared_fields, optional
from bus.levers import LeverPlan
from bus.messages import Stage
from bus.precisions import KVPrecision, Precision

Objective = Literal["latency", "cost", "memory", "gpu_hours"]
CostModel = Literal["memory_seconds", "memory", "gpu_hours"]
Basis = Literal["measured", "extrapolated", "assumed"]
ModelState = Literal["registered", "profiling", "profiled", "failed"]
DeploymentState = Literal["waiting", "loading", "serving", "retiring", "retired", "failed"]
LinkKind = Literal["all_reduce", "hop"]


def _choice(label: str, summary: str, default: str, names: tuple[str, ...]) -> Any:
    return optional(label, summary, "choice", default=default, choices=dict.fromkeys(names, ""))


def _limit(label: str, summary: str, *, maximum: float) -> Any:
    return optional(label, summary, "number", above_minimum=True, maximum=maximum)


def _count(label: str, summary: str, **declaration: Any) -> Any:
    return optional(label, summary, "integer", minimum=1, **declaration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The goal of a deployment (iServe §4.1).

    With `max_latency_s` or `max_cost`, at most one of them, the other quantity is minimised; without them,
    `minimise` is. Latency is that of one request of `prompt_tokens` and `output_tokens` in batches of
    `batch_size`. Cost is in byte seconds, bytes or device hours of a request. A loss of 0.01 is 1 % more
    perplexity. `tp`, `pp`, `precision` and `kv_dtype` are chosen unless they are given.
    """

    minimise: Objective = _choice("Minimise", "goal", "cost", get_args(Objective))
    cost: CostModel = _choice("Cost", "unit of cost", "memory_seconds", get_args(CostModel))
    max_latency_s: float | None = _limit("Latency", "seconds of a request, at most", maximum=1e30)
    max_cost: float | None = _limit("Cost", "cost of a request at most, in its unit", maximum=1e30)
    max_loss: float | None = optional(
        "Loss",
        "share of perplexity at most [1%]; an unknown loss exceeds it",
        "number",
        unit="share",
        maximum=1,
    )
    prompt_tokens: int = _count("Prompt", "tokens of a request's prompt", default=256)
    output_tokens: int = _count("Output", "tokens of a request's output", default=64)
    batch_size: int = _count("Batch", "concurrent requests", default=1, maximum=4096)
    tp: int | None = _count("tp", "workers that share each layer", maximum=64)
    pp: int | None = _count("pp", "stages, of --tp workers each", maximum=64)
    precision: Precision | None = optional("Precision", "precision of all layers", "precision")
    kv_dtype: KVPrecision | None = optional(
        "KV cache",
        "what the KV cache is held in",
        "choice",
        choices={"full": "in the model's dtype", "int8": "in 8 bits"},
    )


INTENT_FIELDS: Final = declared_fields(Intent, Field)
FIXABLE: Final = ("tp", "pp", "precision", "kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to serve a model: pp stages of tp workers each, all layers in one precision.

    kv_dtype: full: what the settings of the workers say.
    """

    tp: int = 1
    pp: int = 1
    precision: Precision = "full"
    kv_dtype: KVPrecision = "full"

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Latencies of a batch of equal dummy requests to a fingerprint, a model of its first layers.

    `seconds` has, for each repetition, the time from the submission of the batch to its last token. Above
    degree 1 it is one rank's own work, without the communication of ranks (`Profile.links`). Repetition i
    with both lengths of output is one run.
    """

    num_layers: int  # hidden layers of what was measured: 1 or 2, or all
    configuration: Configuration
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory of all devices of a configuration together.

    Weights are counted in whole pages, of several devices by their layout, which is exact. Activations of
    several devices are those of one device times their number; None if no device was measured.
    """

    num_layers: int
    configuration: Configuration
    weight_bytes: int
    activation_bytes: int | None = None  # the most that a step had at once beside weights and KV


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Seconds of each all-reduce of two ranks, or hop between stages, with `nbytes` bytes."""

    kind: LinkKind
    nbytes: int
    seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSize:
    """The most that a rank of a degree that stays takes, by the layout and in whole pages.

    Every rank has a part of everything large, so that nothing is left with which it could serve alone.
    """

    tp: int
    precision: Precision
    layer_bytes: int  # weights of a layer
    lead_bytes: int  # embedding and head, of each rank of the first stage
    block_bytes_per_layer: int  # a KV block


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measurements of a model on one kind of device; key `profile:{model}:{device kind}` and a file."""

    model: str  # registered name
    digest: str  # checkpoint: config and the files' names, sizes and times
    device: str  # kind: "cpu", or a GPU's name
    version: str  # version of the program that measured
    num_layers: int  # layers of the whole model
    block_bytes_per_layer: int  # bytes of one KV block in one layer
    block_tokens: int
    latency: list[LatencySample]
    memory: list[MemorySample]
    degrees: list[int] = field(default_factory=list)  # degrees of groups that may part again; empty: unknown
    loss: dict[Precision, float] = field(default_factory=dict)  # share of perplexity added; absent: unknown
    kv_gain: float = 1.0  # KV blocks in 8 bits in the bytes of one that was measured; 1: not to be had
    kv_loss: float | None = None  # share of perplexity that KV in 8 bits costs; None: unknown
    kv_dtype: KVPrecision = "full"  # that was measured, by the settings of the workers
    device_seconds: float = 0.0  # spent on measuring
    peak_bytes: int = 0  # most pages in use at once
    ended_ms: int = 0
    links: list[LinkSample] = field(default_factory=list)  # empty: no other worker to measure with
    row_bytes: int = 0  # bytes of a token between two layers; 0: unknown
    max_num_batched_tokens: int = 0  # most tokens in a step; 0: unknown
    page_bytes: int = 1  # sizes of weights are whole pages of so many bytes; 1: unknown
    ranks: list[RankSize] = field(default_factory=list)  # of degrees that stay; empty: unknown

    @property
    def fixed_degrees(self) -> list[int]:
        """The degrees that its weights can be cut for if the degree stays."""
        return sorted({one.tp for one in self.ranks})

    def kv_loss_of(self, kv: KVPrecision) -> float | None:
        """Return the share of perplexity that KV costs where a configuration says `kv`; None: unknown."""
        return 0.0 if kv == self.kv_dtype == "full" else self.kv_loss

    def rank_block_bytes(self, tp: int, kv: KVPrecision) -> int:
        """Return the bytes of a KV block in one layer at each of `tp` ranks.

        tp 1: one worker, which has all of it. Where there are fewer KV heads, several ranks have one.
        kv: "full" is the form that was measured.
        """
        of_ranks = (one.block_bytes_per_layer for one in self.ranks if one.tp == tp)
        measured = next(of_ranks, self.block_bytes_per_layer // tp)
        return measured if kv == "full" else round(measured / self.kv_gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """An estimate with its bounds: low <= value <= high, all equal if the spread is unknown."""

    value: float
    low: float
    high: float
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One row of the configuration map (iServe §4.2), in seconds, bytes and the unit of the intent's cost."""

    configuration: Configuration
    memory_bytes: Quantity  # sum over all devices, with the KV of the intent's batch
    ttft_s: Quantity
    tpot_s: Quantity
    latency_s: Quantity
    cost: Quantity
    gpu_hours: Quantity  # per request: devices times latency
    loss: Quantity | None = None  # added perplexity against full precision, as a share; None: unknown
    refusal: str = ""  # why this configuration cannot be deployed now; "": it can
    # Bytes of the fullest worker's pages, with the KV of the batch: in a group that may part again, whose
    # workers load the whole model, and where the degree stays. 0: it cannot be so, or is not weighed.
    group_worker_bytes: int = 0
    fixed_worker_bytes: int = 0
    is_fixed: bool = False  # these are the numbers of a degree that stays


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A registered model; key `model:{name}`."""

    name: str
    path: str
    digest: str
    num_layers: int
    state: ModelState
    reason: str = ""
    progress: str = ""
    worker: str = ""  # the worker that measures it, in `epoch`, since `since_ms`
    epoch: int = 0
    since_ms: int = 0
    attempts: int = 0  # failed measurements in a row
    context: int = 0  # most tokens of a sequence; 0: the checkpoint does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model to serve as its intent says; key `deployment:{id}`."""

    id: str
    model: str
    intent: Intent
    state: DeploymentState
    reason: str = ""  # why it is in this state: what failed, or what it waits for
    configuration: Configuration | None = None
    stages: list[Stage] = field(default_factory=list)
    expected: Estimate | None = None
    instance: str = ""  # the instance that serves it
    since_ms: int = 0  # since when it is in this state
    attempts: int = 0  # failed loads in a row
    loads: int = 0  # number of loads ordered so far; part of the ids of commands
    epochs: dict[str, int] = field(default_factory=dict)  # epochs of the workers of `stages` at the command
    replaces: str = ""  # the deployment that it replaces, which serves until then
    heir: str = ""  # the deployment that replaced it
    copies: str = ""  # the deployment that the planner serves once more with this one, for a time
    is_ungrouped: bool = False  # workers refused to form a group for it: it is served without
    is_fixed: bool = False  # each of its workers has a part of the model for good

    @property
    def workers(self) -> list[str]:
        """The workers in the order of their stages."""
        return [worker for stage in self.stages for worker in stage.workers]

    @property
    def is_divided(self) -> bool:
        """True if workers have their parts from the start, as those of several stages do."""
        return self.is_fixed or len(self.stages) > 1

    @property
    def shown_by(self) -> list[str]:
        """The workers whose cards show it: all of a group, or the leader of what is divided."""
        return self.workers[:1] if self.is_divided else self.workers

    @property
    def degree_by_transform(self) -> int:
        """The degree of the group to be made of its workers once they serve alone."""
        return self.configuration.tp if self.configuration and not self.is_divided else 1

    def instance_at(self, worker: str) -> str:
        """Return the id of its instance on `worker`."""
        return f"{self.model}@{worker}"

    def deploy_id(self, worker: str) -> str:
        """Return the id of its latest Deploy to `worker`."""
        return f"{self.id}-{self.loads}-{worker}"

    @property
    def transform_id(self) -> str:
        """The id of the Transform that makes its group."""
        return f"{self.id}-{self.loads}-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterModel:
    """Register a model. Stream `orders`, like the next ones; the controller writes an Answer with this id."""

    id: str
    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveModel:
    """Remove a registered model that no deployment uses."""

    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """Estimate all configurations for an intent and rank them. Changes nothing."""

    id: str
    name: str
    intent: Intent


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployModel:
    """Deploy a registered model as the intent says."""

    id: str
    name: str
    intent: Intent
    copies: str = ""  # see `Deployment.copies`


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireModel:
    """Retire a deployment by its id."""

    id: str
    deployment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighLevers:
    """Weigh what the morph policy would do now. Changes nothing.

    With `requests`, so many more come at once, each with a prompt and an output of so many tokens.
    """

    id: str
    model: str = ""  # the model that is asked about; "": all
    requests: int = 0
    prompt_tokens: int = 256
    output_tokens: int = 64

    @property
    def tokens(self) -> int:
        """Tokens of one request."""
        return self.prompt_tokens + self.output_tokens


CatalogueOrder = RegisterModel | RemoveModel | PlanModel | DeployModel | RetireModel
Order = CatalogueOrder | WeighLevers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to an order; key `answer:{order id}`, for a minute. `status` is that of HTTP."""

    id: str
    status: int
    error: str = ""
    model: ModelCard | None = None
    deployment: Deployment | None = None
    estimates: list[Estimate] = field(default_factory=list)  # best first
    plans: list[LeverPlan] = field(default_factory=list)  # plans of the morph policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePeer:
    """A worker to measure links with, and its address and key as on its card."""

    worker: str
    link: str
    link_key: bytes
    shares_host: bool = True  # False: only hops are measured, since the ranks of a group share a host


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Profile fingerprints of a model between the steps of the engine; stream `control:{worker}`.

    The worker writes the Profile to the catalogue, or publishes an event `profile_failed` with the reason.
    Until then, events `profile_progress` say how far it is. The `morph_id` of these events is this `id`,
    their subject the model.
    """

    id: str
    epoch: int
    model: str
    path: str
    digest: str
    precisions: list[Precision]
    prompt_tokens: list[int]
    batch_sizes: list[int]
    max_bytes: int = 0  # most bytes of pages to use; 0: all that are free
    peer: ProbePeer | None = None  # None: links are not measured
