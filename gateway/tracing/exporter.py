"""The exporter of spans, in a thread of its own. A collector that is away costs spans and nothing else."""

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
    """Writes one log line when the collector takes no more spans, and one when it does again.

    The library itself would write several a second. `num_sent`: spans that the collector took.
    """

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
