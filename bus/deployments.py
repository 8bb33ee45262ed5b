"""Messages of deploying by intent: what is asked for, what was measured, what is expected, what is ordered.

The controller owns registered models and deployments (keys of the registry); gateways order and read, workers
measure, load and retire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bus.messages import Stage
from bus.precisions import Precision

Objective = Literal["latency", "cost", "memory", "gpu_hours"]
CostModel = Literal["memory_seconds", "memory", "gpu_hours"]
Basis = Literal["measured", "extrapolated", "assumed"]
ModelState = Literal["registered", "profiling", "profiled", "failed"]
DeploymentState = Literal["waiting", "loading", "serving", "retiring", "retired", "failed"]
LinkKind = Literal["all_reduce", "hop"]


# --------------------------------------------------------------------------- what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the owner of a deployment wants (iServe §4.1). At most one of the two SLOs; the other quantity is
    then minimised, else `minimise` is. Latency is that of one request of `prompt_tokens` and `output_tokens`
    in batches of `batch_size`. What is given of `tp`, `pp` and `precision` is fixed, the rest is chosen."""

    minimise: Objective = "cost"
    cost: CostModel = "memory_seconds"  # byte seconds of a request, bytes, or device hours of a request
    max_latency_s: float | None = None
    max_cost: float | None = None
    max_loss: float | None = None  # a floor of quality under any: 0.01 is one per cent of perplexity more
    prompt_tokens: int = 256
    output_tokens: int = 64
    batch_size: int = 1
    tp: int | None = None
    pp: int | None = None
    precision: Precision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to serve a model: pp stages of tp workers each, all layers in one precision."""

    tp: int = 1
    pp: int = 1
    precision: Precision = "full"

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp


# --------------------------------------------------------------------------- what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Dummy requests to a fingerprint: `seconds` of each repetition, from the submission of a batch of equal
    requests to the last token of all of them. Of degrees above 1: one rank's own work, without what ranks say
    to each other (`Profile.links`). Repetition i of both lengths of output is one run."""

    num_layers: int  # hidden layers of what was measured: 1 or 2, or all
    configuration: Configuration
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """All devices of the configuration together; bytes of whole pages for the weights. Of several devices the
    weights are what their layout says, which is exact, and activations those of one of them times their
    number, or None where nobody measured one."""

    num_layers: int
    configuration: Configuration
    weight_bytes: int
    activation_bytes: int | None = None  # the most that a step had at once beside weights and KV


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """What two workers say to each other: `seconds` of each repetition of an all-reduce of two ranks, or of a
    hop from one stage to the next, of so many bytes."""

    kind: LinkKind
    nbytes: int
    seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`profile:{model}:{device kind}`, and a file beside the model: what its fingerprints told."""

    model: str  # registered name
    digest: str  # of the checkpoint: config and the files' names, sizes and times
    device: str  # kind: "cpu", or a GPU's name
    version: str  # of the program that measured
    num_layers: int  # of the whole model
    block_bytes_per_layer: int  # of the KV of one block in one layer
    block_tokens: int
    latency: list[LatencySample]
    memory: list[MemorySample]
    degrees: list[int] = field(default_factory=list)  # that its weights can be cut to; empty: not told
    loss: dict[Precision, float] = field(default_factory=dict)  # share of perplexity more; none: not known
    device_seconds: float = 0.0  # that measuring took
    peak_bytes: int = 0  # that it had at once
    ended_ms: int = 0
    links: list[LinkSample] = field(default_factory=list)  # empty: there was no other worker to measure with
    row_bytes: int = 0  # of a token between two layers; 0: not told
    max_num_batched_tokens: int = 0  # of a step; 0: not told


# --------------------------------------------------------------------------- what is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """low <= value <= high; all three alike where nothing is known of the spread."""

    value: float
    low: float
    high: float
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One row of the configuration map (iServe §4.2). Seconds, bytes, and the unit of the intent's cost."""

    configuration: Configuration
    memory_bytes: Quantity  # of all devices together, KV of the intent's batch included
    ttft_s: Quantity
    tpot_s: Quantity
    latency_s: Quantity
    cost: Quantity
    gpu_hours: Quantity  # per request: devices times latency
    loss: Quantity | None = None  # share of perplexity more than at full precision; None: not known
    refusal: str = ""  # why it cannot be had here now; "": it can


# --------------------------------------------------------------------------- registry: keys, no streams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """`model:{name}`: a registered model."""

    name: str
    path: str
    digest: str
    num_layers: int
    state: ModelState
    reason: str = ""
    progress: str = ""
    worker: str = ""  # that measures, as `epoch`, since `since_ms`
    epoch: int = 0
    since_ms: int = 0
    attempts: int = 0  # to measure, in a row
    context: int = 0  # tokens, prompt and output, that a sequence may have; 0: the checkpoint does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`deployment:{id}`: a model that is to be served as its intent says."""

    id: str
    model: str
    intent: Intent
    state: DeploymentState
    reason: str = ""  # of its state: what failed, what would have to go, what is waited for
    configuration: Configuration | None = None
    stages: list[Stage] = field(default_factory=list)
    expected: Estimate | None = None
    instance: str = ""  # that serves it
    since_ms: int = 0  # in this state
    attempts: int = 0  # to load, in a row
    loads: int = 0  # ever ordered; ids of commands are made of it
    epochs: dict[str, int] = field(default_factory=dict)  # of the workers of `stages`, when they were told to
    replaces: str = ""  # it is loaded to take the place of this one, which serves until then
    heir: str = ""  # that took its place
    is_ungrouped: bool = False  # workers would not form a group for it: it is served without one


# --------------------------------------------------------------------------- gateway -> controller


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterModel:
    """`orders`. Answered by an Answer with this id, as the next ones."""

    id: str
    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveModel:
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """What would be chosen for this intent, and everything else; nothing is done."""

    id: str
    name: str
    intent: Intent


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployModel:
    id: str
    name: str
    intent: Intent


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireModel:
    """A deployment, by its id."""

    id: str
    deployment: str


Order = RegisterModel | RemoveModel | PlanModel | DeployModel | RetireModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`answer:{order id}`, for a minute. `status` as of HTTP; `error` with 400 and above."""

    id: str
    status: int
    error: str = ""
    model: ModelCard | None = None
    deployment: Deployment | None = None
    estimates: list[Estimate] = field(default_factory=list)  # best first


# --------------------------------------------------------------------------- controller -> worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePeer:
    """A worker to measure links with, and its address and key as on its card. Ranks of a group share a host:
    without that only hops are measured."""

    worker: str
    link: str
    link_key: bytes
    shares_host: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """`control:{worker}`: profile fingerprints of a model between the steps. Ends in `profile:...`
    (`bus.catalogue.write`), or in an event `profile_failed` whose `morph_id` is this `id`, its subject the
    model and its reason why not; on the way events `profile_progress`, alike, say how far it is."""

    id: str
    epoch: int
    model: str
    path: str
    digest: str
    precisions: list[Precision]
    prompt_tokens: list[int]
    batch_sizes: list[int]
    max_bytes: int = 0  # of pages it may take; 0: what is free
    peer: ProbePeer | None = None  # to measure links with; None: they are not measured
