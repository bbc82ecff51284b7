"""A world in which members of Kafka's classic protocol come and go beside those that let the coordinator assign.

The group moves from one type to the other while its members read. The world checks its invariants for members of both
kinds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from broker.coordinator.core import Reply
from broker.coordinator.groups.classic.commands import (
    Alive,
    HeartbeatClassic,
    JoinClassic,
    Joined,
    LeaveClassic,
    SyncClassic,
    Synced,
)
from broker.coordinator.groups.classic.consumer import assigned_partitions, read_said, written_assignment
from broker.coordinator.groups.classic.machine import ClassicConfig
from broker.coordinator.groups.commands import CommitOffsets, FetchOffsets, GroupConfig
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import FencedInstanceId, MemberIdRequired, RaftlogError, RebalanceInProgress, UnknownMemberId
from raftlog.v1 import group_pb2
from tests.simulation.groups.client import PATIENCE_MS, TICK_MS, Client
from tests.simulation.groups.world import World
from tests.support.group_driver import owned_message

if TYPE_CHECKING:
    from google.protobuf.message import Message

SESSION_MS: Final = 6000
REBALANCE_MS: Final = 8000
"""Longer than a session: a rebalance of a classic group goes on without those that have not joined, and its leader
gives away what they may still read, as in Kafka. So by then they know that they are no members."""
JOIN_PATIENCE_MS: Final = 15_000.0


def subscription(topics: Iterable[str], owned: dict[str, list[int]]) -> bytes:
    """Return a consumer's subscription, in version 1."""
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
    parts = [struct.pack(">hi", 1, len(tuple(topics))), names, struct.pack(">ii", -1, len(owned))]
    for name, numbers in owned.items():
        parts.append(struct.pack(">h", len(name)) + name.encode())
        parts.append(struct.pack(f">i{len(numbers)}i", len(numbers), *numbers))
    return b"".join(parts)


