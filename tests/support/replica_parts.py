"""Partitions without disks for the two ends of a `Replicate` stream, and a wire between those that a test drives."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from raftlog.errors import (
    CorruptRecordError,
    FencedLeaderEpoch,
    InvalidRequestError,
    NotLeader,
    OffsetOutOfRange,
    RaftlogError,
    StaleBrokerEpoch,
    UnknownLeaderEpoch,
    UnknownTopicId,
)
from raftlog.format import wire
from raftlog.v1 import replication_pb2
from replication.follower_session import FollowerOptions, FollowerSession
from replication.leader_session import MARKS_DELAY_MS, LeaderSession, ReadDone
from replication.ports import (
    Accepted,
    Diverging,
    Done,
    FetchState,
    LedPartition,
    Opening,
    OutOfRange,
    Replica,
    Traces,
    Wake,
)
from replication.token_bucket import TokenBucket

CLUSTER = "cluster"
LEADER, FOLLOWER, OTHER = 1, 2, 3
ME = Replica(FOLLOWER, 20)
TOPIC = b"t" * 16

_HEADER = struct.Struct(">qii")


class Batch(NamedTuple):
    """One record, as these logs keep it."""

    offset: int
    epoch: int
    value: bytes

    def encoded(self) -> bytes:
        """Return it as it travels."""
        return _HEADER.pack(self.offset, self.epoch, len(self.value)) + self.value


class Bytes(NamedTuple):
    """The result of a read."""

    records: bytes
    next_offset: int


def decoded(data: bytes | memoryview) -> list[Batch]:
    """Return the batches in what travelled."""
    view, batches = memoryview(data), []
    while len(view):
        offset, epoch, size = _HEADER.unpack_from(view)
        batches.append(Batch(offset, epoch, bytes(view[_HEADER.size : _HEADER.size + size])))
        view = view[_HEADER.size + size :]
    return batches


class MemoryLog:
    """Records with their epochs, from a start offset on."""

    def __init__(self, epochs: Iterable[int] = (), start: int = 0) -> None:
        self.start = start
        self.batches = [Batch(start + i, epoch, b"%d" % (start + i)) for i, epoch in enumerate(epochs)]

    @property
    def end(self) -> int:
        """Exclusive."""
        return self.start + len(self.batches)

    def epoch_before(self, offset: int) -> int:
        """Return the epoch of the record before an offset, -1 without one."""
        return self.batches[offset - 1 - self.start].epoch if offset > self.start else -1

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest epoch that is at most this one, and where it ends."""
        before = [batch for batch in self.batches if batch.epoch <= epoch]
        return (before[-1].epoch, before[-1].offset + 1) if before else (-1, self.start)

    def truncate(self, end: int) -> None:
        """Drop what lies at or above `end`."""
        del self.batches[max(0, end - self.start) :]


