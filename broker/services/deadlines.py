"""Answers in time: a caller hears from this broker why nothing happens, and not from gRPC that time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from raftlog.errors import RequestTimedOut

T = TypeVar("T")

LEADERLESS_S: Final = 1.5
"""After so long without a leader of the quorum its voters do not just elect one: they are down, or out of reach. The
caller may know another broker that is not cut off."""
LOOK_S: Final = 0.1
MARGIN_S: Final = 0.3
"""How long before the caller's deadline the answer leaves at the latest."""
MARGIN_SHARE: Final = 0.2
"""Of a short deadline the margin is this share at most."""


async def in_time(work: Awaitable[T], remaining_s: float | None, waiting_for: Callable[[], str]) -> T:
    """Return what `work` returns, or give it up and say what it waits for.

    Args:
        remaining_s: until the caller's deadline; None when it has none.
        waiting_for: names what the metadata quorum lacks to have a leader, "" when it has one.

    Raises:
        RequestTimedOut: the deadline is near, or the quorum has had no leader for LEADERLESS_S.
    """
    loop = asyncio.get_running_loop()
    until_s = float("inf")
    if remaining_s is not None:
        until_s = loop.time() + remaining_s - min(MARGIN_S, remaining_s * MARGIN_SHARE)
    leaderless_since_s: float | None = None
    task = asyncio.ensure_future(work)
    try:
        while True:
            await asyncio.wait((task,), timeout=max(0.0, min(LOOK_S, until_s - loop.time())))
            if task.done():
                return task.result()
            missing = waiting_for()
            now_s = loop.time()
            if not missing:
                leaderless_since_s = None
            elif leaderless_since_s is None:
                leaderless_since_s = now_s
            if leaderless_since_s is not None and now_s - leaderless_since_s >= LEADERLESS_S:
                raise _no_leader(missing)
            if now_s >= until_s:
                if missing:
                    raise _no_leader(missing)
                raise RequestTimedOut(
                    "the metadata quorum has not answered in time; what was asked for may be done yet"
                )
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _no_leader(missing: str) -> RequestTimedOut:
    return RequestTimedOut(
        f"the metadata quorum has no leader, so nothing can be changed; waiting for {missing}; "
        "see that a majority of the controllers runs and can be reached"
    )
