"""Spans to a collector, from a thread of their own. A collector that is away costs spans and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger("gateway")

TIMEOUT_S: Final = 5.0  # of one batch, with its retries


class Exporter(SpanExporter):
    """`num_sent`: spans that the collector took. One line in the log when it takes no more, and one when it
    does again; the library's own would be some a second."""

    def __init__(self, url: str) -> None:
        self.num_sent = 0
        self._url = url
        self._inner = trace_exporter.OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self._is_away = False
        self._said = _LastWords()
        logging.getLogger(trace_exporter.__name__).addFilter(self._said)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
            if self._is_away:
                log.info("traces reach %s again", self._url)
        elif not self._is_away:
            log.warning("traces do not reach %s and are dropped: %s", self._url, self._said.message)
        self._is_away = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]
        logging.getLogger(trace_exporter.__name__).removeFilter(self._said)


class _LastWords(logging.Filter):
    """Keeps what the library says to itself."""

    message = "no reason given"

    def filter(self, record: logging.LogRecord) -> bool:
        self.message = record.getMessage()
        return False
