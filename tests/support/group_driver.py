"""A group coordinator in memory: the frame's part played by hand, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import md5

from google.protobuf.message import Message

from broker.coordinator.core import Notice, Reply
from broker.coordinator.groups.assignors import BUILT_IN, Assignor
from broker.coordinator.groups.classic.commands import JoinClassic
from broker.coordinator.groups.commands import (
    Command,
    CommitInSession,
    CommitOffsets,
    CommitTransactionOffsets,
    Decision,
    DescribeGroup,
    DescriptionRoom,
    DescriptionShare,
    Disconnected,
    EndTransactionOffsets,
    FetchOffsets,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Now,
)
from broker.coordinator.groups.coordinator import GroupCoordinator, Rest
from broker.coordinator.groups.topics import Topic, TopicPartition
from broker.coordinator.user_bound import (
    MOST_KEPT_BYTES,
    MOST_MEMBERS_BYTES,
    NO_BOUND,
    UserBound,
    kept_bound,
    members_bound,
)
from raftlog.errors import RaftlogError
from raftlog.v1 import group_pb2

WALL_MS = 1_700_000_000_000


def topic_id(name: str, incarnation: int = 0) -> bytes:
    """Return the id that a topic has in these tests."""
    return md5(f"{name}/{incarnation}".encode(), usedforsecurity=False).digest()


class Topics:
    """Metadata with these topics; not changed after it was handed out."""

    def __init__(self, counts: Mapping[str, int], incarnations: Mapping[str, int] | None = None) -> None:
        self.counts = dict(counts)
        self.incarnations = dict(incarnations or {})
        topics = [Topic(topic_id(name, self.incarnations.get(name, 0)), name, n) for name, n in counts.items()]
        self._names = {topic.name: topic for topic in topics}
        self._ids = {topic.topic_id: topic for topic in topics}

    def by_name(self, name: str) -> Topic | None:
        return self._names.get(name)

    def by_id(self, topic_id: bytes) -> Topic | None:
        return self._ids.get(topic_id)


@dataclass(eq=False)
class Stream:
    """One stream, or call: the messages that it was sent, in order."""

    name: str = ""
    got: list[Message | Reply | RaftlogError | None] = field(default_factory=list)

    @property
    def last(self) -> Message | Reply | RaftlogError | None:
        return self.got[-1]

    @property
    def error(self) -> RaftlogError:
        """The stream's last word."""
        assert isinstance(self.got[-1], RaftlogError), self.got
        return self.got[-1]

    @property
    def assignments(self) -> list[group_pb2.GroupAssignment]:
        return [
            sent.assignment
            for sent in self.got
            if isinstance(sent, group_pb2.GroupResponse) and sent.HasField("assignment")
        ]

    @property
    def assignment(self) -> group_pb2.GroupAssignment:
        return self.assignments[-1]


def partitions_of(assignment: group_pb2.GroupAssignment) -> set[tuple[str, int]]:
    """Return the partitions of an assignment, by topic name."""
    return {(topic.topic, number) for topic in assignment.topics for number in topic.partitions}


def owned_message(partitions: Iterable[TopicPartition]) -> list[group_pb2.TopicPartitions]:
    return [group_pb2.TopicPartitions(topic_id=topic, partitions=[number]) for topic, number in sorted(partitions)]


def _wire(offsets: Mapping[TopicPartition, int], metadata: str = "") -> list[group_pb2.CommitOffset]:
    return [
        group_pb2.CommitOffset(topic_id=topic, partition=number, offset=offset, leader_epoch=-1, metadata=metadata)
        for (topic, number), offset in offsets.items()
    ]


