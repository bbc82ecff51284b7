"""Applications that produce: idempotent, with acks=all but not idempotent, with acks=1, and with acks=0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from raftlog import aio
from raftlog.errors import RaftlogError
from tests.simulation.cluster.book import Value, Writer
from tests.simulation.cluster.client import QUICK, Application

if TYPE_CHECKING:
    from raftlog.types import RecordMetadata
    from tests.simulation.cluster.schedule import ClusterSimulation

KINDS: dict[str, dict[str, Any]] = {
    "idempotent": {"acks": "all"},
    "acks=all": {"acks": "all", "enable_idempotence": False},
    "acks=1": {"acks": "1", "enable_idempotence": False},
    "acks=0": {"acks": "0", "enable_idempotence": False},
}
MAX_OPEN = 30
"""Deliveries that a producer leaves open before it waits for some."""


class Produces(Application):
    """Sends to the shared topic; flushes, waits, closes and begins anew now and then."""

    def __init__(self, simulation: ClusterSimulation, number: int, kind: str) -> None:
        super().__init__(simulation, number, kind)
        self._kind = kind
        self._think_s = self.random.choice((0.1, 0.2, 0.5))
        self._keyed = self.random.random() < 0.5

    def _options(self) -> dict[str, Any]:
        chance = self.random
        return {
            **QUICK,
            **KINDS[self._kind],
            "linger_ms": chance.choice((0, 5, 50)),
            "batch_size": chance.choice((200, 2_000, 65_536)),
            "delivery_timeout_ms": chance.choice((1_500, 120_000, 120_000)),
            "max_in_flight_requests_per_connection": chance.choice((1, 2, 5)),
            "compression_type": chance.choice(("none", "none", "lz4")),
        }

    async def work(self) -> None:
        """Send, until it is time to end; then wait for everything. Idempotent producers of one process share calls."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.random.choice((1, 1, 2, 3))):
                group.create_task(self._produce())

    async def _produce(self) -> None:
        kind = KINDS[self._kind]
        idempotent = kind.get("enable_idempotence", True)
        writer = self.book.new_writer(str(self), idempotent=idempotent, safe=kind["acks"] == "all")
        open_: list[asyncio.Task[None]] = []
        async with aio.Producer(self.bootstrap, **self._options()) as producer:
            for _ in range(self.random.choice((20, 100, 10_000))):
                if self.winding_down:
                    break
                for _ in range(self.random.choice((1, 1, 1, 5))):
                    await self._send(producer, writer, open_)
                if self.random.random() < 0.05:
                    await producer.flush()
                open_ = [task for task in open_ if not task.done()]
                if len(open_) > MAX_OPEN:
                    await open_[0]
                await self.think(longest_s=self._think_s)
            if self.random.random() < 0.5:
                await producer.flush()
        for task in open_:
            await task

    async def _send(self, producer: aio.Producer, writer: Writer, open_: list[asyncio.Task[None]]) -> None:
        number = writer.sent
        writer.sent += 1
        value = Value(writer.number, number).encode(self.random.choice((0, 0, 10, 100, 400)))
        key = b"%d" % self.random.randrange(5) if self._keyed else None
        try:
            delivery = await producer.send(self.simulation.work_topic, value, key)
        except RaftlogError as error:  # there is no room, or no broker answers
            self.count(f"not sent: {type(error).__name__}")
            writer.certainly_not.add(number)
            return
        open_.append(asyncio.get_running_loop().create_task(self._wait(writer, number, delivery)))

    async def _wait(self, writer: Writer, number: int, delivery: Awaitable[RecordMetadata]) -> None:
        try:
            told = await delivery
        except RaftlogError as error:
            self.count(type(error).__name__)
            if "certainly not in the log" in str(error):
                writer.certainly_not.add(number)
            return
        self.count("acknowledged")
        self.book.acknowledged(writer, number, told, self.simulation.key_of(told.topic, told.partition))
