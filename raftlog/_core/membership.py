"""A consumer's membership of a group (KIP-848): a state machine without clock, network or threads."""

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
"""The share of the session timeout after which a member treats its session as lost. It is below 1 because the clocks of
client and coordinator differ in speed."""
_SILENCE: Final = 0.2
_SHORTEST_SILENCE_MS: Final = 1000.0
"""After this share of the session timeout without an answer to a heartbeat, the member tries another stream."""
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
    """The member that joins. `rebalance_timeout_ms`: how long the application may take to release a partition."""

    group_id: str
    member_id: str
    instance_id: str = ""
    client_id: str = ""
    rack: str = ""
    rebalance_timeout_ms: int = 0
    assignor: str = ""


class Assigned(NamedTuple):
    """The topic of an assigned partition.

    Partitions from `first_new_partition` on are newer than the group's subscription to the topic: without a committed
    offset they are read from their start (KAFKA-20030).
    """

    topic_id: bytes
    first_new_partition: int


class Membership:
    """One member of one group.

    Transitions:
        OUT     -> JOINING  `join`: there is a subscription
        JOINING -> MEMBER   an assignment
        MEMBER  -> AWAY     the stream broke; the session continues, and so does reading
        AWAY    -> MEMBER   an assignment on the next stream
        JOINING, MEMBER, AWAY -> JOINING  the coordinator has removed the member, or may have, because the session
                            timeout has passed since the last answered heartbeat was *sent*: owned partitions are lost
        any     -> OUT      `leave`: partitions that the caller has not released before are lost
        any     -> FAILED   a refusal that does not pass by itself: owned partitions are lost; `join` tries again

    Invariants: a partition is owned only after it was assigned; only a MEMBER or AWAY owns partitions; no other member
    gets an owned partition before `session_deadline_ms`, because the coordinator never ends the session earlier.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.state = MemberState.OUT
        self.member_epoch = 0
        self.assigned: dict[TopicPartition, Assigned] = {}
        """All partitions that the member may read."""
        self.owned: dict[TopicPartition, bytes] = {}
        """The partitions that the member reads, with topic ids: it has taken them and not yet released them."""
        self.lost: set[TopicPartition] = set()
        """Lost partitions that the application has not been told of; `told_of_loss` removes them."""
        self.note = ""
        self.assignor = ""
        self.error: RaftlogError | None = None
        """Why the membership has failed."""
        self.refusal: RaftlogError | None = None
        """The last error since the last assignment."""
        self.assignments = 0
        """How many assignments have arrived since the last join."""
        self.answered_changes = 0
        """How many of the subscription's `changes` the coordinator has acknowledged."""
        self.changes = 0
        self.session_deadline_ms = math.inf
        self._subscription = group_pb2.Subscription()
        self._session_timeout_ms = 0.0
        self._interval_ms = 0.0
        self._connected = False
        self._unanswered: tuple[float, int] | None = None
        """When the unanswered join or heartbeat was sent, and the value of `changes` then. At most one is unanswered,
        so that the coordinator knows which assignment the member had when it sent a heartbeat."""
        self._acknowledge = False
        """Whether no heartbeat was sent since the last assignment."""
        self._next_heartbeat_ms = math.inf
        self._told: dict[TopicPartition, bytes] = {}
        """The `_claims` that the coordinator was last told."""
        self._tell_subscription = False

    # What the application wants

    @property
    def wants_stream(self) -> bool:
        """Whether the consumer is a member, or wants to be."""
        return self.state in (MemberState.JOINING, MemberState.MEMBER, MemberState.AWAY)

    @property
    def is_member(self) -> bool:
        """Whether the consumer has a member epoch that, as far as it knows, has not ended."""
        return self.state in (MemberState.MEMBER, MemberState.AWAY)

    @property
    def follows(self) -> bool:
        """Whether the assignment may belong to the current subscription, and not to an earlier one."""
        return {part.topic for part in self.assigned} <= set(self._subscription.topics)

    def subscribe(self, topics: Iterable[str], pattern: str) -> bool:
        """Set the subscription; return whether it has changed."""
        wanted = group_pb2.Subscription(topics=sorted(topics), pattern=pattern, assignor=self.identity.assignor)
        if wanted == self._subscription:
            return False
        self._subscription = wanted
        self.changes += 1
        self._tell_subscription = True
        return True

    def join(self) -> None:
        """Start to join, unless the member has joined or is joining."""
        if self.state in (MemberState.OUT, MemberState.FAILED):
            self._begin_anew()

    def leave(self) -> group_pb2.GroupRequest | None:
        """Leave; return the request for the coordinator, or None if it does not know of the member."""
        known = self.wants_stream and self._connected
        self._lose_all()
        self.state = MemberState.OUT
        if known:
            keep = bool(self.identity.instance_id)
            return group_pb2.GroupRequest(leave=group_pb2.LeaveGroup(keep_assignment=keep))
        return None

    # The stream

    def opened(self, now_ms: float) -> group_pb2.GroupRequest:
        """A stream to the coordinator is open: return its first request."""
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
        """Apply an assignment; the first one on a stream answers the join."""
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
        """Apply the answer to a heartbeat."""
        if self.state is MemberState.MEMBER:
            self.member_epoch = max(self.member_epoch, message.member_epoch)  # an assignment may have overtaken it
            self._answered()

    def on_error(self, error: RaftlogError) -> None:
        """Apply an error from the coordinator, or from a broker that the client took for the coordinator."""
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
        """Whether an answer is so late that the caller must give the stream up."""
        return now_ms >= self._silent_ms()

    def expire(self, now_ms: float) -> bool:
        """Lose all owned partitions if the session may be over; return whether that happened now."""
        if not self.is_member or now_ms < self.session_deadline_ms:
            return False
        self._begin_anew()
        return True

    def next_ms(self) -> float:
        """Return when `heartbeat`, `is_silent` or `expire` is next due."""
        heartbeat_ms = math.inf
        if self._may_send():
            heartbeat_ms = -math.inf if self._has_news() else self._next_heartbeat_ms
        return min(heartbeat_ms, self._silent_ms(), self.session_deadline_ms)

    # Releasing and taking partitions

    def to_release(self) -> list[TopicPartition]:
        """Return the owned partitions that are no longer assigned."""
        return sorted(
            part
            for part, topic_id in self.owned.items()
            if part not in self.assigned or self.assigned[part].topic_id != topic_id
        )

    def to_take(self) -> list[TopicPartition]:
        """Return the assigned partitions that are not owned, except those to release first under another topic id."""
        return sorted(self.assigned.keys() - self.owned.keys())

    def released(self, partitions: Iterable[TopicPartition]) -> None:
        """The consumer no longer reads these, and has committed their offsets."""
        for part in partitions:
            self.owned.pop(part, None)

    def taken(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Assigned]:
        """The consumer starts to read these; return those that are still assigned."""
        found = {part: self.assigned[part] for part in partitions if part in self.assigned and part not in self.owned}
        if not self.is_member:
            return {}
        self.owned |= {part: assigned.topic_id for part, assigned in found.items()}
        return found

    def told_of_loss(self, partitions: Iterable[TopicPartition]) -> None:
        """The application has been told that these are lost."""
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
        """Return the partitions that the member reads or may start to read at any moment, with topic ids.

        The latter are included so that no heartbeat after an assignment gives up a partition that the member may still
        take.
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
