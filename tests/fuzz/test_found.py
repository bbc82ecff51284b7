"""What fuzzing has found: each with the smallest input, at the function that was wrong."""

from __future__ import annotations

import io
import struct
from types import SimpleNamespace
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest

from broker.config.config import BROKER_CONFIGS
from broker.coordinator.transactions.marker_sender import check_possible
from broker.log import log_dir
from broker.log.log_dir import decode_lines, encode_lines, load_leader_epochs, load_marks, load_partition_metadata
from broker.log.partition_log import PartitionLog
from broker.log.producer_state import ProducerLimits, decode_snapshot
from broker.partition.follower_term import Following
from raftlog.cli.records.produce import Columns, Format, read
from raftlog.errors import CorruptRecordError, InvalidConfig, InvalidRecord, InvalidRequestError
from raftlog.format import HEADER_BYTES, encode_batch, wire
from raftlog.format import Columns as ArrowColumns
from raftlog.format.control import Marker, encode_control
from raftlog.format.header import build_batch, parse_header
from raftlog.v1.raft_pb2 import AppendEntries, RaftEntry, RaftMessage
from raftmeta.raft.messages import flaw
from tests.support.log_driver import FakeClock, open_manager
from tests.support.memory_storage import MemoryStorage


def directory_with(name: str, content: bytes) -> MemoryStorage:
    storage = MemoryStorage()
    storage.make_dir("/d")
    storage.open(f"/d/{name}", create=True).write((content,), 0)
    return storage


@pytest.mark.parametrize("version", ["²", "٣", "9" * 5_000])
def test_a_version_that_int_does_not_read_is_damage(version: str) -> None:
    with pytest.raises(CorruptRecordError, match="damaged"):
        decode_lines("p", "offsets", f"offsets {version}\n0 00000000\n".encode())


@pytest.mark.parametrize(
    "line", ["", "zz 0 1 1 1", "00 x 1 1 1", "00 0 1 1", "00 0 1 1 1 1", "00 0 -1 1 1", "00 0 1 1 ١", "00 0 +1 1_0 1"]
)
def test_an_offset_checkpoint_whose_lines_say_nothing_is_damage(line: str) -> None:
    storage = directory_with(log_dir.OFFSET_CHECKPOINT, encode_lines("offsets", [line]))
    with pytest.raises(CorruptRecordError, match="offset-checkpoint is damaged"):
        load_marks(storage, "/d")


@pytest.mark.parametrize("lines", [["x 0"], ["1"], ["1 0 0"], ["1 0", "1 5"], ["1 0", "2 0"], ["2 0", "1 5"], ["-1 0"]])
def test_leader_epochs_that_do_not_rise_are_damage(lines: list[str]) -> None:
    storage = directory_with(log_dir.LEADER_EPOCH_CHECKPOINT, encode_lines("leader-epochs", lines))
    with pytest.raises(CorruptRecordError, match="leader-epoch-checkpoint is damaged"):
        load_leader_epochs(storage, "/d")


@pytest.mark.parametrize("lines", [[], ["topic t"], ["topic_id zz", "topic t", "partition 0"], ["word"]])
def test_partition_metadata_that_names_no_partition_is_damage(lines: list[str]) -> None:
    storage = directory_with(log_dir.PARTITION_METADATA, encode_lines("partition", lines))
    with pytest.raises(CorruptRecordError, match=r"partition\.metadata is damaged"):
        load_partition_metadata(storage, "/d")


def test_lines_that_are_not_utf8_are_damage() -> None:
    content = encode_lines("offsets", ["x"]).split(b"\n", 2)
    body = b"\xff\n"
    data = content[0] + b"\n" + f"1 {google_crc32c.value(body):08x}\n".encode() + body
    with pytest.raises(CorruptRecordError, match="its checksum holds"):
        decode_lines("p", "offsets", data)


@pytest.mark.parametrize("line", ["5 0 1 x", "5 0", "open 1 2 x", "aborted", "5 0 1 2 3 4 5 6"])
def test_a_producer_snapshot_whose_lines_say_nothing_is_damage(line: str) -> None:
    with pytest.raises(CorruptRecordError, match="damaged"):
        decode_snapshot("s", encode_lines("producers", [line], 2), ProducerLimits())


@pytest.mark.parametrize(
    ("previous", "entries"),
    [
        (1, [RaftEntry(index=3, term=1, data=b"\1")]),
        (1, [RaftEntry(index=2, term=1, data=b"\1"), RaftEntry(index=2, term=1, data=b"\1")]),
        (1, [RaftEntry(index=2, term=1)]),
        (1, [RaftEntry(index=2, term=2, data=b"\1"), RaftEntry(index=3, term=1, data=b"\1")]),
    ],
    ids=["a gap", "one twice", "no content", "terms that go back"],
)
def test_entries_that_are_no_piece_of_a_log_are_dropped(previous: int, entries: list[RaftEntry]) -> None:
    body = AppendEntries(term=3, previous_index=previous, previous_term=1, entries=entries)
    assert flaw(RaftMessage(sender_term=3, append_entries=body))


