"""The messages of the bus, as plain dataclasses. Standard library only: the engine uses them too.

`bus.morphs` has the messages of morphs, `bus.deployments` those of deploying by intent, `bus.policy` the
morph policy. docs/structure.md says how attempt, epoch and index make delivery effectively once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Literal

from bus.fields import MAX_COUNT
from bus.levers import LeverPlan
from bus.precisions import PRECISIONS, KVPrecision, Precision, lowest

SCHEMA_VERSION: Final = 2  # `bus.schema` says how the versions differ
READS: Final = (1, SCHEMA_VERSION)  # the versions that this program understands, and can write

Part = Literal["attention", "ffn"]
Number = int | float

PARTS: tuple[Part, ...] = ("attention", "ffn")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The precision of each half of a layer."""

    attention: Precision = "full"
    ffn: Precision = "full"

    def of(self, part: Part) -> Precision:
        """Return the precision of one half."""
        return self.attention if part == "attention" else self.ffn


MOST_RANKS: Final = 16  # of a stage whose degree stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [first, end) on `workers`, by shard. The first worker of the first stage leads the pipeline."""

    workers: list[str]
    first: int
    end: int


def layers_below_full(layers: Iterable[LayerShape]) -> int:
    """Return the number of layers of which at least one half is below full precision."""
    return sum(layer != LayerShape() for layer in layers)


def lowest_half(layers: Iterable[LayerShape]) -> Precision:
    """Return the precision with the fewest bits of any half of a layer; "full" without layers."""
    return lowest(half for layer in layers for half in (layer.attention, layer.ffn))


FinishReason = Literal["stop", "length", "error"]


class RejectReason(StrEnum):
    """Why a worker returns a request that can run elsewhere, or on the same instance later."""

    PRECISION_FLOOR = "precision_floor"  # a layer is below the request's `min_precision`
    KV_CAPACITY = "kv_capacity"  # the whole KV cache, at its current size, is too small
    RETIRED = "retired"  # the instance is being unloaded


