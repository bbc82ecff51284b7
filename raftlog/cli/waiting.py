"""How commands wait for a cluster: they look again and again, say once what they wait for, and give up in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import typer

from raftlog.cli.output import print_note
from raftlog.config import parse_duration_ms
from raftlog.errors import RaftlogError, RequestTimedOut

LOOK_EVERY_S: Final = 1.0


def seconds(text: str | float) -> float:
    """Return what a `--timeout` says: seconds, or a number with a unit such as 90s or 2m.

    Raises:
        typer.BadParameter: it is neither, or negative.
    """
    try:
        given = float(text)
    except ValueError:
        try:
            given = parse_duration_ms(text) / 1000
        except ValueError:
            raise typer.BadParameter(f"{text!r}: write seconds, or a duration such as 90s or 2m") from None
    if not 0 <= given < float("inf"):
        raise typer.BadParameter(f"{text!r}: write seconds from 0 on, or a duration such as 90s or 2m")
    return given


def until_done(look: Callable[[], str], timeout_s: float, late: str, *, every_s: float = LOOK_EVERY_S) -> None:
    """Return once `look` returns "": else it says what is waited for. Errors that may pass are waited out.

    Raises:
        RequestTimedOut: the time is up: `late`, and what is still waited for.
        RaftlogError: `look` has failed.
    """
    deadline_s = time.monotonic() + timeout_s
    said = ""
    while True:
        try:
            waits = look()
            if not waits:
                return
        except RaftlogError as error:
            if not error.retriable:
                raise
            waits = str(error)
        if waits != said:
            said = waits
            print_note(f"waiting: {waits}")
        if time.monotonic() >= deadline_s:
            raise RequestTimedOut(f"{late} {timeout_s:g} s: {waits}")
        time.sleep(min(every_s, max(0.0, deadline_s - time.monotonic())))
