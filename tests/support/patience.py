"""Attempts that are made again: where the time may be over before the reason of an error is known, and where a machine
that stands still may have made one of them slow."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import pytest

from raftlog.errors import RaftlogError

E = TypeVar("E", bound=RaftlogError)


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
    raise AssertionError(f"no {kind.__name__} with {words!r}: {said}")
