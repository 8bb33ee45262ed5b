"""The tracer: which calls are traced, and their spans, made at the end from what was noted meanwhile.

A traced call costs its notes while it runs, any other one look at its headers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bus.settings import TracingSettings
from gateway.delivery.cluster import Cluster
from gateway.delivery.journey import Journey
from gateway.delivery.request import RequestState
from gateway.http.body import Scope
from gateway.morphs import KEPT, Morphs
from gateway.openai.request_log import RequestLog
from gateway.tracing import spans

log = logging.getLogger("gateway")

MAX_WAITING: Final = 4096  # spans, of 1 to 2 KB; more are dropped
SEND_MS: Final = 1000.0
TIMEOUT_S: Final = 5.0  # time for one batch, with its retries
CLOSE_S: Final = 2.0  # time to send the rest when the process ends
CLOSE_POLL_S: Final = 0.02
MAX_SEQUENCES: Final = 8  # sequences of a call with spans of their own: each takes 0.05 ms

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

    def begin(self, scope: Scope, arrived: float) -> CallTrace | None:
        """Begin the span of a call; None if the call is not sampled. `arrived`: monotonic seconds."""
        given = ((name, value) for name, value in scope["headers"] if name in _CONTEXT)
        carrier = {name.decode(): value.decode("latin-1") for name, value in given}
        ahead_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"POST {scope['path']}",
            _W3C.extract(carrier),
            SpanKind.SERVER,
            spans.of_request(scope),
            start_time=ahead_ns + round(arrived * 1e9),
        )
        return CallTrace(self, span, ahead_ns) if span.is_recording() else None

    async def close(self) -> None:
        """Send what waits, for CLOSE_S at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        deadline = time.monotonic() + CLOSE_S
        while closing.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(CLOSE_POLL_S)

    def make_spans(self, trace: CallTrace, ended: RequestLog) -> None:
        now, span = time.monotonic(), trace.span
        span.set_attributes(spans.of_end(ended))
        for state in trace.states:
            for phase in spans.phases(state, now):
                self._make_child(trace, phase)
            for at, event in spans.of_replays(state):
                span.add_event("replay", event, trace.wall_ns(at))
        for at_s, event in self._morphs_of(trace, ended):
            span.add_event("morph", event, round(at_s * 1e9))
        if (status := spans.status(ended)) is not None:
            span.set_status(status)
        span.end(trace.wall_ns(now))
        self.num_made += 1

    def _make_child(self, trace: CallTrace, phase: spans.Phase) -> None:
        start_ns = trace.wall_ns(phase.start)
        about = phase.name, trace.context, SpanKind.INTERNAL, phase.facts
        child = self._tracer.start_span(*about, start_time=start_ns)
        for at, event in phase.events:
            child.add_event("shape", event, trace.wall_ns(at))
        if phase.status is not None:
            child.set_status(phase.status)
        child.end(trace.wall_ns(phase.end))
        self.num_made += 1

    def _morphs_of(self, trace: CallTrace, ended: RequestLog) -> list[spans.TimedFacts]:
        """Return the morphs of the workers that served the call, and of those in a group with them."""
        attempts = [attempt for state in trace.states for attempt in spans.attempts_of(state)]
        own = {attempt.worker for attempt in attempts if attempt.number}
        cards = [self._cluster.workers[name] for name in own if name in self._cluster.workers]
        workers = own.union(name for card in cards for one in card.instances for name in one.workers)
        start_s, end_s = trace.wall_ns(ended.arrived) / 1e9, time.time()
        return spans.of_morphs(self._morphs.recent(KEPT), workers, start_s, end_s)


class CallTrace:
    """A call that is traced."""

    def __init__(self, tracer: Tracer, span: Span, ahead_ns: int) -> None:
        self.span = span
        self.context = set_span_in_context(span)
        self.states: Sequence[RequestState] = ()
        self._tracer = tracer
        self._ahead_ns = ahead_ns  # the wall clock's lead over the monotonic one, the same for all spans

    def follow(self, states: Sequence[RequestState]) -> None:
        """Let the call's requests, or the first of many, note what happens to them from now on."""
        self.states = states[:MAX_SEQUENCES]
        now = time.monotonic()
        for state in self.states:
            state.journey = Journey(now)

    def end(self, ended: RequestLog) -> None:
        """Make the spans of the call, which is over. An error here costs the trace and not the call."""
        try:
            self._tracer.make_spans(self, ended)
        except Exception:
            log.exception("a trace is lost")

    def wall_ns(self, at: float) -> int:
        return self._ahead_ns + round(at * 1e9)


class Exporter(SpanExporter):
    """Counts sent spans, and logs once when the collector takes no more, and when it does again."""

    def __init__(self, url: str) -> None:
        self.num_sent = 0
        self._url = url
        self._inner = trace_exporter.OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self._is_away = False
        self._last = _LastMessage()
        logging.getLogger(trace_exporter.__name__).addFilter(self._last)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
            if self._is_away:
                log.info("traces reach %s again", self._url)
        elif not self._is_away:
            log.warning("traces do not reach %s and are dropped: %s", self._url, self._last.message)
        self._is_away = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]
        logging.getLogger(trace_exporter.__name__).removeFilter(self._last)


class _LastMessage(logging.Filter):
    """Keeps the library's last message and drops it from the log."""

    message = "no reason given"

    def filter(self, record: logging.LogRecord) -> bool:
        self.message = record.getMessage()
        return False
