"""Every message of the bus, as plain dataclasses. Standard library only: the engine uses them too.

One stream entry has one field, `m`: msgpack of `[SCHEMA_VERSION, type name, fields]` (see `bus.codec`).

Three numbers make delivery effectively once on an at-least-once bus:

=========  =====================================================================================
attempt    the gateway raises it each time it submits a request again; older attempts are void
epoch      one incarnation of a worker; a worker runs only what is addressed to its own epoch, and
           takes a new one (dropping all it ran) when it finds that its lease was lost
index      position of a token in the request's output; the gateway drops what it already has
=========  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from bus.precisions import PRECISIONS, Precision

SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length", "error"]
Part = Literal["attention", "ffn"]
MorphKind = Literal["swap", "resize", "transform", "deploy", "retire"]
MorphOutcome = Literal["running", "applied", "deferred", "stale", "conflict", "failed"]
# Why a morph was decided: pressure, ease, what waits for a group, an operator; a deployment that comes about,
# is better elsewhere or makes room by going there, goes by order or as its heir serves, failed, is unknown.
Cause = Literal[
    "kv_usage",
    "queue_delay",
    "preemptions",
    "ease",
    "layer_limit",
    "long_request",
    "no_long_request",
    "order",
    "deployment",
    "better",
    "packed",
    "retirement",
    "replaced",
    "undone",
    "orphan",
]

PARTS: tuple[Part, ...] = ("attention", "ffn")
Number = int | float


class RejectReason(StrEnum):
    """Why a worker returns a request that can run elsewhere, or on the same instance later."""

    PRECISION_FLOOR = "precision_floor"  # a layer is below the request's `min_precision`
    KV_CAPACITY = "kv_capacity"  # the whole KV cache, at its current size, is too small
    RETIRED = "retired"  # the instance is being unloaded


# --------------------------------------------------------------------------- gateway -> worker


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `seed` is always set: the gateway draws one where the client gave none.

    A draw is a function of (seed, output position) alone, so a request that is continued elsewhere
    samples the same text. `logprobs`: None off, else how many alternatives per output token (0: only the
    chosen one). `prompt_logprobs`: the same for prompt tokens (echo).
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids; empty when the client said ignore_eos


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """`requests:{instance}`: run this. `sent_token_ids` are output tokens the client already has: the
    worker prefills prompt + sent and goes on at index len(sent_token_ids), with max_tokens still
    counting them."""

    request_id: str
    attempt: int
    gateway: str
    epoch: int  # of the instance's leading worker, when the gateway chose it
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sent_token_ids: list[int] = field(default_factory=list)
    trace_id: str = ""
    min_precision: Precision | Literal[""] = ""  # no layer may be below it while this runs; "": any will do


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """`control:{worker}`: stop these and free their blocks; unknown ids are not an error. `up_to_attempt`:
    later attempts of the same requests live on (they went elsewhere, or come back); None: no attempt does."""

    id: str
    epoch: int
    request_ids: list[str]
    up_to_attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """`control:{worker}`: take nothing new, finish what runs, leave with exit status 0."""

    id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """`control:{worker}`: hold these layers of an instance in `precision`.

    Either `layers`, or `count`: so many more in the instance's order, skipping those that are there already;
    with precision "full" it is the last swapped that goes back first. `wait_s`: how long to wait for pages
    before the answer is `deferred`. Answered by MorphReports with this `id`, at most one of them an end.
    """

    id: str
    epoch: int
    instance: str
    precision: Precision
    layers: list[int] = field(default_factory=list)
    count: int = 0
    parts: list[Part] = field(default_factory=lambda: list(PARTS))
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """`control:{worker}`: have so many KV blocks, as whole pages allow. `wait_s` as in Swap."""

    id: str
    epoch: int
    instance: str
    blocks: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """`control:{worker}` of the worker that leads `instance`: serve it on these workers at degree `tp`.

    `workers`: all that take part, in the order of their shards at the higher degree. Scaling up, they are
    whole instances of the same model and degree, and one group of degree `tp` comes of them; scaling down,
    they are one group, and groups of degree `tp` come of it. `epochs`: of each worker, when this was ordered;
    another incarnation of any of them makes the answer `stale`. `layers_per_step`: how many layers change
    between two steps; 0: as the setting says. Requests stay with the worker that took them. `wait_s` as in
    Swap.
    """

    id: str
    epoch: int
    instance: str
    workers: list[str]
    epochs: dict[str, int]
    tp: int
    layers_per_step: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [first, end) on these workers, in the order of their shards; the first stage's first leads."""

    workers: list[str]
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """`control:{worker}`: load these layers of a model and serve them: a morph of kind "deploy".

    Sent to the worker of every stage; the first stage's worker leads and gets requests. With one stage the
    worker serves alone. `blocks`: KV blocks to have at least; the rest of the room is shared as fair_shares
    says. Other models' idle KV makes room. Answered by MorphReports with this `id`."""

    id: str
    epoch: int
    instance: str  # its id: the leader's is "{model}@{worker}"
    model: str
    path: str
    stages: list[Stage]
    stage: int = 0  # which of them this worker is
    epochs: dict[str, int] = field(default_factory=dict)  # of the workers of all stages
    precision: Precision = "full"
    blocks: int = 0
    max_model_len: int = 0
    digest: str = ""  # of the checkpoint that was planned with; another one is refused
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """`control:{worker}`: take nothing new for this instance, finish what runs, give every page back."""

    id: str
    epoch: int
    instance: str
    wait_s: float = 30.0  # for requests to end; then they go on elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMorph:
    """`control:{worker}`: give up a morph that is still running; the old shape goes on serving."""

    id: str
    epoch: int
    morph_id: str


