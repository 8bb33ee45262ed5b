"""A collector of OpenTelemetry traces on a socket: it reads OTLP over HTTP and remembers the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Seen:
    """One span; ids are hex, times seconds since 1970, `events` (name, attributes)."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: float
    end: float
    facts: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    message: str


class Collector:
    """`url`: for `tracing.endpoint`. `raw`: all that came, as bytes."""

    def __init__(self) -> None:
        self.raw = b""
        self.spans: list[Seen] = []
        self.resource: dict[str, Any] = {}
        self.url = ""
        self.is_hanging = threading.Event()

    def take(self, body: bytes) -> None:
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _facts(group.resource.attributes)
            self.spans += [_seen(span) for scope in group.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Seen]:
        """The spans in the order of their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start)

    def root(self) -> Seen:
        (root,) = (span for span in self.spans if span.name.startswith("POST"))
        return root


@contextmanager
def collecting() -> Iterator[Collector]:
    collector, is_over = Collector(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.is_hanging.is_set():
                is_over.wait(20)
                return
            collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        serving.start()
        try:
            yield collector
        finally:
            is_over.set()
            server.shutdown()
            serving.join(5)


def _seen(span: Any) -> Seen:
    return Seen(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        facts=_facts(span.attributes),
        events=[(event.name, _facts(event.attributes)) for event in span.events],
        is_error=span.status.code == 2,
        message=span.status.message,
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
