"""Errors that name a reason, from attempts whose time may be over before the reason is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import pytest

from raftlog.errors import RaftlogError

E = TypeVar("E", bound=RaftlogError)


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
