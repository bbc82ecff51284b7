"""The leader's end of one `Replicate` stream: a follower opens partitions and grants credit, this end pushes. Pure.

What becomes of a subscription; `replication.push_queue` has what happens between its opening and its end:

    (none)  --open accepted-->                           open      its first frame has the marks
    (none)  --open refused, diverging, out of range-->   (none)    one frame that says so
    open    --close-->                                   (none)
    open    --an error of the partition-->               (none)    told in a frame

Errors of a partition are values in frames; only a broken protocol, or a follower that is not who it should be, ends
the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from raftlog.errors import BrokerOverloaded, InconsistentClusterId, InvalidRequestError, RaftlogError, to_wire
from raftlog.v1 import replication_pb2
from raftlog.wire import ReplicaFrame
from replication.limits import MAX_ACKS, MAX_CLOSES, MAX_OPENS
from replication.ports import Accepted, Diverging, LedPartition, Replica, Wake
from replication.push_queue import PushQueue, ReadLater
from replication.subscription import Kind, Subscription, set_marks
from replication.token_bucket import TokenBucket

SMALLEST_FRAME_BYTES: Final = 4096
"""Even a follower that asks for less gets frames of this size: a frame holds at least one batch anyway."""
MAX_CREDIT_BYTES: Final = 1 << 40
MAX_UNREAD: Final = 100_000
"""Answers to opens that a follower may leave unread; more than there are partitions on a broker."""
MAX_SHOWN: Final = 80


class LeaderSession:
    """State of one stream.

    `find` returns a partition of this broker (raises what the registry raises); `check_replica` refuses a follower
    that is not the broker it says; `wake` is told that `take_frames` may have something, any number of times; `me` is
    this broker; `throttle` is shared by the sessions of a broker (`leader.replication.throttled.rate`).
    """

    def __init__(
        self,
        *,
        find: Callable[[bytes, int], LedPartition],
        me: int,
        cluster_id: str,
        check_replica: Callable[[Replica], None],
        wake: Wake,
        read_later: ReadLater,
        max_frame_bytes: int,
        throttle: TokenBucket,
    ) -> None:
        self._find = find
        self._me = me
        self._cluster_id = cluster_id
        self._check_replica = check_replica
        self._wake = wake
        self._read_later = read_later
        self._max_frame_bytes = max(SMALLEST_FRAME_BYTES, max_frame_bytes)
        self._throttle = throttle
        self._highest_id = 0
        self._queue: PushQueue | None = None
        self._closed = False
        self.replica: Replica | None = None
        """Who is at the other end; None before its hello."""

    def __len__(self) -> int:
        return len(self._queue.subscriptions) if self._queue is not None else 0

    # Requests

    def handle(self, request: replication_pb2.ReplicateRequest, now_ms: float) -> None:
        """Take what the follower sent.

        Raises:
            RaftlogError: the stream ends: the protocol is broken (InvalidRequestError), the other end is not who it
                should be (InconsistentClusterId, StaleBrokerEpoch), or this broker does not know it yet (retriable).
        """
        assert not self._closed, "a session that is closed takes no request"
        if request.HasField("hello"):
            self._take_hello(request.hello)
        replica, queue = self.replica, self._queue
        if replica is None or queue is None:
            raise InvalidRequestError("the first request of a Replicate stream says hello")
        for what, count, most in (
            ("closes", len(request.close), MAX_CLOSES),
            ("opens", len(request.open), MAX_OPENS),
            ("acknowledges", len(request.acks), MAX_ACKS),
        ):
            if count > most:
                raise InvalidRequestError(f"one request {what} {count} subscriptions, at most {most}")
        for subscription_id in request.close:
            self._check_known(subscription_id)
            subscription = queue.subscriptions.get(subscription_id)
            if subscription is not None:
                queue.end(subscription)
        for opening in request.open:
            self._open(replica, queue, opening)
        for ack in request.acks:
            self._take_ack(replica, queue, ack)
        for kind, size_bytes in (
            (Kind.LIVE, request.live_credit_bytes),
            (Kind.CATCH_UP, request.catch_up_credit_bytes),
            (Kind.THROTTLED, request.throttled_credit_bytes),
        ):
            _check_credit(queue.credit[kind], size_bytes)
            queue.credit[kind] += size_bytes
        self._wake()

    def _take_hello(self, hello: replication_pb2.ReplicaHello) -> None:
        if self.replica is not None:
            raise InvalidRequestError("a Replicate stream says hello once")
        if hello.cluster_id != self._cluster_id:
            raise InconsistentClusterId(
                f"broker {hello.broker_id} belongs to the cluster {hello.cluster_id[:MAX_SHOWN]!r} and broker "
                f"{self._me} to {self._cluster_id!r}: correct cluster.id, or the address that one of them advertises"
            )
        if hello.leader_id != self._me:
            raise InvalidRequestError(
                f"broker {hello.broker_id} took broker {self._me} for broker {hello.leader_id}: what broker "
                f"{hello.leader_id} advertises (inter.node.listener, advertised.inter.node.listener) is another's"
            )
        if hello.broker_id == self._me:
            raise InvalidRequestError(f"broker {self._me} does not follow itself; give each node an id of its own")
        replica = Replica(hello.broker_id, hello.broker_epoch)
        self._check_replica(replica)
        wanted = hello.max_frame_bytes or self._max_frame_bytes
        self._queue = PushQueue(
            replica,
            wake=self._wake,
            read_later=self._read_later,
            max_frame_bytes=max(SMALLEST_FRAME_BYTES, min(wanted, self._max_frame_bytes)),
            throttle=self._throttle,
        )
        self.replica = replica

    def _check_known(self, subscription_id: int) -> None:
        """Refuse an id that was never opened; one that is over already may still be named."""
        if not 0 < subscription_id <= self._highest_id:
            raise InvalidRequestError(
                f"subscription_id {subscription_id} was never opened on this stream, the last one is {self._highest_id}"
            )

    def _open(self, replica: Replica, queue: PushQueue, opening: replication_pb2.OpenReplica) -> None:
        if opening.subscription_id <= self._highest_id:
            raise InvalidRequestError(
                f"subscription_id {opening.subscription_id} is not above {self._highest_id}: ids of a stream only grow"
            )
        if queue.unread >= MAX_UNREAD:
            raise BrokerOverloaded("the follower opens partitions and does not read what becomes of them")
        self._highest_id = opening.subscription_id
        head = replication_pb2.ReplicaFrame(subscription_id=opening.subscription_id)
        subscription: Subscription | None = None
        try:
            partition = self._find(opening.topic_id, opening.partition)
            subscription = Subscription(opening, partition, queue.note_change)
            opened = partition.open_replica(
                replica,
                leader_epoch=opening.leader_epoch,
                fetch_offset=opening.fetch_offset,
                last_fetched_epoch=opening.last_fetched_epoch,
                held_end_offset=opening.held_end_offset,
                on_change=subscription.on_change,
            )
            if opening.HasField("damaged_offset"):
                partition.suspect(opening.damaged_offset)
        except RaftlogError as error:
            if subscription is not None:
                subscription.ended = True
            head.error.CopyFrom(to_wire(error))
            queue.say(head)
            return
        if isinstance(opened, Accepted):
            queue.add(subscription)
            return
        subscription.ended = True
        set_marks(head, partition)
        if isinstance(opened, Diverging):
            head.diverging.leader_epoch = opened.leader_epoch
            head.diverging.end_offset = opened.end_offset
        else:
            head.out_of_range = True
            head.log_start_offset = opened.log_start_offset
        queue.say(head)

    def _take_ack(self, replica: Replica, queue: PushQueue, ack: replication_pb2.ReplicaAck) -> None:
        self._check_known(ack.subscription_id)
        subscription = queue.subscriptions.get(ack.subscription_id)
        if subscription is None:
            return
        try:
            subscription.partition.replica_held(replica, subscription.on_change, ack.held_end_offset)
        except RaftlogError as error:
            queue.fail(subscription, error)

    # Frames

    def take_frames(self, now_ms: float) -> Sequence[ReplicaFrame]:
        """Return what goes into the next message; nothing when there is none. Call again once it is on its way."""
        return self._queue.take_frames(now_ms) if self._queue is not None and not self._closed else ()

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when `take_frames` has something at the latest; None: not before something happens."""
        return self._queue.next_deadline_ms(now_ms) if self._queue is not None and not self._closed else None

    def close(self) -> None:
        """The stream is over: partitions forget it, reads under way come to nothing. May be called again."""
        self._closed = True
        if self._queue is not None:
            self._queue.close()


def _check_credit(credit: int, size_bytes: int) -> None:
    if size_bytes < 0 or credit + size_bytes > MAX_CREDIT_BYTES:
        raise InvalidRequestError(
            f"a credit of {size_bytes} bytes on top of {credit}: what is added is not negative, and the sum at "
            f"most {MAX_CREDIT_BYTES}"
        )
