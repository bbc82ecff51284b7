"""What a consumer knows of its place in a group: a state machine without clock, network or threads (KIP-848)."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from raftlog.errors import FencedError, FencedInstanceId, InternalError, RaftlogError, RetriableError
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2

_MARGIN: Final = 0.98
"""Share of the session timeout after which a member holds its session for lost: clocks do not run at one speed."""
_SILENCE: Final = 0.2
_SHORTEST_SILENCE_MS: Final = 1000.0
"""A heartbeat without an answer for this share of the session timeout: another stream may do better."""
_JOIN_PATIENCE_MS: Final = 5000.0
"""How long the first answer on a stream may take."""


class MemberState(enum.Enum):
    """See `Membership`."""

    OUT = "out"
    JOINING = "joining"
    MEMBER = "member"
    AWAY = "away"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who joins. `rebalance_timeout_ms`: how long the application may take to let a partition go."""

    group_id: str
    member_id: str
    instance_id: str = ""
    client_id: str = ""
    rack: str = ""
    rebalance_timeout_ms: int = 0
    assignor: str = ""


class Assigned(NamedTuple):
    """What the coordinator says of a partition that the member may read.

    From `first_new_partition` on, partitions are newer than the group's interest in the topic: without a committed
    offset they are read from their start (KAFKA-20030).
    """

    topic_id: bytes
    first_new_partition: int


