"""The messages of the bus, as plain dataclasses. Standard library only: the engine uses them too.

====================  ===============================================================================
`bus.messages.`       direction
====================  ===============================================================================
`shapes`              shared by the others: parts of a layer, their precisions, pipeline stages
`requests`            gateway to worker and back: requests, tokens
`commands`            gateway and controller to worker: cancellations, morphs
`cards`               worker to everyone: the state that the registry holds
`telemetry`           worker to monitor, and monitor to everyone
`events`              everyone to everyone: decisions, morphs, failures
====================  ===============================================================================

`bus.deployments` has the messages of deploying by intent, and `bus.policy` the morph policy. One stream entry
has one field, `m`: msgpack of `[SCHEMA_VERSION, type name, fields]` (see `bus.codec`).

Three numbers make delivery effectively once on an at-least-once bus:

=========  =====================================================================================
attempt    The gateway raises it each time it submits a request again. Older attempts are void.
epoch      One incarnation of a worker. A worker runs only what is addressed to its own epoch, and
           takes a new epoch, dropping all it ran, when it finds that its lease was lost.
index      The position of a token in the request's output. The gateway drops tokens it has.
=========  =====================================================================================
"""

from bus.messages.cards import InstanceCard, WorkerCard
from bus.messages.commands import (
    Cancel,
    CancelMorph,
    Command,
    Deploy,
    Drain,
    Morph,
    MorphKind,
    Resize,
    Retire,
    Swap,
    Transform,
)
from bus.messages.events import Cause, DeadLetter, Event, MorphOutcome, MorphReport
from bus.messages.requests import (
    Delta,
    Demand,
    FinishReason,
    RejectReason,
    SamplingParams,
    StepOutput,
    Submit,
    TokenLogprobs,
)
from bus.messages.shapes import PARTS, LayerShape, Number, Part, Stage, layers_below_full
from bus.messages.telemetry import (
    Histogram,
    InstanceMetrics,
    InstanceMoment,
    InstanceTelemetry,
    Metrics,
    Moment,
    PageCounts,
    WorkerMetrics,
    WorkerTelemetry,
)

SCHEMA_VERSION = 1

__all__ = [
    "PARTS",
    "SCHEMA_VERSION",
    "Cancel",
    "CancelMorph",
    "Cause",
    "Command",
    "DeadLetter",
    "Delta",
    "Demand",
    "Deploy",
    "Drain",
    "Event",
    "FinishReason",
    "Histogram",
    "InstanceCard",
    "InstanceMetrics",
    "InstanceMoment",
    "InstanceTelemetry",
    "LayerShape",
    "Metrics",
    "Moment",
    "Morph",
    "MorphKind",
    "MorphOutcome",
    "MorphReport",
    "Number",
    "PageCounts",
    "Part",
    "RejectReason",
    "Resize",
    "Retire",
    "SamplingParams",
    "Stage",
    "StepOutput",
    "Submit",
    "Swap",
    "TokenLogprobs",
    "Transform",
    "WorkerCard",
    "WorkerMetrics",
    "WorkerTelemetry",
    "layers_below_full",
]
