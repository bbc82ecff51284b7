"""A follower joined to its leader by direct calls, as the two ends of a stream would join them."""

from __future__ import annotations

import asyncio

from broker.partition.follower_term import Following
from broker.partition.partition import Partition
from raftlog.errors import RaftlogError
from replication.ports import Accepted, Diverging, OutOfRange, Replica


async def settle() -> None:
    """Let everything that is ready on the loop happen."""
    for _ in range(30):
        await asyncio.sleep(0)


class ReplicaLink:
    """The messages of one follower of a partition. `acks`: durable ends are reported as they are flushed."""

    def __init__(self, leader: Partition, follower: Following, replica: Replica) -> None:
        self.leader = leader
        self.follower = follower
        self.replica = replica
        self.acks = True
        self.changes = 0
        self.truncations: list[int] = []

    def on_change(self) -> None:
        """Count."""
        self.changes += 1

    def try_open(self) -> Accepted | Diverging | OutOfRange:
        """Say once where the follower stands."""
        state = self.follower.fetch_state()
        return self.leader.open_replica(
            self.replica,
            leader_epoch=self.follower.leader_epoch,
            fetch_offset=state.log_end_offset,
            last_fetched_epoch=state.last_epoch,
            durable_end_offset=state.durable_end_offset,
            on_change=self.on_change,
        )

    async def open(self) -> None:
        """Open, with as many truncations as that takes."""
        while True:
            opening = self.try_open()
            if isinstance(opening, Accepted):
                break
            done: list[RaftlogError | None] = []
            epoch = self.follower.leader_epoch
            if isinstance(opening, Diverging):
                self.follower.truncate(opening, epoch, done.append)
            else:
                self.follower.start_over(opening.log_start_offset, epoch, done.append)
            await settle()
            assert done == [None], f"the follower's first fetch was answered with {done}"
            self.truncations.append(self.follower.fetch_state().log_end_offset)
        self._marks()

    def _marks(self) -> None:
        leader = self.leader
        self.follower.take_marks(leader.high_watermark, leader.log_start_offset, self.follower.leader_epoch)

    def on_durable(self, durable_end_offset: int) -> None:
        """Tell the leader."""
        if self.acks:
            self.leader.replica_acked(self.replica, self.on_change, durable_end_offset)

    async def pump(self) -> None:
        """Move everything that the leader has, and the marks after it."""
        while True:
            offset = self.follower.fetch_state().log_end_offset
            read = self.leader.read_for_replica(self.on_change, offset, 1 << 20, blocking=True)
            assert read is not None
            if not read.records:
                break
            self.follower.append_replicated(read.records, self.follower.leader_epoch, self.on_durable)
        await settle()
        self._marks()
        await settle()
