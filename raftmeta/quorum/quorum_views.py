"""Whose view of the quorum counts, when several controllers are asked for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from raftlog.v1.common_pb2 import QuorumInfo

AGAIN_S: Final = 0.1


def leads(view: QuorumInfo) -> bool:
    """Whether it is the leader's own."""
    return view.leader_id >= 0 and view.leader_id == view.answered_by


def better(views: Iterable[QuorumInfo]) -> QuorumInfo:
    """Return the view that shows the most; pure.

    The leader's of the highest epoch, or else that of the longest log: a node whose directory was emptied has none, and
    would show the quorum as one without data.
    """
    return max(
        views,
        key=lambda view: (leads(view), leads(view) and view.leader_epoch, view.log_end_index, -view.answered_by),
    )


async def ask_all(
    targets: Iterable[int], ask: Callable[[int], Awaitable[QuorumInfo | None]], timeout_s: float
) -> list[QuorumInfo]:
    """Ask all of `targets`, again while somebody says that there is a leader and the leader says nothing.

    At least once; for `timeout_s` at most. `ask` returns None when there is no answer. [] when nobody answers in time.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    wanted = list(targets)
    while True:
        views = [view for view in await asyncio.gather(*map(ask, wanted)) if view is not None]
        settled = bool(views) and (any(map(leads, views)) or all(view.leader_id < 0 for view in views))
        if settled or loop.time() + AGAIN_S >= end_s:
            return views
        await asyncio.sleep(AGAIN_S)
