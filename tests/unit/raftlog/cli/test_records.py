"""What `raftlog log dump` prints, and what it finds wrong with a segment's files."""

from __future__ import annotations

import base64
import json
import struct
import uuid
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from raftlog.cli.records import internal_records
from raftlog.cli.records.internal_records import readable
from raftlog.cli.records.log_dump import app, check_segment, read_markers, read_records
from raftlog.format import Columns, encode_batch
from raftlog.format.control import Marker, encode_control
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
from raftmeta.raft.wal import WriteAheadLog
from tests.support.command_line import Run
from tests.support.metadata_disk import MemoryDisk
from tests.support.metadata_security import alter_users, credential

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
    assert readable("__consumer_offsets", OFFSET, COMMITTED) == {
        "key": key,
        "value": {"offset": 42, "leader_epoch": -1, "metadata": "", "committed_at_ms": 5, "topic": "a", "user": ""},
    }
    assert readable("__consumer_offsets", OFFSET, None) == {"key": key, "value": None}


def test_offsets_of_transactions() -> None:
    pending = PendingOffsetKey(producer_id=0, topic_id=ID, partition=3)
    key = GroupRecordKey(group_id="g", pending=pending).SerializeToString()
    value = OffsetValue(offset=42, leader_epoch=-1, committed_at_ms=5, topic="a", producer_epoch=2).SerializeToString()
    assert readable("__consumer_offsets", key, value) == {
        "key": {"group_id": "g", "pending": {"producer_id": 0, "topic_id": ID.hex(), "partition": 3}},
        "value": {
            "offset": 42,
            "leader_epoch": -1,
            "metadata": "",
            "committed_at_ms": 5,
            "topic": "a",
            "producer_epoch": 2,
            "user": "",
        },
    }
    key = GroupRecordKey(group_id="g", transaction_of=0).SerializeToString()
    assert readable(
        "__consumer_offsets", key, ProducerFenceValue(producer_epoch=3, ended_at_ms=9).SerializeToString()
    ) == {
        "key": {"group_id": "g", "transaction_of": 0},
        "value": {"producer_epoch": 3, "ended_at_ms": 9},
    }


def test_groups_and_members() -> None:
    group = readable(
        "__consumer_offsets",
        GroupRecordKey(group_id="g", group=True).SerializeToString(),
        GroupValue().SerializeToString(),
    )
    assert group is not None
    assert group["key"] == {"group_id": "g", "group": True}
    assert group["value"]["known_topics"] == []
    value = MemberValue(client_id="c", subscription=group_pb2.Subscription(topics=["a"]))
    member = readable(
        "__consumer_offsets", GroupRecordKey(group_id="g", member_id="m").SerializeToString(), value.SerializeToString()
    )
    assert member is not None
    assert member["key"] == {"group_id": "g", "member_id": "m"}
    assert member["value"]["subscription"] == {"topics": ["a"], "pattern": "", "assignor": ""}
    parts = TargetValue(partitions=[group_pb2.TopicPartitions(topic_id=ID, topic="a", partitions=[0, 2])])
    target = readable(
        "__consumer_offsets", GroupRecordKey(group_id="g", target_of="m").SerializeToString(), parts.SerializeToString()
    )
    assert target is not None
    assert target["value"] == {"partitions": [{"topic_id": ID.hex(), "topic": "a", "partitions": [0, 2]}]}
    owned = AssignmentValue(member_epoch=3, assigned=[AssignedPartitions(partitions=[0], since_epochs=[2])])
    held = readable(
        "__consumer_offsets",
        GroupRecordKey(group_id="g", assignment_of="m").SerializeToString(),
        owned.SerializeToString(),
    )
    assert held is not None
    assert held["value"]["assigned"][0]["since_epochs"] == [2]


def test_transactions() -> None:
    key = TransactionRecordKey(transactional_id="billing").SerializeToString()
    value = TransactionValue(producer_id=7, producer_epoch=3, state=transaction_pb2.TRANSACTION_ONGOING, timeout_ms=9)
    found = internal_records.readable("__transaction_state", key, value.SerializeToString())
    assert found is not None
    assert found["key"] == {"transactional_id": "billing"}
    assert (found["value"]["state"], found["value"]["producer_id"], found["value"]["partitions"]) == ("ongoing", 7, [])
    key = TransactionRecordKey(stage=StageKey(sink_id="s", producer_id=4)).SerializeToString()
    assert internal_records.readable("__transaction_state", key, None) == {
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
        "user": "",
    }
    assert internal_records.readable("events", key, b"") is None
    assert internal_records.readable("__transaction_state", b"\xff", b"") is None


@pytest.mark.parametrize("key", [None, b"", b"\xff\xff", GroupRecordKey(group_id="g").SerializeToString()])
def test_what_is_no_such_record_is_left_as_it_is(key: bytes | None) -> None:
    assert readable("__consumer_offsets", key, b"x") is None
    assert readable("__consumer_offsets", OFFSET, b"\xff") is None


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


