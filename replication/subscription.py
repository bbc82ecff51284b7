"""One partition that a follower has open on a `Replicate` stream, as the leader's end keeps it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from raftlog.v1 import replication_pb2
from replication.ports import LedPartition, Wake


class Kind(Enum):
    """Which of the follower's credits records count against."""

    LIVE = "live"
    CATCH_UP = "catch up"
    THROTTLED = "throttled"


class Subscription:
    """One partition that the follower has open.

    Invariants: `position` only grows; `queued_live` is None while `reading`.
    """

    __slots__ = (
        "catch_up_kind",
        "changed",
        "cold",
        "ended",
        "id",
        "on_change",
        "partition",
        "position",
        "queued_live",
        "reading",
        "told",
    )

    def __init__(
        self,
        opening: replication_pb2.OpenReplica,
        partition: LedPartition,
        note_change: Callable[[Subscription], None],
    ) -> None:
        self.id = opening.subscription_id
        self.partition = partition
        self.position = opening.fetch_offset
        self.catch_up_kind = Kind.THROTTLED if opening.throttled else Kind.CATCH_UP
        """What its records count as while the follower is not in the ISR."""
        self.changed = False  # is in the session's list of changed ones
        self.queued_live: bool | None = None  # which queue it waits in, if any; an entry in the other one is stale
        self.reading = False  # also while what was read waits for its turn
        self.cold = False  # has had to be read from the disk since it was at the log end
        self.ended = False
        self.told = (-1, -1)  # the marks that the follower has seen
        self.on_change: Wake = lambda: note_change(self)

    def tells_all(self) -> bool:
        """Whether the follower has seen the marks as they are."""
        return self.told == (self.partition.high_watermark, self.partition.log_start_offset)

    def marks(self) -> replication_pb2.ReplicaFrame:
        """Return a frame with the marks as they are, which the follower has then seen."""
        head = replication_pb2.ReplicaFrame(subscription_id=self.id)
        set_marks(head, self.partition)
        self.told = (head.high_watermark, head.log_start_offset)
        return head


def set_marks(head: replication_pb2.ReplicaFrame, partition: LedPartition) -> None:
    """Put a partition's marks into a frame."""
    head.high_watermark = partition.high_watermark
    head.log_start_offset = partition.log_start_offset
    head.log_end_offset = partition.log_end_offset
