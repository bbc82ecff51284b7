"""Members of groups, with the real `Membership` inside: they join, read, commit, pause and die.

Invariants, checked after every step of a member:

one owner           no two members own a partition while both are sure of their sessions
commits stay        the next owner of a partition finds the acknowledged commits, or later ones
commits rise        an acknowledged commit is no lower than one that was acknowledged before it was sent
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from broker.coordinator.groups.coordinators import partition_for
from broker.coordinator.internal_topics import CONSUMER_OFFSETS
from raftlog._core.membership import Identity, Membership, MemberState
from raftlog.errors import RaftlogError, from_wire
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2
from raftmeta.image import MetadataImage
from tests.simulation.dataplane.broker import StreamEnded
from tests.simulation.network import Connection
from tests.simulation.parts import Violation
from tests.simulation.process import Host, Process

if TYPE_CHECKING:
    from tests.simulation.dataplane.group_schedule import GroupSimulation

TICK_S = (0.005, 0.03, 0.1)
LEAVE_S = 1.0
PAUSE_S = (0.3, 1.0, 2.0, 5.0)


class Offsets:
    """The acknowledged commits of one group."""

    def __init__(self) -> None:
        self.acknowledged: dict[TopicPartition, int] = {}

    def of(self, part: TopicPartition) -> int:
        """Return the highest offset that was acknowledged."""
        return self.acknowledged.get(part, 0)


class Member:
    """One life of a member of a group, on a host of its own; `again` makes the next one."""

    def __init__(self, simulation: GroupSimulation, number: int, group_id: str, instance_id: str = "") -> None:
        self.simulation = simulation
        self.group_id = group_id
        self.counts: Counter[str] = simulation.counts
        self._random = random.Random(simulation.random.random())
        self._number = number
        self._instance_id = instance_id
        self.host = Host(simulation, number)
        self._image = MetadataImage()
        self._begin()

    def _begin(self) -> None:
        self.process = Process(self.host)
        member_id = self._random.randbytes(16).hex()
        self.core = Membership(Identity(self.group_id, member_id, self._instance_id, client_id=f"m{self._number}"))
        self.core.subscribe([self.simulation.work_topic], "")
        self.core.join()
        self._connection: Connection | None = None
        self._leaving: Connection | None = None
        """Over this one it has left: nothing counts that still comes."""
        self._positions: dict[TopicPartition, int] = {}
        self._fetching: tuple[list[TopicPartition], dict[TopicPartition, int]] | None = None
        self._commits: dict[int, tuple[dict[TopicPartition, int], dict[TopicPartition, int]]] = {}
        self._correlation_id = 0
        self._dirty: set[TopicPartition] = set()
        self._next_look_s = 0.0
        self.process.after(self._random.uniform(0, 0.5), self._tick)
        self.process.after(self._random.uniform(*self.simulation.member_life_s), self._misfortune)

    def now_ms(self) -> float:
        """Time on its host."""
        return self.host.local_s() * 1_000

    def sure_of(self) -> dict[TopicPartition, bytes]:
        """Return what it owns, as it would act on it now."""
        return self.core.owned if self.now_ms() < self.core.session_deadline_ms else {}

    # Misfortune

    def _misfortune(self) -> None:
        simulation = self.simulation
        if simulation.winding_down:
            return
        match self._random.choice(("dies", "stands still", "leaves", "loses its connection")):
            case "dies":
                self.counts["members died"] += 1
                self.process.die(with_machine=False)
                simulation.scheduler.after(self._random.choice((0.01, 0.5, 3.0)), self._begin)
                self.core.owned.clear()
                return
            case "stands still":
                self.counts["members paused"] += 1
                self.process.pause()
                simulation.scheduler.after(self._random.choice(PAUSE_S), self._stir, self._connection)
            case "leaves":
                self.counts["members left"] += 1
                self._leave()
            case _:
                self._lose_connection()
        self.process.after(self._random.uniform(*simulation.member_life_s), self._misfortune)

    def _stir(self, connection: Connection | None) -> None:
        """Go on; a heartbeat that was ready when it began to stand still goes out before it looks at its clock."""
        if connection is not None and connection is self._connection and self.core.is_member:
            late = group_pb2.GroupHeartbeat(member_epoch=self.core.member_epoch)
            connection.send(group_pb2.GroupRequest(heartbeat=late))
        self.process.resume()

    def _leave(self) -> None:
        goodbye = self.core.leave()
        if goodbye is not None and self._connection is not None:
            self._connection.send(goodbye)
            self._leaving = self._connection
            self.process.after(LEAVE_S, self._give_up, self._connection)
        elif self._connection is not None:
            self._lose_connection()
        self._positions.clear()
        self.process.after(self._random.choice((0.05, 1.0)), self.core.join)

    def _give_up(self, connection: Connection) -> None:
        if self._connection is connection:
            self._lose_connection()

    def _lose_connection(self) -> None:
        if self._connection is not None:
            self._connection.break_now()
        self._lost()

    def _lost(self) -> None:
        self._connection = None
        self._fetching = None
        self._commits.clear()
        self.core.closed()

    # What it does

    def _tick(self) -> None:
        self.process.after(self._random.choice(TICK_S), self._tick)
        now_ms = self.now_ms()
        if self.core.expire(now_ms):
            self.counts["sessions over"] += 1
            if self._connection is not None:
                self._lose_connection()
        self._forget_lost()
        self.simulation.check_owners(self)
        if self._connection is None:
            self._connect()
        elif self.core.is_silent(now_ms):
            self._lose_connection()
        if self._connection is None or self._connection is self._leaving:
            return
        self._move()
        heartbeat = self.core.heartbeat(now_ms)
        if heartbeat is not None:
            self._connection.send(heartbeat)

    def _forget_lost(self) -> None:
        self.core.told_of_loss(list(self.core.lost))
        for part in [part for part in self._positions if part not in self.core.owned]:
            del self._positions[part]
            self._dirty.discard(part)

    def _connect(self) -> None:
        now_s = self.simulation.scheduler.now_s
        if not self.core.wants_stream or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._random.uniform(0.02, 0.3)
        if self._random.random() < 0.8:
            self._image = self.simulation.invariants.truth
        topic = self._image.topic(CONSUMER_OFFSETS)
        if topic is None:
            return
        leader = topic.partitions[partition_for(self.group_id, len(topic.partitions))].leader
        broker = self.simulation.data_broker(leader)
        connection = None if broker is None else self.simulation.network.connect(self.process, broker.process)
        if connection is None or broker is None:
            return
        self._connection = connection

        def hear(message: Any) -> None:
            if self._connection is connection:
                self._hear(message)

        def lost() -> None:
            if self._connection is connection:
                self._lost()

        connection.opener_hears(hear, lost)
        broker.accept_member(connection)
        connection.send(self.core.opened(self.now_ms()))

    def _move(self) -> None:
        """Let go, take, read on and commit."""
        assert self._connection is not None
        leaving = self.core.to_release()
        unsaved = [part for part in leaving if part in self._dirty]
        if unsaved and self._random.random() < 0.8:
            self._commit(unsaved)
        elif leaving and (self._random.random() < 0.5 or not self._commits):
            self.core.released(leaving)
            self._forget_lost()
        taken = self.core.taken(self.core.to_take()) if self._random.random() < 0.7 else {}
        self.counts["partitions taken"] += len(taken)
        if taken:
            self.simulation.check_owners(self)
        unknown = [part for part in self.core.owned if part not in self._positions]
        if unknown and self._fetching is None:
            self._fetch(unknown)
        for part in self._positions:
            if self._random.random() < 0.3:
                self._positions[part] += self._random.randrange(1, 5)
                self._dirty.add(part)
        if self._dirty and self._random.random() < 0.2:
            self._commit(sorted(self._dirty))

    def _fetch(self, parts: list[TopicPartition]) -> None:
        assert self._connection is not None
        self._fetching = (parts, {part: self.simulation.offsets[self.group_id].of(part) for part in parts})
        self._connection.send(
            group_pb2.FetchOffsetsRequest(
                group_id=self.group_id,
                member_id=self.core.identity.member_id,
                member_epoch=self.core.member_epoch,
                partitions=[
                    group_pb2.TopicPartitions(
                        topic=part.topic, topic_id=self.core.owned[part], partitions=[part.partition]
                    )
                    for part in parts
                ],
            )
        )

    def _commit(self, parts: list[TopicPartition]) -> None:
        assert self._connection is not None
        self._correlation_id += 1
        known = self.simulation.offsets[self.group_id]
        sent = {part: self._positions[part] for part in parts if part in self._positions and part in self.core.owned}
        self._commits[self._correlation_id] = (sent, {part: known.of(part) for part in sent})
        self._dirty.difference_update(sent)
        commit = group_pb2.SessionCommit(
            correlation_id=self._correlation_id,
            member_epoch=self.core.member_epoch,
            offsets=[
                group_pb2.CommitOffset(
                    topic=part.topic,
                    topic_id=self.core.owned[part],
                    partition=part.partition,
                    offset=offset,
                    leader_epoch=-1,
                )
                for part, offset in sent.items()
            ],
        )
        self._connection.send(group_pb2.GroupRequest(commit=commit))

    # What it hears

    def _hear(self, message: Any) -> None:
        if isinstance(message, StreamEnded):
            self._lost()
        elif self._connection is self._leaving:
            pass
        elif isinstance(message, RaftlogError):  # of the call
            self._fetching = None
            self.counts[f"fetch offsets {type(message).__name__}"] += 1
        elif isinstance(message, group_pb2.FetchOffsetsResponse):
            self._fetched(message)
        else:
            self._hear_response(message)

    def _hear_response(self, response: group_pb2.GroupResponse) -> None:
        match response.WhichOneof("response"):
            case "assignment":
                self.counts["assignments"] += 1
                self.core.on_assignment(response.assignment, self.now_ms())
            case "heartbeat":
                self.counts["heartbeats"] += 1
                self.core.on_heartbeat(response.heartbeat)
            case "error":
                error = from_wire(response.error)
                self.counts[f"session {type(error).__name__}"] += 1
                self.core.on_error(error)
                if self.core.state is MemberState.FAILED:
                    self.process.after(0.5, self.core.join)
            case "commit":
                self._committed(response.commit)
        self._forget_lost()

    def _committed(self, result: group_pb2.SessionCommitResult) -> None:
        sent, before = self._commits.pop(result.correlation_id)
        known = self.simulation.offsets[self.group_id]
        for number, (part, offset) in enumerate(sent.items()):
            error = result.error if result.HasField("error") else None
            if error is None and result.results[number].HasField("error"):
                error = result.results[number].error
            if error is not None:
                self.counts[f"commit {type(from_wire(error)).__name__}"] += 1
                continue
            self.counts["commits"] += 1
            if offset < before[part]:
                raise Violation(
                    f"{self.group_id}: the committed offset of {part} goes back to {offset}, but {before[part]} "
                    "was committed before the request"
                )
            known.acknowledged[part] = max(known.of(part), offset)

    def _fetched(self, response: group_pb2.FetchOffsetsResponse) -> None:
        if self._fetching is None:
            return
        (parts, before), self._fetching = self._fetching, None
        if response.HasField("error"):
            self.counts[f"fetch offsets {type(from_wire(response.error)).__name__}"] += 1
            return
        for part, found in zip(parts, response.offsets, strict=True):
            if found.HasField("error"):
                self.counts[f"fetch offsets {type(from_wire(found.error)).__name__}"] += 1
                continue
            offset = max(found.offset, 0)
            if offset < before[part]:
                raise Violation(
                    f"{self.group_id}: the committed offset of {part} is read as {offset}, but the commit of "
                    f"{before[part]} was acknowledged"
                )
            self.counts["offsets found"] += found.offset >= 0
            if part in self.core.owned:
                self._positions.setdefault(part, offset)
