"""Logging of the server process: one line per transition, as text for people or JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, node, message, then the fields of the line.

    A line about a state transition has a field `event`, with one of the names in `broker.observability.events`.
    """

    def __init__(self, node_id: int | None = None) -> None:
        super().__init__()
        self._node = {} if node_id is None else {"node": node_id}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._node,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, then the fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = super().format(record)
        fields = " ".join(f"{key}={_on_one_line(str(value))}" for key, value in _fields(record).items())
        return f"{line} [{fields}]" if fields else line


def _on_one_line(text: str) -> str:
    """Return a text that begins no line of its own: some of them come from clients."""
    return text if text.isprintable() else ascii(text)


def configure_logging(level: str, line_format: str, node_id: int | None = None) -> None:
    """Send everything at `level` and above to standard error, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(node_id) if line_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
