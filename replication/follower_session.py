"""The follower's end of one `Replicate` stream: it opens partitions, appends what is pushed, acks what is held. Pure.

The states of a partition, each change with its trigger:

    waiting    --(the stream is up, `take_request`)-->              opening
    opening    --(first frame: accepted)-->                         following
    opening    --(frame: diverging)-->                              truncating
    opening    --(frame: out of range)-->                           truncating      the whole log goes
    opening, following --(frame: error; the append fails)-->        backing off
    following  --(its flush takes too long, while catching up)-->   flushing        others get its credit
    flushing   --(held)-->                                          waiting
    truncating --(done)-->                                          waiting
    truncating --(failed)-->                                        backing off
    backing off --(its time has come)-->                            waiting
    any        --(`lost`: the stream broke)-->                      waiting         but what is under way goes on
    any        --(`follow` in another epoch)-->                     waiting         as a new subscription
    any        --(`unfollow`)-->                                    (none)

A frame of a subscription that is over says nothing any more, but its records have used up credit, which is returned.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
from raftlog.v1 import replication_pb2
from raftlog.v1.common_pb2 import NONE
from raftlog.wire import ReplicaFrame
from replication.complaints import Complaints
from replication.followed import Followed, State
from replication.follower_credit import FollowerCredit
from replication.limits import MAX_ACKS, MAX_CLOSES, MAX_OPENS
from replication.ports import Diverging, FollowedPartition, Replica, Wake
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

LASTING_ATTEMPTS: Final = 6
"""After so many, some 600 ms, the log has a line even for an error that passes."""

PartitionKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """How much the leader may send ahead, and how often to try again."""

    credit_bytes: int = 8 << 20
    """For live partitions, until it is appended."""
    catch_up_credit_bytes: int = 1 << 20
    """For partitions that catch up, until it is held: what waits for the disk there delays every other fsync."""
    max_frame_bytes: int = 1 << 20
    first_retry_ms: float = 10.0
    last_retry_ms: float = 1_000.0
    damaged_retry_ms: float = 1_000.0
    """After what came, or this broker's disk, was at fault: quicker would not help."""

    def __post_init__(self) -> None:
        assert 0 < self.first_retry_ms <= self.last_retry_ms
        assert min(self.credit_bytes, self.catch_up_credit_bytes) > 0, "without credit nothing comes"