@pytest.mark.parametrize(("producer_id", "epoch"), [(-1, 1), (5, -1), (5, 1 << 15), (5, -(1 << 31))])
def test_a_marker_that_could_not_be_read_again_is_refused(producer_id: int, epoch: int) -> None:
    with pytest.raises(InvalidRequestError, match="a marker of producer id"):
        check_possible([Marker(5, 1, True, 1), Marker(producer_id, epoch, True, 1)])


def follower_of(storage: MemoryStorage) -> tuple[PartitionLog, Following]:
    log = open_manager(storage).create("topic", b"t" * 16, 0)
    flushing: Any = SimpleNamespace(appended=log.flush, catch_up=log.flush, durable_end_offset=0)
    cuts: Any = SimpleNamespace(busy=False, run=lambda cut, done: cut())
    following = Following(
        log,
        flushing,
        cuts,
        FakeClock(),
        leader_id=1,
        leader_epoch=1,
        wake_readers=lambda: None,
        on_damaged=lambda _log, _error: None,
    )
    return log, following


def test_a_followers_log_does_not_begin_below_0() -> None:
    log, following = follower_of(MemoryStorage())
    batch = encode_batch(ArrowColumns(pa.array([b"x", b"y"])), 1, base_offset=-1, leader_epoch=1)
    with pytest.raises(CorruptRecordError):
        following.append_replicated(batch, 1, lambda _held: None)
    assert (log.log_start_offset, log.log_end_offset) == (0, 0)


def test_a_batch_that_no_leader_has_stamped_is_not_replicated() -> None:
    log, following = follower_of(MemoryStorage())
    with pytest.raises(InvalidRecord, match="no leader has stamped"):
        following.append_replicated(encode_batch(ArrowColumns(pa.array([b"x"])), 1), 1, lambda _held: None)
    assert log.log_end_offset == 0


def test_markers_whose_columns_arrow_finds_invalid_are_not_replicated() -> None:
    """Their checksum is right. Without a look at their contents, reading them ended the follower's process."""
    log, following = follower_of(MemoryStorage())
    markers = [Marker(number, 0, commit=True, coordinator_epoch=0, first_offset=0) for number in range(2)]
    good = encode_control(markers, 1, leader_epoch=1)
    body, ends = bytearray(good[HEADER_BYTES:]), struct.pack("<3i", 0, 14, 28)
    assert body.count(ends) == 1, "the keys are 14 bytes each"
    at = body.index(ends)
    body[at : at + len(ends)] = struct.pack("<3i", 0, 1 << 30, 28)
    with pytest.raises(CorruptRecordError, match="does not decode as Arrow columns"):
        following.append_replicated(build_batch(parse_header(good), bytes(body)), 1, lambda _held: None)
    assert log.log_end_offset == 0


def test_a_batch_does_not_go_beyond_the_last_offset() -> None:
    log, _ = follower_of(MemoryStorage())
    last = (1 << 63) - 1
    log.reset_to(last, now_ms=1)
    batch = encode_batch(ArrowColumns(pa.array([b"x"])), 1, base_offset=last, leader_epoch=1)
    with pytest.raises(InvalidRecord, match="offsets end"):
        log.append_stamped(batch, now_ms=1)
    assert log.log_end_offset == last


def test_what_surrounds_the_frames_of_a_message_is_read_as_well() -> None:
    for decode in (wire.decode_fetch, wire.decode_replicate):
        with pytest.raises(InvalidRequestError):
            decode(b"\x00\x00")


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5_000, "a = " + "{a = " * 5_000, ".".join("a" * 5_000) + " = 1"],
    ids=["lists", "tables", "key"],
)
def test_a_configuration_that_is_nested_very_deep_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        BROKER_CONFIGS.from_toml(text)


@pytest.mark.parametrize(
    ("source", "content"),
    [
        (Format.JSON, b"[" * 100_000),
        (Format.JSON, b'{"value": ' + b"[" * 100_000),
        (Format.JSON, b'{"partition": 4294967296}'),
        (Format.JSON, b'{"timestamp": 9223372036854775808}'),
        (Format.CSV, b"\xff,b\n1,2\n"),
        (Format.CSV, b"a" * 200_000 + b",b\n1,2\n"),
        (Format.PARQUET, b"PAR1" + b"\xff" * 40 + (30).to_bytes(4, "little") + b"PAR1"),
    ],
)
def test_an_input_that_is_not_of_its_format_is_refused(source: Format, content: bytes) -> None:
    with pytest.raises(InvalidRecord, match=r"line 1|the input is not"):
        list(read(io.BytesIO(content), source, Columns()))
