"""Which calls are traced, and when their spans are made: at the end, from what was noted meanwhile.

A call that is traced costs its notes while it runs, one that is not a look at its headers. The spans wait in
a queue of the library's, and a thread of its own sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bus.settings import TracingSettings
from gateway.delivery.cluster import Cluster
from gateway.delivery.inflight import Flight
from gateway.delivery.journey import Journey
from gateway.http.body import Scope
from gateway.morphs import KEPT, Morphs
from gateway.tracing import facts
from gateway.tracing.exporter import Exporter
from gateway.tracing.phases import Phase, phases

if TYPE_CHECKING:
    from gateway.openai.ended import Ended

log = logging.getLogger("gateway")

MAX_WAITING: Final = 4096  # spans, of 1 to 2 KB; more are dropped
SEND_MS: Final = 1000.0
CLOSE_S: Final = 2.0  # for what waits when the process leaves
MAX_SEQUENCES: Final = 8  # of one call, that have spans of their own: a span takes 0.05 ms of the event loop

_W3C: Final = TraceContextTextMapPropagator()
_CONTEXT: Final = (b"traceparent", b"tracestate")


class Tracer:
    """`num_made`: spans; those that `num_sent` lacks for long were dropped."""

    def __init__(self, settings: TracingSettings, gateway_id: str, morphs: Morphs, cluster: Cluster) -> None:
        self.num_made = 0
        self._morphs, self._cluster = morphs, cluster
        self._exporter = Exporter(settings.url)
        about = {"service.name": settings.service_name, "service.instance.id": gateway_id}
        self._provider = TracerProvider(
            ParentBasedTraceIdRatio(settings.sample), Resource.create(about), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=MAX_WAITING, schedule_delay_millis=SEND_MS)
        )
        self._tracer = self._provider.get_tracer("instar")

    @property
    def num_sent(self) -> int:
        return self._exporter.num_sent

    def begin(self, scope: Scope, arrived: float) -> Trace | None:
        """None where this call is not sampled. `arrived`: of the monotonic clock."""
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT
        }
        ahead_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"POST {scope['path']}",
            _W3C.extract(carrier),
            SpanKind.SERVER,
            facts.of_request(scope),
            start_time=ahead_ns + round(arrived * 1e9),
        )
        return Trace(self, span, ahead_ns) if span.is_recording() else None

    def end(self, trace: Trace, ended: Ended) -> None:
        """The call is over. What goes wrong here costs the trace and not the call."""
        try:
            self._draw(trace, ended)
        except Exception:
            log.exception("a trace is lost")

    async def close(self) -> None:
        """Sends what waits, for `CLOSE_S` at most."""
        loop, is_closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(is_closed.set)

        threading.Thread(target=shut_down, name="traces-close", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await is_closed.wait()

    def _draw(self, trace: Trace, ended: Ended) -> None:
        now, span = time.monotonic(), trace.span
        span.set_attributes(facts.of_end(ended))
        for flight in trace.flights:
            for phase in phases(flight, now):
                self._child(trace, phase)
            for at, event in facts.of_replays(flight):
                span.add_event("replay", event, trace.wall_ns(at))
        for at_s, event in self._morphs_of(trace, ended):
            span.add_event("morph", event, round(at_s * 1e9))
        if (status := facts.status(ended)) is not None:
            span.set_status(status)
        span.end(trace.wall_ns(now))
        self.num_made += 1

    def _child(self, trace: Trace, phase: Phase) -> None:
        start_ns = trace.wall_ns(phase.start)
        child = self._tracer.start_span(
            phase.name, trace.context, SpanKind.INTERNAL, phase.facts, start_time=start_ns
        )
        for at, event in phase.events:
            child.add_event("shape", event, trace.wall_ns(at))
        if phase.status is not None:
            child.set_status(phase.status)
        child.end(trace.wall_ns(phase.end))
        self.num_made += 1

    def _morphs_of(self, trace: Trace, ended: Ended) -> list[facts.Happened]:
        """Of the workers that served it, and of those that were in a group with them."""
        workers = {target.worker for target in facts.targets(trace.flights)}
        for target in facts.targets(trace.flights):
            if (card := self._cluster.workers.get(target.worker)) is not None:
                workers.update(name for one in card.instances for name in one.workers)
        start_s, end_s = trace.wall_ns(ended.arrived) / 1e9, time.time()
        return facts.of_morphs(self._morphs.recent(KEPT), workers, start_s, end_s)


class Trace:
    """One call that is traced."""

    def __init__(self, tracer: Tracer, span: Span, ahead_ns: int) -> None:
        self.span = span
        self.context = set_span_in_context(span)
        self.flights: Sequence[Flight] = ()
        self._tracer = tracer
        self._ahead_ns = ahead_ns  # the wall clock's lead over the monotonic one, once for all spans

    def follow(self, flights: Sequence[Flight]) -> None:
        """From here on they note what happens to them; of many the first."""
        self.flights = flights[:MAX_SEQUENCES]
        now = time.monotonic()
        for flight in self.flights:
            flight.journey = Journey(now)

    def end(self, ended: Ended) -> None:
        self._tracer.end(self, ended)

    def wall_ns(self, at: float) -> int:
        return self._ahead_ns + round(at * 1e9)