class Membership:
    """One member of one group.

    Transitions:
        OUT     -> JOINING  `join`: there is a subscription
        JOINING -> MEMBER   an assignment
        MEMBER  -> AWAY     the stream broke; the session goes on, what is owned is read on
        AWAY    -> MEMBER   an assignment on the next stream
        JOINING, MEMBER, AWAY -> JOINING  the coordinator has given the member up, or may have, since the session
                            timeout has passed since the last answered heartbeat was *sent*: what was owned is lost
        any     -> OUT      `leave`: what is owned is let go by the caller before, or lost
        any     -> FAILED   a refusal that does not pass by itself: what was owned is lost; `join` tries once more

    Invariants: only what is in `assigned` comes into `owned`; nothing is owned but as MEMBER or AWAY; the member is
    sure of what it owns until `session_deadline_ms`, which the coordinator's own end of the session never precedes.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.state = MemberState.OUT
        self.member_epoch = 0
        self.assigned: dict[TopicPartition, Assigned] = {}
        """What it may read, as a whole."""
        self.owned: dict[TopicPartition, bytes] = {}
        """What it reads, with topic ids: taken, and not let go yet."""
        self.lost: set[TopicPartition] = set()
        """Was owned and was taken away; `told_of_loss` ends it."""
        self.note = ""
        self.assignor = ""
        self.error: RaftlogError | None = None
        """Why it has failed."""
        self.refusal: RaftlogError | None = None
        """What came instead of an answer last."""
        self.assignments = 0
        """Assignments that came since it joined last."""
        self.answered_changes = 0
        """Subscriptions, counted, that the coordinator has taken note of."""
        self.changes = 0
        self.session_deadline_ms = math.inf
        self._subscription = group_pb2.Subscription()
        self._session_timeout_ms = 0.0
        self._interval_ms = 0.0
        self._connected = False
        self._unanswered: tuple[float, int] | None = None
        """When the join or heartbeat was sent that has no answer, and how many changes of the subscription it told of.
        There is one at most, so that the coordinator knows what had arrived here when a heartbeat was sent."""
        self._acknowledge = False
        """An assignment came that no heartbeat was sent after."""
        self._next_heartbeat_ms = math.inf
        self._told: dict[TopicPartition, bytes] = {}
        """What the coordinator was told last of `_claims`."""
        self._tell_subscription = False

    # What the application wants

    @property
    def wants_stream(self) -> bool:
        """Whether it is, or wants to be, a member."""
        return self.state in (MemberState.JOINING, MemberState.MEMBER, MemberState.AWAY)

    @property
    def is_member(self) -> bool:
        """Whether it has a member epoch and has not heard that it is over."""
        return self.state in (MemberState.MEMBER, MemberState.AWAY)

    @property
    def follows(self) -> bool:
        """Whether what is assigned may follow from the subscription, rather than from the one before."""
        return {part.topic for part in self.assigned} <= set(self._subscription.topics)

    def subscribe(self, topics: Iterable[str], pattern: str) -> bool:
        """Take note of what is to be read; return whether that is a change."""
        wanted = group_pb2.Subscription(topics=sorted(topics), pattern=pattern, assignor=self.identity.assignor)
        if wanted == self._subscription:
            return False
        self._subscription = wanted
        self.changes += 1
        self._tell_subscription = True
        return True

    def join(self) -> None:
        """Become a member, or stay one."""
        if self.state in (MemberState.OUT, MemberState.FAILED):
            self._begin_anew()

    def leave(self) -> group_pb2.GroupRequest | None:
        """Stop being a member; return what to tell the coordinator, None when it does not know of the member."""
        known = self.wants_stream and self._connected
        self._lose_all()
        self.state = MemberState.OUT
        if known:
            keep = bool(self.identity.instance_id)
            return group_pb2.GroupRequest(leave=group_pb2.LeaveGroup(keep_assignment=keep))
        return None

    # The stream

    def opened(self, now_ms: float) -> group_pb2.GroupRequest:
        """A stream to the coordinator is there: return what is sent first."""
        assert self.wants_stream, self.state
        self._connected = True
        self._sent(now_ms)
        identity = self.identity
        return group_pb2.GroupRequest(
            join=group_pb2.JoinGroup(
                group_id=identity.group_id,
                member_id=identity.member_id,
                member_epoch=self.member_epoch,
                instance_id=identity.instance_id,
                client_id=identity.client_id,
                rack=identity.rack,
                subscription=self._subscription,
                rebalance_timeout_ms=identity.rebalance_timeout_ms,
                owned=self._claims_message(),
            )
        )

    def closed(self) -> None:
        """The stream has ended."""
        self._connected = False
        self._unanswered = None
        self._next_heartbeat_ms = math.inf
        if self.state is MemberState.MEMBER:
            self.state = MemberState.AWAY

    def on_assignment(self, message: group_pb2.GroupAssignment, now_ms: float) -> None:
        """Take in what may be read; the first one on a stream answers the join."""
        if not self.wants_stream:
            return
        self.member_epoch = message.member_epoch
        self._session_timeout_ms = float(message.session_timeout_ms)
        self._interval_ms = float(message.heartbeat_interval_ms)
        if self.state is not MemberState.MEMBER:
            self.state = MemberState.MEMBER
            self._answered()
            self._next_heartbeat_ms = min(self._next_heartbeat_ms, now_ms + self._interval_ms)
        self.assigned = {
            TopicPartition(topic.topic, partition): Assigned(topic.topic_id, topic.first_new_partition)
            for topic in message.topics
            for partition in topic.partitions
        }
        self.note, self.assignor = message.note, message.assignor
        self.assignments += 1
        self.refusal = None
        self._acknowledge = True

    def on_heartbeat(self, message: group_pb2.HeartbeatAnswer) -> None:
        """Take in that the coordinator has heard a heartbeat."""
        if self.state is MemberState.MEMBER:
            self.member_epoch = max(self.member_epoch, message.member_epoch)  # it may have left before an assignment
            self._answered()

    def on_error(self, error: RaftlogError) -> None:
        """Take in that the coordinator, or whoever was taken for it, refuses."""
        self.refusal = error
        if not self.wants_stream:
            return
        if isinstance(error, FencedInstanceId):
            self._fail(error)
        elif isinstance(error, FencedError):
            self._begin_anew()
        elif not isinstance(error, (RetriableError, InternalError)):
            self._fail(error)

    # Time

    def heartbeat(self, now_ms: float) -> group_pb2.GroupRequest | None:
        """Return the heartbeat that is due, or None."""
        if not self._may_send() or (not self._has_news() and now_ms < self._next_heartbeat_ms):
            return None
        message = group_pb2.GroupHeartbeat(member_epoch=self.member_epoch)
        if self._tell_subscription:
            message.subscription.CopyFrom(self._subscription)
        if self._claims() != self._told:
            message.owned.CopyFrom(group_pb2.Owned(partitions=self._claims_message()))
        self._sent(now_ms)
        return group_pb2.GroupRequest(heartbeat=message)

    def is_silent(self, now_ms: float) -> bool:
        """Whether the coordinator owes an answer for so long that the stream is to be given up."""
        return now_ms >= self._silent_ms()

    def expire(self, now_ms: float) -> bool:
        """Lose what is owned when the session may be over; return whether that happened now."""
        if not self.is_member or now_ms < self.session_deadline_ms:
            return False
        self._begin_anew()
        return True

    def next_ms(self) -> float:
        """Return when one of `heartbeat`, `is_silent` and `expire` has something to say."""
        heartbeat_ms = math.inf
        if self._may_send():
            heartbeat_ms = -math.inf if self._has_news() else self._next_heartbeat_ms
        return min(heartbeat_ms, self._silent_ms(), self.session_deadline_ms)

    # Letting go and taking

    def to_release(self) -> list[TopicPartition]:
        """Return what is owned and may not be any longer."""
        return sorted(
            part
            for part, topic_id in self.owned.items()
            if part not in self.assigned or self.assigned[part].topic_id != topic_id
        )

    def to_take(self) -> list[TopicPartition]:
        """Return what may be owned and is not; what has to be let go first under the same name is not in it."""
        return sorted(self.assigned.keys() - self.owned.keys())

    def released(self, partitions: Iterable[TopicPartition]) -> None:
        """These are not read any more, and their offsets are committed."""
        for part in partitions:
            self.owned.pop(part, None)

    def taken(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Assigned]:
        """These are read from now on; return those of them that may be."""
        found = {part: self.assigned[part] for part in partitions if part in self.assigned and part not in self.owned}
        if not self.is_member:
            return {}
        self.owned |= {part: assigned.topic_id for part, assigned in found.items()}
        return found

    def told_of_loss(self, partitions: Iterable[TopicPartition]) -> None:
        """The application knows that it has lost these."""
        self.lost.difference_update(partitions)

    # Inside

    def _sent(self, now_ms: float) -> None:
        self._tell_subscription = self._acknowledge = False
        self._told = self._claims()
        self._unanswered = (now_ms, self.changes)
        self._next_heartbeat_ms = now_ms + self._interval_ms if self._interval_ms else math.inf

    def _answered(self) -> None:
        if self._unanswered is not None:
            (sent_ms, self.answered_changes), self._unanswered = self._unanswered, None
            self.session_deadline_ms = sent_ms + self._session_timeout_ms * _MARGIN

    def _silent_ms(self) -> float:
        if self._unanswered is None or not self._connected:
            return math.inf
        patience_ms = _JOIN_PATIENCE_MS
        if self.state is MemberState.MEMBER:
            patience_ms = max(_SHORTEST_SILENCE_MS, self._session_timeout_ms * _SILENCE)
        elif self.state is MemberState.AWAY:
            patience_ms = min(patience_ms, max(_SHORTEST_SILENCE_MS, self._session_timeout_ms * _SILENCE))
        return self._unanswered[0] + patience_ms

    def _may_send(self) -> bool:
        return self.state is MemberState.MEMBER and self._connected and self._unanswered is None

    def _has_news(self) -> bool:
        return self._tell_subscription or self._acknowledge or self._claims() != self._told

    def _claims(self) -> dict[TopicPartition, bytes]:
        """Return what it reads, and what it may begin to read at any moment, with topic ids.

        So a heartbeat that was sent after a partition came never lets it go while it may still be taken.
        """
        return {part: assigned.topic_id for part, assigned in self.assigned.items()} | self.owned

    def _claims_message(self) -> list[group_pb2.TopicPartitions]:
        by_topic: dict[tuple[str, bytes], list[int]] = {}
        for part, topic_id in sorted(self._claims().items()):
            by_topic.setdefault((part.topic, topic_id), []).append(part.partition)
        return [
            group_pb2.TopicPartitions(topic=topic, topic_id=topic_id, partitions=partitions)
            for (topic, topic_id), partitions in by_topic.items()
        ]

    def _begin_anew(self) -> None:
        self._lose_all()
        self.error = None
        self.state = MemberState.JOINING

    def _fail(self, error: RaftlogError) -> None:
        self._lose_all()
        self.error = error
        self.state = MemberState.FAILED

    def _lose_all(self) -> None:
        self.lost |= self.owned.keys()
        self.owned.clear()
        self.assigned = {}
        self.member_epoch = 0
        self.assignments = 0
        self.note = ""
        self.session_deadline_ms = math.inf
        self._next_heartbeat_ms = math.inf