def _between(low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a number that the gateway and the workers refuse outside `low` to `high`."""
    return field(default=default, metadata={"range": (low, high)})


GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The form that an answer must have (`bus.grammars`).

    `text`: a JSON schema, a regular expression, a JSON list of texts, or a grammar in Lark or GBNF.
    """

    kind: GrammarKind
    text: str
    is_lenient: bool = False  # keywords of a schema that are not supported are ignored, not refused
    end_token_ids: tuple[int, ...] = ()  # the model's own; one ends an answer that is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The rules for choosing tokens.

    The gateway draws a `seed` where the client gave none. A draw is a function of (seed, output position)
    alone, so a request that continues on another worker samples the same text.
    """

    max_tokens: int = _between(0, MAX_COUNT)
    seed: int
    temperature: float = _between(0, 2, 1.0)  # 0: greedy
    top_p: float = _between(0, 1, 1.0)
    top_k: int = _between(0, MAX_COUNT, 0)  # 0: off
    min_p: float = _between(0, 1, 0.0)
    presence_penalty: float = _between(-2, 2, 0.0)
    frequency_penalty: float = _between(-2, 2, 0.0)
    repetition_penalty: float = _between(0.01, 10, 1.0)  # of tokens in the prompt or the output
    min_tokens: int = _between(0, MAX_COUNT, 0)  # output tokens before one of stop_token_ids may come
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = _between(0, 20, None)  # alternatives of an output token; 0: only the chosen one
    prompt_logprobs: int | None = _between(0, 20, None)  # the same of each prompt token
    stop_token_ids: tuple[
        int, ...
    ] = ()  # end-of-sequence ids, unless ignore_eos is set, and the client's own
    grammar: Grammar | None = None  # no token may come that its form does not allow


SAMPLING_RANGES: Final[dict[str, tuple[float, float]]] = {
    one.name: one.metadata["range"] for one in fields(SamplingParams) if one.metadata
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingChoice:
    """Another request with the prompt of a `Submit`: all else is as there."""

    request_id: str
    attempt: int
    seed: int
    sent_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request to run, and more with the same prompt; stream `requests:{instance}`.

    The client already has the output tokens `sent_token_ids`. The worker prefills prompt and sent tokens and
    continues at index len(sent_token_ids); `max_tokens` counts the sent tokens too.
    """

    request_id: str
    attempt: int
    gateway: str
    epoch: int  # epoch of the leading worker when the gateway chose the instance
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sent_token_ids: list[int] = field(default_factory=list)
    trace_id: str = ""
    min_precision: Precision | Literal[""] = ""  # no layer may be below it while this runs; "": no floor
    cache_salt: str = ""  # requests with unlike salts share no KV blocks
    key: str = ""  # id of the API key: between keys the queue is fair by tokens
    weight: float = 1.0  # the key's share beside that of others, above 0
    priority: int = 0  # within a key the lowest goes first in the queue
    embeds: bool = False  # no token is wanted, but the direction of the prompt's last hidden state
    choices: list[SiblingChoice] = field(default_factory=list)  # the others, so that the prompt is sent once

    def each(self) -> list[Submit]:
        """Return the requests of this entry, each alone; they share the list of the prompt's tokens."""
        if not self.choices:
            return [self]
        others = (
            replace(
                self,
                request_id=one.request_id,
                attempt=one.attempt,
                sampling=replace(self.sampling, seed=one.seed),
                sent_token_ids=one.sent_token_ids,
                choices=[],
            )
            for one in self.choices
        )
        return [replace(self, choices=[]), *others]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log probability of a token and of its most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens that one step added to one request, or the embedding that ends one.

    Empty `token_ids` without a `finish_reason` mean that the request was admitted (its first prefill chunk
    ran, which ends its time in the queue), that more of its prompt is scored, or that it is still alive after
    a long silence.
    """

    request_id: str
    attempt: int
    index: int  # output position of token_ids[0]
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with finish_reason "error"
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of prompt tokens, None of the very first
    prompt_index: int = 0  # prompt position of prompt_logprobs[0]; all come by the first token, in order
    reject_reason: RejectReason | None = None  # set with an error that another attempt may avoid
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; sent once, at admission
    embedding: bytes | None = None  # of a request that `embeds`: float32, little-endian, of length 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything that a step made for one gateway; stream `tokens:{gateway}`.

    Short steps in a row with the same shape share an entry. Then `deltas` has those of all of them, in order,
    and the other fields are those of the first step.
    """

    worker: str
    epoch: int
    instance: str
    step: int
    born_ns: int  # time.time_ns() when the step's tokens were known: the start of their way to the client
    fingerprint: str  # shape id of the step, such as tp1-int4x2; clients get it as `system_fingerprint`
    deltas: list[Delta]
    layers_below_full: int = 0  # layers of the instance in this step; see `layers_below_full`
    step_s: float = 0.0  # duration; requests that the step admitted stopped waiting when it began


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A gateway's requests that wait for another shape, repeated while they wait; stream `demand`."""

    gateway: str
    model: str
    tokens: int  # prompt and output of the longest request that only a higher degree could hold; 0: none
    count: int  # number of these requests
    at_ms: int
    floor: Precision | Literal[""] = ""  # the highest that a request waits for; "": none waits for one


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
class Histogram:
    """A mergeable sketch: the number of values by bucket (see `bus.histogram`), and their sum."""

    counts: dict[int, int] = field(default_factory=dict)
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """A number of instances or workers at /metrics, as `instar_{name}`; a counter only grows.

    `of_leader`: a fact of the whole instance, such as its KV, which its first worker reports; other numbers
    are each worker's own, so that no counter falls when a group parts. `routers_read`: also under vLLM's
    name, for the Gateway API inference extension. label: the field is a dict, by the values of this label.
    """

    name: str
    help: str
    is_counter: bool = False
    of_leader: bool = False
    routers_read: bool = False
    label: str = ""


def _gauge(name: str, text: str, **more: Any) -> Any:
    return field(default=0, metadata={"metric": MetricEntry(name, text, **more)})


def _of_gpu(name: str, text: str, *, is_counter: bool = False) -> Any:
    """Declare a number that a GPU may not tell: None."""
    return field(default=None, metadata={"metric": MetricEntry(f"gpu_{name}", text, is_counter)})


def _of_gpu_by(label: str, name: str, text: str, *, is_counter: bool = False) -> dict[str, MetricEntry]:
    """Declare numbers of a GPU by the values of a label: the metadata of a dict."""
    return {"metric": MetricEntry(f"gpu_{name}", text, is_counter, label=label)}


def _counter(name: str, text: str, **more: bool) -> Any:
    return _gauge(name, text, is_counter=True, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTelemetry:
    """One instance, in seconds, tokens and blocks. Counters and histograms count since the epoch began.

    The numbers that are declared as gauges and counters are those at /metrics.
    """

    id: str
    running: int = _gauge("num_requests_running", "Sequences in the batch.", routers_read=True)
    waiting: int = _gauge("num_requests_waiting", "Sequences in the queue.", routers_read=True)
    waiting_tokens: int
    kv_blocks: int = _gauge("kv_blocks", "KV blocks: changes while serving.", of_leader=True)
    kv_used: int = _gauge("kv_blocks_used", "KV blocks in use.", of_leader=True)  # by all of its group
    layers: list[LayerShape]
    prompt_tokens: int
    generation_tokens: int
    preemptions: int = _counter("num_preemptions", "Sequences put back.")
    finished: dict[str, int]
    queue_seconds: Histogram
    step_seconds: Histogram
    time_to_first_token: Histogram  # measured from when the worker received the request
    time_per_output_token: Histogram
    oldest_wait_seconds: float = 0.0
    recomputed_tokens: int = _counter(
        "recomputed_tokens", "Tokens whose KV was lost or given away and made again."
    )
    longest_tokens: int = 0  # prompt and most output of the longest request here, running or waiting
    kv_own: int = 0  # blocks of its own requests, which it keeps when its group splits; part of `kv_used`
    prefix_queries: int = _counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", routers_read=True
    )
    prefix_hits: int = _counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache, which were not computed.",
        routers_read=True,
    )
    prefix_digests: frozenset[int] = frozenset()  # digests of the blocks used last (`bus.prefix_keys`)
    workers: list[str] = field(default_factory=list)  # members of its group, by shard; empty: it serves alone
    kv_precision: KVPrecision = "full"  # what its KV cache is held in
    # By layer, the shares of use of the less used quarter, half and three quarters of its experts; empty: it
    # has none, or none was used yet.
    expert_use: list[list[float]] = field(default_factory=list)


