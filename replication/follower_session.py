"""The follower's end of one `Replicate` stream: it opens partitions, appends batches, acks durable ends. Pure.

`FollowerSession` is the stream, `Followed` one partition on it, `FollowerCredit` what the leader may send ahead,
`Complaints` the warnings about partitions that cannot be followed.

The states of a partition, each change with its trigger:

    waiting      --(the stream is up, `take_request`)-->            opening
    opening      --(first frame: accepted)-->                       following
    opening      --(frame: diverging)-->                            truncating
    opening      --(frame: out of range)-->                         truncating     the whole log goes
    opening, following   --(frame: error; the append fails)-->      backing off
    following    --(its flush takes too long, while catching up)--> flushing       others get its credit
    flushing     --(durable)-->                                     waiting
    truncating   --(done)-->                                        waiting
    truncating   --(failed)-->                                      backing off
    backing off  --(the pause is over)-->                           waiting
    opening, following   --(`lost`: the stream broke)-->            waiting
    any          --(`follow` in another epoch)-->                   waiting        as a new subscription
    any          --(`unfollow`)-->                                  (none)

A frame of a subscription that has ended is ignored, but the credit that its records have used is returned.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from raftlog.errors import (
    CorruptRecordError,
    FencedError,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    RetriableError,
    StorageError,
    from_wire,
)
from raftlog.format.header import Buffer
from raftlog.format.wire import ReplicaFrame
from raftlog.v1 import replication_pb2
from raftlog.v1.common_pb2 import NONE
from replication.pacing import CatchUpPace, LiveTraffic
from replication.ports import MAX_ACKS, MAX_CLOSES, MAX_OPENS, Diverging, Done, FollowedPartition, Replica, Wake
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

GATHER_MS: Final = 1_000.0
"""How long the first complaint waits for others before a line is logged."""
MAX_NAMED: Final = 3


class Complaints:
    """Warnings about one leader's partitions that cannot be followed: one log line for each reason.

    Bounded: a reason is an error's type; only the first few partitions of each are named.
    """

    def __init__(self, leader_id: int) -> None:
        self._leader_id = leader_id
        self._gathered: dict[str, tuple[RaftlogError, dict[str, None]]] = {}
        self._counts: dict[str, int] = {}
        self.due_ms: float | None = None
        """When `say` has a line to log; None: no complaints."""

    def note(self, name: str, error: RaftlogError, now_ms: float) -> None:
        reason = type(error).__name__
        _, names = self._gathered.setdefault(reason, (error, {}))
        if name not in names:
            self._counts[reason] = self._counts.get(reason, 0) + 1
            if len(names) < MAX_NAMED:
                names[name] = None
        if self.due_ms is None:
            self.due_ms = now_ms + GATHER_MS

    def say(self, now_ms: float) -> None:
        """Log a line for each reason, if they are due."""
        if self.due_ms is None or now_ms < self.due_ms:
            return
        for reason, (error, names) in self._gathered.items():
            count = self._counts[reason]
            which = ", ".join(names) + (f" and {count - len(names)} more partitions" if count > len(names) else "")
            logger.warning(
                "cannot follow %s: %s; trying again",
                which,
                error,
                extra={"leader": self._leader_id, "partitions": count, "reason": reason},
            )
        self._gathered.clear()
        self._counts.clear()
        self.due_ms = None


class State(Enum):
    """The state of one partition; the module docstring has the transitions."""

    WAITING = "waiting"
    OPENING = "opening"
    FOLLOWING = "following"
    TRUNCATING = "truncating"
    FLUSHING = "flushing"
    BACKING_OFF = "backing off"


class Followed:
    """One partition, followed in one leader epoch. `id` is that of its subscription, 0: it has none.

    Invariant, until `over`: it has a subscription exactly while it is opening or following.
    """

    __slots__ = (
        "acked_end_offset",
        "acked_start_offset",
        "attempts",
        "damaged_offset",
        "flush_end_offset",
        "id",
        "last_ends",
        "leader_epoch",
        "name",
        "on_durable",
        "on_truncated",
        "over",
        "partition",
        "pending",
        "retry_at_ms",
        "state",
        "throttled",
    )

    def __init__(
        self,
        partition: FollowedPartition,
        durable: Callable[[Followed, int], None],
        truncated: Callable[[Followed, RaftlogError | None], None],
    ) -> None:
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.name = partition.name
        self.id = 0
        self.state = State.WAITING
        self.over = False
        self.attempts = 0
        self.retry_at_ms = 0.0
        self.acked_end_offset = 0
        self.acked_start_offset = 0
        """The log start of the last ack; 0: the leader was told none since it was opened."""
        self.flush_end_offset = 0
        """While flushing: the end that has to be durable before it is opened again."""
        self.throttled = False
        """Whether it was opened as throttled."""
        self.damaged_offset: int | None = None
        """Where the leader has sent an invalid batch; sent to the leader with the next open."""
        self.pending: deque[tuple[int, int]] = deque()
        """(log end, bytes) of appends made while catching up that are not durable yet, oldest first."""
        self.last_ends: tuple[int, int] | None = None
        """The log ends here and at the leader after the last piece that caught up; None before the first."""
        # One object each, so that the partition recognises equal callbacks.
        self.on_durable: Callable[[int], None] = lambda durable_end_offset: durable(self, durable_end_offset)
        self.on_truncated: Done = lambda error: truncated(self, error)

    def check_invariants(self) -> None:
        has_subscription = self.state is State.OPENING or self.state is State.FOLLOWING
        assert self.over or has_subscription == (self.id != 0), f"{self.name} is {self.state.value} with id {self.id}"

    def backs_off_until(self, at_ms: float) -> bool:
        """Whether it still backs off until that instant."""
        return not self.over and self.state is State.BACKING_OFF and self.retry_at_ms == at_ms

    # Catch-up credit of appends that are not durable

    def note_appended(self, size_bytes: int) -> bool:
        """Remember a new append; return False if it is durable already, or the subscription has ended."""
        if not self.id:
            return False
        log_end_offset = self.partition.fetch_state().log_end_offset
        if log_end_offset <= self.acked_end_offset:
            return False
        self.pending.append((log_end_offset, size_bytes))
        return True

    def progress(self, leader_end_offset: int) -> tuple[int, int]:
        """Return by how many offsets this log, and the leader's, grew since the last piece; (0, 0) for the first."""
        ends = self.partition.fetch_state().log_end_offset, leader_end_offset
        before, self.last_ends = self.last_ends or ends, ends
        return ends[0] - before[0], ends[1] - before[1]

    def take_durable(self, durable_end_offset: int) -> int:
        """Drop the appends that are durable now; return their bytes."""
        size_bytes = 0
        while self.pending and self.pending[0][0] <= durable_end_offset:
            size_bytes += self.pending.popleft()[1]
        return size_bytes

    def forget_pending(self) -> int:
        """Drop all pending appends; return their bytes."""
        size_bytes = sum(size for _, size in self.pending)
        self.pending.clear()
        return size_bytes