Morph = Swap | Resize | Transform | Deploy | Retire
Command = Cancel | Drain | Morph | CancelMorph
KIND_OF: dict[type[Morph], MorphKind] = {
    Swap: "swap",
    Resize: "resize",
    Transform: "transform",
    Deploy: "deploy",
    Retire: "retire",
}


# --------------------------------------------------------------------------- worker -> gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """`logprob` of the token itself and its most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one request. Empty `token_ids` with no `finish_reason`: it was admitted
    (its first prefill chunk ran), which ends its time in the queue, or has been silent for long and lives."""

    request_id: str
    attempt: int
    index: int  # output position of token_ids[0]
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token; [0] is None
    reject_reason: RejectReason | None = None  # with an error that another attempt may avoid


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """`tokens:{gateway}`: everything one engine step made for one gateway."""

    worker: str
    epoch: int
    instance: str
    step: int
    born_ns: int  # time.time_ns() when the step's tokens were known: for the road's latency
    fingerprint: str  # names the shape that served it
    deltas: list[Delta]
    layers_below_full: int = 0  # of the instance, in this step; a layer counts if either part is swapped
    step_s: float = 0.0  # that it took: so long before its tokens the wait of those it admits was over


# --------------------------------------------------------------------------- registry: keys, no streams


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCard:
    """A model being served. `model_path` must be readable by the gateway too: it holds the tokenizer.

    A group is one instance of several workers, and each of them has a card of its own with the same `tp` and
    `workers`: its members in the order of their shards. The first leads the group and its card stands for it;
    each takes requests on the stream of its own card. A pipeline (`pp` above 1) has one card, its leader's:
    `stages` says which layers are where, `workers` lists those of all stages, `tp` is the degree of each.
    """

    id: str
    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    num_layers: int
    dtype: str
    block_tokens: int
    tp: int = 1
    pp: int = 1
    workers: list[str] = field(default_factory=list)
    variants: list[Precision] = field(default_factory=lambda: ["full"])  # what its layers can be
    order: list[int] = field(default_factory=list)  # in which layers are swapped; [0] goes first
    order_name: str = ""  # "profile", "front-to-back", "back-to-front", "random"
    min_blocks: int = 0  # a resize below it is refused: the longest sequence must fit
    max_blocks: int = (
        0  # at degree 1, with every layer in its fewest bits; a group has `tp` times that. 0: unknown
    )
    layer_pages: dict[Precision, int] = field(default_factory=dict)  # of its largest layer in each variant
    attention_pages: dict[Precision, int] = field(default_factory=dict)  # the same of its attention alone
    kv_heads: int = 0  # 0: not told
    degrees: list[int] = field(default_factory=lambda: [1])  # that its weights are padded for
    tokens_at: dict[int, int] = field(default_factory=dict)  # degree: tokens of KV it would have
    deployed: str = ""  # the id of the Deploy that loaded it; "": it is served by the worker's settings
    precision: Precision = "full"  # that it was deployed in
    stages: list[Stage] = field(default_factory=list)  # of a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCard:
    """`card:{worker}`: who I am. Valid only while `lease:{worker}` holds the same epoch."""

    id: str
    epoch: int
    host: str
    pid: int
    device: str
    page_bytes: int
    state: Literal["loading", "serving", "draining"]
    instances: list[InstanceCard] = field(default_factory=list)
    progress: str = ""  # while loading: what, and how far
    link: str = ""  # "host:port", where other workers reach it; "": it takes part in no group or pipeline
    link_key: bytes = b""  # what other workers show there
    variants: list[Precision] = field(default_factory=lambda: list(PRECISIONS))  # that it keeps of a model
    loading: list[str] = field(default_factory=list)  # models that it is about to serve beside the others
    device_kind: str = ""  # that a profile is of: "cpu", or a GPU's name; "": not known yet

    @property
    def kind(self) -> str:
        """As profiles name its device: those of one kind measure alike."""
        return self.device_kind or self.device.partition(":")[0]


# --------------------------------------------------------------------------- telemetry and metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A mergeable sketch: the number of values by bucket (see `bus.histogram`), and their sum."""

    counts: dict[int, int] = field(default_factory=dict)
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    attention: Precision = "full"
    ffn: Precision = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTelemetry:
    """Gauges are now; counters and histograms are since the epoch began. Seconds, tokens, blocks."""

    id: str
    running: int
    waiting: int
    waiting_tokens: int
    kv_blocks: int
    kv_used: int  # in a group: of all its members
    layers: list[LayerShape]
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    finished: dict[str, int]
    queue_seconds: Histogram
    step_seconds: Histogram
    time_to_first_token: Histogram  # from the worker's receipt
    time_per_output_token: Histogram
    oldest_wait_seconds: float = 0.0
    recomputed_tokens: int = 0  # whose KV was lost or given away, and was made again
    longest_tokens: int = 0  # prompt and output that the longest request here may come to, running or waiting
    kv_own: int = 0  # of `kv_used`: blocks of its own requests, which stay with it when its group parts
    workers: list[str] = field(
        default_factory=list
    )  # of its group, in the order of their shards; none: alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """budget = weights + kv + free, always."""

    budget: int
    weights: int
    kv: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTelemetry:
    """`telemetry`: several times a second while busy, once a second when idle."""

    worker: str
    epoch: int
    at_ms: int  # the worker's wall clock, for display; intervals come from its monotonic clock
    busy: float  # share of the time since the last report spent in engine steps, 0..1
    pages: PageCounts
    instances: list[InstanceTelemetry]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMetrics:
    """Smoothed view of one instance over the monitor's window."""

    id: str
    worker: str
    epoch: int
    running: float
    waiting: float
    waiting_tokens: float
    kv_blocks: int
    kv_used: float
    kv_usage: float  # 0..1
    queue_seconds_p95: float | None  # None: nothing finished queueing in the window (absent is not zero)
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    preemptions_per_second: float
    last: InstanceTelemetry  # unsmoothed, for /metrics and /admin/state
    queue_delay_seconds: float = 0.0  # the p95 above or the age of the queue's head, whichever is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    worker: str
    epoch: int
    busy: float
    pages: PageCounts
    age_seconds: float  # since the last report; stale means hold
    at_ms: int = 0  # of that report, by the worker's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """`metrics`: the monitor's smoothed picture."""

    at_ms: int
    window_seconds: float
    workers: list[WorkerMetrics]
    instances: list[InstanceMetrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMoment:
    """One instance at one time: what a chart shows. Of a group all members together."""

    running: float
    waiting: float
    queue_delay_s: float
    ttft_p95_s: float | None  # None: no first token in the window
    tpot_p95_s: float | None
    kv_blocks: int
    kv_used: float
    layers_below_full: int
    tp: int
    tokens_per_s: float  # generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """`moments`: the monitor's history, a quarter of an hour at least, for whoever looks back."""

    at: float  # seconds since 1970
    instances: dict[str, InstanceMoment]


# --------------------------------------------------------------------------- morphs


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphReport:
    """`events`: where a morph is. `ended_ms` with every state but running. `numbers`: bytes, seconds, pages,
    blocks: what it took, or what was missing.

    `telemetry`: the worker's numbers after a morph that ended, which the monitor's picture may not have yet.

    Of a transform there is a report after every boundary at which layers changed: `layers_done` of `layers`,
    the last layer first, from degree `tp_before` to `tp_after`; `workers` are those of the command.
    """

    id: str
    kind: MorphKind
    target: str  # the instance
    worker: str
    epoch: int
    state: MorphOutcome
    reason: str
    started_ms: int
    ended_ms: int | None = None
    numbers: dict[str, Number] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)  # none: it alone
    telemetry: WorkerTelemetry | None = None


# --------------------------------------------------------------------------- gateway -> controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`demand`: requests wait here that no instance can hold in its shape of now, but one of a higher degree
    could. Told again and again while they wait; a demand that is not repeated is over."""

    gateway: str
    model: str
    tokens: int  # prompt and output of the longest that waits
    count: int
    at_ms: int


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`events`: every decision and every morph: what, why, and the numbers it saw.

    Kinds so far: worker_joined, worker_lost, worker_left, epoch_changed, bus_restarted, dead_letter,
    request_replayed, morph_decided. `worker_lost` and `worker_left` carry `epoch` in numbers: gateways replay
    what that epoch had. `epoch_changed` carries `epoch` and `previous_epoch`: what the latter had is void.
    `morph_decided` carries the `morph_id` that the MorphReports of its outcome will have, and its `cause`.
    """

    kind: str
    source: str
    subject: str
    reason: str
    at_ms: int
    numbers: dict[str, Number] = field(default_factory=dict)
    morph_id: str = ""
    cause: str = ""  # a `Cause`: the reason in a word, to be counted


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """`dead-letters`: an entry nobody could use, whole, with the reason."""

    stream: str
    entry_id: str
    reason: str
    payload: bytes
    at_ms: int
