"""Logging of all services: to stderr, one line a record, as text or JSON. Never log secrets.

What a call passes as `extra` becomes `key=value` in text and keys in JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final

from bus.settings import LogSettings

# The attributes of every LogRecord; all others came with `extra`.
_OWN: Final = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName", "color_message"}

# Libraries that log much at levels below warning.
_QUIET: Final = ("asyncio", "httpx", "httpcore", "redis", "uvicorn.access", "transformers", "numba")


def set_up(settings: LogSettings, service: str) -> None:
    """Replace the root handlers. Warnings of Python's `warnings` module are logged too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service) if settings.json_lines else Text(service))
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the caller passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _OWN}


class Text(logging.Formatter):
    """Records as lines like `12:04:31.250 gateway WARNING bus: lost Redis at ... request_id=cmpl-1`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = "" if record.name in (self._service, "root") else f" {record.name}:"
        level = "" if record.levelno == logging.INFO else f" {record.levelname}"
        line = f"{clock}.{int(record.msecs):03d} {self._service}{level}{where} {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in extras(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """Records as JSON objects: `time` (RFC 3339, UTC), `level`, `service`, `logger`, `message`, extras."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = extras(record) | {
            "time": f"{day}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)
