"""A client that may write the shared topic, reads all producer ids, and tries to do harm with them.

It has two transactional ids of its own and names no other: which ids it may name is the authorizer's business, which
this world does not have. It knows what brokers know of producers, without asking. Under its own id it writes to
partitions that it has not added. Every batch that it sends has to be refused.

One of its two ids has the tag of every producer id (`tags_collide`). That stands for a client that has tried names
until one had the tag of the producer id that it wants to use: some millions of attempts, too many for a simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from raftlog import aio
from raftlog._client.connections import connections
from raftlog._core.transaction_state import Numbers
from raftlog.errors import RaftlogError
from raftlog.format import Attributes
from raftlog.format.wire import Produce, ProducePart, encode_produce
from raftlog.v1 import common_pb2, log_pb2
from raftmeta.producer_ids import ProducerIdKey, ProducerOwner
from tests.simulation.cluster.client import QUICK, Application
from tests.simulation.parts import Violation
from tests.support.batches import batch_of

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

NAME = "hostile"
COLLIDING = "hostile, with the tag of every producer id"
ANSWER_S = 3.0
LAST_EPOCH = 32_767


@contextlib.contextmanager
def tags_collide() -> Iterator[None]:
    """Let the tag of every producer id fit the transactional id COLLIDING too."""
    owns, colliding = ProducerIdKey.owns, ProducerOwner.transactional(COLLIDING)

    def owns_or_collides(self: ProducerIdKey, owner: ProducerOwner, producer_id: int) -> bool:
        return owner == colliding or owns(self, owner, producer_id)

    ProducerIdKey.owns = owns_or_collides  # type: ignore[method-assign] # for the time of a simulation
    try:
        yield
    finally:
        ProducerIdKey.owns = owns  # type: ignore[method-assign] # as above


class Hostile(Application):
    """Attacks now and then; see the module."""

    def __init__(self, simulation: ClusterSimulation, number: int) -> None:
        super().__init__(simulation, number, NAME)
        self._sent = 0
        self._own: Numbers | None = None

    async def work(self) -> None:
        """Attack until it is time to end."""
        network = connections(None, None)
        producer = aio.Producer(self.bootstrap, transactional_id=NAME, max_block_ms=5_000, **QUICK)
        self._own = None
        try:
            if await self.attempt(producer.init_transactions()) is None:
                transactions = producer._engine.transactions
                assert transactions is not None
                self._own = transactions.state.numbers
            while not self.winding_down:
                await self.think(longest_s=0.2)
                for address in self.bootstrap:
                    await self._attack(network.channel(address))
        finally:
            if self.process.alive:
                await self.attempt(producer.close())
                await network.close()

    async def _attack(self, channel: Any) -> None:
        """Send one forged batch to one broker."""
        partition = self.random.randrange(self.simulation.work_partitions)
        producer_id, epoch, sequence, transactional = self._numbers(partition)
        batch = batch_of(
            b"hostile",
            attributes=int(Attributes.TRANSACTIONAL) if transactional else 0,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        self._sent += 1
        topic_id = self.simulation.id_of(self.simulation.work_topic)
        head = log_pb2.ProduceRequest(correlation_id=self._sent, acks=log_pb2.ALL, timeout_ms=1_000)
        if transactional:
            own = self._own is not None and (producer_id, epoch) == self._own
            head.transactional_id = COLLIDING if self._sent % 2 and not own else NAME
        part = log_pb2.ProducePartition(topic_id=topic_id, partition=partition, leader_epoch=-1, chain=self._sent)
        call = channel.stream_stream(
            "/raftlog.v1.Log/Produce",
            request_serializer=encode_produce,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )()
        try:
            async with asyncio.timeout(ANSWER_S):
                await call.write(Produce(head, [ProducePart(part, batch)]))
                answer = await call.read()
        except (TimeoutError, RaftlogError, grpc.RpcError, asyncio.InvalidStateError):
            self.count("no answer")
            return
        finally:
            call.cancel()
        if not isinstance(answer, log_pb2.ProduceResponse):
            self.count("no answer")
            return
        code = answer.results[0].error.code
        self.count(common_pb2.ErrorCode.Name(code))
        if code in (common_pb2.NONE, common_pb2.DUPLICATE_SEQUENCE_NUMBER):
            raise Violation(
                f"a hostile client's batch under producer id {producer_id} and epoch {epoch} was accepted as "
                f"{'transactional' if transactional else 'plain'}"
            )

    def _numbers(self, partition: int) -> tuple[int, int, int, bool]:
        """Return a producer id, an epoch, a sequence, and whether to pretend a transaction.

        Plain batches go under ids of transactions only: all applications here are one user.
        """
        chance = self.random.random()
        if chance < 0.2:
            return self.random.choice((3, 1_000, 1 << 30, 1 << 62)), LAST_EPOCH, 0, self.random.random() < 0.5
        if chance < 0.4 and self._own is not None:
            return *self._own, 0, True
        topic_id = self.simulation.id_of(self.simulation.work_topic)
        known = [
            (producer_id, state)
            for broker in self.simulation.cluster_brokers()
            for each in broker.registry.partitions()
            if each.leads and (each.log.topic_id, each.log.partition) == (topic_id, partition)
            for producer_id, state in each.log.producers.items()
            if state.first_offset >= 0
        ]
        if not known:
            return 1 << 40, LAST_EPOCH, 0, True
        producer_id, state = self.random.choice(known)
        epoch = self.random.choice((state.epoch, state.epoch, state.epoch, state.epoch + 1, LAST_EPOCH))
        return producer_id, epoch, state.next_sequence if epoch == state.epoch else 0, self.random.random() < 0.6
