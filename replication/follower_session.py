"""The follower's end of one `Replicate` stream: it opens partitions, appends what is pushed, acks what is held. Pure.

The states of a partition, each change with its trigger:

    waiting    --(the stream is up, `take_request`)-->              opening
    opening    --(first frame: accepted)-->                         following
    opening    --(frame: diverging)-->                              truncating
    opening    --(frame: out of range)-->                           truncating      the whole log goes
    opening, following --(frame: error; the append fails)-->        backing off
    truncating --(done)-->                                          waiting
    truncating --(failed)-->                                        backing off
    backing off --(its time has come)-->                            waiting
    any        --(`lost`: the stream broke)-->                      waiting         but truncating, backing off go on
    any        --(`follow` in another epoch)-->                     waiting         as a new subscription
    any        --(`unfollow`)-->                                    (none)

A frame of a subscription that is over says nothing any more, but its records have used up credit, which is returned.
"""

from __future__ import annotations

import heapq
import itertools
import logging
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
from replication.followed import Followed, State
from replication.ports import Diverging, FollowedPartition, Replica, Wake
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MAX_OPENS: Final = 2_000
"""Partitions opened in one request: some 150 KiB."""
RETURN_FRACTION: Final = 4
"""Credit goes back with an ack, or alone once it is this part of the window."""

LOOK_AGAIN_MS: Final = 5.0
"""Between two looks at what was being flushed when it was opened."""
LASTING_ATTEMPTS: Final = 6
"""After so many, some 600 ms, the log has a line even for an error that passes."""

PartitionKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """How much the leader may send ahead, and how often to try again."""

    credit_bytes: int = 8 << 20
    """For live partitions, until it is appended."""
    catch_up_credit_bytes: int = 2 << 20
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
    of a broker (`follower.replication.throttled.rate`): credit for what throttled partitions got goes back at its
    pace.

    Bounded: the leader sends at most the credit. That for live partitions goes back when records are appended; that
    for the others when they are held, or when nothing can be said of them any more.
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
        self._throttle = throttle
        self._options = options
        self._followed: dict[PartitionKey, Followed] = {}
        self._connected = False
        self._says_hello = False
        self._next_id = 1
        self._by_id: dict[int, Followed] = {}
        self._to_open: dict[Followed, None] = {}
        self._to_close: list[int] = []
        self._acks: dict[int, int] = {}
        self._live_to_return = 0
        self._catch_up_to_return = 0
        self._withheld = 0
        self._being_held: dict[Followed, None] = {}
        self._look_at_ms = 0.0
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
        self._to_open.pop(followed, None)

    def _close(self, followed: Followed) -> None:
        """Tell the leader, if it knows of it, that this subscription is over."""
        if followed.id and self._by_id.pop(followed.id, None) is not None:
            self._acks.pop(followed.id, None)
            if self._connected:
                self._to_close.append(followed.id)
        followed.id = 0
        self._catch_up_to_return += followed.forget_unheld()

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
            followed.forget_unheld()
        self._by_id.clear()
        self._being_held.clear()
        self._to_close.clear()
        self._acks.clear()
        self._live_to_return = self._catch_up_to_return = self._withheld = 0

    def take_request(self, now_ms: float) -> replication_pb2.ReplicateRequest | None:
        """Return the next request, None when there is nothing to say now. Call again once it is on its way."""
        self._now_ms = now_ms
        self._retry_due(now_ms)
        if not self._connected:
            return None
        if self._being_held and now_ms >= self._look_at_ms:
            self._look_what_is_held()
        request = replication_pb2.ReplicateRequest()
        if self._says_hello:
            self._say_hello(request)
        if self._to_close:
            request.close.extend(self._to_close)
            self._to_close.clear()
        self._add_opens(request)
        for subscription_id, held_end_offset in self._acks.items():
            request.acks.add(subscription_id=subscription_id, held_end_offset=held_end_offset)
        self._acks.clear()
        if self._withheld and self._throttle.ready_at_ms(now_ms) <= now_ms:
            self._catch_up_to_return += self._withheld
            self._withheld = 0
        says_something = request.ByteSize() > 0
        options = self._options
        if self._live_to_return >= (1 if says_something else max(1, options.credit_bytes // RETURN_FRACTION)):
            request.live_credit_bytes += self._live_to_return
            self._live_to_return = 0
        if self._catch_up_to_return >= (1 if says_something else self._least_catch_up_credit()):
            request.catch_up_credit_bytes += self._catch_up_to_return
            self._catch_up_to_return = 0
        return request if request.ByteSize() else None

    def _least_catch_up_credit(self) -> int:
        """Return how much of it is worth a request of its own."""
        return max(1, self._options.catch_up_credit_bytes // RETURN_FRACTION)

    def _say_hello(self, request: replication_pb2.ReplicateRequest) -> None:
        self._says_hello = False
        request.hello.cluster_id = self._cluster_id
        request.hello.broker_id = self._me.broker_id
        request.hello.broker_epoch = self._me.broker_epoch
        request.hello.leader_id = self._leader_id
        request.hello.max_frame_bytes = self._options.max_frame_bytes
        request.live_credit_bytes = self._options.credit_bytes
        request.catch_up_credit_bytes = self._options.catch_up_credit_bytes

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
            followed.opened_end_offset = state.log_end_offset
            if state.held_end_offset < state.log_end_offset:
                if not self._being_held:
                    self._look_at_ms = self._now_ms + LOOK_AGAIN_MS
                self._being_held[followed] = None
            self._by_id[followed.id] = followed
            followed.check_invariants()
            request.open.add(
                subscription_id=followed.id,
                topic_id=followed.partition.topic_id,
                partition=followed.partition.partition,
                leader_epoch=followed.leader_epoch,
                fetch_offset=state.log_end_offset,
                last_fetched_epoch=state.last_epoch,
                held_end_offset=state.held_end_offset,
            )

    def _look_what_is_held(self) -> None:
        """Ack what was appended in an earlier epoch and held only after the open in this one: nobody else says so."""
        self._look_at_ms = self._now_ms + LOOK_AGAIN_MS
        for followed in list(self._being_held):
            if followed.id:
                try:
                    self._held(followed, followed.partition.fetch_state().held_end_offset)
                except RaftlogError:  # the next frame tells what became of it
                    followed.acked_end_offset = followed.opened_end_offset
            if not followed.id or followed.acked_end_offset >= followed.opened_end_offset:
                del self._being_held[followed]

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when `take_request` has something at the latest; None: not before something happens."""
        while self._retries and not self._retries[0][2].backs_off_until(self._retries[0][0]):
            heapq.heappop(self._retries)
        due_ms = self._retries[0][0] if self._retries and self._connected else None
        if self._being_held and self._connected:
            due_ms = self._look_at_ms if due_ms is None else min(due_ms, self._look_at_ms)
        if self._withheld and self._connected:
            ready_ms = self._throttle.ready_at_ms(now_ms)
            due_ms = ready_ms if due_ms is None else min(due_ms, ready_ms)
        return due_ms

    # What the leader sends

    def handle(self, frames: Sequence[ReplicaFrame], now_ms: float) -> None:
        """Take the frames of one message.

        Raises:
            InvalidRequestError: the leader breaks the protocol; end the stream.
        """
        self._now_ms = now_ms
        for head, records in frames:
            followed = self._by_id.get(head.subscription_id)
            is_throttled = False
            if followed is not None:
                is_throttled = head.catch_up and followed.partition.is_throttled
                self._take(followed, head, records)
                followed.check_invariants()
            elif not 0 < head.subscription_id < self._next_id:
                raise InvalidRequestError(
                    f"broker {self._leader_id} sends a frame for subscription {head.subscription_id}, which was never "
                    "opened"
                )
            if records:
                self._count(followed, len(records), catch_up=head.catch_up, is_throttled=is_throttled)
        self._wake_to_return()

    def _wake_to_return(self) -> None:
        live_is_due = self._live_to_return >= max(1, self._options.credit_bytes // RETURN_FRACTION)
        if live_is_due or self._catch_up_to_return >= self._least_catch_up_credit():
            self._wake()

    def _count(self, followed: Followed | None, size_bytes: int, *, catch_up: bool, is_throttled: bool) -> None:
        if not catch_up:
            self._live_to_return += size_bytes
        elif is_throttled:
            self._throttle.take(size_bytes, self._now_ms)
            self._withheld += size_bytes
            self._wake()
        elif followed is None or not followed.note_unheld(size_bytes):
            self._catch_up_to_return += size_bytes

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
                followed.partition.append_replicated(memoryview(records), followed.leader_epoch, followed.on_held)
                followed.attempts = 0
            followed.partition.take_marks(head.high_watermark, head.log_start_offset, followed.leader_epoch)
        except RaftlogError as error:
            self._close(followed)
            self._back_off(followed, error, local=True)
            self._wake()

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
        self._catch_up_to_return += followed.take_held(held_end_offset)
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
        self._catch_up_to_return += followed.forget_unheld()

    def _back_off(self, followed: Followed, error: RaftlogError, *, local: bool = False) -> None:
        options = self._options
        if local and isinstance(error, (CorruptRecordError, StorageError, InternalError)):
            delay_ms = options.damaged_retry_ms
        else:
            delay_ms = min(options.last_retry_ms, options.first_retry_ms * 2**followed.attempts)
        at_fault = not isinstance(error, (RetriableError, FencedError)) or isinstance(error, StorageError)
        if followed.attempts == (0 if at_fault else LASTING_ATTEMPTS):  # metadata that is behind for a moment is usual
            logger.warning(
                "cannot follow: %s; trying again",
                error,
                extra={"partition": followed.name, "leader": self._leader_id, "leader_epoch": followed.leader_epoch},
            )
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