BASE = 100


def batch(base_offset: int, rows: int = 3, timestamp_ms: int = 1000) -> bytes:
    values = pa.array([f"v{number}".encode() for number in range(rows)], pa.binary())
    return encode_batch(Columns(values), timestamp_ms, base_offset=base_offset, leader_epoch=4)


def segment(directory: Path, *batches: bytes) -> Path:
    path = directory / f"{BASE:020}.log"
    path.write_bytes(b"".join(batches))
    return path


def index_entry(layout: str, *values: int, base_offset: int = BASE) -> bytes:
    raw = struct.pack(layout, *values)
    return raw + struct.pack("<I", google_crc32c.extend(google_crc32c.value(struct.pack("<q", base_offset)), raw))


def test_a_good_segment_has_no_problems(tmp_path: Path) -> None:
    first, second = batch(100, 3, 1000), batch(103, 2, 500)
    path = segment(tmp_path, first, second)
    path.with_suffix(".index").write_bytes(
        index_entry("<II", 3, len(first)) + index_entry("<II", 5, len(first + second))
    )
    path.with_suffix(".timeindex").write_bytes(index_entry("<qI", 1000, 3) + index_entry("<qI", 1000, 5))
    report = check_segment(path)
    assert report.problems == []
    assert [(found.position, found.header.base_offset, found.header.leader_epoch) for found in report.batches] == [
        (0, 100, 4),
        (len(first), 103, 4),
    ]
    assert (report.index_entries, report.time_index_entries) == (2, 2)
    assert read_records(path, len(first)) == [
        {"value": b"v0", "offset": 103, "timestamp_ms": 500},
        {"value": b"v1", "offset": 104, "timestamp_ms": 500},
    ]


def test_markers_and_aborted_transactions_are_read_and_checked(tmp_path: Path) -> None:
    markers = encode_control([Marker(7, 1, False, 3, 90), Marker(8, 1, True, 3, 100)], 1, base_offset=103)
    path = segment(tmp_path, batch(100, 3), markers)
    assert read_markers(path, len(batch(100, 3)))[0] == (103, Marker(7, 1, False, 3, 90))
    good = index_entry("<qqqq", 7, 90, 103, 104)
    closing = index_entry("<qqqq", -1, BASE, 105, 105)
    index = path.with_suffix(".txnindex")
    index.write_bytes(good + closing)
    report = check_segment(path)
    assert (report.problems, report.txn_index_entries) == ([], 1)
    for wrong, words in (
        (index_entry("<qqqq", 7, 90, 102, 104), "offset 102 is not a marker"),
        (index_entry("<qqqq", 7, 103, 103, 104), "begins at offset 103"),
        (good[:-1] + b"x", "entry 0 is damaged"),
        (good + closing[:-1], "entry 1 is damaged"),
    ):
        index.write_bytes(wrong)
        (problem,) = check_segment(path).problems
        assert words in problem


def test_a_dump_shows_markers(tmp_path: Path) -> None:
    path = segment(tmp_path, encode_control([Marker(7, 1, False, 3, 90), Marker(8, 2, True, -1)], 5, base_offset=BASE))
    done = CliRunner().invoke(app, ["dump", str(path), "--records", "--output", "json"])
    assert done.exit_code == 0
    (found,) = json.loads(done.stdout.splitlines()[0])["batches"]
    assert found["transactional"] == "markers"
    assert [row["marker"] for row in found["contents"]] == [
        {"ends": "abort", "producer_id": 7, "producer_epoch": 1, "coordinator_epoch": 3, "first_offset": 90},
        {"ends": "commit", "producer_id": 8, "producer_epoch": 2, "coordinator_epoch": -1, "first_offset": None},
    ]


def test_an_empty_segment_has_no_problems(tmp_path: Path) -> None:
    report = check_segment(segment(tmp_path))
    assert (report.problems, report.batches) == ([], [])


@pytest.mark.parametrize("flipped", [21, 40, 63, 64, 100])
def test_a_flipped_byte_is_found_and_the_batches_after_it_are_still_read(tmp_path: Path, flipped: int) -> None:
    damaged = bytearray(batch(100))
    damaged[flipped] ^= 1
    report = check_segment(segment(tmp_path, bytes(damaged), batch(103)))
    assert any(problem.startswith("position 0, offset 100: ") for problem in report.problems)
    assert [found.problem is None for found in report.batches] == [False, True]


@pytest.mark.parametrize("kept", [1, 63, 64, 80])
def test_a_batch_that_is_cut_short_is_found(tmp_path: Path, kept: int) -> None:
    first = batch(100)
    report = check_segment(segment(tmp_path, first, batch(103)[:kept]))
    assert len(report.problems) == 1
    assert report.problems[0].startswith(f"position {len(first)}")
    assert len(report.batches) == 1


