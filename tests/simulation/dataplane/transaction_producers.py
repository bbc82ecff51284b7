"""Producers with a transactional id, with the SDK's state machine inside; some of them transform what they read.

They follow the rules of the client (docs/transactions.md): records of a partition only after it was added, sequences
from 0 in every transaction, commit only when everything is acknowledged, a decision asked for again until it is known.
Their misfortune: they die, they stand still or dawdle past their timeout, and others begin with the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from raftlog._core.positions import Rows
from raftlog._core.transaction_state import Numbers, TransactionPhase, TransactionState
from raftlog.errors import DuplicateSequence, FencedError, InvalidTxnState, RaftlogError, TransactionAbortable
from raftlog.format import Attributes, Columns, encode_batch, parse_batch
from raftlog.v1 import group_pb2
from raftlog.v1 import transaction_pb2 as pb
from tests.simulation.dataplane.clients import EPOCH_MS, SMALL_BYTES
from tests.simulation.dataplane.messages import Failed, PartitionKey, Produce, Produced
from tests.simulation.dataplane.transaction_book import Transaction, Value, read_value
from tests.simulation.dataplane.transaction_clients import GaveUp, TransactionClient, topic_partitions

if TYPE_CHECKING:
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation

GIVE_UP_S = 4.0
QUICK_S = 0.98
"""A producer that hears of a decision sooner than this has waited for all markers."""
MAX_HOPS = 2


class TransactionalWriter(TransactionClient):
    """Writes batches of a transaction, or of a stage; each is sent until it is answered."""

    async def produce(self, transaction: Transaction, key: PartitionKey, groups: Sequence[Sequence[Value]]) -> None:
        """Send batches to a partition, one after the other.

        Raises:
            GaveUp: no answer in time. RaftlogError: refused.
        """
        sequence = len(transaction.acknowledged.get(key, ()))
        for values in groups:
            batch = encode_batch(
                Columns(pa.array([each.encode(self.random.choice(SMALL_BYTES)) for each in values], pa.binary())),
                EPOCH_MS,
                attributes=int(Attributes.TRANSACTIONAL),
                producer_id=transaction.numbers[0],
                producer_epoch=transaction.numbers[1],
                base_sequence=sequence,
            )
            await self._send(key, batch)
            transaction.acknowledged.setdefault(key, []).extend(values)
            sequence += len(values)

    async def _send(self, key: PartitionKey, batch: bytes) -> None:
        give_up_s = self.now_s + GIVE_UP_S
        while self.now_s < give_up_s:
            leader, part = self.leader(key), self.image.partition(*key)
            if leader is not None and part is not None:
                request = Produce(key, part.leader_epoch, batch, parse_batch(batch), all_replicas=True)
                self.remember(request)
                answer = await self.ask(leader, request)
                self.heard(answer)
                if isinstance(answer, Produced):
                    self.counts["transactional batches"] += 1
                    return
                if isinstance(answer, Failed):
                    self.counts[f"produce {type(answer.error).__name__}"] += 1
                    if isinstance(answer.error, DuplicateSequence):
                        return
                    if not answer.error.retriable and not _is_about_leaders(answer.error):
                        raise answer.error
            await self.pause()
        raise GaveUp

    async def dawdle(self) -> None:
        """Let something go wrong, perhaps."""
        if self.simulation.winding_down:
            return
        chance = self.random.random()
        timeout_s = self.simulation.timeout_ms / 1_000
        if chance < 0.03:
            self.counts["producers dawdled"] += 1
            await self.pause(0.0, 1.5 * timeout_s)
        elif chance < 0.06:
            self.counts["producers stood still"] += 1
            self.simulation.scheduler.after(self.random.uniform(0.2, 1.5) * timeout_s, self.process.resume)
            self.process.pause()
            await self.pause(0.0, 0.01)
        elif chance < 0.08 * self.simulation.death_factor:
            self.counts["producers died"] += 1
            self.die()
            await asyncio.sleep(1e6)

    def die(self) -> None:
        """End; another process takes its place."""
        self.process.die(with_machine=False)


def _is_about_leaders(error: RaftlogError) -> bool:
    return type(error).__name__ == "FencedLeaderEpoch"


class TransactionalProducer(TransactionalWriter):
    """Appends to several partitions in each transaction."""

    def __init__(self, simulation: TransactionSimulation, number: int, name: str, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        super().__init__(simulation, number, name)
        self.state = TransactionState(transactional_id)
        self._added: set[PartitionKey | str] = set()
        self._think_s = self.random.choice((0.01, 0.05, 0.2))

    def die(self) -> None:
        """End; another process begins with the same id."""
        super().die()
        self.simulation.begin_again(self)

    async def run(self) -> None:
        """Run transactions until the faults are over, or another process has the id; then begin anew."""
        while not self.simulation.winding_down:
            try:
                await self._live()
            except (FencedError, InvalidTxnState) as error:
                self.counts[f"transactional ids lost by {type(error).__name__}"] += 1
                self.state = TransactionState(self.transactional_id)
                await self.pause(0.1, 2.0)
        self.finished = True

    async def _live(self) -> None:
        while not self.simulation.winding_down:
            self.replay_some()
            if self.state.phase is TransactionPhase.NEW:
                await self._initialize()
                await self.initialized()
            await self.pause(0.0, self._think_s)
            numbers = self.state.begin()
            self._added.clear()
            name = f"{self.name} ({self.transactional_id})"
            transaction = self.simulation.book.begin(name, *numbers)
            try:
                await self.write(transaction)
            except GaveUp:
                self.state.fail(RaftlogError("nobody has answered"))
            except RaftlogError as error:
                self.counts[f"transaction failed by {type(error).__name__}"] += 1
                self.state.fail(error)
            self.state.check_usable()
            await self.dawdle()
            await self._end(transaction)

    async def initialized(self) -> None:
        """It has numbers, and nothing is open."""

    async def write(self, transaction: Transaction) -> None:
        """Write the records of a transaction."""
        keys = self.random.sample(self.simulation.work(), self.random.choice((1, 2, 2, 3)))
        count = self.random.choice((0, 2, 2, 3, 5))
        amounts = [self.random.randrange(-50, 50) for _ in range(count - 1)]
        amounts = [*amounts, -sum(amounts)] if count else []
        values = [Value(transaction.number, number, amount, 0) for number, amount in enumerate(amounts)]
        await self.append(transaction, {key: values[number :: len(keys)] for number, key in enumerate(keys)})

    async def append(self, transaction: Transaction, values: dict[PartitionKey, list[Value]]) -> None:
        """Add the partitions, and send the records; to several partitions at the same time."""
        keys = [key for key, some in values.items() if some or self.random.random() < 0.3]
        while keys:
            some, keys = keys[:2], keys[2:]
            await self.add(some, [])
            await self.dawdle()
            results = await asyncio.gather(
                *(self.produce(transaction, key, self._batches(values[key])) for key in some), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            await self.dawdle()

    def _batches(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        size = self.random.choice((1, 2, 5))
        return [values[start : start + size] for start in range(0, len(values), size)]

    # Calls

    async def _initialize(self) -> None:
        request = pb.InitProducerIdRequest(
            transactional_id=self.transactional_id, transaction_timeout_ms=self.simulation.timeout_ms
        )
        if self.state.numbers is not None:
            request.producer_id, request.producer_epoch = self.state.numbers
        try:
            answer = await self.call("InitProducerId", request, pb.InitProducerIdResponse, again=False)
        except RaftlogError as error:
            self.state.refused(error)
            self.state.check_usable()
            raise
        self.counts["producers initialized"] += 1
        if self.state.numbers is not None and self.state.numbers.used_up:
            self.counts["producer ids used up"] += 1
        self.state.initialized(Numbers(answer.producer_id, answer.producer_epoch))

    async def add(self, keys: list[PartitionKey], group_ids: list[str]) -> None:
        """Add to the transaction; returns when that is on record.

        Raises:
            GaveUp, RaftlogError: it is not.
        """
        assert self.state.numbers is not None
        request = pb.AddToTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=self.state.numbers.producer_id,
            producer_epoch=self.state.numbers.producer_epoch,
            partitions=topic_partitions(keys),
            group_ids=group_ids,
        )
        await self._added_to(request)

    async def _added_to(self, request: pb.AddToTransactionRequest) -> None:
        added = self.call("AddToTransaction", request, pb.AddToTransactionResponse, give_up_s=self.now_s + GIVE_UP_S)
        await added

    async def _end(self, transaction: Transaction) -> None:
        """Commit or abort, until that is known.

        Raises:
            RaftlogError: another producer has the id.
        """
        if self.state.phase is not TransactionPhase.FAILED and self.random.random() < 0.8:
            self.state.flush()
            self.state.commit()
            transaction.may_commit = True
            try:
                numbers = await self._ask_end(transaction, True)
            except TransactionAbortable as error:
                self.state.refused(error)
            except RaftlogError as error:
                self.state.refused(error)
                self.state.check_usable()
                raise
            else:
                self.counts["transactions committed"] += 1
                self.state.ended(numbers)
                return
        self.state.abort()
        assert self.state.numbers is not None
        if self.random.random() < 0.3:  # it goes on with its numbers, and what is open is aborted (KIP-360)
            self.state.ended(self.state.numbers, known=False)
            return
        try:
            numbers = await self._ask_end(transaction, False)
        except RaftlogError as error:
            self.state.refused(error)
            self.state.check_usable()
            raise
        self.counts["transactions aborted"] += 1
        self.state.ended(numbers)

    async def _ask_end(self, transaction: Transaction, commit: bool) -> Numbers:
        numbers = transaction.numbers
        request = pb.EndTransactionRequest(
            transactional_id=self.transactional_id, producer_id=numbers[0], producer_epoch=numbers[1], commit=commit
        )
        begun_s = self.now_s
        answer = await self.call("EndTransaction", request, pb.EndTransactionResponse)
        self.simulation.book.tell(transaction, commit, is_quick=self.now_s - begun_s < QUICK_S)
        return Numbers(numbers[0], answer.producer_epoch)


class Transformer(TransactionalProducer):
    """Makes records from those of one partition, and commits how far it has read with them."""

    def __init__(
        self, simulation: TransactionSimulation, number: int, name: str, transactional_id: str, partition: int
    ) -> None:
        super().__init__(simulation, number, name, transactional_id)
        self.group_id = f"group-{transactional_id}"
        self.partition = partition
        self._position: int | None = None

    async def initialized(self) -> None:
        """It has no open transaction: continue after the committed records."""
        self._position = None

    async def write(self, transaction: Transaction) -> None:
        """Read on, and write the transformed records."""
        source = self.simulation.work()[self.partition]
        if self._position is None:
            self._position = await self._committed(source)
        begin, self._position = self._position, None  # until this one is committed
        end, rows = await self._read(source, begin)
        made: list[Value] = []
        for each in rows:
            for offset, value in enumerate(each.column("value").to_pylist(), each.first_offset):
                found = read_value(value)
                if found is not None and found.hops < MAX_HOPS:
                    made.append(Value(transaction.number, len(made), 0, found.hops + 1, offset))
                    header = each.header
                    transaction.reads_from.add((header.producer_id, header.producer_epoch))
        transaction.to_make = [value.source for value in made]
        keys = self.random.sample(self.simulation.work(), 2)
        if made:
            await self.append(transaction, {key: made[number::2] for number, key in enumerate(keys)})
        if end > begin:
            await self._send_offsets(transaction, source, begin, end)

    async def _read(self, source: PartitionKey, begin: int) -> tuple[int, list[Rows]]:
        give_up_s = self.now_s + GIVE_UP_S
        while True:
            try:
                answer, rows = await self.read(source, begin)
            except GaveUp:
                if self.now_s > give_up_s:
                    raise
                await self.pause()
                continue
            # Compaction and markers leave offsets without rows: what counts is how far it has read.
            return max(begin, answer.next_offset), rows

    async def _committed(self, source: PartitionKey) -> int:
        request = group_pb2.FetchOffsetsRequest(
            group_id=self.group_id, member_epoch=-1, partitions=topic_partitions([source]), require_stable=True
        )
        give_up_s = self.now_s + GIVE_UP_S
        while True:
            answer = await self.call(
                "FetchOffsets", request, group_pb2.FetchOffsetsResponse, again=False, give_up_s=give_up_s
            )
            [found] = answer.offsets
            if not found.HasField("error"):
                return max(found.offset, 0)
            self.counts["offsets that were not stable"] += 1
            if self.now_s > give_up_s:
                raise GaveUp
            await self.pause()

    async def _send_offsets(self, transaction: Transaction, source: PartitionKey, begin: int, end: int) -> None:
        await self.add([], [self.group_id])
        await self.dawdle()
        numbers = transaction.numbers
        request = group_pb2.CommitTransactionOffsetsRequest(
            group_id=self.group_id,
            transactional_id=self.transactional_id,
            producer_id=numbers[0],
            producer_epoch=numbers[1],
            member_epoch=-1,
            offsets=[
                group_pb2.CommitOffset(topic_id=source[0], partition=source[1], offset=end, leader_epoch=-1),
            ],
        )
        await self.call(
            "CommitTransactionOffsets", request, group_pb2.CommitOffsetsResponse, give_up_s=self.now_s + GIVE_UP_S
        )
        self.counts["offsets in transactions"] += 1
        transaction.group_id, transaction.source, transaction.consumed = self.group_id, source, (begin, end)
