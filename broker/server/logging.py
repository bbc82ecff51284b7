"""The log of the server process: one line per transition, as text or JSON, with levels that can change while it runs.

Levels are Kafka's config resource BROKER_LOGGER: keys are names of loggers, values are levels. The level of a logger
applies to the loggers below it (`broker.log` to `broker.log.cleaner`), the level of `root` to all loggers without one.
Changes last until the process ends.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from raftlog.errors import InvalidConfig
from raftlog.v1.admin_pb2 import ConfigEntry

logger = logging.getLogger(__name__)

ROOT: Final = "root"
AUDIT: Final = "raftlog.audit"
"""Logs refusals at level INFO; no client can set it, or a logger above it, so high that these are lost."""
LEVELS: Final[Mapping[str, int]] = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
"""Kafka's names without TRACE, since Python has no level below DEBUG."""
ALSO: Final[Mapping[str, str]] = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class LogLevels:
    """The levels of all loggers; `level` is the configured one, which `root` returns to."""

    def __init__(self, level: str, root: logging.Logger | None = None) -> None:
        self._configured = level.upper()
        self._root = root or logging.getLogger()
        self._set: set[str] = set()

    def describe(self) -> Iterator[ConfigEntry]:
        """Yield each logger with its effective level; a level set by a client has the source DYNAMIC_BROKER_LOGGER."""
        for name in (ROOT, *self._names()):
            source = ConfigEntry.DYNAMIC_BROKER_LOGGER if name in self._set else ConfigEntry.STATIC_BROKER
            level = _name_of(self._logger(name).getEffectiveLevel())
            yield ConfigEntry(key=name, value=level, source=source, read_only=False)

    def alter(self, changes: Mapping[str, str], unset: Iterable[str], *, validate_only: bool = False) -> None:
        """Set levels, and let the unset loggers inherit theirs again; all or none.

        Raises:
            InvalidConfig: a logger or level is unknown, or the change would turn off the audit log.
        """
        wanted = {self._known(name): _level(name, level) for name, level in changes.items()}
        if wanted.get(AUDIT, logging.INFO) > logging.INFO:
            raise InvalidConfig(f"{AUDIT}={changes[AUDIT].strip()!r} would turn off the audit log; use INFO or DEBUG")
        back = [self._known(name) for name in unset]
        twice = sorted(wanted.keys() & set(back))
        if twice:
            raise InvalidConfig(f"the request both sets and unsets the level of {twice[0]}; choose one")
        if validate_only:
            return
        for name in back:
            self._logger(name).setLevel(LEVELS[_canonical(self._configured)] if name == ROOT else logging.NOTSET)
            self._set.discard(name)
        for name, level in wanted.items():
            self._logger(name).setLevel(level)
            self._set.add(name)
        self._keep_audit()
        for name in (*back, *wanted):
            fields = {"changed": name, "effective": _name_of(self._logger(name).getEffectiveLevel())}
            logger.warning("log level changed", extra={"event": "log_level_changed", **fields})

    def _keep_audit(self) -> None:
        """Let the audit log inherit its level, but no higher than INFO or the configured level."""
        if AUDIT in self._set or AUDIT not in self._root.manager.loggerDict:
            return
        highest = max(logging.INFO, LEVELS[_canonical(self._configured)])
        audit = self._logger(AUDIT)
        audit.setLevel(logging.NOTSET)
        if audit.getEffectiveLevel() > highest:
            audit.setLevel(highest)

    def _logger(self, name: str) -> logging.Logger:
        return self._root if name == ROOT else self._root.manager.getLogger(name)

    def _names(self) -> list[str]:
        """Return the names of all loggers, including packages."""
        return sorted(self._root.manager.loggerDict)

    def _known(self, name: str) -> str:
        if name == ROOT or name in self._root.manager.loggerDict:
            return name
        packages = ", ".join(sorted({each.partition(".")[0] for each in self._names()}))
        raise InvalidConfig(
            f"there is no logger {name[:100]!r}: use {ROOT}, one of {packages}, or one below them; describe the "
            "configs of the broker's loggers to list all"
        )


def _canonical(level: str) -> str:
    level = level.strip().upper()
    return ALSO.get(level, level)


def _level(name: str, level: str) -> int:
    found = LEVELS.get(_canonical(level))
    if found is None:
        raise InvalidConfig(f"{name[:100]}={level[:40]!r} is not a level: use one of {', '.join(LEVELS)}")
    return found


def _name_of(level: int) -> str:
    """Return Kafka's name of a level, or of the next higher level that has one."""
    return next((name for name, value in LEVELS.items() if value >= level), "FATAL")


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """A JSON object per line: time (UTC, ISO 8601), level, logger, node, message, then the fields of the record.

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
    """Time, level, logger, message, then the fields as [key=value ...].

    A value that could be taken for more than one field, or for the end of them, is in quotes.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = super().format(record)
        fields = " ".join(f"{key}={_as_one_value(value)}" for key, value in _fields(record).items())
        return f"{line} [{fields}]" if fields else line


_IN_TEXT = re.compile(r"""[\s='"\[\]]""")
_IN_OTHERS = re.compile(r"""[='"]""")
"""Lists and numbers are the broker's own, but a list may have texts in it."""


def _as_one_value(value: object) -> str:
    """Return a value in which no reader finds other fields, or other lines, that a client could forge."""
    text = str(value)
    if not text.isprintable():
        return ascii(text)
    ambiguous = _IN_TEXT if isinstance(value, str) else _IN_OTHERS
    return text if ambiguous.search(text) is None else repr(text)


def configure_logging(level: str, line_format: str, node_id: int | None = None) -> None:
    """Log to standard error at `level` and above, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(node_id) if line_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
