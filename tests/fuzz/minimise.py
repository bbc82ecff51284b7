"""Making a failing input small: fewer bytes, then smaller ones, as long as it fails in the same way."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator

Check = Callable[[bytes], None]


def signature(error: BaseException) -> tuple[str, ...]:
    """Return what makes two failures the same: the kind of exception, and where it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.name}" for frame in frames if "/oracle.py" not in frame.filename
    ]
    return (type(error).__name__, *places[-2:])


def failure(check: Check, data: bytes) -> Exception | None:
    """Return how an input fails, None if it does not."""
    try:
        check(data)
    except Exception as error:
        return error
    return None


def minimise(check: Check, data: bytes, error: BaseException, seconds: float = 20.0) -> bytes:
    """Return a smaller input that fails in the same way, as small as the time allows."""
    wanted, until = signature(error), time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(data):
            if time.monotonic() > until:
                return data
            found = failure(check, candidate)
            if found is not None and signature(found) == wanted:
                data, smaller = candidate, True
                break
    return data


def _candidates(data: bytes) -> Iterator[bytes]:
    """Yield simpler inputs, the simplest first."""
    size = len(data)
    step = size
    while step:
        for start in range(0, size, step):
            yield data[:start] + data[start + step :]
        step //= 2
    for at in range(size):
        if data[at]:
            yield data[:at] + b"\0" + data[at + 1 :]
            if data[at] > 1:
                yield data[:at] + bytes([data[at] // 2]) + data[at + 1 :]
