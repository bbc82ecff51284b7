"""A member as small as it can be: it does as it is told, in its own time, and knows when its session is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from broker.coordinator.groups.commands import CommitInSession, CommitOffsets, FetchOffsets, Heartbeat, Join, Leave
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import RaftlogError
from raftlog.v1 import group_pb2
from tests.simulation.groups.network import Link
from tests.support.group_driver import owned_message

if TYPE_CHECKING:
    from tests.simulation.groups.world import World

TICK_MS = 150.0
PATIENCE_MS = 2500.0
"""Without an answer for so long a stream is given up, and another one opened."""


class Client:
    """`owned` is what it reads; `position` what it has read of it, once it knows where it begins."""

    require_stable = False

    def __init__(self, world: World, name: str, topics: tuple[str, ...], instance: str) -> None:
        self._world = world
        self.name = name
        self.topics = topics
        self.instance = instance
        self.alive = True
        self.slow = False
        self._paused_until_ms = 0.0
        self._waiting: list[Callable[[], None]] = []
        self.link: Link | None = None
        self._links: list[Link] = []
        self.epoch = 0
        self.owned: dict[TopicPartition, int | None] = {}
        self._tenures: dict[TopicPartition, int] = {}
        self._leaving: dict[TopicPartition, float] = {}
        self._session_from_ms: float | None = None
        self._answered = False
        self._asked_at_ms: float | None = None
        self._dirty = self._resubscribed = False
        self._heartbeat_at_ms = 0.0
        self._retry_at_ms = 0.0
        world.at(world.random.uniform(0, 500), self._tick)

    def believed(self) -> set[TopicPartition]:
        """Return what it owns as far as it can know."""
        return set(self.owned) if self.alive and self._session_lives else set()

    @property
    def _session_lives(self) -> bool:
        begun = self._session_from_ms
        return begun is not None and self._world.now_ms < begun + self._world.config.session_timeout_ms

    @property
    def _up_at_ms(self) -> float:
        """When everything it has sent over streams has arrived."""
        return max((link.up_at_ms for link in self._links), default=0.0)

    # What happens to it

    def kill(self) -> None:
        """As kill -9 does."""
        self.alive = False
        if self.link is not None:
            self.link.break_off(0)

    def pause(self, for_ms: float) -> None:
        """Pause its process."""
        self._paused_until_ms = self._world.now_ms + for_ms
        self._world.at(for_ms, self._resume)

    def _resume(self) -> None:
        if self._world.now_ms >= self._paused_until_ms:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                action()

    def subscribe(self, topics: tuple[str, ...]) -> None:
        """Read something else from now on."""
        self.topics = topics
        self._resubscribed = True

    def leave(self) -> None:
        """Stop, and say so if there is a stream on which that may be said."""
        paused = self._world.now_ms < self._paused_until_ms
        if self.link is not None and self._answered and not paused:
            for partition in list(self.owned):
                self._commit(partition)
            request = group_pb2.LeaveGroup(keep_assignment=bool(self.instance) and self._world.random.random() < 0.7)
            self.link.send(Leave(self.link.deliver, "g", self.name, request))
        self.kill()

    # What it does

    def _awake(self, action: Callable[[], None]) -> bool:
        """Whether it can act now; if it is only paused, it does so later."""
        if self.alive and self._world.now_ms < self._paused_until_ms:
            self._waiting.append(action)
            return False
        return self.alive

    def _tick(self) -> None:
        if not self._awake(self._tick):
            return
        now_ms = self._world.now_ms
        if self._session_from_ms is not None and not self._session_lives:
            self._lose()
        elif self._asked_at_ms is not None and now_ms - self._asked_at_ms > PATIENCE_MS and self.link is not None:
            self.link.break_off(0)
            self.link = None
        if self.link is None:
            if now_ms >= self._retry_at_ms:
                self._join()
        elif self._answered:
            self._work()
            due = now_ms - self._heartbeat_at_ms >= self._world.config.heartbeat_interval_ms
            if self._asked_at_ms is None and (due or self._dirty or self._resubscribed):
                self._heartbeat()
        self._world.at(TICK_MS, self._tick)

    def _join(self) -> None:
        self.link = self._world.open(self)
        self._links.append(self.link)
        self._answered = False
        self._asked_at_ms = self._heartbeat_at_ms = self._world.now_ms
        request = group_pb2.JoinGroup(
            group_id="g",
            member_id=self.name,
            member_epoch=self.epoch,
            instance_id=self.instance,
            subscription=self._subscription(),
            owned=owned_message(self.owned),
        )
        self.link.send(Join(self.link.deliver, request))

    def _subscription(self) -> group_pb2.Subscription:
        self._resubscribed = False
        return group_pb2.Subscription(topics=self.topics)

    def _heartbeat(self) -> None:
        assert self.link is not None
        request = group_pb2.GroupHeartbeat(member_epoch=self.epoch)
        if self._dirty:
            request.owned.partitions.extend(owned_message(self.owned))
            request.owned.SetInParent()
        if self._resubscribed:
            request.subscription.CopyFrom(self._subscription())
        self._dirty = False
        self._asked_at_ms = self._heartbeat_at_ms = self._world.now_ms
        self.link.send(Heartbeat(self.link.deliver, "g", self.name, request))

    def _work(self) -> None:
        for partition, position in self.owned.items():
            if position is not None and partition not in self._leaving:
                self.owned[partition] = position + self._world.random.randint(0, 3)
                if self._world.random.random() < 0.2:
                    self._commit(partition)
        for partition, until_ms in list(self._leaving.items()):
            if self._world.now_ms >= until_ms:
                self._commit(partition)
                self._commit_late(partition)
                del self._leaving[partition], self.owned[partition]
                self._dirty = True

    def _offset(self, partition: TopicPartition) -> list[group_pb2.CommitOffset]:
        return [
            group_pb2.CommitOffset(topic_id=partition[0], partition=partition[1], offset=self.owned[partition] or 0)
        ]

    def _commit(self, partition: TopicPartition) -> None:
        if self.link is not None and self.owned[partition] is not None:
            request = group_pb2.SessionCommit(member_epoch=self.epoch, offsets=self._offset(partition))
            self.link.send(CommitInSession(self.link.deliver, "g", self.name, request))

    def _commit_late(self, partition: TopicPartition) -> None:
        """The last commit of its time with a partition, by a call that may take long: others may be ahead by then.

        It does not overtake its own commits that are under way, as no client may let it.
        """
        if self.owned[partition] is not None:
            request = group_pb2.CommitOffsetsRequest(
                group_id="g", member_id=self.name, member_epoch=self.epoch, offsets=self._offset(partition)
            )
            self._world.call(lambda to: CommitOffsets(to, request), lambda message: None, self._up_at_ms)

    def _lose(self) -> None:
        """The session is over: it reads nothing, and joins anew."""
        for partition in self.owned:
            self._commit_late(partition)
        if self.link is not None:
            self.link.break_off(0)
        self.link = self._session_from_ms = self._asked_at_ms = None
        self.epoch = 0
        self.owned, self._leaving = {}, {}
        self._retry_at_ms = self._world.now_ms + self._world.random.uniform(0, 1000)

    # What it is told

    def lost_link(self, link: Link) -> None:
        if self.link is link and self._awake(partial(self.lost_link, link)):
            self.link = self._asked_at_ms = None

    def receive(self, link: Link, message: Message | RaftlogError | None) -> None:
        if not self._awake(partial(self.receive, link, message)) or self.link is not link:
            return
        if self._session_from_ms is not None and not self._session_lives:
            self._lose()
            return
        if not isinstance(message, group_pb2.GroupResponse):
            self._lose()
        elif message.HasField("assignment"):
            self._take(message.assignment)
        elif message.HasField("heartbeat"):
            self._session_from_ms = self._asked_at_ms
            self._asked_at_ms = None

    def _take(self, assignment: group_pb2.GroupAssignment) -> None:
        if not self._answered:
            self._answered = True
            self._session_from_ms = self._asked_at_ms
            self._asked_at_ms = None
            if not self._session_lives:
                self._lose()
                return
        self.epoch = assignment.member_epoch
        told = {(topic.topic_id, number) for topic in assignment.topics for number in topic.partitions}
        for partition in sorted(self.owned.keys() - told):
            slow_ms = self._world.random.choice([0, 500, 3000, 9000]) if self.slow else 0
            self._leaving.setdefault(partition, self._world.now_ms + slow_ms)
        for partition in sorted(told - self.owned.keys()):
            self.owned[partition] = None
            self._tenures[partition] = self._tenures.get(partition, 0) + 1
            self._ask_position(partition)
        self._dirty = True

    def _ask_position(self, partition: TopicPartition) -> None:
        if partition not in self.owned or self.owned[partition] is not None:
            return
        request = group_pb2.FetchOffsetsRequest(
            group_id="g",
            member_id=self.name,
            member_epoch=self.epoch,
            partitions=owned_message([partition]),
            require_stable=self.require_stable,
        )
        tenure = self._tenures[partition]

        def answer(message: Message | RaftlogError | None) -> None:
            if not isinstance(message, group_pb2.FetchOffsetsResponse) or self._tenures.get(partition) != tenure:
                return
            (committed,) = message.offsets
            if not committed.HasField("error") and partition in self.owned and self.owned[partition] is None:
                self.owned[partition] = max(0, committed.offset)

        self._world.call(lambda to: FetchOffsets(to, request), answer)
        self._world.at(1000, lambda: self._ask_position(partition))
