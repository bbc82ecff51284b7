"""The leader's end of one `Replicate` stream: a follower opens partitions and grants credit, this end pushes. Pure.

`LeaderSession` takes the requests, `PushQueue` decides what the stream sends next, `Subscription` is one partition that
the follower has open. Errors of a partition are values in frames. Only a broken protocol, or a follower that is not the
expected broker, ends the stream.

Between its opening and its end a subscription is:

    (none)    --open accepted-->                           idle      its first frame has the marks
    (none)    --open refused, diverging, out of range-->   (none)    the answer is one frame
    idle      --the log end is above its position-->       queued    live, or catching up while out of the ISR
    queued    --its turn, credit, bytes in memory-->       idle      a frame; queued again if more records follow
    queued    --its turn, bytes not in memory-->           reading   `read_later`; the others continue meanwhile
    reading   --read-->                                    idle      a frame; queued again if more records follow
    any       --close, or an error of the partition-->     ended     a frame tells the follower of an error

Live partitions come first. A message carries frames of live partitions, or one piece of a partition that catches up.
While both kinds wait they take turns, so a live record waits for at most one piece, and a partition far behind never
starves. While live records flow through the broker, on any stream, there is a pause after each piece (`CatchUpPace`).
Small live records gather for the next message while earlier ones are not acknowledged (`LivePace`).
Each kind has its own credit. Partitions that the follower throttles are a third kind, so that they delay no
others that catch up. The session never scans partitions that have not changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from raftlog.errors import (
    BrokerOverloaded,
    InconsistentClusterId,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    to_wire,
)
from raftlog.format.wire import MAX_PARTS, ReplicaFrame
from raftlog.v1 import replication_pb2
from replication.pacing import SMALL_BYTES, CatchUpPace, LivePace, LiveTraffic, gather_ms
from replication.ports import MAX_ACKS, MAX_CLOSES, MAX_OPENS, Accepted, Diverging, LedPartition, Read, Replica, Wake
from replication.token_bucket import TokenBucket


class Kind(Enum):
    """The credit of the follower that records count against."""

    LIVE = "live"
    CATCH_UP = "catch up"
    THROTTLED = "throttled"

    __hash__ = object.__hash__  # enum's own is Python code, and each message looks its credit up many times


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
        "last_end",
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
        """The kind of its records while the follower is not in the ISR."""
        self.changed = False  # it is in the queue's list of changed subscriptions
        self.queued_live: bool | None = None  # which queue it waits in, if any; an entry in the other one is stale
        self.reading = False  # also while the records that were read wait for their turn
        self.cold = False  # since it was last at the log end, a read had to wait for the disk
        self.ended = False
        self.last_end = partition.log_end_offset
        """The log end at the last piece that was sent."""
        self.told = (-1, -1)  # (high watermark, log start offset) that the follower was sent last
        self.on_change: Wake = lambda: note_change(self)

    def tells_all(self) -> bool:
        """Whether the follower was sent the present marks."""
        return self.told == (self.partition.high_watermark, self.partition.log_start_offset)

    def marks(self) -> replication_pb2.ReplicaFrame:
        """Return a frame with the present marks, and note that the follower was sent them."""
        head = replication_pb2.ReplicaFrame(subscription_id=self.id)
        set_marks(head, self.partition)
        self.told = (head.high_watermark, head.log_start_offset)
        return head


def set_marks(head: replication_pb2.ReplicaFrame, partition: LedPartition) -> None:
    head.high_watermark = partition.high_watermark
    head.log_start_offset = partition.log_start_offset
    head.log_end_offset = partition.log_end_offset


MARKS_DELAY_MS: Final = 5.0
"""How long new marks wait for records, to be sent in one frame with them."""
MAX_FRAMES: Final = 4_000
"""Frames in one message. A few more may follow; `raftlog.format.wire.MAX_PARTS` is what a follower accepts."""
PIECE_BESIDE_LIVE_BYTES: Final = 256 << 10
"""Largest catch-up piece while live records flow, since the next live record may wait for it."""

assert MAX_FRAMES * 2 < MAX_PARTS

ReadDone = Callable[[Read | RaftlogError], None]


class ReadLater(Protocol):
    """Runs `read_for_replica(on_change, offset, max_bytes, blocking=True)` elsewhere, then `done` on this thread."""

    def __call__(
        self, partition: LedPartition, on_change: Wake, offset: int, max_bytes: int, done: ReadDone
    ) -> None: ...


class PushQueue:
    """The subscriptions of one stream, and what they have to send.

    `wake` is called when `take_frames` may have frames, any number of times; that includes frames that did not fit the
    last message. `wake_soon` is called when marks have moved and no records have: `take_frames` is due within
    MARKS_DELAY_MS. All streams of a broker share `throttle` (`leader.replication.throttled.rate`) and `live`.

    Bounded: records are read only while their kind's credit is above zero, one message at a time. A read on another
    thread uses credit from its start.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        wake: Wake,
        wake_soon: Wake,
        read_later: ReadLater,
        max_frame_bytes: int,
        throttle: TokenBucket,
        live: LiveTraffic,
    ) -> None:
        self._replica = replica
        self._wake = wake
        self._wake_soon = wake_soon
        self._read_later = read_later
        self._max_frame_bytes = max_frame_bytes
        self._throttle = throttle
        self._closed = False
        self.subscriptions: dict[int, Subscription] = {}
        self.credit = dict.fromkeys(Kind, 0)
        """Bytes that the follower accepts, by kind."""
        self._changed: deque[Subscription] = deque()
        self._control: deque[ReplicaFrame] = deque()
        self._ready: deque[tuple[Subscription, Read]] = deque()
        self._piece: tuple[Subscription, Read] | None = None
        """Records read for a partition that catches up, until it is their turn."""
        self._live: deque[Subscription] = deque()
        self._catch_up: dict[Kind, deque[Subscription]] = {Kind.THROTTLED: deque(), Kind.CATCH_UP: deque()}
        """THROTTLED comes first: the follower grants it little credit, so that it delays no others."""
        self._throttled: list[Subscription] = []
        """Subscriptions that wait for this leader's throttle."""
        self._reads_catch_up = False
        """Whether a piece is being read; at most one is read or waits in `_piece`."""
        self._live_was_last = False
        self._live_traffic = live
        self._pace = CatchUpPace(live)
        self._live_pace = LivePace()
        self._gathers = False
        """Whether live records wait for `_live_pace`."""
        self._sends_piece = False
        """Whether the last message has a piece of a partition that catches up; it is sent once the next is taken."""
        self._stale_marks: dict[Subscription, None] = {}
        self._marks_due_ms: float | None = None
        self._now_ms = 0.0
        """The time of the last call that told it."""

    def add(self, subscription: Subscription) -> None:
        """Add an accepted subscription; its first frame, with the marks, is sent at once."""
        self.subscriptions[subscription.id] = subscription
        self.say(subscription.marks())
        self.note_change(subscription)

    # Changes

    def note_change(self, subscription: Subscription) -> None:
        """Note that a partition changed; partitions call this amid their own changes.

        Most changes are a high watermark that has moved. It travels with the next records, so it wakes nothing yet. Nor
        do records that gather.
        """
        if subscription.ended:
            return
        if not subscription.changed:
            subscription.changed = True
            self._changed.append(subscription)
        has_records = subscription.position < subscription.partition.log_end_offset
        if (has_records and not self._live_pace.gathers) or not self._is_served(subscription):
            self._wake()
        elif has_records:
            if not (self._is_live(subscription) and self._gather(self._now_ms)):
                self._wake()
        elif self._marks_due_ms is None:
            self._marks_due_ms = self._now_ms + MARKS_DELAY_MS
            self._wake_soon()

    def _gather(self, now_ms: float) -> bool:
        """Return whether live records gather: until `acked` ends that, or their time is over (`next_deadline_ms`)."""
        self._gathers = self._live_pace.until_ms(now_ms) is not None
        return self._gathers

    def acked(self, subscription: Subscription, durable_end_offset: int) -> None:
        """Note what the follower holds durably; the partition has noted it before."""
        self._live_pace.acked(subscription, durable_end_offset)
        self._stop_gathering()

    def _stop_gathering(self) -> None:
        """Wake, if live records need gather no longer."""
        if self._gathers and not self._live_pace.gathers:
            self._gathers = False
            self._wake()

    def _is_served(self, subscription: Subscription) -> bool:
        """Whether this broker still leads the partition of the subscription."""
        try:
            subscription.partition.check_open(subscription.on_change)
        except RaftlogError:
            return False
        return True

    def note_time(self, now_ms: float) -> None:
        """Note the time, from which the delay of marks counts."""
        self._now_ms = now_ms

    def grant(self, kind: Kind, size_bytes: int) -> None:
        """Add to the credit of a kind."""
        before = self.credit[kind]
        self.credit[kind] = before + size_bytes
        if before <= 0 < before + size_bytes:
            self._wake()

    def _sort_changed(self, now_ms: float) -> None:
        """Queue each changed subscription that has records, or marks, to send."""
        changed, self._changed = self._changed, deque()
        for subscription in changed:
            subscription.changed = False
            if subscription.ended or not self._check_open(subscription):
                continue
            if subscription.position < subscription.partition.log_end_offset:
                self._queue(subscription)
            if not subscription.tells_all():
                self._stale_marks[subscription] = None
                if self._marks_due_ms is None:
                    self._marks_due_ms = now_ms + MARKS_DELAY_MS

    def _check_open(self, subscription: Subscription) -> bool:
        """Return whether the partition still serves this subscription in the same term; if not, end it.

        Called before anything read from the partition is sent: records and marks of a later term may contradict those
        of the term in which the follower opened.
        """
        try:
            subscription.partition.check_open(subscription.on_change)
        except RaftlogError as error:
            self.fail(subscription, error)
            return False
        return True

    def _queue(self, subscription: Subscription) -> None:
        if subscription.reading:
            return
        live = self._is_live(subscription)
        if subscription.queued_live is not live:
            subscription.queued_live = live
            (self._live if live else self._catch_up[subscription.catch_up_kind]).append(subscription)
        self._check_invariants(subscription)

    def _is_live(self, subscription: Subscription) -> bool:
        return subscription.partition.is_live(self._replica.broker_id)

    # Frames

    def take_frames(self, now_ms: float) -> Sequence[ReplicaFrame]:
        """Return the frames of the next message, or none. Call again once that message is sent, after `wake`."""
        if self._closed:
            return []
        self._now_ms = now_ms
        if self._sends_piece:
            self._sends_piece = False
            self._pace.done(now_ms)
        self._sort_changed(now_ms)
        frames: list[ReplicaFrame] = []
        self._add_control(frames)
        turn_of_catch_up = self._live_was_last
        self._live_was_last = False
        if not (turn_of_catch_up and self._add_catch_up(frames, now_ms)):
            if not ((self._live or self._ready) and self._gather(now_ms)):
                self._add_live(frames)
            if self._live_was_last:
                self._live_traffic.note(now_ms)
            else:
                self._add_catch_up(frames, now_ms)
        self._sort_changed(now_ms)  # subscriptions that ended meanwhile are in this message
        self._add_control(frames)
        if not self._stale_marks:
            self._marks_due_ms = None
        elif frames or (self._marks_due_ms is not None and now_ms >= self._marks_due_ms):
            self._add_marks(frames)
            self._add_control(frames)  # subscriptions that `_add_marks` has ended
        if frames and (self._sends_piece or self._has_more()):  # the pause after a piece begins when it is sent
            self._wake()
        return frames

    def _has_more(self) -> bool:
        """Whether the next message may have frames at once."""
        has_live = bool(self._ready or (self._live and self.credit[Kind.LIVE] > 0))
        return bool(self._control or (has_live and not self._gather(self._now_ms)) or self._has_piece())

    def _has_piece(self) -> bool:
        """Whether a partition that catches up has records to send, or to read, now or after the pause."""
        credit = self.credit
        return bool(
            self._piece
            or (not self._reads_catch_up and any(self._catch_up[kind] and credit[kind] > 0 for kind in self._catch_up))
        )

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when to call `take_frames` at the latest, even without `wake`; None: only after `wake`."""
        due_ms = self._marks_due_ms if self._stale_marks or self._changed else None
        until_ms = self._live_pace.until_ms(now_ms)
        if until_ms is not None:  # also without records that gather: those that come until then wake nothing
            due_ms = until_ms if due_ms is None else min(due_ms, until_ms)
        if self._throttled and not self._reads_catch_up:
            ready_ms = self._throttle.look_again_at_ms(now_ms)
            due_ms = ready_ms if due_ms is None else min(due_ms, ready_ms)
        paused_until_ms = self._pace.ready_at_ms(now_ms)
        if paused_until_ms > now_ms and self._has_piece():
            due_ms = paused_until_ms if due_ms is None else min(due_ms, paused_until_ms)
        return due_ms

    def _add_late(self, frames: list[ReplicaFrame], subscription: Subscription, read: Read, kind: Kind) -> int:
        """Add records that `read_later` has read, unless the subscription has ended; return their size."""
        subscription.reading = False
        # The partition may have lost its leadership, and these records, since they were read.
        if subscription.ended or not self._check_open(subscription):
            self.credit[kind] += len(read.records)  # the follower never gets them, so it cannot return the credit
            return 0
        frames.append(self._frame(subscription, read, kind))
        return len(read.records)

    def _add_control(self, frames: list[ReplicaFrame]) -> None:
        while self._control and len(frames) < MAX_FRAMES:
            frames.append(self._control.popleft())

    def _add_live(self, frames: list[ReplicaFrame]) -> None:
        """Add the records of live partitions, in turn, until the message is full."""
        room, used, count = self._max_frame_bytes, 0, 0
        last: Subscription | None = None
        while self._ready and used < room and len(frames) < MAX_FRAMES:
            subscription, read = self._ready.popleft()
            begin = subscription.position
            if size := self._add_late(frames, subscription, read, Kind.LIVE):
                used += size
                count += subscription.position - begin
                last = subscription
        while used < room and self.credit[Kind.LIVE] > 0 and self._live and len(frames) < MAX_FRAMES:
            subscription = self._live.popleft()
            if subscription.ended or subscription.queued_live is not True:
                continue
            subscription.queued_live = None
            if not self._is_live(subscription):
                self._queue(subscription)
                continue
            begin = subscription.position
            if size := self._add_read(frames, subscription, room - used, Kind.LIVE):
                used += size
                count += subscription.position - begin
                last = subscription
        self._live_was_last = used > 0
        is_full = used >= room or len(frames) >= MAX_FRAMES
        if last is not None and used < SMALL_BYTES and not is_full:
            self._live_pace.sent(last, last.position, count, self._now_ms + gather_ms(last.partition.flush_ms))

    def _add_catch_up(self, frames: list[ReplicaFrame], now_ms: float) -> bool:
        """Add the next piece of a partition that catches up, if one may be sent; return whether."""
        if self._pace.ready_at_ms(now_ms) > now_ms:
            return False
        size, max_bytes = 0, self._max_frame_bytes
        if self._pace.is_live(now_ms):
            max_bytes = min(max_bytes, PIECE_BESIDE_LIVE_BYTES)
        if self._piece is not None:
            subscription, read = self._piece
            self._piece = None
            size = self._add_late(frames, subscription, read, subscription.catch_up_kind)
            self._throttled_bytes(subscription, size, now_ms)
        while not self._reads_catch_up and (following := self._next_catch_up(now_ms)) is not None:
            kind = following.catch_up_kind
            if following.cold:  # read ahead while the previous piece travels
                self._start_reading(following, self._piece_bytes(following, max_bytes), kind)
            elif size:
                following.queued_live = False
                self._catch_up[kind].appendleft(following)
                break
            else:
                size = self._add_read(frames, following, self._piece_bytes(following, max_bytes), kind)
                self._throttled_bytes(following, size, now_ms)
        if size:
            self._sends_piece = True
            self._pace.begin(now_ms)
        return size > 0

    def _next_catch_up(self, now_ms: float) -> Subscription | None:
        """Take the next subscription that may be read out of its queue."""
        if self._throttled and self._throttle.ready_at_ms(now_ms) <= now_ms:
            for subscription in self._throttled:
                self._catch_up[subscription.catch_up_kind].append(subscription)
            self._throttled.clear()
        for kind, waiting in self._catch_up.items():
            while self.credit[kind] > 0 and waiting:
                subscription = waiting.popleft()
                if subscription.ended or subscription.queued_live is not False:
                    continue
                if self._is_live(subscription):
                    subscription.queued_live = None
                    self._queue(subscription)
                elif subscription.partition.is_throttled and self._throttle.ready_at_ms(now_ms) > now_ms:
                    self._throttled.append(subscription)
                else:
                    subscription.queued_live = None
                    return subscription
        return None

    def _piece_bytes(self, subscription: Subscription, max_bytes: int) -> int:
        """Return how much to read at once: records that either end throttles travel in small pieces."""
        if subscription.catch_up_kind is Kind.THROTTLED:
            max_bytes = min(max_bytes, self.credit[Kind.THROTTLED])
        piece_bytes = self._throttle.piece_bytes
        if piece_bytes is not None and subscription.partition.is_throttled:
            max_bytes = min(max_bytes, piece_bytes)
        return max_bytes

    def _throttled_bytes(self, subscription: Subscription, size: int, now_ms: float) -> None:
        if size and subscription.partition.is_throttled:
            self._throttle.take(size, now_ms)

    def _add_read(self, frames: list[ReplicaFrame], subscription: Subscription, room: int, kind: Kind) -> int:
        """Read for a subscription: add a frame now, or call `read_later`; return the size of the frame."""
        partition, position = subscription.partition, subscription.position
        if position >= partition.log_end_offset:  # an earlier read has reached the end
            return 0
        try:
            read = partition.read_for_replica(subscription.on_change, position, room, blocking=False)
        except RaftlogError as error:
            self.fail(subscription, error)
            return 0
        if read is None:
            self._start_reading(subscription, room, kind)
            return 0
        size = len(read.records)
        self.credit[kind] -= size
        frames.append(self._frame(subscription, read, kind))
        return size

    def _start_reading(self, subscription: Subscription, max_bytes: int, kind: Kind) -> None:
        subscription.reading = subscription.cold = True
        live = kind is Kind.LIVE
        self.credit[kind] -= max_bytes
        if not live:
            assert not self._reads_catch_up, "one piece at a time"
            assert self._piece is None, "one piece at a time"
            self._reads_catch_up = True

        def done(read: Read | RaftlogError) -> None:
            if not live:
                self._reads_catch_up = False
            self.credit[kind] += max_bytes
            if self._closed or subscription.ended:
                pass
            elif isinstance(read, RaftlogError):
                self.fail(subscription, read)
            else:
                self.credit[kind] -= len(read.records)
                if live:
                    self._ready.append((subscription, read))
                else:
                    self._piece = (subscription, read)
            self._wake()

        self._read_later(subscription.partition, subscription.on_change, subscription.position, max_bytes, done)

    def _frame(self, subscription: Subscription, read: Read, kind: Kind) -> ReplicaFrame:
        """Return the frame of these records, and queue the subscription if more follow."""
        begin, traces = subscription.position, subscription.partition.traces
        goes_on = read.next_offset > begin
        subscription.position = max(begin, read.next_offset)
        head = subscription.marks()
        if traces is not None:
            head.traceparents.extend(traces.between(begin, read.next_offset))
        head.catch_up = kind is not Kind.LIVE
        head.throttled = kind is Kind.THROTTLED
        if head.catch_up:
            grown = head.log_end_offset - subscription.last_end
            self._pace.note_progress(len(read.records), subscription.position - begin, grown)
        subscription.last_end = head.log_end_offset
        self._stale_marks.pop(subscription, None)
        if subscription.position < head.log_end_offset:
            if goes_on:
                self._queue(subscription)
            else:  # a bug, which must not repeat for ever
                self.fail(subscription, InternalError(f"the log returns no records at offset {subscription.position}"))
        else:
            subscription.cold = False
        self._check_invariants(subscription)
        return ReplicaFrame(head, read.records)

    def _add_marks(self, frames: list[ReplicaFrame]) -> None:
        while self._stale_marks and len(frames) < MAX_FRAMES:
            subscription = next(iter(self._stale_marks))
            del self._stale_marks[subscription]
            if self._check_open(subscription) and not subscription.tells_all():
                frames.append(ReplicaFrame(subscription.marks(), b""))
        if not self._stale_marks:
            self._marks_due_ms = None

    @property
    def unread(self) -> int:
        """How many frames without records wait to be sent."""
        return len(self._control)

    def say(self, head: replication_pb2.ReplicaFrame) -> None:
        """Send a frame without records with the next message."""
        self._control.append(ReplicaFrame(head, b""))

    def _check_invariants(self, subscription: Subscription) -> None:
        assert not (subscription.reading and subscription.queued_live is not None), "one read of a partition at a time"
        assert subscription.ended or self.subscriptions.get(subscription.id) is subscription
        assert not (self._reads_catch_up and self._piece is not None), "one catch-up piece of a stream at a time"

    # Ends

    def fail(self, subscription: Subscription, error: RaftlogError) -> None:
        """End a subscription, and tell the follower why."""
        self.end(subscription)
        self.say(replication_pb2.ReplicaFrame(subscription_id=subscription.id, error=to_wire(error)))
        self._wake()

    def end(self, subscription: Subscription) -> None:
        """End a subscription; one that has ended already is ignored."""
        if subscription.ended:
            return
        subscription.ended = True
        self._live_pace.ended(subscription)
        self._stop_gathering()
        self._stale_marks.pop(subscription, None)
        del self.subscriptions[subscription.id]
        subscription.partition.close_replica(self._replica, subscription.on_change)

    def close(self) -> None:
        """End all subscriptions; reads under way are discarded. May be called again."""
        if self._closed:
            return
        for subscription in list(self.subscriptions.values()):
            self.end(subscription)
        self._closed = True


SMALLEST_FRAME_BYTES: Final = 4096
"""The least frame size that a follower can ask for; a frame holds at least one batch anyway."""
MAX_CREDIT_BYTES: Final = 1 << 40
MAX_UNREAD: Final = 100_000
"""Answers to opens that a follower may leave unread; more than a broker has partitions."""
MAX_SHOWN: Final = 80


class LeaderSession:
    """State of one stream.

    find            returns a partition of this broker, or raises as `ReplicaManager.find`
    me              the id of this broker
    check_replica   refuses a follower that is not the broker it claims to be
    wake            called when `take_frames` may have frames, any number of times
    wake_soon       called when `take_frames` is due within MARKS_DELAY_MS (the default wakes at once)
    throttle        shared by the sessions of a broker (`leader.replication.throttled.rate`)
    live            shared by the sessions of a broker, of both kinds
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
        wake_soon: Wake | None = None,
        live: LiveTraffic | None = None,
    ) -> None:
        self._find = find
        self._me = me
        self._cluster_id = cluster_id
        self._check_replica = check_replica
        self._wake = wake
        self._wake_soon = wake_soon or wake
        self._read_later = read_later
        self._max_frame_bytes = max(SMALLEST_FRAME_BYTES, max_frame_bytes)
        self._throttle = throttle
        self._live = live or LiveTraffic()
        self._highest_id = 0
        self._queue: PushQueue | None = None
        self._closed = False
        self.replica: Replica | None = None
        """The follower at the other end; None before its hello."""

    def __len__(self) -> int:
        return len(self._queue.subscriptions) if self._queue is not None else 0

    # Requests

    def handle(self, request: replication_pb2.ReplicateRequest, now_ms: float) -> None:
        """Take a request of the follower.

        Raises:
            RaftlogError: the stream has to end: the protocol is broken (InvalidRequestError), the follower is not the
                expected broker (InconsistentClusterId, StaleBrokerEpoch), or not known here yet (retriable).
        """
        assert not self._closed, "a closed session takes no request"
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
        queue.note_time(now_ms)
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
            queue.grant(kind, size_bytes)
        if request.open:
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
            wake_soon=self._wake_soon,
            read_later=self._read_later,
            max_frame_bytes=max(SMALLEST_FRAME_BYTES, min(wanted, self._max_frame_bytes)),
            throttle=self._throttle,
            live=self._live,
        )
        self.replica = replica

    def _check_known(self, subscription_id: int) -> None:
        """Refuse an id that was never opened; an ended subscription may still be named."""
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
            raise BrokerOverloaded("the follower opens partitions and does not read the answers")
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
                durable_end_offset=opening.durable_end_offset,
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
            subscription.partition.replica_acked(
                replica, subscription.on_change, ack.durable_end_offset, ack.log_start_offset
            )
        except RaftlogError as error:
            queue.fail(subscription, error)
        else:
            queue.acked(subscription, ack.durable_end_offset)

    # Frames

    def take_frames(self, now_ms: float) -> Sequence[ReplicaFrame]:
        """Return the frames of the next message, or none. Call again once that message is sent, after `wake`."""
        return self._queue.take_frames(now_ms) if self._queue is not None and not self._closed else ()

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when to call `take_frames` at the latest, even without `wake`; None: only after `wake`."""
        return self._queue.next_deadline_ms(now_ms) if self._queue is not None and not self._closed else None

    def close(self) -> None:
        """End all subscriptions with the stream; reads under way are discarded. May be called again."""
        self._closed = True
        if self._queue is not None:
            self._queue.close()


def _check_credit(credit: int, size_bytes: int) -> None:
    if size_bytes < 0 or credit + size_bytes > MAX_CREDIT_BYTES:
        raise InvalidRequestError(
            f"a credit of {size_bytes} bytes on top of {credit} is refused: grant at least 0 bytes, in all at most "
            f"{MAX_CREDIT_BYTES}"
        )
