"""Readers of committed records, and one that looks at what coordinators say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from raftlog.errors import OffsetOutOfRange, RaftlogError, from_wire
from raftlog.format import iter_headers
from raftlog.format.wire import Frame
from raftlog.v1 import common_pb2, group_pb2, log_pb2
from raftlog.v1 import transaction_pb2 as pb
from tests.simulation.dataplane.broker import DataBroker, StreamEnded
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.dataplane.transaction_clients import GaveUp, TransactionClient, topic_partitions
from tests.simulation.network import Connection
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation

SILENCE_S = 3.0
CREDIT_BYTES = 20_000


class Reader(TransactionClient):
    """A reader of all partitions to their ends."""

    def __init__(self, simulation: TransactionSimulation, number: int, name: str) -> None:
        super().__init__(simulation, number, name)
        self.positions: dict[PartitionKey, int] = {}

    def _behind(self) -> list[PartitionKey]:
        """Return the partitions of which it has not read everything yet."""
        ledger = self.simulation.transaction_ledger
        return [key for key in self.simulation.work() if self.positions.get(key, 0) < ledger.of(key).end]

    def is_behind(self) -> str | None:
        """Return where it has not read everything yet."""
        for key in self._behind():
            end = self.simulation.transaction_ledger.of(key).end
            return (
                f"{self.name} has read partition {key[1]} up to offset {self.positions.get(key, 0)}, and it ends at "
                f"{end}"
            )
        return None


class CommittedReader(Reader):
    """Reads every partition from its start, again and again, from leaders and followers."""

    def __init__(self, simulation: TransactionSimulation, number: int, name: str) -> None:
        super().__init__(simulation, number, name)
        self._stable: dict[tuple[PartitionKey, int], int] = {}
        self._think_s = self.random.choice((0.01, 0.03, 0.1))
        self._follower_share = self.random.choice((0.0, 0.3))

    async def run(self) -> None:
        """Read, for ever."""
        while True:
            over = (
                self.simulation.winding_down
            )  # then it has so much time to read what is left, a few records at a time
            await self.pause(0.0, min(0.01, self._think_s) if over else self._think_s)
            wanted = (self._behind() if over else []) or self.simulation.work()
            if not wanted:
                continue
            key = self.random.choice(wanted)
            reached = self.positions.get(key, 0)
            again = self.random.random() < 0.05 and not self.simulation.winding_down
            position = self.random.choice((0, reached // 2)) if again else reached
            follower = self.random.random() < self._follower_share
            try:
                answer, _ = await self.read(key, position, follower=follower)
            except GaveUp:
                continue
            self.positions[key] = max(reached, answer.next_offset)
            if not follower:
                self._check_stable(key, answer.leader_epoch, answer.last_stable_offset)

    def _check_stable(self, key: PartitionKey, leader_epoch: int, offset: int) -> None:
        before = self._stable.get((key, leader_epoch), 0)
        if offset < before:
            raise Violation(
                f"the last stable offset of partition {key[1]} goes back from {before} to {offset} within "
                f"leader epoch {leader_epoch}"
            )
        self._stable[key, leader_epoch] = offset


class SessionReader(Reader):
    """Follows every partition by a fetch session that pushes, as the SDK's consumers do.

    After the faults no reader asks again, so a session that a decision does not wake is noticed.
    """

    def __init__(self, simulation: TransactionSimulation, number: int, name: str) -> None:
        super().__init__(simulation, number, name)
        self._epochs: dict[PartitionKey, int] = {}
        self._follower_share = self.random.choice((0.0, 0.5))

    async def run(self) -> None:
        """Follow, for ever."""
        for key in self.simulation.work():
            self.spawn(self._follow(key))

    async def _follow(self, key: PartitionKey) -> None:
        while True:
            follower = self.random.random() < self._follower_share
            part, leader = self.image.partition(*key), self.leader(key)
            if part is not None and leader is not None:
                source = self.random.choice(part.replicas) if follower else leader
                broker = self.simulation.data_broker(source)
                acceptor = None if broker is None else broker.process
                connection = self.simulation.network.connect(self.process, acceptor)
                if broker is not None and connection is not None:
                    await self._hear(broker, connection, key, follower)
            await self.pause()

    async def _hear(self, broker: DataBroker, connection: Connection, key: PartitionKey, follower: bool) -> None:
        heard: asyncio.Queue[Frame | StreamEnded | None] = asyncio.Queue()
        connection.opener_hears(heard.put_nowait, lambda: heard.put_nowait(None))
        broker.accept_reader(connection)
        opening = log_pb2.OpenFetchSession(isolation_level=common_pb2.READ_COMMITTED, credit_bytes=CREDIT_BYTES)
        part = self.image.partition(*key)
        wanted = log_pb2.FetchPartition(
            subscription_id=0,
            topic_id=key[0],
            partition=key[1],
            offset=self.positions.get(key, 0),
            leader_epoch=-1 if part is None else part.leader_epoch,
            last_fetched_epoch=self._epochs.get(key, -1),
            from_follower=follower,
        )
        connection.send(log_pb2.FetchRequest(open=opening))
        connection.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[wanted])))
        while True:
            try:
                async with asyncio.timeout(None if self.simulation.winding_down else SILENCE_S):
                    frame = await heard.get()
            except TimeoutError:
                frame = None
            if not isinstance(frame, Frame) or not self._take(key, frame):
                connection.break_now()
                return
            if frame.records:
                credit = log_pb2.GrantCredit(bytes=len(frame.records))
                connection.send(log_pb2.FetchRequest(credit=credit))

    def _take(self, key: PartitionKey, frame: Frame) -> bool:
        """Take a frame; return whether there may be more."""
        head, position = frame.head, self.positions.get(key, 0)
        if head.HasField("error"):
            error = from_wire(head.error)
            self.counts[f"session of a reader {type(error).__name__}"] += 1
            if isinstance(error, OffsetOutOfRange):
                raise Violation(
                    f"{self.name}: offset {position} of partition {key[1]} was refused as out of range: {error}"
                )
            return False
        records = bytes(frame.records)
        end = position
        for _, header in iter_headers(records):
            end, self._epochs[key] = header.next_offset, header.leader_epoch
        self.committed_rows(key, position, end, records, head.last_stable_offset, head.aborted)
        self.positions[key] = max(position, end)
        self.counts["frames"] += 1
        return True


class Observer(TransactionClient):
    """Asks for what groups have committed, pending or not, and now and then aborts a transaction as a tool does."""

    async def run(self) -> None:
        """Look, until the faults are over."""
        while not self.simulation.winding_down:
            await self.pause(0.02, 0.3)
            try:
                if self.random.random() < 0.04:
                    await self._abort()
                else:
                    await self._look_at_group()
            except (GaveUp, RaftlogError):
                continue
        self.finished = True

    async def _look_at_group(self) -> None:
        group_id, partition = self.random.choice(self.simulation.groups())
        source = self.simulation.work()[partition]
        request = group_pb2.FetchOffsetsRequest(
            group_id=group_id, member_epoch=-1, partitions=topic_partitions([source])
        )
        before = self._told(group_id)
        answer = await self.call(
            "FetchOffsets", request, group_pb2.FetchOffsetsResponse, again=False, give_up_s=self.now_s + 1.0
        )
        [found] = answer.offsets
        if found.HasField("error"):
            return
        self.counts["offsets seen"] += found.offset >= 0
        decided = self.simulation.transaction_ledger.decided
        committed = {
            each.consumed[1]
            for each in self.simulation.book.transactions
            if each.group_id == group_id and each.consumed is not None and decided.get(each.numbers)
        }
        if found.offset >= 0 and found.offset not in committed:
            raise Violation(
                f"{group_id}: the committed offset is reported as {found.offset}, but only {sorted(committed)} "
                "were committed"
            )
        if found.offset < before:
            raise Violation(
                f"{group_id}: the committed offset is reported as {found.offset}, but the commit of {before} "
                "was acknowledged earlier"
            )

    def _told(self, group_id: str) -> int:
        """Return up to where clients were told, with all markers written, that a group has committed."""
        ledger = self.simulation.transaction_ledger
        return max(
            (
                each.consumed[1]
                for each in self.simulation.book.transactions
                if each.group_id == group_id and each.consumed is not None and each.told
                if not ledger.unmarked(each.numbers)
            ),
            default=-1,
        )

    async def _abort(self) -> None:
        transactional_id = self.random.choice(self.simulation.transactional_ids)
        request = pb.AbortTransactionRequest(transactional_id=transactional_id)
        await self.call("AbortTransaction", request, pb.AbortTransactionResponse, again=False, give_up_s=self.now_s + 1)
        self.counts["aborted by a tool"] += 1