class ClassicClient(Client):
    """A consumer of the classic protocol, eager or cooperative; it assigns where it leads."""

    def __init__(self, world: BothProtocols, name: str, topics: tuple[str, ...], instance: str) -> None:
        super().__init__(world, name, topics, instance)
        self._cooperative = world.cooperative
        self._ids = count()
        self.member_id = ""
        self.generation = -1
        self._phase = "join"
        self._call = 0
        """The number of the call whose answer is waited for; 0: none."""
        self._calls = count(1)
        self._sent_at_ms = 0.0
        self._arrived_ms = 0.0
        self._beat: int = 0
        self._beat_at_ms = 0.0

    def leave(self) -> None:
        """Stop, and say so, if it is not a static member: those do not."""
        if self.member_id and not self.instance and self._world.now_ms >= self._paused_until_ms:
            for partition in list(self.owned):
                self._commit(partition)
            self._ask(LeaveClassic(lambda _: None, "g", ((self.member_id, ""),)), lambda _: None)
        self.kill()

    def _tick(self) -> None:
        if not self._awake(self._tick):
            return
        now_ms = self._world.now_ms
        if self._session_from_ms is not None and not self._session_lives and self._phase == "stable":
            self._lose()
        patience_ms = JOIN_PATIENCE_MS if self._phase == "join" else PATIENCE_MS
        if self._call and now_ms - self._sent_at_ms > patience_ms:
            self._call, self._phase = 0, "join"
        if not self._call and now_ms >= self._retry_at_ms:
            if self._phase == "join":
                self._join()
            elif self._phase == "stable":
                self._work()
                if self._resubscribed:
                    self._phase = "join"
                elif now_ms - self._heartbeat_at_ms >= self._world.config.heartbeat_interval_ms and not self._beat:
                    self._heartbeat()
                elif self._beat and now_ms - self._beat_at_ms > PATIENCE_MS:
                    self._beat = 0
        self._world.at(TICK_MS, self._tick)

    # Calls: over one connection, so that none overtakes another one

    def _ask(self, command: Any, answer: Callable[[Any], None]) -> None:
        world, term = self._world, self._world.term
        self._arrived_ms = max(self._arrived_ms, world.now_ms + world.delay())

        def heard(message: Message | Reply | RaftlogError | None) -> None:
            if self._awake(partial(heard, message)):
                answer(message)

        def arrive() -> None:
            if term == world.term:  # else it is lost, or its answer is, with the coordinator
                world.submit(replace(command, to=lambda message: world.at(world.delay(), lambda: heard(message))))

        world.at(self._arrived_ms - world.now_ms, arrive)

    def _await(self, command: Any, answer: Callable[[Any], None]) -> None:
        self._call = number = next(self._calls)
        self._sent_at_ms = self._world.now_ms

        def answered(message: Any) -> None:
            if self._call == number:
                self._call = 0
                answer(message)

        self._ask(command, answered)

    def _join(self) -> None:
        if self._session_from_ms is not None and not self._session_lives:
            self._lose()
            return
        if not self._cooperative:
            self._release(list(self.owned))
        self._resubscribed = False
        self._beat = 0
        said = subscription(self.topics, self._names(self.owned))
        protocol = "coop" if self._cooperative else "range"
        self._await(
            JoinClassic(
                None,
                "g",
                self.member_id,
                f"{self.name}-{next(self._ids)}",
                self.instance,
                "client",
                "10.0.0.1",
                "consumer",
                ((protocol, said),),
                SESSION_MS,
                REBALANCE_MS,
                requires_id=True,
            ),
            self._joined,
        )

    def _joined(self, message: Any) -> None:
        if isinstance(message, Joined) and isinstance(message.error, MemberIdRequired):
            self.member_id = message.member_id
        elif isinstance(message, Joined):
            self.member_id, self.generation = message.member_id, message.generation
            self._sync(message)
        else:
            self._refused(message)

    def _sync(self, joined: Joined) -> None:
        self._phase = "sync"
        gives = self._assigned(joined) if joined.leader == self.member_id else {}
        self._await(
            SyncClassic(None, "g", self.member_id, self.instance, self.generation, "consumer", joined.protocol, gives),
            self._synced,
        )

    def _synced(self, message: Any) -> None:
        if not isinstance(message, Synced):
            self._refused(message)
            return
        self._phase = "stable"
        self._heartbeat_at_ms = self._world.now_ms
        self._session_from_ms = self._sent_at_ms
        if not self._session_lives:
            self._lose()
            return
        told = set(self._ids_of(assigned_partitions("consumer", message.assignment)))
        gone = sorted(self.owned.keys() - told)
        self._release(gone)
        for partition in sorted(told - self.owned.keys()):
            self.owned[partition] = None
            self._tenures[partition] = self._tenures.get(partition, 0) + 1
            self._ask_position(partition)
        if gone:
            self._phase = "join"

    def _heartbeat(self) -> None:
        self._beat = beat = next(self._calls)
        sent_ms = self._beat_at_ms = self._heartbeat_at_ms = self._world.now_ms

        def answered(message: Any) -> None:
            if self._beat != beat:
                return
            self._beat = 0
            if isinstance(message, Alive):
                self._session_from_ms = sent_ms
            elif self._phase == "stable":
                self._refused(message)

        self._ask(HeartbeatClassic(None, "g", self.member_id, self.instance, self.generation), answered)

    def _refused(self, error: Any) -> None:
        """Join again: as the same member where the group rebalances, else as another one that reads nothing."""
        self._phase = "join"
        if isinstance(error, RebalanceInProgress):
            return
        if isinstance(error, FencedInstanceId):
            self.owned = {}
            self.kill()
            return
        if isinstance(error, UnknownMemberId):
            self.member_id = ""
        self._lose()

    def _lose(self) -> None:
        for partition in list(self.owned):
            self._commit_late(partition)
        self.owned, self._leaving = {}, {}
        self.generation, self._session_from_ms = -1, None
        self._phase, self._call, self._beat = "join", 0, 0
        self._retry_at_ms = self._world.now_ms + self._world.random.uniform(0, 1000)

    # Partitions

    def _release(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            self._commit(partition)
            del self.owned[partition]

    def _commit(self, partition: TopicPartition) -> None:
        if self.owned[partition] is not None and self._session_lives:
            self._ask_commit(partition)

    def _commit_late(self, partition: TopicPartition) -> None:
        if self.owned[partition] is not None:
            self._ask_commit(partition)

    def _ask_commit(self, partition: TopicPartition) -> None:
        request = group_pb2.CommitOffsetsRequest(
            group_id="g",
            member_id=self.member_id,
            member_epoch=self.generation,
            instance_id=self.instance,
            offsets=self._offset(partition),
        )
        self._ask(CommitOffsets(None, request), lambda _: None)

    def _ask_position(self, partition: TopicPartition) -> None:
        if partition not in self.owned or self.owned[partition] is not None:
            return
        request = group_pb2.FetchOffsetsRequest(group_id="g", member_epoch=-1, partitions=owned_message([partition]))
        tenure = self._tenures[partition]

        def answer(message: Any) -> None:
            if not isinstance(message, group_pb2.FetchOffsetsResponse) or self._tenures.get(partition) != tenure:
                return
            (committed,) = message.offsets
            if not committed.HasField("error") and partition in self.owned and self.owned[partition] is None:
                self.owned[partition] = max(0, committed.offset)

        self._ask(FetchOffsets(None, request), answer)
        self._world.at(1000, lambda: self._ask_position(partition))

    def _names(self, partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for topic_id, number in sorted(partitions):
            topic = self._world.topics.by_id(topic_id)
            assert topic is not None, "a topic is gone, though this simulation deletes none"
            found.setdefault(topic.name, []).append(number)
        return found

    def _ids_of(self, topics: dict[str, list[int]]) -> Iterable[TopicPartition]:
        for name, numbers in topics.items():
            topic = self._world.topics.by_name(name)
            assert topic is not None, "a topic is gone, though this simulation deletes none"
            yield from ((topic.topic_id, number) for number in numbers)

    def _assigned(self, joined: Joined) -> dict[str, bytes]:
        """Return the leader's assignment: all in turn; a cooperative one leaves out what others still have."""
        said = {member_id: read_said(metadata) for member_id, _, metadata in joined.members}
        owner = {
            (name, number): member_id
            for member_id, each in said.items()
            for name, numbers in each.owned.items()
            for number in numbers
        }
        gives: dict[str, dict[str, list[int]]] = {member_id: {} for member_id in said}
        for name, partitions in sorted(self._world.topics.counts.items()):
            readers = sorted(member_id for member_id, each in said.items() if name in each.topics)
            for number in range(partitions if readers else 0):
                reader = readers[number % len(readers)]
                if owner.get((name, number), reader) == reader:
                    gives[reader].setdefault(name, []).append(number)
        return {member_id: written_assignment(1, topics) for member_id, topics in gives.items()}


class BothProtocols(World):
    """Members of both protocols; the classic ones are all eager, or all cooperative, as the seed says."""

    def __init__(self, seed: int, *, members: int = 4, faults: bool = True) -> None:
        self.cooperative = seed % 2 == 1
        self.types: set[str] = set()
        """The types that the group has had."""
        super().__init__(seed, members=members, faults=faults)

    def _make_config(self) -> GroupConfig:
        return GroupConfig(
            session_timeout_ms=6000,
            heartbeat_interval_ms=1500,
            rebalance_timeout_ms=4000,
            classic=ClassicConfig(initial_rebalance_delay_ms=200),
        )

    def _check(self) -> None:
        super()._check()
        group = self.core.groups.get("g")
        if group is not None and group.head is not None and group.members:
            self.types.add("consumer" if group.head.classic is None else "classic")

    def _make_client(self, name: str, topics: tuple[str, ...], instance: str) -> Client:
        # Mostly of one kind for a while, so that the group is of either type, and moves.
        share = 0.9 if int(self.now_ms // 20_000) % 2 else 0.2
        if self.random.random() < share:
            return ClassicClient(self, name, topics, instance)
        return super()._make_client(name, topics, instance)
