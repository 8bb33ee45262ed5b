"""Messages for the tests of the bus: plain ones, and any one that hypothesis can think of."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

from hypothesis import strategies as st

from bus import histogram
from bus.messages import (
    Cancel,
    Delta,
    Event,
    Histogram,
    InstanceCard,
    InstanceTelemetry,
    LayerShape,
    PageCounts,
    SamplingParams,
    StepOutput,
    Submit,
    WorkerCard,
    WorkerTelemetry,
)

INT64 = st.integers(min_value=-(2**63), max_value=2**64 - 1)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
    bool: st.booleans(),
    type(None): st.none(),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Make values of a type as the messages write it: plain, enum, container, union, literal, dataclass."""
    if kind in PLAIN:
        return PLAIN[kind]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: any_of(hints[f.name]) for f in dataclasses.fields(kind)})
    if isinstance(kind, enum.EnumType):
        return st.sampled_from(list(kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(any_of(arg) for arg in args))
    if origin is list:
        return st.lists(any_of(args[0]), max_size=3)
    if origin in (tuple, frozenset):
        return st.lists(any_of(args[0]), max_size=3).map(origin)
    if origin is dict:
        return st.dictionaries(any_of(args[0]), any_of(args[1]), max_size=3)
    raise NotImplementedError(f"no strategy for {kind}")


def submit(request_id: str = "r1", *, epoch: int = 1, attempt: int = 1) -> Submit:
    return Submit(
        request_id=request_id,
        attempt=attempt,
        gateway="g",
        epoch=epoch,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=4, seed=7),
    )


def event(kind: str = "worker_joined", subject: str = "w0") -> Event:
    return Event(kind=kind, source="test", subject=subject, reason="a test wants it", at_ms=1)


def cancel(name: str = "c1") -> Cancel:
    return Cancel(id=name, epoch=1, request_ids=["r1"])


def card(worker: str = "w0", epoch: int = 1, *, state: Any = "serving") -> WorkerCard:
    instance = InstanceCard(
        id=f"demo@{worker}",
        model="demo",
        model_path="/models/demo",
        max_model_len=2048,
        vocab_size=4096,
        num_layers=8,
        dtype="float32",
        block_tokens=16,
        workers=[worker],
    )
    return WorkerCard(
        id=worker,
        epoch=epoch,
        host="h",
        pid=1,
        device="cpu",
        page_bytes=65536,
        state=state,
        instances=[instance],
    )


def step_output(num_deltas: int = 1, *, index: int = 0) -> StepOutput:
    deltas = [
        Delta(request_id=f"cmpl-{i:032x}", attempt=1, index=index, token_ids=[i]) for i in range(num_deltas)
    ]
    return StepOutput(
        worker="w0", epoch=1, instance="demo@w0", step=1, born_ns=1, fingerprint="full-tp1", deltas=deltas
    )


def telemetry(
    worker: str = "w0", epoch: int = 1, *, running: int = 0, tokens: int = 0, ttft: tuple[float, ...] = ()
) -> WorkerTelemetry:
    """A report of one instance; `tokens` and `ttft` are what it counted since its epoch began."""
    first_token = histogram.Accumulator()
    for seconds in ttft:
        first_token.observe(seconds)
    empty = Histogram()
    instance = InstanceTelemetry(
        id=f"demo@{worker}",
        running=running,
        waiting=0,
        waiting_tokens=0,
        kv_blocks=100,
        kv_used=10 * running,
        layers=[LayerShape()],
        prompt_tokens=tokens,
        generation_tokens=2 * tokens,
        preemptions=0,
        finished={},
        queue_seconds=empty,
        step_seconds=empty,
        time_to_first_token=first_token.snapshot(),
        time_per_output_token=empty,
    )
    pages = PageCounts(budget=10, weights=5, kv=3, free=2)
    return WorkerTelemetry(
        worker=worker,
        epoch=epoch,
        at_ms=1,
        busy=float(running > 0),
        pages=pages,
        instances=[instance],
        steps=1,
    )