class Led:
    """A partition that this broker leads."""

    def __init__(self, log: MemoryLog, epoch: int = 1, *, live: Iterable[int] = (FOLLOWER,)) -> None:
        self.log = log
        self.epoch = epoch
        self.high_watermark = log.start
        self.live = set(live)
        self.is_throttled = False
        self.flush_ms = 0.0
        self.replicas = {FOLLOWER, OTHER}
        self.held: dict[int, int] = {}
        self.open_by: dict[int, tuple[Replica, Wake]] = {}
        self.cold_below = 0
        """Reads below this offset have to wait for the disk."""
        self.reads = 0
        self.error: RaftlogError | None = None
        self.suspected: list[int] = []
        self.traces: Traces | None = None

    @property
    def log_start_offset(self) -> int:
        return self.log.start

    @property
    def log_end_offset(self) -> int:
        return self.log.end

    def append(self, *values: bytes, epoch: int | None = None) -> None:
        """Append a record each."""
        for value in values:
            self.log.batches.append(Batch(self.log.end, self.epoch if epoch is None else epoch, value))
        self.changed()

    def changed(self) -> None:
        """Tell the follower that has it open."""
        for _, on_change in list(self.open_by.values()):
            on_change()

    def resign(self) -> None:
        """Lead no more."""
        self.error = NotLeader("another one leads", OTHER, self.epoch + 1)
        self.changed()

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
        if self.error is not None:
            raise self.error
        if leader_epoch != self.epoch:
            kind = FencedLeaderEpoch if leader_epoch < self.epoch else UnknownLeaderEpoch
            raise kind(f"epoch {leader_epoch}, it is {self.epoch}")
        if replica.broker_id not in self.replicas:
            raise InvalidRequestError(f"broker {replica.broker_id} is no replica")
        before = self.open_by.get(replica.broker_id)
        if before is not None and before[0].broker_epoch > replica.broker_epoch:
            raise StaleBrokerEpoch("a later life has been heard of")
        if not 0 <= durable_end_offset <= fetch_offset:
            raise InvalidRequestError(f"offsets {durable_end_offset}, {fetch_offset} make no sense")
        if fetch_offset < self.log.start:
            return OutOfRange(self.log.start)
        if last_fetched_epoch >= 0:
            epoch, end = self.log.end_of_epoch(last_fetched_epoch)
            if epoch < last_fetched_epoch or end < fetch_offset:
                return Diverging(epoch, end)
        elif fetch_offset != self.log.start:
            return OutOfRange(self.log.start)
        self.open_by[replica.broker_id] = (replica, on_change)
        if before is not None:
            before[1]()
        self._count(replica.broker_id, durable_end_offset)
        return Accepted()

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        if self.open_by.get(replica.broker_id) == (replica, on_change):
            del self.open_by[replica.broker_id]

    def check_open(self, on_change: Wake) -> None:
        self._check(on_change)

    def suspect(self, offset: int) -> None:
        self.suspected.append(offset)

    def replica_acked(
        self, replica: Replica, on_change: Wake, durable_end_offset: int, log_start_offset: int = 0
    ) -> None:
        self._check(on_change)
        if durable_end_offset > self.log.end:
            raise InvalidRequestError(f"{durable_end_offset} is beyond the log end {self.log.end}")
        self._count(replica.broker_id, durable_end_offset)

    def _count(self, broker_id: int, durable_end_offset: int) -> None:
        self.held[broker_id] = durable_end_offset
        mark = min((self.held.get(member, 0) for member in self.live), default=self.log.end)
        if mark > self.high_watermark:
            self.high_watermark = mark
            self.changed()

    def _check(self, on_change: Wake) -> None:
        if self.error is not None:
            raise self.error
        if all(known != on_change for _, known in self.open_by.values()):
            raise FencedLeaderEpoch("another stream has taken over")

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> Bytes | None:
        self._check(on_change)
        if offset < self.log.start:
            raise OffsetOutOfRange(f"offset {offset} is below {self.log.start}")
        if offset < self.cold_below and not blocking:
            return None
        self.reads += 1
        out: list[bytes] = []
        size = 0
        for batch in self.log.batches[offset - self.log.start :]:
            piece = batch.encoded()
            if out and size + len(piece) > max_bytes:
                break
            out.append(piece)
            size += len(piece)
        return Bytes(b"".join(out), offset + len(out))

    def is_live(self, broker_id: int) -> bool:
        return broker_id in self.live


