"""Applications with transactions: a bank, whose transfers add up to nothing, and transformers (read, make, write)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from raftlog import aio
from raftlog.errors import (
    FencedError,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    RetriableError,
    TransactionAbortable,
)
from raftlog.types import Record, TopicPartition
from tests.simulation.cluster.book import Writer
from tests.simulation.cluster.client import QUICK, Application
from tests.simulation.cluster.deals import BANK, MADE, Deal

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

FINAL = (ProducerFenced,)


class Transacts(Application):
    """What both have in common: a producer with a transactional id, and how its transactions end."""

    def __init__(self, simulation: ClusterSimulation, number: int, transactional_id: str) -> None:
        super().__init__(simulation, number, transactional_id)
        self._transactional_id = transactional_id

    def _options(self) -> dict[str, Any]:
        chance = self.random
        return {
            **QUICK,
            "transactional_id": self._transactional_id,
            "transaction_timeout_ms": self.simulation.transaction_timeout_ms,
            "linger_ms": chance.choice((0, 5, 50)),
            "batch_size": chance.choice((200, 65_536)),
            "delivery_timeout_ms": chance.choice((3_000, 120_000)),
            "max_block_ms": 5_000,
        }

    async def work(self) -> None:
        """Run transactions until it is time to end, or another process has the id."""
        writer = self.book.new_writer(str(self), idempotent=True, safe=False)
        producer = aio.Producer(self.bootstrap, **self._options())
        try:
            await producer.init_transactions()
            await self.transact(producer, writer)
        except RaftlogError as error:
            self.count(f"ends by {type(error).__name__}")
            await self.think(longest_s=1.0)
        finally:
            if self.process.alive:
                await self.attempt(producer.close())

    async def transact(self, producer: aio.Producer, writer: Writer) -> None:
        """Do transactions, one after the other."""
        raise NotImplementedError

    async def _end(self, producer: aio.Producer, deal: Deal, *, commit: bool) -> bool:
        """Commit or abort; return whether it is committed.

        Raises:
            RaftlogError: there is no going on with this producer.
        """
        if commit:
            deal.may_commit = True
            while True:
                try:
                    await producer.commit_transaction()
                    self.simulation.deals.told(deal, committed=True)
                    return True
                except RetriableError as error:
                    self.count(f"asks again after {type(error).__name__}")
                except TransactionAbortable:
                    break
                except InvalidTxnState as error:
                    self.count(f"commit: {error}")
                    raise
        await self._abort(producer, deal)
        return False

    async def _abort(self, producer: aio.Producer, deal: Deal) -> None:
        while True:
            try:
                await producer.abort_transaction()
                self.simulation.deals.told(deal, committed=False)
                return
            except RetriableError as error:
                self.count(f"asks again after {type(error).__name__}")


class Bank(Transacts):
    """Moves money from account to account."""

    async def transact(self, producer: aio.Producer, writer: Writer) -> None:
        """Transfer after transfer."""
        turns = self.random.choice((5, 30, 10_000))
        while not self.winding_down and turns > 0:
            turns -= 1
            deal = self.simulation.deals.begin(self.name, writer)
            await producer.begin_transaction()
            error = await self.attempt(self._transfer(producer, deal))
            if isinstance(error, FINAL):
                raise error
            await self._end(producer, deal, commit=error is None and self.random.random() < 0.8)
            await self.think(longest_s=self.random.choice((0.2, 0.6)))

    async def _transfer(self, producer: aio.Producer, deal: Deal) -> None:
        left = 0
        for index in range(count := self.random.choice((1, 2, 2, 5))):
            amount = -left if index == count - 1 else self.random.randrange(-50, 50)
            left += amount
            value = self.simulation.deals.value(deal, BANK, amount)
            partition = self.random.randrange(self.simulation.work_partitions)
            delivery = await producer.send(self.simulation.work_topic, value.encode(), partition=partition)
            if self.random.random() < 0.1:
                await delivery
        if self.random.random() < 0.05:
            await self.think(longest_s=self.random.choice((0.3, 2.0)))


class Transformer(Transacts):
    """Reads records as a member of a group, makes one of each, and commits both together."""

    def __init__(self, simulation: ClusterSimulation, number: int, transactional_id: str, group_id: str) -> None:
        super().__init__(simulation, number, transactional_id)
        self.group_id = group_id

    async def transact(self, producer: aio.Producer, writer: Writer) -> None:
        """Read, make, write."""
        consumer = aio.Consumer(
            self.bootstrap,
            group_id=self.group_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            default_api_timeout_ms=3_000,
            max_poll_records=self.random.choice((10, 50, 500)),
            **QUICK,
        )
        try:
            await consumer.subscribe([self.simulation.work_topic])
            turns = self.random.choice((10, 50, 10_000))
            while not self._is_over() and (turns > 0 or self.winding_down):
                turns -= 1
                records = await consumer.poll(self.random.choice((0.05, 0.3)))
                if not self.winding_down:
                    await self.think(longest_s=0.3)  # the application is at work; a reader of small polls is slow
                if records:
                    await self._make(consumer, producer, writer, records)
        finally:
            if self.process.alive:
                await self.attempt(consumer.close())

    def _is_over(self) -> bool:
        return self.simulation.sources_are_done() and self.simulation.group_behind(self.group_id) is None

    async def _make(
        self, consumer: aio.Consumer, producer: aio.Producer, writer: Writer, records: list[Record]
    ) -> None:
        deal = self.simulation.deals.begin(self.name, writer)
        await producer.begin_transaction()
        error = await self.attempt(self._write(consumer, producer, deal, records))
        if isinstance(error, FINAL):
            raise error
        commits = error is None and self.random.random() < 0.9
        if not await self._end(producer, deal, commit=commits):
            await self._back(consumer)

    async def _write(self, consumer: aio.Consumer, producer: aio.Producer, deal: Deal, records: list[Record]) -> None:
        offsets: dict[TopicPartition, int] = {}
        for record in records:
            value = self.simulation.deals.value(deal, MADE, record.partition, record.offset)
            await producer.send(self.simulation.made_topic, value.encode())
            offsets[TopicPartition(record.topic, record.partition)] = record.offset + 1
        for record in records:
            key = self.simulation.key_of(record.topic, record.partition)
            self.simulation.offsets.done(self.group_id, key, record.offset)
        if self.random.random() < 0.05:
            await self.think(longest_s=self.random.choice((0.3, 2.0)))
        await producer.send_offsets_to_transaction(offsets, consumer.group_metadata())

    async def _back(self, consumer: aio.Consumer) -> None:
        """Read again the records that the aborted transaction had read."""
        while True:
            try:
                for part, committed in (await consumer.committed()).items():
                    if part not in consumer.assignment():
                        continue
                    if committed is None:
                        await consumer.seek_to_beginning(part)
                    else:
                        consumer.seek(part, committed.offset)
                return
            except RetriableError as error:
                self.count(f"goes back: {type(error).__name__}")
                await asyncio.sleep(0.05)
            except FencedError as error:
                self.count(f"goes back: {type(error).__name__}")
                return
