"""The admin client asks every leader for its replicas, and moves partitions in pieces."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from raftlog import Admin, TopicPartition, aio
from raftlog.errors import InvalidReplicaAssignment, NoReassignmentInProgress, RetriableError, UnknownTopicOrPartition
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer
from tests.support.metadata import broker_epoch, create_topic, fence, register, uuid_of
from tests.support.patience import quickest_s


class Log(NamedTuple):
    topic_id: bytes
    partition: int


class Description(NamedTuple):
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    replicas: list[ReplicaView]


class Led(NamedTuple):
    log: Log
    described: Description

    def describe_replicas(self) -> Description:
        return self.described


@pytest.fixture
def server() -> Iterator[AdminServer]:
    """Three brokers; topic `a` has partition 0 led by broker 1, which knows of it, and partition 1 led by broker 2."""
    with AdminServer(3) as server:
        command = create_topic("a", 1, 2, 2)
        for replicas in ([1, 2], [2, 3]):
            command.create_topic.assignments.add(replicas=replicas)
        server.propose(command)
        views = [ReplicaView(1, 10, 0, 5_000, True), ReplicaView(2, 7, 3, 4_000, True)]
        server.cluster.partitions = [
            Led(Log(uuid_of(1), 0), Description(0, 1, 7, 10, views)),
            Led(Log(uuid_of(99), 0), Description(0, 0, 0, 0, views)),
        ]
        yield server


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def move_broker(server: AdminServer, broker_id: int, port: int) -> None:
    """Let a broker be somewhere else."""
    server.propose(register(broker_id, incarnation=broker_id, port=port))


def test_replicas_are_described_as_their_leader_sees_them(server: AdminServer) -> None:
    with Admin(server.bootstrap, retry_backoff_ms=5, retry_backoff_max_ms=5) as admin:
        found = admin.describe_replicas()
        assert list(found) == [TopicPartition("a", 0)], "the topic with the other id is not known"
        part = found[TopicPartition("a", 0)]
        assert (part.leader, part.log_start_offset, part.high_watermark, part.log_end_offset) == (1, 1, 7, 10)
        assert part.replicas[1] == (2, 7, 3, 1_000, True)
        assert admin.describe_replicas(["a"]) == found
        assert admin.describe_replicas([]) == {}
        with pytest.raises(UnknownTopicOrPartition):
            admin.describe_replicas(["zzz"])


def test_a_leader_that_says_nothing_does_not_keep_the_answers_of_others_back(server: AdminServer, silent: int) -> None:
    move_broker(server, 2, silent)

    def attempt() -> float:
        with Admin(server.bootstrap) as admin:  # a new one, which does not know who is silent
            started = time.monotonic()
            found = list(admin.describe_replicas(timeout=1.0))
            return time.monotonic() - started if found == [TopicPartition("a", 0)] else math.inf

    assert quickest_s(attempt, 1.1) < 1.1


def test_when_no_leader_answers_it_is_said(server: AdminServer, silent: int) -> None:
    move_broker(server, 1, silent)
    move_broker(server, 2, silent)
    with Admin(server.bootstrap) as admin, pytest.raises(RetriableError):
        admin.describe_replicas(timeout=0.6)


def test_moves_begin_are_listed_and_cancelled(server: AdminServer) -> None:
    part = TopicPartition("a", 1)
    with Admin(server.bootstrap) as admin:
        admin.alter_reassignments({part: [3, 1]})
        assert admin.list_reassignments() == {part: ([3, 1], [1], [2])}
        described = admin.describe_topic("a").partitions[1]
        assert (described.replicas, described.adding_replicas, described.removing_replicas) == ([3, 1, 2], [1], [2])
        admin.alter_reassignments({part: None})
        assert admin.list_reassignments() == {}
        with pytest.raises(NoReassignmentInProgress):
            admin.alter_reassignments({part: None})
        with pytest.raises(ValueError, match="None cancels"):
            admin.alter_reassignments({part: []})


def test_what_is_refused_is_raised_once_all_were_tried(server: AdminServer) -> None:
    command = create_topic("many", 2, 600, 1)
    server.propose(command)
    wanted: dict[TopicPartition, list[int] | None] = {TopicPartition("many", 0): [9], TopicPartition("many", 1): [8]}
    for partition in range(2, 600):
        wanted[TopicPartition("many", partition)] = [1, 2, 3]
    with Admin(server.bootstrap) as admin:
        with pytest.raises(InvalidReplicaAssignment, match=r"many-0: broker 9 .*; 2 of 600 were refused"):
            admin.alter_reassignments(wanted)
        assert len(admin.list_reassignments()) == 598


def test_offline_and_eligible_replicas_are_told(server: AdminServer) -> None:
    server.propose(fence(2, broker_epoch(server.image, 2)))

    async def scenario() -> None:
        async with aio.Admin(server.bootstrap) as admin:
            [topic] = await admin.describe_topics(["a"])
            assert [part.offline_replicas for part in topic.partitions] == [[2], [2]]
            assert topic.partitions[0].eligible_leader_replicas == []
            assert await admin.describe_topics() == [topic]

    asyncio.run(scenario())


def test_replicas_can_be_placed_by_hand(server: AdminServer) -> None:
    with Admin(server.bootstrap) as admin:
        created = admin.create_topic("placed", replica_assignment=[[3, 1], [1, 2]])
        assert created is not None
        assert [part.replicas for part in created.partitions] == [[3, 1], [1, 2]]
        with pytest.raises(InvalidReplicaAssignment):
            admin.create_topic("not", replica_assignment=[[3, 1], [1]])