class Followed:
    """A partition that this broker follows. `flushes` holds back what is appended until `flush`."""

    def __init__(self, log: MemoryLog, epoch: int = 1, *, partition: int = 0, topic_id: bytes = TOPIC) -> None:
        self.log = log
        self.topic_id = topic_id
        self.partition = partition
        self.leader_epoch = epoch
        self.held = log.end
        self.flushes_by_hand = False
        self.is_throttled = False
        self.high_watermark = self.log_start_offset = self.leader_high_watermark = 0
        self.append_error: RaftlogError | None = None
        self.truncations: list[int] = []
        self.traceparents: list[str] = []
        """Of all that came."""
        self.waits_with_truncation = False
        self.truncated: Done | None = None
        self._waiting: dict[Callable[[int], None], None] = {}

    @property
    def name(self) -> str:
        return f"topic-{self.partition}"

    def call_when_durable(self, on_durable: Callable[[int], None]) -> None:
        if self.held < self.log.end:
            self._waiting[on_durable] = None

    def fetch_state(self) -> FetchState:
        return FetchState(self.log.end, self.log.epoch_before(self.log.end), min(self.held, self.log.end))

    def append_replicated(
        self,
        records: bytes | memoryview,
        leader_epoch: int,
        on_durable: Callable[[int], None],
        traceparents: Sequence[str] = (),
    ) -> None:
        self.traceparents += traceparents
        if leader_epoch != self.leader_epoch:
            raise FencedLeaderEpoch(f"this broker follows in epoch {self.leader_epoch}")
        if self.append_error is not None:
            raise self.append_error
        for batch in decoded(records):
            if batch.offset != self.log.end:
                raise CorruptRecordError(f"offset {batch.offset} does not follow {self.log.end}")
            self.log.batches.append(batch)
        self._raise_high_watermark()
        self._waiting[on_durable] = None
        if not self.flushes_by_hand:
            self.flush()

    def flush(self) -> None:
        """Make the appended records durable."""
        self.held = self.log.end
        waiting, self._waiting = self._waiting, {}
        for on_durable in waiting:
            on_durable(self.held)

    def take_marks(self, high_watermark: int, log_start_offset: int, leader_epoch: int) -> int:
        if leader_epoch != self.leader_epoch:
            return 0
        self.leader_high_watermark = max(self.leader_high_watermark, high_watermark)
        self._raise_high_watermark()
        self.log_start_offset = max(self.log_start_offset, log_start_offset)
        return self.log_start_offset

    def _raise_high_watermark(self) -> None:
        self.high_watermark = max(self.high_watermark, min(self.leader_high_watermark, self.log.end))

    def truncate(self, diverging: Diverging, leader_epoch: int, done: Done) -> None:
        end = min(diverging.end_offset, self.log.end_of_epoch(diverging.leader_epoch)[1])
        self._cut(lambda: self.log.truncate(end), end, done)

    def start_over(self, log_start_offset: int, leader_epoch: int, done: Done) -> None:
        def reset() -> None:
            self.log = MemoryLog(start=log_start_offset)
            self.held = log_start_offset

        self._cut(reset, log_start_offset, done)

    def _cut(self, cut: Callable[[], None], end: int, done: Done) -> None:
        def now(error: RaftlogError | None = None) -> None:
            if error is None:
                cut()
                self.truncations.append(end)
                self.leader_high_watermark = 0
                self.held = min(self.held, self.log.end)
            done(error)

        if self.waits_with_truncation:
            self.truncated = now
        else:
            now()


def _is_due(due_ms: float | None, now_ms: float) -> bool:
    return due_ms is not None and due_ms <= now_ms


def _sooner(one_ms: float | None, other_ms: float | None) -> float | None:
    return min((ms for ms in (one_ms, other_ms) if ms is not None), default=None)


