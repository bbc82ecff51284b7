"""How much this process writes to its own log, by logger; changed while it runs, and forgotten when it ends.

Kafka's config resource BROKER_LOGGER: keys are names of loggers, values levels. What is set for a logger counts for
those beneath it (`broker.log` for `broker.log.cleaner`), `root` for all that nothing is set for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from raftlog.errors import InvalidConfig
from raftlog.v1.admin_pb2 import ConfigEntry

logger = logging.getLogger(__name__)

ROOT: Final = "root"
AUDIT: Final = "raftlog.audit"
"""What is refused is there at level INFO: it cannot be turned off from outside, by it or by the loggers above it."""
LEVELS: Final[Mapping[str, int]] = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
"""Kafka's names, but TRACE: there is nothing below DEBUG."""
ALSO: Final[Mapping[str, str]] = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class LogLevels:
    """`level` is the configured one, which `root` goes back to."""

    def __init__(self, level: str, root: logging.Logger | None = None) -> None:
        self._configured = level.upper()
        self._root = root or logging.getLogger()
        self._set: set[str] = set()

    def describe(self) -> Iterator[ConfigEntry]:
        """Yield each logger with the level that counts for it; what somebody set is `DYNAMIC_BROKER_LOGGER`."""
        for name in (ROOT, *self._names()):
            source = ConfigEntry.DYNAMIC_BROKER_LOGGER if name in self._set else ConfigEntry.STATIC_BROKER
            level = _name_of(self._logger(name).getEffectiveLevel())
            yield ConfigEntry(key=name, value=level, source=source, read_only=False)

    def alter(self, changes: Mapping[str, str], unset: Iterable[str], *, validate_only: bool = False) -> None:
        """Set levels, and put others back to what counts above them; all or none.

        Raises:
            InvalidConfig: there is no such logger or level, or the audit log would be turned off.
        """
        wanted = {self._known(name): _level(name, level) for name, level in changes.items()}
        if wanted.get(AUDIT, logging.INFO) > logging.INFO:
            raise InvalidConfig(
                f"{AUDIT}={changes[AUDIT].strip()!r} would turn the audit log off: INFO or DEBUG are allowed"
            )
        back = [self._known(name) for name in unset]
        twice = sorted(wanted.keys() & set(back))
        if twice:
            raise InvalidConfig(f"the level of {twice[0]} is set and unset at once; choose one")
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
        """Let the audit log follow the loggers above it, but no higher than INFO, or what is configured."""
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
        """Return the names that there are, those of packages included."""
        return sorted(self._root.manager.loggerDict)

    def _known(self, name: str) -> str:
        if name == ROOT or name in self._root.manager.loggerDict:
            return name
        packages = ", ".join(sorted({each.partition(".")[0] for each in self._names()}))
        raise InvalidConfig(
            f"there is no logger {name[:100]!r}: use {ROOT}, one of {packages}, or one beneath them; describing the "
            "configuration of the broker's loggers lists all"
        )


def _canonical(level: str) -> str:
    level = level.strip().upper()
    return ALSO.get(level, level)


def _level(name: str, level: str) -> int:
    found = LEVELS.get(_canonical(level))
    if found is None:
        raise InvalidConfig(f"{name[:100]}={level[:40]!r} is no level: use one of {', '.join(LEVELS)}")
    return found


def _name_of(level: int) -> str:
    """Return Kafka's name of a level; that of the next one above where it has none."""
    return next((name for name, value in LEVELS.items() if value >= level), "FATAL")
