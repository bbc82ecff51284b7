"""`raftlog txn` and the calls of the admin client behind it, against real servers."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from raftlog import Admin, Consumer, Producer, StagedWriter, TopicPartition
from raftlog.errors import InvalidTxnState, RaftlogError, TransactionalIdNotFound
from raftlog.testing import Cluster
from raftmeta.features import METADATA_VERSION, PRODUCER_OWNERS_LEVEL
from tests.support import patience
from tests.support.command_line import run_here
from tests.support.hanging import before_verification, send_without_adding
from tests.support.up_to_date import heard_everywhere

WAIT_S = 90.0
OPEN_MS = 600_000
"""What is left open stays so for longer than any test takes."""
until = partial(patience.until, within_s=WAIT_S, pause_s=0.05)


@pytest.fixture
def topic(three: Cluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with Admin(three.bootstrap) as admin:
        admin.create_topic(name, partitions=3, replication_factor=3)
    heard_everywhere(three)
    return name


@pytest.fixture
def admin(three: Cluster) -> Iterator[Admin]:
    with Admin(three.bootstrap) as admin:
        yield admin


@contextlib.contextmanager
def producer_of(cluster: Cluster, topic: str) -> Iterator[Producer]:
    """A producer that has begun a transaction, with the topic's name as its id."""
    producer = Producer(cluster.bootstrap, transactional_id=topic, transaction_timeout_ms=OPEN_MS)
    producer.begin_transaction()
    try:
        yield producer
    finally:
        with contextlib.suppress(RaftlogError):  # an administrator has ended its transaction
            producer.close()