def lowest_precision(instance: InstanceTelemetry) -> Precision:
    """Return the precision with the fewest bits of any half of a layer and of the KV cache."""
    return lowest([lowest_half(instance.layers), instance.kv_precision])


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Pages of a worker's pool by use. Always budget = weights + kv + free."""

    budget: int
    weights: int
    kv: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTelemetry:
    """A worker's GPU by NVML, also at /metrics. A number that the GPU or the machine does not tell is None.

    The numbers are those of the whole GPU: other processes may use it too. The last is the worker's own.
    """

    name: str = ""  # as NVML has it
    memory_used_bytes: int | None = _of_gpu("memory_used_bytes", "Memory in use, by all processes.")
    memory_total_bytes: int | None = _of_gpu("memory_total_bytes", "Memory of the GPU.")
    utilization: float | None = _of_gpu("utilization", "Share of the time in which a kernel ran, 0 to 1.")
    memory_utilization: float | None = _of_gpu(
        "memory_utilization", "Share of the time in which memory was read or written, 0 to 1."
    )
    power_watts: float | None = _of_gpu("power_watts", "Power that the GPU draws.")
    power_limit_watts: float | None = _of_gpu("power_limit_watts", "Power that the GPU may draw.")
    temperature_celsius: float | None = _of_gpu("temperature_celsius", "Temperature of the GPU's chip.")
    sm_clock_hertz: float | None = _of_gpu("sm_clock_hertz", "Clock of the multiprocessors.")
    sm_clock_max_hertz: float | None = _of_gpu("sm_clock_max_hertz", "Highest clock of the multiprocessors.")
    throttling: dict[str, float] = field(
        default_factory=dict,
        metadata=_of_gpu_by(
            "reason", "throttling", "Share of the readings in which clocks were lowered, by reason."
        ),
    )
    ecc_corrected_errors: int | None = _of_gpu(
        "ecc_corrected_errors", "Memory errors that ECC corrected, since the driver started.", is_counter=True
    )
    ecc_uncorrected_errors: int | None = _of_gpu(
        "ecc_uncorrected_errors", "Memory errors that ECC found, since the driver started.", is_counter=True
    )
    xid_errors: dict[str, int] = field(
        default_factory=dict,
        metadata=_of_gpu_by(
            "xid", "xid_errors", "Errors that the driver reported while the worker ran.", is_counter=True
        ),
    )
    kernels_compiled_late: int | None = _of_gpu(
        "kernels_compiled_late",
        "Kernels that the worker compiled while it served, which held it up.",
        is_counter=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTelemetry:
    """A worker's report; stream `telemetry`. Several a second under load, one a second when idle."""

    worker: str
    epoch: int
    at_ms: int  # the worker's wall clock, for display; intervals come from its monotonic clock
    busy: float  # share of the time since the last report spent in engine steps, 0..1
    pages: PageCounts
    instances: list[InstanceTelemetry]
    steps: int
    gpu: GpuTelemetry | None = None  # None: no GPU, or NVML says nothing of it


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMetrics:
    """One instance, smoothed over the monitor's window. A percentile is None if there was no such value."""

    id: str
    worker: str
    epoch: int
    running: float
    waiting: float
    waiting_tokens: float
    kv_blocks: int
    kv_used: float
    kv_usage: float  # 0..1
    queue_seconds_p95: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    preemptions_per_second: float
    last: InstanceTelemetry  # unsmoothed, for /metrics and /admin/state
    queue_delay_seconds: float = 0.0  # queue_seconds_p95 or the age of the queue's head, the longer one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """The last report of one worker, and its age; its busy share and its GPU smoothed."""

    worker: str
    epoch: int
    busy: float
    pages: PageCounts
    age_seconds: float  # since the last report; policies hold still on stale metrics
    at_ms: int = 0  # time of that report, by the worker's clock
    gpu: GpuTelemetry | None = None  # means over the window; counters and memory of the last report


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The monitor's smoothed picture of the cluster; stream `metrics`."""

    at_ms: int
    window_seconds: float
    workers: list[WorkerMetrics]
    instances: list[InstanceMetrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMoment:
    """One instance at one time, as charts show it. The members of a group count as one."""

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
    """One point of the monitor's history; stream `moments`, which holds 15 minutes at least."""

    at: float  # seconds since 1970
    instances: dict[str, InstanceMoment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A decision or an incident: what, why, and the numbers behind it. docs/observe.md lists the kinds."""

    kind: str
    source: str
    subject: str
    reason: str
    at_ms: int
    numbers: dict[str, Number] = field(default_factory=dict)
    morph_id: str = ""
    cause: str = ""  # a `bus.morphs.Cause`, to be counted
    weighed: LeverPlan | None = None  # what the planner weighed; None: the decision is not the planner's


# What a controller does: the subject of its events `controller_failed`.
ControllerWork = Literal["membership", "schema", "morphs", "deployments", "orders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A stream entry that could not be decoded, whole, with the reason; stream `dead-letters`."""

    stream: str
    entry_id: str
    reason: str
    payload: bytes
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCard:
    """A model that a worker serves.

    Each member of a tensor-parallel group has a card of its own, with the same `tp` and `workers`. The card
    of the first member stands for the group; each member takes requests on the stream of its own card. What
    is divided for good, into `pp` stages of `tp` ranks, has only the card of its leader: `workers` lists the
    workers of all stages.
    """

    id: str
    model: str
    model_path: str  # readable by the gateway too, which loads the tokenizer from it
    max_model_len: int
    vocab_size: int
    num_layers: int
    dtype: str
    block_tokens: int
    tp: int = 1
    pp: int = 1
    workers: list[str] = field(default_factory=list)  # workers in the order of their shards
    variants: list[Precision] = field(default_factory=lambda: ["full"])  # precisions its layers can have
    order: list[int] = field(default_factory=list)  # order in which layers are swapped; [0] goes first
    order_name: str = ""  # "profile", "front-to-back", "back-to-front", "random"
    min_blocks: int = 0  # the fewest KV blocks: the longest sequence must fit
    max_blocks: int = 0  # the most that one worker can have; a group can have `tp` times that; 0: unknown
    layer_pages: dict[Precision, int] = field(default_factory=dict)  # pages of its largest layer
    attention_pages: dict[Precision, int] = field(default_factory=dict)  # those of its attention alone
    kv_heads: int = 0  # 0: unknown
    degrees: list[int] = field(default_factory=lambda: [1])  # tensor-parallel degrees it can be part of
    tokens_at: dict[int, int] = field(default_factory=dict)  # tokens of KV it would hold, by degree
    deployed: str = ""  # id of the Deploy that loaded it; "": the worker's settings named it
    precision: Precision = "full"  # precision at deployment
    stages: list[Stage] = field(default_factory=list)  # what is divided for good
    products: list[str] = field(default_factory=list)  # the kernels of its dense products on a CPU, as text
    losses: dict[Precision, float] = field(default_factory=dict)  # measured: of perplexity, all layers in it
    losses_assumed: dict[Precision, str] = field(default_factory=dict)  # why the others were not measured
    kv_dtype: KVPrecision = "full"  # what its KV cache rests in
    kv_loss: float | None = None  # share of perplexity that a KV cache in 8 bits costs; None: not measured
    max_num_seqs: int = 0  # in one step, as the next one; 0: unknown
    max_num_batched_tokens: int = 0
    max_tp: int = 0  # the degree that its weights are padded for; 1: none; 0: unknown
    kv_gain: float = 1.0  # KV blocks in 8 bits in the pages of one in the model's dtype
    takes_grammars: bool = False  # False: an older worker, which would leave the form of an answer out

    @property
    def is_divided(self) -> bool:
        """True if its workers have parts of the model for good: no group that may part again."""
        return self.pp > 1 or bool(self.stages)

    @property
    def most_blocks(self) -> int:
        """The most KV blocks of the instance; 0: unknown. What is divided has the same on each worker."""
        return self.max_blocks * (1 if self.is_divided else self.tp)

    @property
    def best(self) -> Precision:
        """The most bits that its layers can have: full, or those of a quantised checkpoint."""
        return min(self.variants, key=PRECISIONS.index, default="full")

    def members(self, worker: str) -> list[str]:
        """Return its workers, the leader first. worker: the one whose card this is."""
        return self.workers or [worker]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCard:
    """A worker; key `card:{worker}`. Valid only while `lease:{worker}` holds the same epoch."""

    id: str
    epoch: int
    host: str
    pid: int
    device: str
    page_bytes: int
    state: Literal["loading", "serving", "draining"]
    instances: list[InstanceCard] = field(default_factory=list)
    progress: str = ""  # what is loading, and how far
    link: str = ""  # "host:port" for other workers; "": it joins no group and no pipeline
    link_key: bytes = b""  # key that they authenticate with
    variants: list[Precision] = field(default_factory=lambda: list(PRECISIONS))  # precisions it keeps
    loading: list[str] = field(default_factory=list)  # models that it loads while it serves others
    device_kind: str = ""  # "cpu" or the name of the GPU; "": not known yet
    reads: tuple[int, ...] = READS  # versions of the schema that it understands (`bus.schema`)

    @property
    def kind(self) -> str:
        """The kind of device that profiles are keyed by: devices of one kind measure alike."""
        return self.device_kind or self.device.partition(":")[0]
