"""What the two ends of a `Replicate` stream ask of the partitions on their broker.

    LeaderSession    --LedPartition-->       the broker's partition, while it leads
    FollowerSession  --FollowedPartition-->  the broker's partition, while it follows

All calls happen on one thread (the event loop's, or the simulation's). Operations that wait for the disk call back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from raftlog.errors import RaftlogError

MAX_OPENS: Final = 500
"""Partitions that one request opens: some 40 KiB, and a first frame for each. The limits keep requests short work."""
MAX_CLOSES: Final = 2_000
MAX_ACKS: Final = 2_000

Wake = Callable[[], None]
Done = Callable[[RaftlogError | None], None]
"""Called once: with None on success, else with the error."""


class Replica(NamedTuple):
    """One life (registration) of a follower's broker. A larger `broker_epoch` is a later life (KIP-903)."""

    broker_id: int
    broker_epoch: int


class FetchState(NamedTuple):
    """Where a follower's log ends. `last_epoch` is the leader epoch of its last record, -1 without records."""

    log_end_offset: int
    last_epoch: int
    durable_end_offset: int


class Accepted(NamedTuple):
    """The follower's log is a prefix of the leader's."""


class Diverging(NamedTuple):
    """The logs diverge at or below the end of this epoch (`proto/raftlog/v1/replication.proto`)."""

    leader_epoch: int
    end_offset: int


class OutOfRange(NamedTuple):
    """The follower's log ends outside of the leader's; the follower starts over at the leader's log start."""

    log_start_offset: int


Opening = Accepted | Diverging | OutOfRange


class Read(Protocol):
    """Whole batches as they are in the log, and the offset after them."""

    @property
    def records(self) -> bytes: ...

    @property
    def next_offset(self) -> int: ...


class Traces(Protocol):
    """The sampled traces that a partition's records belong to."""

    def between(self, begin: int, end: int) -> Sequence[str]:
        """Return the spans that records from `begin` to `end` (exclusive) belong to, as W3C traceparents."""
        ...


class LedPartition(Protocol):
    """A partition that this broker leads, as a `LeaderSession` sees it."""

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
        durable_end_offset: int,
        on_change: Wake,
    ) -> Opening:
        """Begin to serve a follower if its log is a prefix of this one; what it holds counts from then on.

        `on_change` is called after the log end, a mark, the follower's ISR membership or the leadership changed, until
        `close_replica`, any number of times. It must only note the change. If another stream serves the follower, this
        stream replaces it, and the other one's `on_change` is called once more.

        Raises:
            NotLeader, FencedLeaderEpoch, UnknownLeaderEpoch: the follower's leader epoch is not this partition's.
            StaleBrokerEpoch: a later life of the follower has been here.
            InvalidRequestError: the broker has no replica of the partition, or its offsets are impossible.
        """
        ...

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        """Forget the stream of `on_change`, but not what the follower holds."""
        ...

    def check_open(self, on_change: Wake) -> None:
        """Check that the stream of `on_change` still serves its follower in this leader epoch.

        Only then may records and marks of this partition be sent on that stream.

        Raises:
            NotLeader, FencedLeaderEpoch: it does not, or no longer.
        """
        ...

    def replica_acked(
        self, replica: Replica, on_change: Wake, durable_end_offset: int, log_start_offset: int = 0
    ) -> None:
        """Count what a follower holds durably, and note where its log starts (0: it does not say).

        Raises:
            NotLeader, FencedLeaderEpoch: the stream of `on_change` does not serve the follower in this epoch.
            InvalidRequestError: beyond the log end.
        """
        ...

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> Read | None:
        """Return whole batches from `offset` up to the log end; None when that would wait for the disk.

        Raises:
            NotLeader, FencedLeaderEpoch: as `replica_acked`.
            OffsetOutOfRange: retention has deleted the offset; the follower has to open the partition again.
            RaftlogError: the log cannot be read.
        """
        ...

    def suspect(self, offset: int) -> None:
        """Have the log checked at an offset where the follower got an invalid batch. Returns at once."""
        ...

    @property
    def flush_ms(self) -> float:
        """The shortest recent fsync on this broker, in ms; 0.0: replicas acknowledge records without one."""
        ...

    def is_live(self, broker_id: int) -> bool:
        """Whether a follower is in the ISR, so that its records use the live credit; else it is catching up."""
        ...

    @property
    def is_throttled(self) -> bool:
        """Whether `leader.replication.throttled.replicas` names this broker, the sending one (KIP-73)."""
        ...


class FollowedPartition(Protocol):
    """A partition that this broker follows, in one leader epoch, as a `FollowerSession` sees it."""

    @property
    def topic_id(self) -> bytes: ...

    @property
    def partition(self) -> int: ...

    @property
    def name(self) -> str:
        """Topic and partition number, for logs and messages."""
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

    def call_when_durable(self, on_durable: Callable[[int], None]) -> None:
        """Call `on_durable` as `append_replicated` does, for the records that the log has now."""
        ...

    def append_replicated(
        self,
        records: bytes | memoryview,
        leader_epoch: int,
        on_durable: Callable[[int], None],
        traceparents: Sequence[str] = (),
    ) -> None:
        """Check and append batches as the leader stamped them; call `on_durable(durable_end_offset)` after the flush.

        `on_durable` may be called at once, and only while this broker follows in `leader_epoch`. Equal callbacks that
        wait for the same flush are called once. `traceparents`: the leader's spans of these records.

        Raises:
            FencedLeaderEpoch, NotLeader: this broker does not follow, or no longer follows, in that epoch.
            CorruptRecordError: a batch is invalid, or does not continue the log.
            StorageFull, StorageError: the log cannot be written now.
        """
        ...

    def take_marks(self, high_watermark: int, log_start_offset: int, leader_epoch: int) -> int:
        """Raise the high watermark, up to the log's durable end, and the log start; other epochs are ignored.

        A later durable end raises them further. Called before the records of the same frame are appended. Returns the
        log start offset; 0 if the marks were ignored.
        """
        ...

    def truncate(self, diverging: Diverging, leader_epoch: int, done: Done) -> None:
        """Truncate what the leader does not have (`replication.leader_epochs.truncation_offset`), then call `done`."""
        ...

    def start_over(self, log_start_offset: int, leader_epoch: int, done: Done) -> None:
        """Drop everything and begin at the leader's log start, then call `done`."""
        ...
