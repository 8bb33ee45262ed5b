"""Decisions, morphs and failures, for operators and for the audit; stream `events`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bus.messages.commands import MorphKind
from bus.messages.shapes import Number
from bus.messages.telemetry import WorkerTelemetry

MorphOutcome = Literal["running", "applied", "deferred", "stale", "conflict", "failed"]

# Why a morph was decided.
Cause = Literal[
    "kv_usage",  # pressure: too few free KV blocks
    "queue_delay",  # pressure: requests wait too long
    "preemptions",  # pressure: requests were preempted
    "ease",  # no pressure any more
    "layer_limit",  # more layers below full than the policy allows
    "long_request",  # a request needs a higher degree
    "no_long_request",  # no request needs the group any more
    "order",  # an operator's
    "deployment",  # a deployment is being served
    "better",  # a deployment is served better elsewhere
    "packed",  # a deployment makes room by moving
    "retirement",  # an operator retired a deployment
    "replaced",  # its replacement serves
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
    numbers: dict[str, Number] = field(
        default_factory=dict
    )  # bytes, seconds, pages, blocks: taken or missing
    workers: list[str] = field(default_factory=list)  # of the command; empty: `worker` alone
    telemetry: WorkerTelemetry | None = None  # at the end: the monitor's picture may be older
    steps: list[str] = field(default_factory=list)  # ids of the morphs that this transform consists of


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A decision or an incident: what, why, and the numbers behind it.

    =================  ==================================================================================
    kind               meaning
    =================  ==================================================================================
    worker_joined      a worker registered
    worker_lost        a worker's lease expired; gateways replay the requests of `numbers["epoch"]`
    worker_left        a worker exited; gateways replay the requests of `numbers["epoch"]`
    epoch_changed      a worker took the epoch `numbers["epoch"]`; `numbers["previous_epoch"]` is void
    bus_restarted      Redis restarted
    dead_letter        a stream entry could not be decoded
    request_replayed   a gateway submitted a request again
    morph_decided      the controller ordered the morph `morph_id`, for `cause`; MorphReports follow
    =================  ==================================================================================

    Other services add kinds of their own.
    """

    kind: str
    source: str
    subject: str
    reason: str
    at_ms: int
    numbers: dict[str, Number] = field(default_factory=dict)
    morph_id: str = ""
    cause: str = ""  # a `Cause`, to be counted


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A stream entry that could not be decoded, whole, with the reason; stream `dead-letters`."""

    stream: str
    entry_id: str
    reason: str
    payload: bytes
    at_ms: int