class GroupDriver:
    """Decides, appends to `log`, replays, delivers at once; `restart` loads another coordinator from the log.

    `most_of_user`: groups that a user may make; None: any number. `user`: the one that asks. `most_kept_bytes`: what
    the offsets of a user's groups may take. `most_members_bytes`: what their members may take.
    """

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        config: GroupConfig | None = None,
        assignors: Mapping[str, Assignor] = BUILT_IN,
        most_of_user: int | None = None,
        most_kept_bytes: int = MOST_KEPT_BYTES,
        most_members_bytes: int = MOST_MEMBERS_BYTES,
    ) -> None:
        self.user = ""
        self.kept_bound = kept_bound(lambda user: self.core.kept.get(user, 0), most_kept_bytes)
        self.members_bound = members_bound(lambda user: self.core.members_bytes.get(user, 0), most_members_bytes)
        self.bound = NO_BOUND
        if most_of_user is not None:
            self.bound = UserBound(
                "max.groups.per.user", "groups", most_of_user, lambda user: self.core.made.counts.get(user, 0)
            )
        self.config = config or GroupConfig()
        self.topics = Topics(topics or {"t": 4})
        self.assignors = assignors
        self.now_ms = 0.0
        self.wall_ahead_ms = 0
        """By how much the broker's wall clock is ahead."""
        self.log: list[tuple[bytes, bytes | None]] = []
        self.core = self._new_core()
        self.core.loaded(self.now)

    def _new_core(self) -> GroupCoordinator:
        return GroupCoordinator(
            self.config,
            self.topics,
            self.assignors,
            bound=self.bound,
            kept_bound=self.kept_bound,
            members_bound=self.members_bound,
        )

    @property
    def now(self) -> Now:
        return Now(self.now_ms, WALL_MS + int(self.now_ms) + self.wall_ahead_ms)

    def decide(self, command: Command) -> Decision:
        """Play a command, and what is due then."""
        if isinstance(command, Join | JoinClassic | CommitOffsets | CommitTransactionOffsets):
            command = replace(command, user=command.user or self.user)
        decision = self._apply(self.core.decide(command, self.now))
        rest = decision.rest
        while rest is not None:
            assert isinstance(rest, Rest)
            piece = self._apply(self.core.decide(rest, self.now))
            rest = piece.rest
            decision.records += piece.records
            decision.effects += piece.effects
        self.settle()
        return decision

    def _apply(self, decision: Decision) -> Decision:
        for key, value in decision.records:
            self.log.append((key, value))
            self.core.replay(key, value)
        for effect in decision.effects:
            assert isinstance(effect.to, Stream)
            assert not isinstance(effect.message, Notice)
            effect.to.got.append(effect.message)
        return decision

    def settle(self) -> None:
        """Do what is due now."""
        for _ in range(1000):
            due_ms = self.core.next_deadline_ms()
            if due_ms is None or due_ms > self.now_ms:
                return
            self._apply(self.core.on_time(self.now))
        raise AssertionError("on_time was called 1,000 times, and still something is due")

    def wait(self, elapsed_ms: float) -> None:
        """Let time go by, stopping at every deadline."""
        until_ms = self.now_ms + elapsed_ms
        while (due_ms := self.core.next_deadline_ms()) is not None and due_ms <= until_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.settle()
        self.now_ms = until_ms

    def change_topics(self, counts: Mapping[str, int], incarnations: Mapping[str, int] | None = None) -> None:
        """Metadata has these topics now."""
        self.topics = Topics(counts, incarnations)
        self._apply(self.core.on_topics(self.topics, self.now))
        self.settle()

    def restart(self, log: Iterable[tuple[bytes, bytes | None]] | None = None) -> None:
        """Another broker coordinates: it has the log, or `log`."""
        self.core = self._new_core()
        for key, value in self.log if log is None else log:
            self.core.replay(key, value)
        self.core.loaded(self.now)
        self.settle()

    def join(
        self,
        member_id: str,
        *topics: str,
        group_id: str = "g",
        epoch: int = 0,
        owned: Iterable[TopicPartition] = (),
        instance: str = "",
        pattern: str = "",
        assignor: str = "",
        rebalance_timeout_ms: int = 0,
    ) -> Stream:
        """Let a member join on a new stream."""
        stream = Stream(member_id)
        request = group_pb2.JoinGroup(
            group_id=group_id,
            member_id=member_id,
            member_epoch=epoch,
            instance_id=instance,
            subscription=group_pb2.Subscription(topics=topics, pattern=pattern, assignor=assignor),
            owned=owned_message(owned),
            rebalance_timeout_ms=rebalance_timeout_ms,
        )
        self.decide(Join(stream, request, "10.0.0.1"))
        return stream

    def heartbeat(
        self,
        stream: Stream,
        epoch: int,
        owned: Iterable[TopicPartition] | None = None,
        group_id: str = "g",
        subscription: group_pb2.Subscription | None = None,
    ) -> None:
        """Send a heartbeat of the member that the stream is named after."""
        request = group_pb2.GroupHeartbeat(member_epoch=epoch, subscription=subscription)
        if owned is not None:
            request.owned.partitions.extend(owned_message(owned))
            request.owned.SetInParent()
        self.decide(Heartbeat(stream, group_id, stream.name, request))

    def follow(self, stream: Stream, group_id: str = "g") -> None:
        """Let the member do at once as it was told, and say so."""
        for _ in range(10):
            last = stream.assignment
            owned = {(topic.topic_id, number) for topic in last.topics for number in topic.partitions}
            self.heartbeat(stream, last.member_epoch, owned, group_id)
            if stream.assignment is last:
                return
        raise AssertionError("ten heartbeats in a row were answered with another assignment")

    def leave(self, stream: Stream, *, keep: bool = False, group_id: str = "g") -> None:
        self.decide(Leave(stream, group_id, stream.name, group_pb2.LeaveGroup(keep_assignment=keep)))

    def disconnect(self, stream: Stream, group_id: str = "g") -> None:
        self.decide(Disconnected(stream, group_id, stream.name))

    def commit(
        self,
        offsets: Mapping[TopicPartition, int],
        member_id: str = "",
        epoch: int = -1,
        group_id: str = "g",
        metadata: str = "",
    ) -> group_pb2.CommitOffsetsResponse:
        """Commit by a unary call."""
        request = group_pb2.CommitOffsetsRequest(
            group_id=group_id,
            member_id=member_id,
            member_epoch=epoch,
            offsets=_wire(offsets, metadata),
        )
        return self._committed(lambda call: CommitOffsets(call, request))

    def commit_in_transaction(
        self,
        producer: tuple[int, int],
        offsets: Mapping[TopicPartition, int],
        member_id: str = "",
        epoch: int = -1,
        group_id: str = "g",
        instance: str = "",
    ) -> group_pb2.CommitOffsetsResponse:
        """Send offsets in a transaction of a producer: its id and epoch."""
        request = group_pb2.CommitTransactionOffsetsRequest(
            group_id=group_id,
            transactional_id=f"producer-{producer[0]}",
            producer_id=producer[0],
            producer_epoch=producer[1],
            member_id=member_id,
            member_epoch=epoch,
            instance_id=instance,
            offsets=_wire(offsets),
        )
        return self._committed(lambda call: CommitTransactionOffsets(call, request))

    def _committed(self, make: Callable[[Stream], Command]) -> group_pb2.CommitOffsetsResponse:
        """Make a unary call; return its response, or raise its error."""
        call = Stream()
        self.decide(make(call))
        if isinstance(call.last, RaftlogError):
            raise call.last
        assert isinstance(call.last, group_pb2.CommitOffsetsResponse)
        return call.last

    def mark(self, producer: tuple[int, int], *, commit: bool, group_id: str = "g") -> Decision:
        """Bring the marker of a producer's transaction: its id, and the epoch of the transaction."""
        call = Stream()
        decision = self.decide(EndTransactionOffsets(call, group_id, producer[0], producer[1] + 1, commit))
        assert call.got == [group_pb2.CommitOffsetResult()], (
            f"the group answered a marker with {call.got}, not with one empty result"
        )
        return decision

    def commit_in_session(
        self, stream: Stream, epoch: int, offsets: Mapping[TopicPartition, int], group_id: str = "g"
    ) -> group_pb2.SessionCommitResult:
        """Commit over a member's stream."""
        request = group_pb2.SessionCommit(
            correlation_id=7,
            member_epoch=epoch,
            offsets=[
                group_pb2.CommitOffset(topic_id=topic, partition=number, offset=offset)
                for (topic, number), offset in offsets.items()
            ],
        )
        self.decide(CommitInSession(stream, group_id, stream.name, request))
        assert isinstance(stream.last, group_pb2.GroupResponse)
        return stream.last.commit

    def committed(
        self,
        group_id: str = "g",
        member_id: str = "",
        epoch: int = -1,
        partitions: Iterable[TopicPartition] = (),
        *,
        stable: bool = False,
    ) -> group_pb2.FetchOffsetsResponse:
        """Ask for committed offsets; all, unless some are named."""
        call = Stream()
        asked = owned_message(partitions)
        self.decide(
            FetchOffsets(
                call,
                group_pb2.FetchOffsetsRequest(
                    group_id=group_id,
                    member_id=member_id,
                    member_epoch=epoch,
                    partitions=asked,
                    all=not asked,
                    require_stable=stable,
                ),
            )
        )
        if isinstance(call.last, RaftlogError):
            raise call.last
        assert isinstance(call.last, group_pb2.FetchOffsetsResponse)
        return call.last

    def described(self, group_id: str = "g", max_bytes: int = 1 << 20) -> group_pb2.GroupDescription:
        call = Stream()
        self.decide(DescribeGroup(call, group_id, DescriptionShare(DescriptionRoom(max_bytes))))
        if isinstance(call.last, RaftlogError):
            raise call.last
        assert isinstance(call.last, group_pb2.GroupDescription)
        return call.last
