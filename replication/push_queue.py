"""What one `Replicate` stream pushes next: fair between partitions, within the follower's credit. Pure.

What a subscription goes through:

    idle      --the log end is above its position-->       queued    live, or catching up while out of the ISR
    queued    --its turn, credit, bytes at hand-->         idle      a frame, and queued again when there is more
    queued    --its turn, bytes not in memory-->           reading   `read_later`; others go on meanwhile
    reading   --read-->                                    idle      a frame, and queued again when there is more
    any       --`end`, an error of the partition-->        ended     an error is told in a frame

Live partitions go first: a message carries frames of live ones, or one piece of a partition that catches up; while
both wait they take turns, so a live record waits for one piece at most, and what lies far behind never starves. Each
kind has its own credit, as have those that the follower throttles: they hold up no others that catch up. Nothing here
looks at partitions that have not changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from raftlog.errors import InternalError, RaftlogError, to_wire
from raftlog.v1 import replication_pb2
from raftlog.wire import MAX_PARTS, ReplicaFrame
from replication.ports import LedPartition, Read, Replica, Wake
from replication.subscription import Kind, Subscription
from replication.token_bucket import TokenBucket

MARKS_DELAY_MS: Final = 5.0
"""How long a high watermark waits for records to ride along with."""
MAX_FRAMES: Final = 4_000
"""In one message, so that a follower reads it: but for the last few, below `raftlog.wire.MAX_PARTS`."""
LIVE_MS: Final = 1_000.0
PIECE_BESIDE_LIVE_BYTES: Final = 256 << 10
"""Largest piece of what catches up while something live was sent within LIVE_MS: a live record may wait for one."""

LOOK_AGAIN_MS: Final = 500.0
"""A wait for the throttle is never longer than this, since the rate may have changed meanwhile."""

assert MAX_FRAMES * 2 < MAX_PARTS

ReadDone = Callable[[Read | RaftlogError], None]


class ReadLater(Protocol):
    """`read_for_replica(on_change, offset, max_bytes, blocking=True)` where it may wait, then `done` on this thread."""

    def __call__(self, partition: LedPartition, on_change: Wake, offset: int, max_bytes: int, done: ReadDone) -> None:
        """Start it."""
        ...


class PushQueue:
    """The subscriptions of one stream, and what they have to send.

    `wake` is told that `take_frames` may have something, any number of times; `throttle` is shared by the streams of a
    broker (`leader.replication.throttled.rate`).

    Bounded: records are read only while the credit they count against is above zero, one message at a time; what is
    read off this thread counts from the moment it is asked for.
    """

    def __init__(
        self, replica: Replica, *, wake: Wake, read_later: ReadLater, max_frame_bytes: int, throttle: TokenBucket
    ) -> None:
        self._replica = replica
        self._wake = wake
        self._read_later = read_later
        self._max_frame_bytes = max_frame_bytes
        self._throttle = throttle
        self._closed = False
        self.subscriptions: dict[int, Subscription] = {}
        self.credit = dict.fromkeys(Kind, 0)
        """Bytes that the follower takes."""
        self._changed: deque[Subscription] = deque()
        self._control: deque[ReplicaFrame] = deque()
        self._ready: deque[tuple[Subscription, Read]] = deque()
        self._piece: tuple[Subscription, Read] | None = None
        """What was read for a partition that catches up, until it is its turn."""
        self._live: deque[Subscription] = deque()
        self._catch_up: dict[Kind, deque[Subscription]] = {Kind.THROTTLED: deque(), Kind.CATCH_UP: deque()}
        """Those throttled by the follower first: it grants them little, so that they hold up nobody."""
        self._throttled: list[Subscription] = []
        self._reads_catch_up = False
        """A piece is being read; there is never more than one, with `_piece`."""
        self._live_was_last = False
        self._live_sent_ms = float("-inf")
        self._stale_marks: dict[Subscription, None] = {}
        self._marks_due_ms: float | None = None

    def add(self, subscription: Subscription) -> None:
        """Take on a subscription that was accepted; its first frame, with the marks, goes at once."""
        self.subscriptions[subscription.id] = subscription
        self.say(subscription.marks())
        self.note_change(subscription)

    # What changed

    def note_change(self, subscription: Subscription) -> None:
        """Called by partitions, in the middle of whatever they do: only take note."""
        if not subscription.changed and not subscription.ended:
            subscription.changed = True
            self._changed.append(subscription)
            self._wake()

    def _sort_changed(self, now_ms: float) -> None:
        """Give each subscription that changed its place."""
        changed, self._changed = self._changed, deque()
        for subscription in changed:
            subscription.changed = False
            if not subscription.ended:
                self._sort(subscription, now_ms)

    def _sort(self, subscription: Subscription, now_ms: float) -> None:
        if not self._check_open(subscription):
            return
        if subscription.position < subscription.partition.log_end_offset:
            self._queue(subscription)
        if not subscription.tells_all():
            self._stale_marks[subscription] = None
            if self._marks_due_ms is None:
                self._marks_due_ms = now_ms + MARKS_DELAY_MS

    def _check_open(self, subscription: Subscription) -> bool:
        """Return whether it was opened in this term of the partition and nobody has taken over; if not, it ends.

        Comes before anything that is read off the partition leaves: what it says in a later term is of another history.
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
        """Return what goes into the next message; nothing when there is none. Call again once it is on its way."""
        if self._closed:
            return []
        self._sort_changed(now_ms)
        frames: list[ReplicaFrame] = []
        self._add_control(frames)
        turn_of_catch_up = self._live_was_last
        self._live_was_last = False
        if not (turn_of_catch_up and self._add_catch_up(frames, now_ms)):
            self._add_live(frames)
            if self._live_was_last:
                self._live_sent_ms = now_ms
            else:
                self._add_catch_up(frames, now_ms)
        self._sort_changed(now_ms)  # what ended meanwhile says so in this message
        self._add_control(frames)
        if not self._stale_marks:
            self._marks_due_ms = None
        elif frames or (self._marks_due_ms is not None and now_ms >= self._marks_due_ms):
            self._add_marks(frames)
            self._add_control(frames)  # what they found over
        return frames

    def next_deadline_ms(self, now_ms: float) -> float | None:
        """Return when `take_frames` has something at the latest; None: not before something happens."""
        due_ms = self._marks_due_ms if self._stale_marks else None
        if self._throttled and not self._reads_catch_up:
            ready_ms = min(self._throttle.ready_at_ms(now_ms), now_ms + LOOK_AGAIN_MS)
            due_ms = ready_ms if due_ms is None else min(due_ms, ready_ms)
        return due_ms

    def _add_late(self, frames: list[ReplicaFrame], subscription: Subscription, read: Read, kind: Kind) -> int:
        """Add what was read elsewhere for a partition, if that is still worth something; return its size."""
        subscription.reading = False
        # It may have lost its leadership, and these records, since they were read.
        if subscription.ended or not self._check_open(subscription):
            self.credit[kind] += len(read.records)  # the follower never sees them, and cannot give it back
            return 0
        frames.append(self._frame(subscription, read, kind))
        return len(read.records)

    def _add_control(self, frames: list[ReplicaFrame]) -> None:
        while self._control and len(frames) < MAX_FRAMES:
            frames.append(self._control.popleft())

    def _add_live(self, frames: list[ReplicaFrame]) -> None:
        """Add what live partitions have, in turn, as far as a message goes."""
        room, used = self._max_frame_bytes, 0
        while self._ready and used < room and len(frames) < MAX_FRAMES:
            used += self._add_late(frames, *self._ready.popleft(), Kind.LIVE)
        while used < room and self.credit[Kind.LIVE] > 0 and self._live and len(frames) < MAX_FRAMES:
            subscription = self._live.popleft()
            if subscription.ended or subscription.queued_live is not True:
                continue
            subscription.queued_live = None
            if not self._is_live(subscription):
                self._queue(subscription)
                continue
            used += self._add_read(frames, subscription, room - used, Kind.LIVE)
        self._live_was_last = used > 0

    def _add_catch_up(self, frames: list[ReplicaFrame], now_ms: float) -> bool:
        """Add the next piece of a partition that catches up, if there is one that may be sent; return whether."""
        size, max_bytes = 0, self._max_frame_bytes
        if now_ms - self._live_sent_ms < LIVE_MS:
            max_bytes = min(max_bytes, PIECE_BESIDE_LIVE_BYTES)
        if self._piece is not None:
            subscription, read = self._piece
            self._piece = None
            size = self._add_late(frames, subscription, read, subscription.catch_up_kind)
            self._throttled_bytes(subscription, size, now_ms)
        while not self._reads_catch_up and (following := self._next_catch_up(now_ms)) is not None:
            kind = following.catch_up_kind
            if following.cold:  # read ahead while the piece before it travels
                self._start_reading(following, self._piece_bytes(following, max_bytes), kind)
            elif size:
                following.queued_live = False
                self._catch_up[kind].appendleft(following)
                break
            else:
                size = self._add_read(frames, following, self._piece_bytes(following, max_bytes), kind)
                self._throttled_bytes(following, size, now_ms)
        return size > 0

    def _next_catch_up(self, now_ms: float) -> Subscription | None:
        """Take the next one out of the queue that may be read."""
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
                elif self._is_throttled(subscription) and self._throttle.ready_at_ms(now_ms) > now_ms:
                    self._throttled.append(subscription)
                else:
                    subscription.queued_live = None
                    return subscription
        return None

    def _piece_bytes(self, subscription: Subscription, max_bytes: int) -> int:
        """Return how much of it to read at once: what is throttled, by either end, flows in small pieces."""
        if subscription.catch_up_kind is Kind.THROTTLED:
            max_bytes = min(max_bytes, self.credit[Kind.THROTTLED])
        piece_bytes = self._throttle.piece_bytes
        if piece_bytes is not None and self._is_throttled(subscription):
            max_bytes = min(max_bytes, piece_bytes)
        return max_bytes

    def _is_throttled(self, subscription: Subscription) -> bool:
        return subscription.partition.is_throttled(self._replica.broker_id)

    def _throttled_bytes(self, subscription: Subscription, size: int, now_ms: float) -> None:
        if size and self._is_throttled(subscription):
            self._throttle.take(size, now_ms)

    def _add_read(self, frames: list[ReplicaFrame], subscription: Subscription, room: int, kind: Kind) -> int:
        """Read on for a subscription: a frame now, or `read_later`; return the size of the frame."""
        partition, position = subscription.partition, subscription.position
        if position >= partition.log_end_offset:  # it was read for already
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
        """Return the frame of what was read, and see to it that the rest follows."""
        begin, traces = subscription.position, subscription.partition.traces
        goes_on = read.next_offset > begin
        subscription.position = max(begin, read.next_offset)
        head = subscription.marks()
        if traces is not None:
            head.traceparents.extend(traces.between(begin, read.next_offset))
        head.catch_up = kind is not Kind.LIVE
        head.throttled = kind is Kind.THROTTLED
        self._stale_marks.pop(subscription, None)
        if subscription.position < head.log_end_offset:
            if goes_on:
                self._queue(subscription)
            else:  # a bug, which must not go round for ever
                self.fail(subscription, InternalError(f"the log does not return what is at {subscription.position}"))
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
        """Frames without records that wait to be taken."""
        return len(self._control)

    def say(self, head: replication_pb2.ReplicaFrame) -> None:
        """Have a frame without records leave at once."""
        self._control.append(ReplicaFrame(head, b""))

    def _check_invariants(self, subscription: Subscription) -> None:
        assert not (subscription.reading and subscription.queued_live is not None), "one piece of it at a time"
        assert subscription.ended or self.subscriptions.get(subscription.id) is subscription
        assert not (self._reads_catch_up and self._piece is not None), "one piece of all at a time"

    # Ends

    def fail(self, subscription: Subscription, error: RaftlogError) -> None:
        """End a subscription, and tell the follower why."""
        self.end(subscription)
        self.say(replication_pb2.ReplicaFrame(subscription_id=subscription.id, error=to_wire(error)))
        self._wake()

    def end(self, subscription: Subscription) -> None:
        """End a subscription; one that has ended is fine."""
        if subscription.ended:
            return
        subscription.ended = True
        self._stale_marks.pop(subscription, None)
        del self.subscriptions[subscription.id]
        subscription.partition.close_replica(self._replica, subscription.on_change)

    def close(self) -> None:
        """The stream is over: partitions forget it, reads under way come to nothing. May be called again."""
        if self._closed:
            return
        for subscription in list(self.subscriptions.values()):
            self.end(subscription)
        self._closed = True