def test_offsets_that_do_not_ascend_are_found(tmp_path: Path) -> None:
    report = check_segment(segment(tmp_path, batch(100), batch(101)))
    assert ["expected at least 103" in problem for problem in report.problems] == [True]
    report = check_segment(segment(tmp_path, batch(99)))
    assert ["expected at least 100" in problem for problem in report.problems] == [True]


@pytest.mark.parametrize(
    ("suffix", "entry", "words"),
    [
        (".index", index_entry("<II", 3, 7), "no batch with offset 103 begins at position 7"),
        (".index", index_entry("<II", 1, 0), "no batch with offset 101 begins at position 0"),
        (".index", index_entry("<II", 0, 0, base_offset=0), "entry 0 is damaged"),
        (".index", b"\0" * 12, "entry 0 is damaged"),
        (".index", index_entry("<II", 0, 0)[:-1], "entry 0 is damaged"),
        (".timeindex", index_entry("<qI", 999, 3), "the largest timestamp below offset 103 is 1000, not 999"),
        (".timeindex", b"\0" * 16, "entry 0 is damaged"),
    ],
)
def test_an_index_that_does_not_fit_is_found(tmp_path: Path, suffix: str, entry: bytes, words: str) -> None:
    path = segment(tmp_path, batch(100))
    path.with_suffix(suffix).write_bytes(entry)
    report = check_segment(path)
    assert [words in problem for problem in report.problems] == [True]


def indexed(directory: Path, batches: list[bytes], damage: int | None = None, bit: int = 1) -> Path:
    """A segment of batches of two records with an index entry for each, and one byte flipped."""
    data, offsets, times = bytearray(), b"", b""
    for number, one in enumerate(batches):
        data += one
        offsets += index_entry("<II", 2 * number + 2, len(data))
        times += index_entry("<qI", 1000 + number, 2 * number + 2)
    if damage is not None:
        data[damage] ^= bit
    path = segment(directory, bytes(data))
    path.with_suffix(".index").write_bytes(offsets)
    path.with_suffix(".timeindex").write_bytes(times)
    return path


@pytest.mark.parametrize("bit", [1, 32])
@pytest.mark.parametrize("number", [0, 7, 19])
def test_one_flipped_bit_is_one_line_and_only_its_batch_is_not_read(tmp_path: Path, number: int, bit: int) -> None:
    batches = [batch(BASE + 2 * number, 2, 1000 + number) for number in range(20)]
    assert check_segment(indexed(tmp_path, batches)).problems == []
    begin = sum(map(len, batches[:number]))
    for at in range(len(batches[number])):
        if at in range(12, 16):
            continue  # the leader epoch: neither a checksum nor a neighbour tells
        report = check_segment(indexed(tmp_path, batches, begin + at, bit))
        assert len(report.problems) == 1, f"byte {at}: {report.problems}"
        assert f"position {begin}" in report.problems[0] or at < 8
        sound = [found.position for found in report.batches if found.problem is None]
        assert len(sound) >= 19, (
            f"with the byte at {at} damaged, 19 of the batches must still be valid, but {len(sound)} are"
        )


def test_without_an_index_what_lies_behind_a_damaged_length_is_passed_over(tmp_path: Path) -> None:
    batches = [batch(BASE + 2 * number, 2) for number in range(5)]
    path = indexed(tmp_path, batches, len(batches[0]) + 8)
    path.with_suffix(".index").unlink()
    report = check_segment(path)
    (problem,) = report.problems
    assert problem.endswith(f"{sum(map(len, batches[1:]))} bytes are skipped")
    assert len(report.batches) == 1


@pytest.mark.parametrize("options", [[], ["--records"], ["--records", "-o", "json"]])
def test_a_file_of_the_metadata_log_is_no_segment_and_what_is_kept_of_passwords_does_not_show(
    tmp_path: Path, options: list[str]
) -> None:
    disk = MemoryDisk()
    wal = WriteAheadLog(disk, uuid.UUID(int=7))
    wal.open()
    secret = credential("alice", secret=33)
    wal.add(alter_users([secret]).SerializeToString(), 2, 1)
    wal.sync()
    (name,) = disk.names()
    held = disk.read(name)
    assert secret.salt in held
    assert secret.stored_key in held
    (tmp_path / name).write_bytes(held)
    run = CliRunner().invoke(app, ["dump", str(tmp_path / name), *options])
    assert run.exit_code == 1
    assert "the name is not the segment's base offset" in run.output
    for part in (secret.salt, secret.stored_key, secret.server_key):
        for shown in (part.decode("latin-1"), part.hex(), base64.b64encode(part).decode()[:12], repr(part)[2:-1]):
            assert shown not in run.output
