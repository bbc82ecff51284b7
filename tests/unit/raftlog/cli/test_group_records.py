"""`raftlog log dump` prints what stands in __consumer_offsets and __transaction_state, and producers' numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from raftlog.cli import internal_records, transaction_records
from raftlog.cli.group_records import readable
from raftlog.format import Columns, encode_batch
from raftlog.v1 import group_pb2, transaction_pb2
from raftlog.v1.group_records_pb2 import (
    AssignedPartitions,
    AssignmentValue,
    GroupRecordKey,
    GroupValue,
    MemberValue,
    OffsetKey,
    OffsetValue,
    PendingOffsetKey,
    ProducerFenceValue,
    TargetValue,
)
from raftlog.v1.transaction_records_pb2 import SinkValue, StageKey, TransactionRecordKey, TransactionValue
from tests.support.command_line import Run

ID = bytes(range(16))
OFFSET = GroupRecordKey(group_id="g", offset=OffsetKey(topic_id=ID, partition=3)).SerializeToString()
COMMITTED = OffsetValue(offset=42, leader_epoch=-1, committed_at_ms=5, topic="a").SerializeToString()


@pytest.fixture
def server() -> object:
    """No server is needed."""

    class Nobody:
        bootstrap = "127.0.0.1:1"

    return Nobody()


def test_offsets() -> None:
    key = {"group_id": "g", "offset": {"topic_id": ID.hex(), "partition": 3}}
    assert readable(OFFSET, COMMITTED) == {
        "key": key,
        "value": {"offset": 42, "leader_epoch": -1, "metadata": "", "committed_at_ms": 5, "topic": "a"},
    }
    assert readable(OFFSET, None) == {"key": key, "value": None}


def test_offsets_of_transactions() -> None:
    pending = PendingOffsetKey(producer_id=0, topic_id=ID, partition=3)
    key = GroupRecordKey(group_id="g", pending=pending).SerializeToString()
    value = OffsetValue(offset=42, leader_epoch=-1, committed_at_ms=5, topic="a", producer_epoch=2).SerializeToString()
    assert readable(key, value) == {
        "key": {"group_id": "g", "pending": {"producer_id": 0, "topic_id": ID.hex(), "partition": 3}},
        "value": {
            "offset": 42,
            "leader_epoch": -1,
            "metadata": "",
            "committed_at_ms": 5,
            "topic": "a",
            "producer_epoch": 2,
        },
    }
    key = GroupRecordKey(group_id="g", transaction_of=0).SerializeToString()
    assert readable(key, ProducerFenceValue(producer_epoch=3, ended_at_ms=9).SerializeToString()) == {
        "key": {"group_id": "g", "transaction_of": 0},
        "value": {"producer_epoch": 3, "ended_at_ms": 9},
    }


def test_groups_and_members() -> None:
    group = readable(GroupRecordKey(group_id="g", group=True).SerializeToString(), GroupValue().SerializeToString())
    assert group is not None
    assert group["key"] == {"group_id": "g", "group": True}
    assert group["value"]["known_topics"] == []
    value = MemberValue(client_id="c", subscription=group_pb2.Subscription(topics=["a"]))
    member = readable(GroupRecordKey(group_id="g", member_id="m").SerializeToString(), value.SerializeToString())
    assert member is not None
    assert member["key"] == {"group_id": "g", "member_id": "m"}
    assert member["value"]["subscription"] == {"topics": ["a"], "pattern": "", "assignor": ""}
    parts = TargetValue(partitions=[group_pb2.TopicPartitions(topic_id=ID, topic="a", partitions=[0, 2])])
    target = readable(GroupRecordKey(group_id="g", target_of="m").SerializeToString(), parts.SerializeToString())
    assert target is not None
    assert target["value"] == {"partitions": [{"topic_id": ID.hex(), "topic": "a", "partitions": [0, 2]}]}
    owned = AssignmentValue(member_epoch=3, assigned=[AssignedPartitions(partitions=[0], since_epochs=[2])])
    held = readable(GroupRecordKey(group_id="g", assignment_of="m").SerializeToString(), owned.SerializeToString())
    assert held is not None
    assert held["value"]["assigned"][0]["since_epochs"] == [2]


def test_transactions() -> None:
    key = TransactionRecordKey(transactional_id="billing").SerializeToString()
    value = TransactionValue(producer_id=7, producer_epoch=3, state=transaction_pb2.TRANSACTION_ONGOING, timeout_ms=9)
    found = transaction_records.readable(key, value.SerializeToString())
    assert found is not None
    assert found["key"] == {"transactional_id": "billing"}
    assert (found["value"]["state"], found["value"]["producer_id"], found["value"]["partitions"]) == ("ongoing", 7, [])
    key = TransactionRecordKey(stage=StageKey(sink_id="s", producer_id=4)).SerializeToString()
    assert transaction_records.readable(key, None) == {
        "key": {"stage": {"sink_id": "s", "producer_id": 4}},
        "value": None,
    }
    key = TransactionRecordKey(sink_id="s").SerializeToString()
    found = internal_records.readable("__transaction_state", key, SinkValue(last_batch_id=4).SerializeToString())
    assert found is not None
    assert found["value"] == {
        "last_batch_id": 4,
        "target": "",
        "updated_ms": 0,
        "committing": [],
        "expire_after_ms": 0,
        "fenced": [],
    }
    assert internal_records.readable("events", key, b"") is None
    assert transaction_records.readable(b"\xff", b"") is None


@pytest.mark.parametrize("key", [None, b"", b"\xff\xff", GroupRecordKey(group_id="g").SerializeToString()])
def test_what_is_no_such_record_is_left_as_it_is(key: bytes | None) -> None:
    assert readable(key, b"x") is None
    assert readable(OFFSET, b"\xff") is None


def test_a_dump(tmp_path: Path, run: Run) -> None:
    columns = Columns(pa.array([COMMITTED, b"\xff", None]), key=pa.array([OFFSET, b"\xff", OFFSET], pa.binary()))
    batch = encode_batch(columns, 1_000, base_offset=0, leader_epoch=2)
    for name in ("__consumer_offsets-17", "events-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{0:020}.log").write_bytes(batch)
    ran = run("log", "dump", str(tmp_path / "__consumer_offsets-17"), "--records", "-o", "json")
    assert ran.code == 0, ran.err
    [found] = ran.json["batches"]
    first, second, third = found["contents"]
    assert first["key"]["group_id"] == "g"
    assert (first["value"]["offset"], first["offset"], first["timestamp"]) == (42, 0, 1_000)
    assert second["key_base64"] == "/w=="
    assert third["value"] is None
    assert third["offset"] == 2
    assert (found["producer_id"], found["producer_epoch"], found["base_sequence"]) == (None, None, None)
    lines = run("log", "dump", str(tmp_path / "__consumer_offsets-17"), "--records").out.splitlines()
    assert json.loads(lines[3])["value"]["topic"] == "a"
    plain = run("log", "dump", str(tmp_path / "events-0"), "--records", "-o", "json").json
    assert "key_base64" in plain["batches"][0]["contents"][0] or "key" in plain["batches"][0]["contents"][0]
    assert plain["batches"][0]["contents"][0].get("value") != first["value"]
