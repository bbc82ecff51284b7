"""What some loggers have written: other threads of the process, and what is collected, write lines of their own."""

from __future__ import annotations

import logging

import pytest


def records_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[logging.LogRecord]:
    """Return the records of a logger, and of those beneath it."""
    return [record for record in caplog.records if f"{record.name}.".startswith(f"{logger}.")]


def lines_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """Return the logged messages."""
    return [record.getMessage() for record in records_of(caplog, logger)]