def txn(cluster: Cluster, *arguments: str) -> Any:
    """Run `raftlog txn ...`, and return what it prints as JSON."""
    done = run_here("txn", *arguments, "-b", cluster.bootstrap, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def end_offset(
    cluster: Cluster, part: TopicPartition, isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
) -> int:
    with Consumer(cluster.bootstrap, isolation_level=isolation) as consumer:
        return consumer.end_offsets([part])[part]


def test_transactions_are_found_and_aborted(three: Cluster, topic: str, admin: Admin) -> None:
    with producer_of(three, topic) as producer:
        producer.send(topic, b"no", partition=1).result(WAIT_S)
        described = admin.describe_transaction(topic)
        admin.list_transactions(timeout=WAIT_S)  # waits for coordinators that are loading; the tool says that they are
        (listed,) = txn(three, "list", "--state", "ongoing", "--producer-id", str(described.producer_id))
        assert listed["transactional_id"] == topic
        assert txn(three, "describe", topic)[0]["partitions"] == [{"topic": topic, "partition": 1}]
        _, known, _ = txn(three, "producers", topic)
        (writer,) = known["producers"]
        assert (writer["producer_id"], writer["producer_epoch"]) == (described.producer_id, described.producer_epoch)
        assert (writer["transaction_start_offset"], known["last_stable_offset"], known["high_watermark"]) == (0, 0, 1)
        assert admin.find_hanging_transactions([topic], max_transaction_timeout_ms=0) == []
        with pytest.raises(InvalidTxnState, match="is not hanging"):
            admin.abort_hanging(topic, 1, 0)
        assert txn(three, "abort", topic)["aborted"] == [topic]
        until(lambda: admin.describe_transaction(topic).state == "complete_abort")
        assert end_offset(three, TopicPartition(topic, 1)) == 2
        with pytest.raises(InvalidTxnState):
            admin.abort_transaction(topic)
    with pytest.raises(TransactionalIdNotFound):
        admin.describe_transaction("nobody")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with before_verification(tmp_path, monkeypatch) as cluster:
        yield cluster


def test_what_hangs_is_found_and_ended_and_hangs_no_more_after_the_upgrade(
    older: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by a client that has not added the partition, so that no coordinator would ever send a marker."""
    topic = "hangs"

    part, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with Admin(older.bootstrap) as admin, Producer(older.bootstrap) as plain:
        admin.create_topic(topic, partitions=3)
        plain.send(topic, b"plain", partition=2).result(WAIT_S)
        with producer_of(older, topic) as producer:
            producer.send(topic, b"kept", partition=1).result(WAIT_S)
            send_without_adding(producer, topic, b"hangs", monkeypatch)
            (hanging,) = txn(older, "find-hanging", "--topic", topic, "--max-transaction-timeout", "0s")
            assert (hanging["partition"], hanging["start_offset"]) == (0, 0)
            producer.commit_transaction()
            until(lambda: end_offset(older, other) == 2)
            assert [each.partition for each in admin.find_hanging_transactions(max_transaction_timeout_ms=0)] == [0]
            assert admin.find_hanging_transactions() == []
            assert (end_offset(older, part), end_offset(older, part, "read_uncommitted")) == (0, 1)
            assert txn(older, *hanging["abort_command"].split()[2:])["producer_id"] == hanging["producer_id"]
            assert end_offset(older, part) == 2
            assert admin.find_hanging_transactions(max_transaction_timeout_ms=0) == []
            with pytest.raises(InvalidTxnState, match="none is open there"):
                admin.abort_hanging(topic, 0, 0)

            producer.begin_transaction()
            producer.send(topic, b"before the upgrade", partition=1).result(WAIT_S)
            before = admin.describe_transaction(topic).producer_id
            admin.update_feature(METADATA_VERSION, PRODUCER_OWNERS_LEVEL)
            plain.send(topic, b"plain, too", partition=2).result(WAIT_S)
            producer.send(topic, b"after it", partition=1).result(WAIT_S)
            with pytest.raises(RaftlogError, match="the partition was not added"):
                send_without_adding(producer, topic, b"hangs", monkeypatch)
            producer.abort_transaction()
        with producer_of(older, topic) as successor:
            assert admin.describe_transaction(topic).producer_id != before, (
                "the new producer must have another producer id, one that is bound to its transactional id"
            )
            successor.send(topic, b"of its successor", partition=1).result(WAIT_S)
            successor.commit_transaction()
        assert admin.find_hanging_transactions(max_transaction_timeout_ms=0) == []
    with Consumer(older.bootstrap, auto_offset_reset="earliest", isolation_level="read_committed") as consumer:
        consumer.assign([part, other])
        found: list[bytes | None] = []
        until(lambda: len(found.__iadd__([record.value for record in consumer.poll(1.0)])) == 2)
    assert found == [b"kept", b"of its successor"]


def test_sinks_and_their_stages(three: Cluster, topic: str, admin: Admin) -> None:
    sink = f"sink-{topic}"
    with StagedWriter(three.bootstrap, sink, topic) as writer:
        tokens = []
        for batch_id in range(2):
            with writer.stage(batch_id) as stage:
                stage.send_batch(topic, [b"a"], partition=[0])
                tokens.append(stage.finish(WAIT_S))
            if batch_id == 0:
                writer.commit(0, tokens)
    assert [each["last_batch_id"] for each in txn(three, "sinks") if each["sink_id"] == sink] == [0]
    until(lambda: len(admin.describe_sink(sink).stages) == 1)  # the first one is over soon
    (described,) = txn(three, "sinks", sink)
    assert (described["last_batch_id"], described["target"]) == (0, topic)
    (stage_,) = described["stages"]
    assert (stage_["batch_id"], stage_["state"]) == (1, "ongoing")
    assert stage_["partitions"] == [{"topic": topic, "partition": 0}]
    assert admin.find_hanging_transactions([topic], max_transaction_timeout_ms=0) == []
    (listed,) = admin.list_transactions(["ongoing"], producer_ids=[stage_["producer_id"]])
    assert (listed.sink_id, listed.transactional_id) == (sink, "")
    with pytest.raises(TransactionalIdNotFound):
        admin.describe_sink("nobody")
