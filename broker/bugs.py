"""Exceptions that must not stop what others wait for."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)


def report(what: str, error: Exception) -> None:
    """Tell the event loop of a bug, which logs it with its traceback; in a simulation it ends the run."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        logger.error(what, exc_info=error)
    else:
        loop.call_exception_handler({"message": what, "exception": error})
