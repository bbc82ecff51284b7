"""Reading a replica's log at the end of a test: all that it has, and no less because it hears of it late."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from raftlog import TopicPartition
from raftlog.format import Columns, decode_batch, encode_batch, pack_stamp, parse_header
from raftlog.v1 import common_pb2, log_pb2, metadata_pb2
from raftlog.wire import Frame
from tests.support.append_workload import RefusedRead, read_partition

PART = TopicPartition("chaos", 0)
LEADER, FOLLOWER = 1, 2


class FakeCall:
    """A fetch stream; what it is told is in `written`."""

    def __init__(self) -> None:
        self.written: list[log_pb2.FetchRequest] = []
        self.cancelled = False

    async def write(self, request: log_pb2.FetchRequest) -> None:
        self.written.append(request)

    def cancel(self) -> None:
        self.cancelled = True


class FakeReplica:
    """Answers each stream with what the test says, in this order; then with silence."""

    def __init__(self, *streams: list[Frame]) -> None:
        self._streams = list(streams)
        self._frames: list[Frame] = []
        self.calls: list[FakeCall] = []

    async def metadata(self, request: metadata_pb2.MetadataRequest) -> metadata_pb2.MetadataResponse:
        partition = metadata_pb2.PartitionInfo(partition=0, leader=LEADER, leader_epoch=3)
        return metadata_pb2.MetadataResponse(
            topics=[metadata_pb2.TopicInfo(name="chaos", topic_id=bytes(16), partitions=[partition])]
        )

    def fetch_call(self) -> FakeCall:
        self._frames = self._streams.pop(0)
        self.calls.append(FakeCall())
        return self.calls[-1]

    async def read_frames(self, call: FakeCall) -> list[Frame]:
        if not self._frames:
            await asyncio.sleep(3600)
        return [self._frames.pop(0)]


def frame(base: int, count: int, high_watermark: int) -> Frame:
    """Return a frame with a batch of so many records, or with the high watermark alone."""
    head = log_pb2.FetchFrame(subscription_id=1, high_watermark=high_watermark)
    if not count:
        return Frame(head, b"")
    batch = encode_batch(Columns(pa.array([b"%d" % (base + n) for n in range(count)], pa.binary())), 1_000)
    return Frame(head, pack_stamp(base, parse_header(batch).batch_length, 3) + bytes(batch[16:]))


REFUSAL = Frame(
    log_pb2.FetchFrame(
        subscription_id=1, error=common_pb2.Error(code=common_pb2.NOT_LEADER_OR_FOLLOWER, message="not now")
    ),
    b"",
)


def records(replica: FakeReplica, until: int, behind_s: float) -> list[bytes]:
    """Return what is read of a follower."""
    client: Any = replica
    data, found, at = asyncio.run(read_partition(client, FOLLOWER, PART, until, behind_s)), [], 0
    while at < len(data):
        decoded = decode_batch(data, at)
        found += decoded.columns.column("value").to_pylist()
        at += decoded.header.size
    assert all(call.cancelled for call in replica.calls)
    return found


def test_a_follower_that_hears_of_the_high_watermark_late_is_read_to_the_end() -> None:
    replica = FakeReplica([frame(0, 7, 7), frame(7, 3, 10)])
    assert len(records(replica, until=10, behind_s=30)) == 10
    [_, subscribe] = replica.calls[0].written
    assert subscribe.subscribe.partitions[0].from_follower


def test_what_a_replica_goes_on_lacking_is_not_there() -> None:
    assert len(records(FakeReplica([frame(0, 7, 7)]), until=10, behind_s=0.05)) == 7
    assert records(FakeReplica([frame(0, 0, 0)]), until=10, behind_s=0.05) == []


def test_what_lies_beyond_the_end_that_was_told_is_read_too() -> None:
    assert len(records(FakeReplica([frame(0, 7, 9), frame(7, 2, 9)]), until=7, behind_s=30)) == 9


def test_who_refuses_while_its_role_changes_is_asked_again() -> None:
    assert len(records(FakeReplica([REFUSAL], [frame(0, 7, 7)]), until=7, behind_s=30)) == 7
    with pytest.raises(RefusedRead, match="replica 2, chaos-0: not now"):
        records(FakeReplica([REFUSAL]), until=7, behind_s=0)
