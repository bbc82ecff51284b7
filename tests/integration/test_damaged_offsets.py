"""An unreadable record of __consumer_offsets: its groups hear where it is, and other groups are served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from grpc import aio

import raftlog
from broker.coordinator.core import encode
from broker.coordinator.groups.coordinators import partition_for
from raftlog.format import iter_headers, pack_stamp
from raftlog.testing import Cluster
from raftlog.v1 import common_pb2, group_pb2, group_pb2_grpc
from tests.support.steady import STEADY

PARTITIONS = 2
TIMEOUT_S = 90.0
NOT_YET = {
    common_pb2.COORDINATOR_LOAD_IN_PROGRESS,
    common_pb2.COORDINATOR_NOT_AVAILABLE,
    common_pb2.NOT_COORDINATOR,
}
HARMED = next(name for name in map(str, range(100)) if partition_for(name, PARTITIONS) == 0)
UNHARMED = next(name for name in map(str, range(100)) if partition_for(name, PARTITIONS) == 1)


async def commit(stub: Any, group_id: str, offset: int) -> group_pb2.CommitOffsetsResponse:
    request = group_pb2.CommitOffsetsRequest(
        group_id=group_id,
        member_epoch=-1,
        offsets=[group_pb2.CommitOffset(topic="t", partition=0, offset=offset, leader_epoch=-1)],
    )
    answer: group_pb2.CommitOffsetsResponse = await stub.CommitOffsets(request, timeout=TIMEOUT_S)
    return answer


async def served(stub: Any, group_id: str) -> group_pb2.FetchOffsetsResponse:
    """Return the committed offsets, or why there are none, once the coordinator is loaded or has failed to."""
    await stub.FindCoordinator(group_pb2.FindCoordinatorRequest(group_id=group_id), timeout=TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            answer: group_pb2.FetchOffsetsResponse = await stub.FetchOffsets(
                group_pb2.FetchOffsetsRequest(group_id=group_id, member_epoch=-1, all=True), timeout=TIMEOUT_S
            )
            if answer.error.code not in NOT_YET or "cannot be loaded" in answer.error.message:
                return answer
            await asyncio.sleep(0.05)


def append_junk(partition_dir: Path) -> int:
    """Append a batch that checks and says nothing that a coordinator knows; return its offset."""
    segment = sorted(partition_dir.glob("*.log"))[-1]
    data = segment.read_bytes()
    last = [header for _, header in iter_headers(data)][-1]
    batch, header = encode([(b"\xff\xff\xff", b"junk")], 1_000)
    stamp = pack_stamp(last.next_offset, header.batch_length, last.leader_epoch)
    with segment.open("r+b") as file:
        file.seek(sum(header.size for _, header in iter_headers(data)))  # there may be preallocated zeros behind
        file.write(stamp + batch[len(stamp) :])
    return last.next_offset


def test_groups_of_a_partition_that_cannot_be_loaded_hear_why_and_others_are_served() -> None:
    async def before(address: str) -> None:
        async with aio.insecure_channel(address) as channel:
            stub: Any = group_pb2_grpc.GroupStub(channel)
            for group_id in (HARMED, UNHARMED):
                assert not (await served(stub, group_id)).HasField("error")
                assert not (await commit(stub, group_id, 5)).HasField("error")

    async def after(address: str, offset: int) -> None:
        async with aio.insecure_channel(address) as channel:
            stub: Any = group_pb2_grpc.GroupStub(channel)
            found = await served(stub, UNHARMED)
            assert [each.offset for each in found.offsets] == [5]
            refused = await served(stub, HARMED)
            assert refused.error.code == common_pb2.COORDINATOR_NOT_AVAILABLE
            assert f"__consumer_offsets-0 cannot be loaded: the record at offset {offset}" in refused.error.message
            assert (await commit(stub, HARMED, 6)).error.code == common_pb2.COORDINATOR_NOT_AVAILABLE
            listed = await stub.ListGroups(group_pb2.ListGroupsRequest(), timeout=TIMEOUT_S)
            assert [group.group_id for group in listed.groups] == [UNHARMED]
            assert [error.code for error in listed.loading] == [common_pb2.COORDINATOR_NOT_AVAILABLE]

    with Cluster(nodes=1, config={**STEADY, "offsets.topic.num.partitions": PARTITIONS}) as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("t")
        asyncio.run(before(cluster.bootstrap))
        cluster.kill(1)
        offset = append_junk(cluster.log_dir(1) / "__consumer_offsets-0")
        cluster.start(1)
        asyncio.run(after(cluster.bootstrap, offset))
