"""What the two ends of a `Replicate` stream ask of the partitions on their broker.

    LeaderSession    --LedPartition-->       the broker's partition, while it leads
    FollowerSession  --FollowedPartition-->  the broker's partition, while it follows

Everything is called on one thread (the event loop's, or the simulation's); what has to wait for the disk calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from raftlog.errors import RaftlogError

Wake = Callable[[], None]
Done = Callable[[RaftlogError | None], None]
"""Called once: None, or why it was not done."""


class Replica(NamedTuple):
    """One life of a follower. A larger `broker_epoch` is a later life (KIP-903)."""

    broker_id: int
    broker_epoch: int


class FetchState(NamedTuple):
    """Where a follower's log ends. `last_epoch` is that of its last record, -1 without one."""

    log_end_offset: int
    last_epoch: int
    held_end_offset: int


class Accepted(NamedTuple):
    """The follower's log is a prefix of the leader's."""


class Diverging(NamedTuple):
    """It is not: its log parts from the leader's at or below this (`proto/raftlog/v1/replication.proto`)."""

    leader_epoch: int
    end_offset: int


class OutOfRange(NamedTuple):
    """It ends below the leader's log start, at which it is to start over."""

    log_start_offset: int


Opening = Accepted | Diverging | OutOfRange


class Read(Protocol):
    """Whole batches as they are in the log, and where to go on."""

    @property
    def records(self) -> bytes: ...

    @property
    def next_offset(self) -> int: ...


class Traces(Protocol):
    """Of which sampled traces the records of a partition are."""

    def between(self, begin: int, end: int) -> Sequence[str]:
        """Return the spans that records from `begin` to `end` (exclusive) belong to, as W3C traceparents."""
        ...


class LedPartition(Protocol):
    """A partition that this broker leads, as the leader's end of a stream sees it."""

    @property
    def log_start_offset(self) -> int: ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def log_end_offset(self) -> int: ...

    @property
    def traces(self) -> Traces | None:
        """None where nothing is traced."""
        ...

    def open_replica(
        self,
        replica: Replica,
        *,
        leader_epoch: int,
        fetch_offset: int,
        last_fetched_epoch: int,
        held_end_offset: int,
        on_change: Wake,
    ) -> Opening:
        """Take a follower on, if its log is a prefix of this one; what it holds counts from then on.

        `on_change` is called after the log end, a mark, the follower's place in the ISR or the leadership changed,
        until `close_replica`, any number of times; it must only note that there is something to look at. A follower
        that is open already is taken over from its former stream, whose `on_change` is called once more.

        Raises:
            NotLeader, FencedLeaderEpoch, UnknownLeaderEpoch: another epoch than the follower believes in.
            StaleBrokerEpoch: a later life of this broker has been heard of.
            InvalidRequestError: it is no replica of the partition, or its offsets make no sense.
        """
        ...

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        """Forget the stream of `on_change`; what the follower holds is remembered."""
        ...

    def check_open(self, on_change: Wake) -> None:
        """Check that the stream of `on_change` is still the one that its follower is served on in this epoch.

        Only then does anything that is read off this partition, marks as well, belong on that stream.

        Raises:
            NotLeader, FencedLeaderEpoch: it is not, or not any more.
        """
        ...

    def replica_held(self, replica: Replica, on_change: Wake, held_end_offset: int) -> None:
        """Count what a follower holds durably.

        Raises:
            NotLeader, FencedLeaderEpoch: `on_change` is not (any more) the one it was opened with in this epoch.
            InvalidRequestError: beyond the log end.
        """
        ...

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> Read | None:
        """Return whole batches from `offset` up to the log end; None when that would wait for the disk.

        Raises:
            NotLeader, FencedLeaderEpoch: as `replica_held`.
            OffsetOutOfRange: retention has been quicker; the follower has to open anew.
            RaftlogError: the log cannot be read.
        """
        ...

    def suspect(self, offset: int) -> None:
        """Have the log checked at an offset: a follower says that the batch there does not check. Returns at once."""
        ...

    def is_live(self, broker_id: int) -> bool:
        """Whether a follower is in the ISR, so that its records go by the live credit; else it is catching up."""
        ...

    def is_throttled(self, broker_id: int) -> bool:
        """Whether `leader.replication.throttled.replicas` names it."""
        ...


class FollowedPartition(Protocol):
    """A partition that this broker follows, in one leader epoch, as the follower's end of a stream sees it."""

    @property
    def topic_id(self) -> bytes: ...

    @property
    def partition(self) -> int: ...

    @property
    def name(self) -> str:
        """Topic and number, for people."""
        ...

    @property
    def leader_epoch(self) -> int:
        """The epoch that this broker follows in."""
        ...

    @property
    def is_throttled(self) -> bool:
        """Whether `follower.replication.throttled.replicas` names this broker."""
        ...

    def fetch_state(self) -> FetchState:
        """Return where the log ends now."""
        ...

    def call_when_held(self, on_held: Callable[[int], None]) -> None:
        """Have `on_held` called as `append_replicated` does, for what the log has now and is not held yet."""
        ...

    def append_replicated(
        self,
        records: bytes | memoryview,
        leader_epoch: int,
        on_held: Callable[[int], None],
        traceparents: Sequence[str] = (),
    ) -> None:
        """Check and append batches as the leader stamped them; call `on_held(held_end_offset)` when they are held.

        `on_held` may be called at once, and is called only while this broker follows in `leader_epoch`; equal
        callbacks that wait for the same flush are called once. `traceparents`: the leader's spans of these records.

        Raises:
            FencedLeaderEpoch, NotLeader: this broker does not follow in that epoch (any more).
            CorruptRecordError: what came does not check, or does not continue the log.
            StorageFull, StorageError: it cannot be written now.
        """
        ...

    def take_marks(self, high_watermark: int, log_start_offset: int, leader_epoch: int) -> None:
        """Raise the high watermark, as far as the log goes, and the log start; older epochs are passed over."""
        ...

    def truncate(self, diverging: Diverging, leader_epoch: int, done: Done) -> None:
        """Drop what the leader does not have (`replication.divergence.truncation_offset`), then call `done`."""
        ...

    def start_over(self, log_start_offset: int, leader_epoch: int, done: Done) -> None:
        """Drop everything, and begin at the leader's log start, then call `done`."""
        ...