RETURN_FRACTION: Final = 4
"""Credit is returned with another request, or alone once it is this fraction of the window."""
STALLED_MS: Final = 500.0
"""A partition whose flush takes longer than this is closed, so that others get its credit."""
STALLED_TOO_MS: Final = 100.0
"""The same while another partition is closed for that reason."""
UNTHROTTLED_PIECE_BYTES: Final = 64 << 10
"""Grant for partitions that were opened as throttled, when no rate is set any more."""


class FollowerCredit:
    """How much the leader of one stream may send ahead: one window for each kind of records.

        kind        for                                        credit is returned
        live        partitions whose ISR this broker is in     once the records are appended
        catch-up    the others                                 once they are durable, or no longer followed, and after
                                                               a pause while live records flow (`CatchUpPace`)
        throttled   the others, if they are throttled          in pieces, as fast as the throttle allows

    Records of catching-up partitions that wait for the disk delay every other fsync, so that window is small, and half
    as large while live records flow. A log
    whose flush hangs would keep all of the catch-up credit: `stalled` returns it, and the session closes it until it is
    durable. Other logs on the same disk are likely to hang too, so they get less time from then on.

    All streams of a broker share `throttle` (`follower.replication.throttled.rate`) and `live`.

    Invariant: `_pending_since` has exactly the partitions with pending appends, the longest wait first.
    """

    def __init__(self, live_window: int, catch_up_window: int, throttle: TokenBucket, live: LiveTraffic) -> None:
        self._windows = live_window, catch_up_window
        self._throttle = throttle
        self._live_traffic = live
        self._pace = CatchUpPace(live)
        self._is_done = False
        """Whether catch-up credit has come back since the last request, so that the pause begins."""
        self._live = 0
        self._catch_up = 0
        self._pending_since: dict[Followed, float] = {}
        self._throttled: set[Followed] = set()
        self._throttled_left = 0
        """Granted and not used; below zero when a batch was larger than the grant."""
        self._has_new_deadline = False
        self._patience_ms = STALLED_MS

    @property
    def is_limited(self) -> bool:
        return self._throttle.rate_bytes_per_s is not None

    def begin(self, request: replication_pb2.ReplicateRequest, now_ms: float) -> None:
        """Grant the windows of a new stream, and forget the former one's credit."""
        self._live = self._catch_up = self._throttled_left = 0
        request.live_credit_bytes, request.catch_up_credit_bytes = self._windows
        self._pace.begin(now_ms)

    def opened(self, followed: Followed) -> None:
        """Include a newly opened partition in the throttled grants, if it is throttled."""
        if followed.throttled:
            self._throttled.add(followed)
            self._has_new_deadline = True

    def over(self, followed: Followed) -> None:
        """Take back the credit of a partition whose subscription has ended."""
        self._throttled.discard(followed)
        self._give_back(followed.forget_pending())
        self._pending_since.pop(followed, None)

    def received(
        self, followed: Followed | None, head: replication_pb2.ReplicaFrame, size_bytes: int, now_ms: float
    ) -> None:
        """Count records that were appended, or ignored: `followed` is None then, or has no subscription."""
        counts = size_bytes if head.catch_up and not head.throttled else 0
        if not head.catch_up:
            self._live += size_bytes
            self._live_traffic.note(now_ms)
            return
        if counts and followed is not None and followed.id:
            self._pace.note_progress(counts, *followed.progress(head.log_end_offset))
        if head.throttled:
            self._has_new_deadline = True
            self._throttled_left -= size_bytes
            self._throttle.take(max(0, min(size_bytes, -self._throttled_left)), now_ms)
        if followed is None or not followed.note_appended(counts):
            self._give_back(counts)
        else:
            self._has_new_deadline = self._has_new_deadline or not self._pending_since
            self._pending_since.setdefault(followed, now_ms)

    def flushed(self, followed: Followed, durable_end_offset: int, now_ms: float) -> None:
        """Return the credit of durable records; the wait for the rest begins anew, since the disk works."""
        if self._pending_since.pop(followed, None) is not None:
            self._give_back(followed.take_durable(durable_end_offset))
            if followed.pending:
                self._pending_since[followed] = now_ms

    def _give_back(self, size_bytes: int) -> None:
        self._catch_up += size_bytes
        self._is_done = self._is_done or size_bytes > 0

    def _returnable(self, now_ms: float) -> int:
        """Return how much catch-up credit to return after the pause; beside live records half of the window stays."""
        withheld = self._windows[1] // 2 if self._pace.is_live(now_ms) else 0
        return max(0, self._catch_up - withheld)

    def stalled(self, now_ms: float, *, beside_others: bool) -> list[Followed]:
        """Return the partitions whose flush takes too long; `beside_others`: others are closed for that already."""
        self._patience_ms = STALLED_TOO_MS if beside_others else STALLED_MS
        stalled = []
        for followed, since_ms in self._pending_since.items():
            if now_ms < since_ms + self._patience_ms:
                break
            stalled.append(followed)
        return stalled

    def put_into(self, request: replication_pb2.ReplicateRequest, now_ms: float, *, goes_anyway: bool) -> bool:
        """Add the credit to return, if the request goes anyway or the credit is worth a request of its own.

        Return whether the request goes.
        """
        waits_for_throttle = self._throttled and self._throttled_left <= 0
        if waits_for_throttle and self._throttle.ready_at_ms(now_ms) <= now_ms:
            piece = self._throttle.piece_bytes or UNTHROTTLED_PIECE_BYTES
            self._throttle.take(piece, now_ms)
            request.throttled_credit_bytes = piece - self._throttled_left
            self._throttled_left = piece
            goes_anyway = True
        if self._live and (goes_anyway or self._live >= self._windows[0] // RETURN_FRACTION):
            request.live_credit_bytes += self._live
            self._live = 0
            goes_anyway = True
        if self._is_done:
            self._is_done = False
            self._pace.done(now_ms)
        catch_up = self._returnable(now_ms) if self._pace.ready_at_ms(now_ms) <= now_ms else 0
        if catch_up and (goes_anyway or catch_up >= self._windows[1] // RETURN_FRACTION):
            request.catch_up_credit_bytes += catch_up
            self._catch_up -= catch_up
            self._pace.begin(now_ms)
            goes_anyway = True
        return goes_anyway

    def take_is_due(self, now_ms: float) -> bool:
        """Return whether credit is worth a request now, or there is a new deadline since the last call."""
        live, catch_up = self._windows
        paused = self._pace.ready_at_ms(now_ms) > now_ms
        had_new_deadline, self._has_new_deadline = self._has_new_deadline, False
        return (
            had_new_deadline
            or (self._live > 0 and self._live >= live // RETURN_FRACTION)
            or (not paused and 0 < self._returnable(now_ms) >= catch_up // RETURN_FRACTION)
        )

    def deadlines_ms(self, now_ms: float) -> list[float]:
        """Return the times at which credit needs a request even if nothing else happens."""
        deadlines = []
        if self._pending_since:
            deadlines.append(next(iter(self._pending_since.values())) + self._patience_ms)
        if self._throttled and self._throttled_left <= 0:
            deadlines.append(self._throttle.look_again_at_ms(now_ms))
        paused_until_ms = self._pace.ready_at_ms(now_ms)
        if paused_until_ms > now_ms and self._returnable(now_ms) >= self._windows[1] // RETURN_FRACTION:
            deadlines.append(paused_until_ms)
        return deadlines

    def lost(self) -> None:
        """Forget everything about the stream and its subscriptions."""
        for followed in self._pending_since:
            followed.forget_pending()
        self._pending_since.clear()
        self._throttled.clear()
        self._live = self._catch_up = self._throttled_left = 0


LASTING_ATTEMPTS: Final = 6
"""After this many attempts, some 600 ms, even a transient error gets a line in the log."""

PartitionKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """How much the leader may send ahead, and how often to retry."""

    credit_bytes: int = 8 << 20
    """For live partitions, until the records are appended."""
    catch_up_credit_bytes: int = 1 << 20
    """For partitions that catch up, until the records are durable; unsynced ones delay every other fsync."""
    max_frame_bytes: int = 1 << 20
    first_retry_ms: float = 10.0
    last_retry_ms: float = 1_000.0
    damaged_retry_ms: float = 1_000.0
    """Pause after an invalid batch, or an error of this broker's disk; a shorter one would not help."""

    def __post_init__(self) -> None:
        assert 0 < self.first_retry_ms <= self.last_retry_ms
        assert min(self.credit_bytes, self.catch_up_credit_bytes) > 0, "without credit the leader sends nothing"


class FollowerSession:
    """All partitions that this broker follows from one leader; it outlives the streams to that leader.

    `wake` is called when `take_request` may have a request, any number of times. All sessions of a broker share
    `throttle` (`follower.replication.throttled.rate`) and `live`, to which its `LeaderSession`s belong as well.

    Bounded: the leader sends at most the credit that it was granted (`FollowerCredit`).
    """

    def __init__(
        self,
        *,
        me: Replica,
        leader_id: int,
        cluster_id: str,
        wake: Wake,
        throttle: TokenBucket,
        options: FollowerOptions = FollowerOptions(),
        live: LiveTraffic | None = None,
    ) -> None:
        self._me = me
        self._leader_id = leader_id
        self._cluster_id = cluster_id
        self._wake = wake
        self._options = options
        self._credit = FollowerCredit(
            options.credit_bytes, options.catch_up_credit_bytes, throttle, live or LiveTraffic()
        )
        self._complaints = Complaints(leader_id)
        self._followed: dict[PartitionKey, Followed] = {}
        self._connected = False
        self._says_hello = False
        self._next_id = 1
        self._by_id: dict[int, Followed] = {}
        self._flushing: set[Followed] = set()
        self._to_open: dict[Followed, None] = {}
        self._to_close: list[int] = []
        self._acks: dict[int, int] = {}
        self._retries: list[tuple[float, int, Followed]] = []
        self._order = itertools.count()
        self._now_ms = 0.0

    def __len__(self) -> int:
        return len(self._followed)

    def states(self) -> dict[PartitionKey, State]:
        """Return the state of each partition; for tests and debugging."""
        return {key: followed.state for key, followed in self._followed.items()}

    # Followed partitions

    def follow(self, partition: FollowedPartition) -> None:
        """Follow a partition in its present epoch; a second call in the same epoch changes nothing."""
        key = (partition.topic_id, partition.partition)
        before = self._followed.get(key)
        if before is not None:
            if before.partition is partition and before.leader_epoch == partition.leader_epoch:
                return
            self._drop(before)
        followed = Followed(partition, self._on_durable, self._truncated)
        self._followed[key] = followed
        self._to_open[followed] = None
        self._wake()

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Stop following a partition; one that is not followed is ignored."""
        followed = self._followed.pop((topic_id, partition), None)
        if followed is not None:
            self._drop(followed)
            self._wake()

    def _drop(self, followed: Followed) -> None:
        self._close(followed)
        followed.over = True
        self._flushing.discard(followed)
        self._to_open.pop(followed, None)

    def _close(self, followed: Followed, *, by_leader: bool = False) -> None:
        """End the subscription, if there is one, and tell the leader unless the leader has ended it."""
        if followed.id and self._by_id.pop(followed.id, None) is not None:
            self._acks.pop(followed.id, None)
            if self._connected and not by_leader:
                self._to_close.append(followed.id)
        followed.id = 0
        self._credit.over(followed)

    # The stream

    def connected(self, now_ms: float) -> None:
        """Begin on a new stream; the next `take_request` returns the hello."""
        assert not self._connected, "`lost` is called before the next stream"
        self._now_ms = now_ms
        self._connected = self._says_hello = True
        self._next_id = 1
        for followed in self._followed.values():
            if followed.state is State.WAITING:
                self._to_open[followed] = None
        self._wake()

    def lost(self) -> None:
        """End the stream: partitions wait for the next one; truncations and flushes under way continue."""
        self._connected = self._says_hello = False
        for followed in self._by_id.values():
            followed.id = 0
            followed.state = State.WAITING
        self._by_id.clear()
        self._to_close.clear()
        self._acks.clear()
        self._credit.lost()
        self._complaints.say(math.inf)

    def take_request(self, now_ms: float) -> replication_pb2.ReplicateRequest | None:
        """Return the next request, or None. Call again once that request is sent, after `wake`."""
        self._now_ms = now_ms
        self._retry_due(now_ms)
        self._complaints.say(now_ms)
        if not self._connected:
            return None
        for followed in self._credit.stalled(now_ms, beside_others=bool(self._flushing)):
            self._wait_for_flush(followed)
        goes = self._says_hello or bool(self._to_close or self._acks)
        request = replication_pb2.ReplicateRequest()
        if self._says_hello:
            self._say_hello(request, now_ms)
        if self._to_close:
            request.close.extend(self._to_close[:MAX_CLOSES])
            del self._to_close[:MAX_CLOSES]
        if self._to_open:
            self._add_opens(request)
            goes = goes or bool(request.open)
        for subscription_id in list(itertools.islice(self._acks, MAX_ACKS)):
            request.acks.add(
                subscription_id=subscription_id,
                durable_end_offset=self._acks.pop(subscription_id),
                log_start_offset=self._by_id[subscription_id].acked_start_offset,
            )
        if self._to_close or self._to_open or self._acks:  # the rest goes with the next request
            self._wake()
        return request if self._credit.put_into(request, now_ms, goes_anyway=goes) else None

    def _say_hello(self, request: replication_pb2.ReplicateRequest, now_ms: float) -> None:
        self._says_hello = False
        request.hello.cluster_id = self._cluster_id
        request.hello.broker_id = self._me.broker_id
        request.hello.broker_epoch = self._me.broker_epoch
        request.hello.leader_id = self._leader_id
        request.hello.max_frame_bytes = self._options.max_frame_bytes
        self._credit.begin(request, now_ms)

    def _add_opens(self, request: replication_pb2.ReplicateRequest) -> None:
        for followed in list(itertools.islice(self._to_open, MAX_OPENS)):
            del self._to_open[followed]
            try:
                state = followed.partition.fetch_state()
            except RaftlogError as error:
                self._back_off(followed, error)
                continue
            followed.id = self._next_id
            self._next_id += 1
            followed.state = State.OPENING
            followed.acked_end_offset = state.durable_end_offset
            followed.acked_start_offset = 0
            if state.durable_end_offset < state.log_end_offset:
                followed.partition.call_when_durable(followed.on_durable)
            followed.throttled = self._is_throttled(followed)
            self._by_id[followed.id] = followed
            self._credit.opened(followed)
            followed.check_invariants()
            opening = request.open.add(
                subscription_id=followed.id,
                topic_id=followed.partition.topic_id,
                partition=followed.partition.partition,
                leader_epoch=followed.leader_epoch,
                fetch_offset=state.log_end_offset,
                last_fetched_epoch=state.last_epoch,
                durable_end_offset=state.durable_end_offset,
                throttled=followed.throttled,
            )
            if followed.damaged_offset is not None:
                opening.damaged_offset = followed.damaged_offset
                followed.damaged_offset = None

    def _is_throttled(self, followed: Followed) -> bool:
        return followed.partition.is_throttled and self._credit.is_limited

    def _wait_for_flush(self, followed: Followed) -> None:
        """Close a partition whose appends are not durable for too long, until they are, so others get its credit."""
        self._close(followed)
        try:
            state = followed.partition.fetch_state()
        except RaftlogError as error:
            self._back_off(followed, error)
            return
        self._complaints.note(
            followed.name, StorageError("the flush of its appended records takes very long"), self._now_ms
        )
        followed.state = State.FLUSHING
        self._flushing.add(followed)
        followed.flush_end_offset = state.log_end_offset
        followed.partition.call_when_durable(followed.on_durable)
        self._on_durable(followed, state.durable_end_offset)

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when to call `take_request` at the latest, even without `wake`; None: only after `wake`."""
        while self._retries and not self._retries[0][2].backs_off_until(self._retries[0][0]):
            heapq.heappop(self._retries)
        if not self._connected:
            return None
        deadlines = self._credit.deadlines_ms(now_ms)
        if self._retries:
            deadlines.append(self._retries[0][0])
        if self._complaints.due_ms is not None:
            deadlines.append(self._complaints.due_ms)
        return min(deadlines, default=None)

    # Frames

    def handle(self, frames: Sequence[ReplicaFrame], now_ms: float) -> None:
        """Take the frames of one message.

        Raises:
            InvalidRequestError: the leader breaks the protocol; end the stream.
        """
        self._now_ms = now_ms
        for head, records in frames:
            followed = self._by_id.get(head.subscription_id)
            if followed is not None:
                self._take(followed, head, records)
                followed.check_invariants()
            elif not 0 < head.subscription_id < self._next_id:
                raise InvalidRequestError(
                    f"broker {self._leader_id} sends a frame for subscription {head.subscription_id}, which was never "
                    "opened"
                )
            if records:
                self._credit.received(followed, head, len(records), now_ms)
        if self._credit.take_is_due(now_ms):
            self._wake()

    def _take(self, followed: Followed, head: replication_pb2.ReplicaFrame, records: Buffer) -> None:
        if head.error.code != NONE:
            self._close(followed, by_leader=True)
            self._back_off(followed, from_wire(head.error))
            return
        if head.HasField("diverging") or head.out_of_range:
            self._truncate(followed, head)
            return
        if followed.state is State.OPENING:
            followed.state = State.FOLLOWING
        try:
            # first the marks: a marker among the records says where its transaction begins above the leader's log start
            log_start_offset = followed.partition.take_marks(
                head.high_watermark, head.log_start_offset, followed.leader_epoch
            )
            if log_start_offset > followed.acked_start_offset:
                followed.acked_start_offset = log_start_offset
                self._ack(followed)
            if records:
                followed.partition.append_replicated(
                    memoryview(records), followed.leader_epoch, followed.on_durable, head.traceparents
                )
                followed.attempts = 0
        except RaftlogError as error:
            self._close(followed)
            self._note_damage(followed, error)
            self._back_off(followed, error, local=True)
            self._wake()
            return
        if head.catch_up and head.throttled != self._is_throttled(followed):  # opened again, to use the other credit
            self._close(followed)
            followed.state = State.WAITING
            self._to_open[followed] = None
            self._wake()

    def _note_damage(self, followed: Followed, error: RaftlogError) -> None:
        """Remember the offset of an invalid batch, so that the leader checks its own log there."""
        if isinstance(error, CorruptRecordError):
            with contextlib.suppress(RaftlogError):
                followed.damaged_offset = followed.partition.fetch_state().log_end_offset

    def _truncate(self, followed: Followed, head: replication_pb2.ReplicaFrame) -> None:
        if followed.state is not State.OPENING:
            raise InvalidRequestError(
                f"broker {self._leader_id} has accepted {followed.name} and now says that its log diverges"
            )
        self._close(followed, by_leader=True)
        followed.state = State.TRUNCATING
        epoch = followed.leader_epoch
        try:
            if head.out_of_range:
                logger.warning(
                    "the log ends outside of the leader's: starting over at the leader's log start",
                    extra={"partition": followed.name, "leader": self._leader_id, "offset": head.log_start_offset},
                )
                followed.partition.start_over(head.log_start_offset, epoch, followed.on_truncated)
            else:
                diverging = Diverging(head.diverging.leader_epoch, head.diverging.end_offset)
                logger.info(
                    "the log differs from the leader's: truncating",
                    extra={
                        "partition": followed.name,
                        "leader": self._leader_id,
                        "epoch": diverging.leader_epoch,
                        "end_offset": diverging.end_offset,
                    },
                )
                followed.partition.truncate(diverging, epoch, followed.on_truncated)
        except RaftlogError as error:
            self._back_off(followed, error, local=True)

    def _truncated(self, followed: Followed, error: RaftlogError | None) -> None:
        """Continue after a truncation; the partition calls this once it is done or has failed."""
        if followed.over or followed.state is not State.TRUNCATING:
            return
        if error is not None:
            self._back_off(followed, error, local=True)
        else:
            followed.state = State.WAITING
            self._to_open[followed] = None
        followed.check_invariants()
        self._wake()

    def _on_durable(self, followed: Followed, durable_end_offset: int) -> None:
        """Act on a new durable end: return credit, ack, and open a flushed partition again."""
        self._credit.flushed(followed, durable_end_offset, self._now_ms)
        if followed in self._flushing and durable_end_offset >= followed.flush_end_offset:
            self._flushing.discard(followed)
            followed.state = State.WAITING
            self._to_open[followed] = None
            self._wake()
        if followed.id and durable_end_offset > followed.acked_end_offset:
            followed.acked_end_offset = durable_end_offset
            self._ack(followed)

    def _ack(self, followed: Followed) -> None:
        self._acks[followed.id] = followed.acked_end_offset
        self._wake()

    # Trouble

    def _back_off(self, followed: Followed, error: RaftlogError, *, local: bool = False) -> None:
        options = self._options
        if local and isinstance(error, (CorruptRecordError, StorageError, InternalError)):
            delay_ms = options.damaged_retry_ms
        else:
            delay_ms = min(options.last_retry_ms, options.first_retry_ms * 2**followed.attempts)
        at_fault = not isinstance(error, (RetriableError, FencedError)) or isinstance(error, StorageError)
        if followed.attempts == (0 if at_fault else LASTING_ATTEMPTS):  # stale metadata is usual for a moment
            self._complaints.note(followed.name, error, self._now_ms)
        followed.attempts = min(followed.attempts + 1, 16)
        followed.state = State.BACKING_OFF
        followed.retry_at_ms = self._now_ms + delay_ms
        heapq.heappush(self._retries, (followed.retry_at_ms, next(self._order), followed))
        self._wake()

    def _retry_due(self, now_ms: float) -> None:
        while self._retries and self._retries[0][0] <= now_ms:
            at_ms, _, followed = heapq.heappop(self._retries)
            if followed.backs_off_until(at_ms):
                followed.state = State.WAITING
                self._to_open[followed] = None
