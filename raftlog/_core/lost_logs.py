"""What to say of a partition that nobody leads because the log went with the disk of the only one in sync."""

from __future__ import annotations

from collections.abc import Sequence


def why_lost(
    topic: str, leader: int, replicas: Sequence[int], isr: Sequence[int], lost_replicas: Sequence[int]
) -> str | None:
    """Return what happened and what to do where nobody leads and all in sync came back without their log; else None."""
    if leader >= 0 or not lost_replicas or not set(isr) <= set(lost_replicas):
        return None
    left = [replica for replica in replicas if replica not in lost_replicas]
    who = f"{'brokers' if len(isr) > 1 else 'broker'} {_listed(isr)}"
    then = (
        f"which has broker {_listed(left, ' or ')}, if it is up, lead with the records that it has"
        if left
        else "which begins the partition empty"
    )
    return (
        f"{who} alone had every record and came back without the log: the disk was replaced, or is not mounted; "
        "start it with the disk that it had, or give up what is lost: "
        f"raftlog partition elect {topic} --unclean, {then}"
    )


def _listed(ids: Sequence[int], between: str = ", ") -> str:
    return between.join(map(str, ids))