class Stream:
    """A leader's and a follower's session with a wire between them; `run` carries messages until there are none."""

    def __init__(
        self,
        led: dict[int, Led],
        *,
        options: FollowerOptions | None = None,
        max_frame_bytes: int = 1 << 20,
        me: Replica = ME,
        leader_throttle: TokenBucket | None = None,
        follower_throttle: TokenBucket | None = None,
    ) -> None:
        self.led = led
        self.now_ms = 1_000.0
        self.leader_wakes = 0
        self.later: deque[tuple[LedPartition, Wake, int, int, ReadDone]] = deque()
        self.requests: list[replication_pb2.ReplicateRequest] = []
        self.messages: list[list[wire.ReplicaFrame]] = []
        self.refuse_replica: RaftlogError | None = None
        self._max_frame_bytes = max_frame_bytes
        self._leader_throttle = leader_throttle or TokenBucket()
        self._leader_due_ms: float | None = 0.0
        self._follower_due_ms: float | None = 0.0
        self.follower = FollowerSession(
            me=me,
            leader_id=LEADER,
            cluster_id=CLUSTER,
            wake=self._wake_follower,
            throttle=follower_throttle or TokenBucket(),
            options=options or FollowerOptions(),
        )
        self.leader = self.connect()

    def connect(self) -> LeaderSession:
        """Begin another stream: a new session on the leader's end."""

        def check(replica: Replica) -> None:
            if self.refuse_replica is not None:
                raise self.refuse_replica

        self.leader = LeaderSession(
            find=self._find,
            me=LEADER,
            cluster_id=CLUSTER,
            check_replica=check,
            wake=self._wake_leader,
            wake_soon=self._wake_leader_soon,
            read_later=lambda *read: self.later.append(read),
            max_frame_bytes=self._max_frame_bytes,
            throttle=self._leader_throttle,
        )
        self._leader_due_ms = None
        self.follower.connected(self.now_ms)
        return self.leader

    # As in a shell, each end is asked only when it has woken, or at its deadline.

    def _wake_leader(self) -> None:
        self.leader_wakes += 1
        self._leader_due_ms = 0.0

    def _wake_leader_soon(self) -> None:
        self._leader_due_ms = _sooner(self._leader_due_ms, self.now_ms + MARKS_DELAY_MS)

    def _wake_follower(self) -> None:
        self._follower_due_ms = 0.0

    def _find(self, topic_id: bytes, partition: int) -> Led:
        found = self.led.get(partition) if topic_id == TOPIC else None
        if found is None:
            raise UnknownTopicId("not here")
        return found

    def break_off(self) -> None:
        """The connection is gone."""
        self.leader.close()
        self.follower.lost()

    def send_requests(self) -> bool:
        """Carry the follower's messages; return whether there were any."""
        any_sent = False
        while (request := self._take_request()) is not None:
            self.requests.append(replication_pb2.ReplicateRequest.FromString(request.SerializeToString()))
            self.leader.handle(self.requests[-1], self.now_ms)
            any_sent = True
        return any_sent

    def _take_request(self) -> replication_pb2.ReplicateRequest | None:
        if not _is_due(self._follower_due_ms, self.now_ms):
            return None
        self._follower_due_ms = None
        request = self.follower.take_request(self.now_ms)
        self._follower_due_ms = _sooner(self._follower_due_ms, self.follower.next_deadline_ms(self.now_ms))
        return request

    def send_frames(self) -> list[wire.ReplicaFrame]:
        """Carry one message of the leader; return its frames."""
        if not _is_due(self._leader_due_ms, self.now_ms):
            return []
        self._leader_due_ms = None
        frames = self.leader.take_frames(self.now_ms)
        self._leader_due_ms = _sooner(self._leader_due_ms, self.leader.next_deadline_ms(self.now_ms))
        if not frames:
            return []
        message = wire.decode_replicate(wire.encode_replicate(frames))
        self.messages.append(message)
        self.follower.handle(message, self.now_ms)
        return message

    def read_one(self) -> None:
        """Let the disk answer the first read that waits for it."""
        partition, on_change, offset, max_bytes, done = self.later.popleft()
        try:
            read = partition.read_for_replica(on_change, offset, max_bytes, blocking=True)
        except RaftlogError as error:
            done(error)
            return
        assert read is not None
        done(read)

    def run(self, *, reads: bool = True) -> None:
        """Carry everything until both are silent."""
        for _ in range(100_000):
            busy = self.send_requests()
            busy = bool(self.send_frames()) or busy
            if reads and self.later:
                self.read_one()
                busy = True
            if not busy:
                return
        raise AssertionError("the sessions still have messages to send after the limit of rounds")

    def advance(self, ms: float) -> None:
        """Let time pass, with everything that falls due in it."""
        end_ms = self.now_ms + ms
        while True:
            self.run()
            next_ms = _sooner(self._leader_due_ms, self._follower_due_ms)
            if next_ms is None or next_ms >= end_ms:
                break
            assert next_ms > self.now_ms, (
                f"a deadline at {next_ms:g} ms has passed, but is still due at {self.now_ms:g} ms"
            )
            self.now_ms = next_ms
        self.now_ms = end_ms
        self.run()
