"""Lines of the audit log become records: in the background, bounded, in partitions that this broker leads."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from broker.security.audit import Audit, note_change
from broker.security.audit_topic import MAX_BATCH, MAX_WAITING, AuditTopic
from raftlog.errors import CoordinatorNotAvailable, NotEnoughReplicas, RaftlogError
from raftlog.format import decode_batch
from raftlog.types import TopicPartition
from raftmeta.image import TopicImage
from tests.support.scram_parts import Hands

AUDIT_LOG = logging.getLogger("raftlog.audit")


class Partition:
    """A partition that keeps what is appended."""

    leader_epoch = 3

    def __init__(self, number: int, *, leads: bool = True, topic: str = "__audit") -> None:
        self.topic_partition = TopicPartition(topic, number)
        self.leads = leads
        self.refuses: RaftlogError | None = None
        self.written: list[dict[str, Any]] = []
        self.keys: list[bytes] = []

    def append(self, batch: bytes, epoch: int, answer: object, *, all_replicas: bool, checked: object) -> None:
        assert (epoch, answer, all_replicas) == (self.leader_epoch, None, True)
        if self.refuses is not None:
            raise self.refuses
        columns = decode_batch(batch, 0).columns
        self.written += [json.loads(value) for value in columns["value"].to_pylist()]
        self.keys += columns["key"].to_pylist()


class World:
    def __init__(self, *partitions: Partition) -> None:
        self.partitions = list(partitions)
        self.missing: RaftlogError | None = None
        self.topic = AuditTopic(7, self._needed, lambda: self.partitions, lambda: 1_000)  # type: ignore[arg-type,return-value] # stand-ins

    async def _needed(self) -> TopicImage:
        if self.missing is not None:
            raise self.missing
        return TopicImage("__audit", b"", ())

    def write(self) -> bool:
        return asyncio.run(self.topic.write())


@pytest.fixture
def world() -> Iterator[World]:
    made = World(Partition(0), Partition(1, leads=False), Partition(2, topic="orders"))
    level = AUDIT_LOG.level
    AUDIT_LOG.setLevel(logging.INFO)
    AUDIT_LOG.addHandler(made.topic)
    yield made
    AUDIT_LOG.removeHandler(made.topic)
    AUDIT_LOG.setLevel(level)


def test_each_line_is_a_record_with_its_fields(world: World) -> None:
    Audit(Hands()).refused("User:ada", "10.0.0.1", "DELETE", "TOPIC", "orders")
    note_change(("User:boss", "10.0.0.2", "CREATE", "USER", "User:bob"), is_certain=True)
    assert world.write()
    ours = world.partitions[0]
    assert ours.keys == [b"User:ada", b"User:boss"]
    first, second = ours.written
    assert first.pop("time_ms") > 1_600_000_000_000
    assert first == {
        "node": 7,
        "event": "refused",
        "principal": "User:ada",
        "host": "10.0.0.1",
        "operation": "DELETE",
        "resource_type": "TOPIC",
        "resource": "orders",
        "allowed": False,
    }
    assert (second["event"], second["resource"], second["allowed"]) == ("changed", "User:bob", True)
    assert not world.partitions[1].written, "no event may be written to a partition that another broker leads"
    assert not world.partitions[2].written, "no event may be written to a partition of another topic"


def test_lines_wait_until_a_partition_takes_them_and_keep_their_order(world: World) -> None:
    for number in range(MAX_BATCH + 1):
        AUDIT_LOG.info("changed", extra={"resource": str(number)})
    world.missing = CoordinatorNotAvailable("it is being made")
    assert not world.write()
    world.missing = None
    world.partitions[0].refuses = NotEnoughReplicas("1 of 2")
    assert not world.write()
    assert len(world.topic) == MAX_BATCH + 1
    world.partitions[0].refuses = None
    assert world.write()
    assert [each["resource"] for each in world.partitions[0].written] == [str(each) for each in range(MAX_BATCH + 1)]


def test_another_partition_takes_what_one_refuses(world: World) -> None:
    world.partitions[0].refuses = NotEnoughReplicas("1 of 2")
    world.partitions[1].leads = True
    AUDIT_LOG.info("changed", extra={"resource": "User:bob"})
    assert world.write()
    assert len(world.partitions[1].written) == 1


def test_the_queue_is_bounded_and_says_what_it_dropped(world: World) -> None:
    for number in range(MAX_WAITING + 5):
        AUDIT_LOG.info("changed", extra={"resource": str(number)})
    assert len(world.topic) == MAX_WAITING
    assert world.write()
    written = world.partitions[0].written
    assert (written[0]["event"], written[0]["left_out"]) == ("dropped", 5)
    assert [written[1]["resource"], written[-1]["resource"]] == ["5", str(MAX_WAITING + 4)]
    AUDIT_LOG.info("changed", extra={"resource": "last"})
    assert world.write()
    assert written[-1]["resource"] == "last"
    assert sum(each["event"] == "dropped" for each in written) == 1, "dropped events must be reported once"