class FollowerSession:
    """All partitions that this broker follows one leader for; it outlives the streams to that leader.

    `wake` is told that `take_request` may have something, any number of times. `throttle` is shared by the sessions
    of a broker (`follower.replication.throttled.rate`).

    Bounded: the leader sends at most the credit that it was given (`replication.follower_credit`).
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
    ) -> None:
        self._me = me
        self._leader_id = leader_id
        self._cluster_id = cluster_id
        self._wake = wake
        self._options = options
        self._credit = FollowerCredit(options.credit_bytes, options.catch_up_credit_bytes, throttle)
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
        """Return the state of each partition; for tests, and for whoever looks for trouble."""
        return {key: followed.state for key, followed in self._followed.items()}

    # What is followed

    def follow(self, partition: FollowedPartition) -> None:
        """Follow a partition in the epoch that it is in now; again in the same one changes nothing."""
        key = (partition.topic_id, partition.partition)
        before = self._followed.get(key)
        if before is not None:
            if before.partition is partition and before.leader_epoch == partition.leader_epoch:
                return
            self._drop(before)
        followed = Followed(partition, self._held, self._truncated)
        self._followed[key] = followed
        self._to_open[followed] = None
        self._wake()

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Do not follow a partition any more; one that is not followed is fine."""
        followed = self._followed.pop((topic_id, partition), None)
        if followed is not None:
            self._drop(followed)
            self._wake()

    def _drop(self, followed: Followed) -> None:
        self._close(followed)
        followed.over = True
        self._flushing.discard(followed)
        self._to_open.pop(followed, None)

    def _close(self, followed: Followed) -> None:
        """Tell the leader, if it knows of it, that this subscription is over."""
        if followed.id and self._by_id.pop(followed.id, None) is not None:
            self._acks.pop(followed.id, None)
            if self._connected:
                self._to_close.append(followed.id)
        followed.id = 0
        self._credit.over(followed)

    # The stream

    def connected(self, now_ms: float) -> None:
        """There is a stream, on which nothing was said yet: `take_request` begins with the hello."""
        assert not self._connected, "the former stream is lost first"
        self._now_ms = now_ms
        self._connected = self._says_hello = True
        self._next_id = 1
        for followed in self._followed.values():
            if followed.state is State.WAITING:
                self._to_open[followed] = None
        self._wake()

    def lost(self, error: RaftlogError | None = None) -> None:
        """The stream is over. Partitions wait for the next one; what is under way on the disk goes on."""
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
        """Return the next request, None when there is nothing to say now. Call again once it is on its way."""
        self._now_ms = now_ms
        self._retry_due(now_ms)
        self._complaints.say(now_ms)
        if not self._connected:
            return None
        for followed in self._credit.stalled(now_ms, beside_others=bool(self._flushing)):
            self._wait_for_flush(followed)
        request = replication_pb2.ReplicateRequest()
        if self._says_hello:
            self._say_hello(request)
        if self._to_close:
            request.close.extend(self._to_close[:MAX_CLOSES])
            del self._to_close[:MAX_CLOSES]
        self._add_opens(request)
        for subscription_id in list(itertools.islice(self._acks, MAX_ACKS)):
            request.acks.add(subscription_id=subscription_id, held_end_offset=self._acks.pop(subscription_id))
        self._credit.put_into(request, now_ms)
        return request if request.ByteSize() else None

    def _say_hello(self, request: replication_pb2.ReplicateRequest) -> None:
        self._says_hello = False
        request.hello.cluster_id = self._cluster_id
        request.hello.broker_id = self._me.broker_id
        request.hello.broker_epoch = self._me.broker_epoch
        request.hello.leader_id = self._leader_id
        request.hello.max_frame_bytes = self._options.max_frame_bytes
        self._credit.begin(request)

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
            followed.acked_end_offset = state.held_end_offset
            if state.held_end_offset < state.log_end_offset:
                followed.partition.call_when_held(followed.on_held)
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
                held_end_offset=state.held_end_offset,
                throttled=followed.throttled,
            )
            if followed.damaged_offset is not None:
                opening.damaged_offset = followed.damaged_offset
                followed.damaged_offset = None

    def _is_throttled(self, followed: Followed) -> bool:
        return followed.partition.is_throttled and self._credit.is_limited

    def _wait_for_flush(self, followed: Followed) -> None:
        """Close what has been appended and is not held for too long, until it is: others are to get its credit."""
        self._close(followed)
        try:
            state = followed.partition.fetch_state()
        except RaftlogError as error:
            self._back_off(followed, error)
            return
        self._complain(followed, StorageError("the flush of what was appended takes very long"))
        followed.state = State.FLUSHING
        self._flushing.add(followed)
        followed.flush_end_offset = state.log_end_offset
        followed.partition.call_when_held(followed.on_held)
        self._held(followed, state.held_end_offset)

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when `take_request` has something at the latest; None: not before something happens."""
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

    # What the leader sends

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
        if self._credit.take_is_due():
            self._wake()

    def _take(self, followed: Followed, head: replication_pb2.ReplicaFrame, records: Buffer) -> None:
        if head.error.code != NONE:
            self._over(followed)
            self._back_off(followed, from_wire(head.error))
            return
        if head.HasField("diverging") or head.out_of_range:
            self._truncate(followed, head)
            return
        if followed.state is State.OPENING:
            followed.state = State.FOLLOWING
        try:
            if records:
                followed.partition.append_replicated(
                    memoryview(records), followed.leader_epoch, followed.on_held, head.traceparents
                )
                followed.attempts = 0
            followed.partition.take_marks(head.high_watermark, head.log_start_offset, followed.leader_epoch)
        except RaftlogError as error:
            self._close(followed)
            self._note_damage(followed, error)
            self._back_off(followed, error, local=True)
            self._wake()
            return
        if head.catch_up and head.throttled != self._is_throttled(followed):  # it goes by the other credit now
            self._close(followed)
            followed.state = State.WAITING
            self._to_open[followed] = None
            self._wake()

    def _note_damage(self, followed: Followed, error: RaftlogError) -> None:
        """Remember where a batch came that does not check, for the leader to look at its own."""
        if isinstance(error, CorruptRecordError):
            with contextlib.suppress(RaftlogError):
                followed.damaged_offset = followed.partition.fetch_state().log_end_offset

    def _truncate(self, followed: Followed, head: replication_pb2.ReplicaFrame) -> None:
        if followed.state is not State.OPENING:
            raise InvalidRequestError(
                f"broker {self._leader_id} has accepted {followed.name} and now says that it is not a prefix"
            )
        self._over(followed)
        followed.state = State.TRUNCATING
        epoch = followed.leader_epoch
        try:
            if head.out_of_range:
                logger.warning(
                    "the log ends below the leader's log start: starting over there",
                    extra={"partition": followed.name, "leader": self._leader_id, "offset": head.log_start_offset},
                )
                followed.partition.start_over(head.log_start_offset, epoch, followed.on_truncated)
            else:
                diverging = Diverging(head.diverging.leader_epoch, head.diverging.end_offset)
                logger.info(
                    "the log parts from the leader's: truncating",
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
        """Called by the partition once the truncation is done, or has failed."""
        if followed.over or followed.state is not State.TRUNCATING:
            return
        if error is not None:
            self._back_off(followed, error, local=True)
        else:
            followed.state = State.WAITING
            self._to_open[followed] = None
        followed.check_invariants()
        self._wake()

    def _held(self, followed: Followed, held_end_offset: int) -> None:
        """Called by the partition when more is held."""
        self._credit.held(followed, held_end_offset, self._now_ms)
        if followed in self._flushing and held_end_offset >= followed.flush_end_offset:
            self._flushing.discard(followed)
            followed.state = State.WAITING
            self._to_open[followed] = None
            self._wake()
        if followed.id and held_end_offset > followed.acked_end_offset:
            followed.acked_end_offset = held_end_offset
            self._acks[followed.id] = held_end_offset
            self._wake()

    # Trouble

    def _over(self, followed: Followed) -> None:
        """The leader has ended the subscription."""
        self._by_id.pop(followed.id, None)
        self._acks.pop(followed.id, None)
        followed.id = 0
        self._credit.over(followed)

    def _complain(self, followed: Followed, error: RaftlogError) -> None:
        self._complaints.note(followed.name, error, self._now_ms)

    def _back_off(self, followed: Followed, error: RaftlogError, *, local: bool = False) -> None:
        options = self._options
        if local and isinstance(error, (CorruptRecordError, StorageError, InternalError)):
            delay_ms = options.damaged_retry_ms
        else:
            delay_ms = min(options.last_retry_ms, options.first_retry_ms * 2**followed.attempts)
        at_fault = not isinstance(error, (RetriableError, FencedError)) or isinstance(error, StorageError)
        if followed.attempts == (0 if at_fault else LASTING_ATTEMPTS):  # metadata that is behind for a moment is usual
            self._complain(followed, error)
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
