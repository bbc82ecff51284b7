"""Waits, and attempts that are repeated: because time ran out too early, or because the machine was slow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from raftlog.errors import RaftlogError

E = TypeVar("E", bound=RaftlogError)


def until(
    condition: Callable[[], object], what: str = "the condition holds", *, within_s: float, pause_s: float = 0.02
) -> None:
    """Wait until a condition holds, looking at it every `pause_s`.

    Raises:
        AssertionError: it does not hold within `within_s`; `what` says what was waited for.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s)


def quickest_s(attempt: Callable[[], float], enough_s: float, tries: int = 10) -> float:
    """Return the time (s) of the first attempt that takes less than `enough_s`, or of the quickest of all tries.

    What takes too long because of the product takes too long every time.
    """
    took_s = []
    for _ in range(tries):
        took_s.append(attempt())
        if took_s[-1] < enough_s:
            break
    return min(took_s)


def refusal(kind: type[E], words: str, attempt: Callable[[float], object], *limits_s: float) -> E:
    """Return the error of this kind, with these words, that an attempt ends with that is given one of the limits.

    An attempt whose time was over before it heard anything says just that: then the next one is given the next limit.

    Raises:
        AssertionError: no attempt ends so. pytest.fail.Exception: one succeeds.
    """
    said = []
    for limit_s in limits_s:
        with pytest.raises(RaftlogError) as caught:
            attempt(limit_s)
        if isinstance(caught.value, kind) and re.search(words, str(caught.value)):
            return caught.value
        said.append(f"{limit_s:g} s: {type(caught.value).__name__}: {caught.value}")
    raise AssertionError(f"no attempt failed with {kind.__name__} and the words {words!r}: {said}")
