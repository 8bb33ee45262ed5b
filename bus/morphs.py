"""The kinds of morphs: their commands, their reports, and the one table that every process reads.

Standard library only. What an operator sends is a dataclass whose fields carry their limits and words. API,
audit, /metrics, dashboard and command line derive from MORPHS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from bus.fields import Field, declared_fields, optional, required
from bus.messages import PARTS, Cancel, Drain, Number, Part, Stage, WorkerTelemetry
from bus.precisions import KVPrecision, Precision

MAX_LAYERS: Final = 4096  # named in one order
MAX_DEGREE: Final = 64
MAX_WAIT_S: Final = 600
STANDS_S: Final = 10.0  # time for what needs swapped layers to come: metrics take 3 s to show them
HALF_S: Final = 0.01  # that a half of a layer is taken to need, with all of the time, until one was swapped


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOrder:
    """The precision that one half of a layer goes to."""

    layer: int
    part: Part
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Hold layers of an instance in `precision`, or each of `halves` in its own.

    Of `layers`, `count` and `halves` give one. A count is that many more layers in the instance's order,
    skipping those that are already there. With precision "full", the layers that were swapped last go back
    first.
    """

    id: str
    epoch: int
    instance: str
    precision: Precision = "full"
    halves: list[HalfOrder] = field(default_factory=list)  # halves in the order of their swaps
    layers: list[int] = field(default_factory=list)
    count: int = 0
    parts: list[Part] = field(default_factory=lambda: list(PARTS))
    wait_s: float = 0.0  # how long to wait for free pages before the answer is `deferred`
    stands_s: float = 0.0  # how long no layer goes back by itself; 0: until something has run
    urgency: float = 0.0  # share of a busy worker's time (0..1) that it may take, if that is more than usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Have `blocks` KV blocks, rounded to whole pages."""

    id: str
    epoch: int
    instance: str
    blocks: int
    wait_s: float = 0.0  # see `Swap.wait_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCache:
    """Hold the KV cache in `kv_dtype`, the blocks in use included."""

    id: str
    epoch: int
    instance: str
    kv_dtype: KVPrecision
    wait_s: float = 0.0  # see `Swap.wait_s`
    stands_s: float = 0.0  # see `Swap.stands_s`


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
    workers: list[str]  # members in the order of their shards at the higher degree
    epochs: dict[str, int]  # epoch of each worker at the time of the order
    tp: int
    layers_per_step: int = 0  # layers that change between two steps; 0: the worker's setting
    wait_s: float = 0.0  # see `Swap.wait_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Load layers of a model and serve them; sent to the worker of every stage.

    The first worker of the first stage leads and gets requests. With one worker in all it serves alone.
    Several workers of one stage are ranks of a degree that stays. The idle KV blocks of other models on the
    worker make room.
    """

    id: str
    epoch: int
    instance: str  # the leader's instance id: "{model}@{worker}"
    model: str
    path: str
    stages: list[Stage]
    stage: int = 0  # the index in `stages` of the worker that gets this
    epochs: dict[str, int] = field(default_factory=dict)  # epochs of the workers of all stages
    precision: Precision = "full"
    blocks: int = 0  # KV blocks to have at least; the other free blocks are shared among the models
    max_model_len: int = 0
    digest: str = ""  # checkpoint of the plan; a worker refuses any other
    kv_dtype: KVPrecision = "full"  # full: what the worker's settings say
    wait_s: float = 0.0  # see `Swap.wait_s`

    @property
    def is_divided(self) -> bool:
        """True if several workers have parts of the model for good."""
        return len(self.stages) > 1 or any(len(stage.workers) > 1 for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Accept nothing new for an instance, finish what runs, return all its pages."""

    id: str
    epoch: int
    instance: str
    wait_s: float = 30.0  # time for requests to end; then the gateway submits them elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMorph:
    """Give up a morph that is still running. The instance keeps its old shape."""

    id: str
    epoch: int
    morph_id: str


MorphKind = Literal["swap", "resize", "kv", "transform", "deploy", "retire"]
Morph = Swap | Resize | ConvertCache | Transform | Deploy | Retire
Command = Cancel | Drain | Morph | CancelMorph


MorphOutcome = Literal["running", "applied", "deferred", "stale", "conflict", "failed"]

# Why a morph was decided.
Cause = Literal[
    "kv_usage",  # pressure: too few free KV blocks
    "queue_delay",  # pressure: requests wait too long
    "preemptions",  # pressure: requests were preempted
    "forecast",  # pressure is expected
    "precision_floor",  # a request waits that takes no layer below a precision
    "ease",  # no pressure any more
    "long_request",  # a request needs a higher degree
    "no_long_request",  # no request needs the group any more
    "order",  # an operator's
    "deployment",  # a deployment is being served
    "better",  # a deployment is served better elsewhere
    "packed",  # a deployment makes room by moving
    "retirement",  # an operator retired a deployment
    "replaced",  # the instance's replacement serves
    "undone",  # a deployment failed
    "orphan",  # no deployment knows the instance
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphReport:
    """The progress or the outcome of a morph.

    A transform reports after every step at which layers changed; its `numbers` have `layers_done` of
    `layers`, counted from the last layer, and the degrees `tp_before` and `tp_after`. A transform of several
    `steps` is reported by the gateway that orders them; `worker` leads after the last one.
    """

    id: str
    kind: MorphKind
    target: str  # the instance
    worker: str
    epoch: int
    state: MorphOutcome
    reason: str
    started_ms: int
    ended_ms: int | None = None  # None: still running
    numbers: dict[str, Number] = field(default_factory=dict)  # bytes, s, pages, blocks: taken or missing
    workers: list[str] = field(default_factory=list)  # workers of the command; empty: `worker` alone
    telemetry: WorkerTelemetry | None = None  # at the end: the monitor's picture may be older
    steps: list[str] = field(default_factory=list)  # ids of the morphs that this transform consists of

    @property
    def worked_s(self) -> float:
        """The seconds of copies, and of boundaries that did not wait for these; of a swap."""
        copied, between = (self.numbers.get(f"{part}_seconds", 0.0) for part in ("copy", "boundary"))
        return float(copied + between - self.numbers.get("awaited_seconds", 0.0))


def _wait() -> Any:
    summary = "seconds it may wait for free memory"
    return optional("Wait", summary, "number", default=0.0, maximum=MAX_WAIT_S, is_shown=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOrder:
    """Either `layers` or `count`; without `parts` both halves of a layer."""

    layers: list[int] | None = optional("Layers", "their numbers", "layers", max_items=MAX_LAYERS)
    count: int | None = optional(
        "Count",
        "the next N in the instance's order; to full precision, the last N that were swapped",
        "integer",
        minimum=1,
        is_shown=False,
    )
    precision: Precision = required("To", "the precision to hold them in", "precision")
    parts: list[Part] | None = optional("Part", "attention or ffn", "parts", max_items=len(PARTS))
    wait_s: float = _wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOrder:
    blocks: int = required("KV blocks", "rounded to whole pages", "blocks", minimum=1)
    wait_s: float = _wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOrder:
    kv_dtype: KVPrecision = required(
        "KV cache",
        "full: in the model's dtype, int8: in 8 bits",
        "choice",
        choices={"full": "in the model's dtype", "int8": "in 8 bits"},
    )
    wait_s: float = _wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformOrder:
    """Without `workers` the gateway chooses them."""

    workers: list[str] | None = optional(
        "Workers", "all that form groups of that degree", "workers", max_items=MAX_DEGREE
    )
    instance: str | None = optional("Instance", "one that takes part", "text", is_shown=False)
    tp: int = required("Degree", "workers of one instance", "degree", minimum=1, maximum=MAX_DEGREE)
    model: str | None = optional("Model", "the model, if the workers serve several", "text", is_shown=False)
    layers_per_step: int | None = optional(
        "Layers a step",
        "layers that change between two steps [worker.layers_per_step]",
        "integer",
        minimum=1,
        is_shown=False,
    )
    wait_s: float = _wait()


ManualOrder = SwapOrder | ResizeOrder | KVOrder | TransformOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphEntry:
    """One kind.

    `target`: what an operator orders it for; "" where only deployments do. `words`: what a command orders.
    `progress`: the numbers of its reports that say how much is done, and of how much. `running` and `applied`
    are the dashboard's words, with numbers of the reports in braces. `causes`: why it may be decided. Colours
    are those of its marks in charts; without one it has that of any event.
    """

    name: MorphKind
    command: type[Morph]
    label: str
    summary: str
    words: Callable[[Any], str]
    running: str
    applied: str
    causes: tuple[Cause, ...]
    target: Literal["instance", "workers", ""] = ""
    order: type[ManualOrder] | None = None
    progress: tuple[str, str] | None = None
    colour: str = ""
    dark_colour: str = ""

    @property
    def fields(self) -> tuple[Field, ...]:
        return declared_fields(self.order, Field) if self.order else ()


def _swap_words(command: Swap) -> str:
    if command.halves:
        counts = Counter(one.precision for one in command.halves)
        return ", ".join(f"{count} halves to {precision}" for precision, count in counts.items())
    which = f"layers {', '.join(map(str, command.layers))}" if command.layers else f"{command.count} more"
    only = "" if len(command.parts) == len(PARTS) else f", {command.parts[0]} only"
    return f"{which} to {command.precision}{only}"


_PRESSURE: Final[tuple[Cause, ...]] = ("kv_usage", "queue_delay", "preemptions", "forecast")
_AWAY: Final[tuple[Cause, ...]] = ("retirement", "replaced", "undone", "orphan")

MORPHS: Final = (
    MorphEntry(
        name="swap",
        command=Swap,
        label="Swap",
        summary="hold layers in another precision",
        words=_swap_words,
        running="swapping: {halves_applied} of {halves} halves",
        applied="{halves_applied} halves, {bytes_copied} copied, {pages_unmapped} pages freed",
        causes=(*_PRESSURE, "ease", "precision_floor", "long_request", "order"),
        target="instance",
        order=SwapOrder,
        progress=("halves_applied", "halves"),
        colour="#c98500",
        dark_colour="#e6a62f",
    ),
    MorphEntry(
        name="resize",
        command=Resize,
        label="Resize",
        summary="set the number of KV blocks",
        words=lambda command: f"{command.blocks} KV blocks",
        running="resizing: {blocks_before} → {blocks_after} blocks",
        applied="{blocks_before} → {blocks_after} blocks",
        causes=(*_PRESSURE, "order"),
        target="instance",
        order=ResizeOrder,
        colour="#7d4fb3",
        dark_colour="#ab82e3",
    ),
    MorphEntry(
        name="kv",
        command=ConvertCache,
        label="KV precision",
        summary="hold the KV cache in another precision",
        words=lambda command: f"KV cache in {command.kv_dtype}",
        running="converting the KV cache: {layers_done} of {layers} layers",
        applied="{blocks_before} → {blocks_after} blocks",
        causes=(*_PRESSURE, "ease", "precision_floor", "order"),
        target="instance",
        order=KVOrder,
        progress=("layers_done", "layers"),
    ),
    MorphEntry(
        name="transform",
        command=Transform,
        label="Transform",
        summary="change the degree of tensor parallelism",
        words=lambda command: f"tp {command.tp} on {', '.join(command.workers)}",
        running="tp{tp_before} → tp{tp_after} on {workers}: {layers_done} of {layers} layers",
        applied="tp{tp_before} → tp{tp_after}",
        causes=("long_request", "no_long_request", "order", "deployment", *_AWAY),
        target="workers",
        order=TransformOrder,
        progress=("layers_done", "layers"),
        colour="#149070",
        dark_colour="#33b592",
    ),
    MorphEntry(
        name="deploy",
        command=Deploy,
        label="Deploy",
        summary="load a model",
        words=lambda command: f"serve {command.path} in {command.precision} precision",
        running="loading: {reason}",
        applied="",
        causes=("deployment", "better", "packed"),
    ),
    MorphEntry(
        name="retire",
        command=Retire,
        label="Retire",
        summary="give a model's memory back",
        words=lambda command: "serve it no longer",
        running="retiring: its last requests",
        applied="",
        causes=_AWAY,
    ),
)
STEPS: Final = ("steps_done", "steps")  # the progress of a transform that takes several steps

MORPH_KINDS: Final[tuple[MorphKind, ...]] = tuple(entry.name for entry in MORPHS)
ENTRIES: Final[dict[str, MorphEntry]] = {entry.name: entry for entry in MORPHS}
KIND_OF: Final[dict[type[Morph], MorphKind]] = {entry.command: entry.name for entry in MORPHS}


def in_words(command: Morph) -> str:
    """Return what a command orders, for people."""
    return ENTRIES[KIND_OF[type(command)]].words(command)


def progress_of(kind: str, numbers: dict[str, Any]) -> float | None:
    """Return the share of a morph that is done, 0 to 1, by the numbers of its report; None: unknown."""
    for names in (STEPS, ENTRIES[kind].progress if kind in ENTRIES else None):
        if names and numbers.get(names[1]):
            return float(numbers.get(names[0], 0) / numbers[names[1]])
    return None


def describe() -> list[dict[str, Any]]:
    """MORPHS as JSON values, in their order, for programs that draw forms and bars."""
    left_out = ("command", "words", "order", "causes")
    names = [one.name for one in fields(MorphEntry) if one.name not in left_out]
    return [
        {name: getattr(entry, name) for name in names} | {"fields": [asdict(one) for one in entry.fields]}
        for entry in MORPHS
    ]
