"""Applications that read by `assign`, with either isolation level."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from raftlog import aio
from raftlog.errors import RaftlogError
from raftlog.types import Record, TopicPartition
from tests.simulation.cluster.client import QUICK, Application

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation


class Reads(Application):
    """Reads all partitions of the topic from the begin, over and over; seeks back now and then."""

    def __init__(self, simulation: ClusterSimulation, number: int, isolation_level: str) -> None:
        super().__init__(simulation, number, f"reader {isolation_level}")
        self._isolation_level = isolation_level
        self.positions: dict[int, int] = {}

    def _options(self) -> dict[str, Any]:
        chance = self.random
        return {
            **QUICK,
            "isolation_level": self._isolation_level,
            "auto_offset_reset": "earliest",
            "default_api_timeout_ms": 5_000,
            "fetch_max_bytes": chance.choice((2_000, 50_000, 50 << 20)),
            "max_partition_fetch_bytes": chance.choice((1_024, 1 << 20)),
            "max_poll_records": chance.choice((3, 500)),
        }

    def born(self) -> None:
        """It knows nothing."""
        self.positions = {}

    async def work(self) -> None:
        """Read, until there is nothing more to come."""
        topic = self.simulation.work_topic
        wanted = [TopicPartition(topic, number) for number in range(self.simulation.work_partitions)]
        async with aio.Consumer(self.bootstrap, **self._options()) as consumer:
            while True:
                try:
                    await consumer.assign(wanted)
                    break
                except RaftlogError as error:
                    self.count(f"not assigned: {type(error).__name__}")
                    await self.think()
            self.positions = dict.fromkeys(range(len(wanted)), 0)
            turns = self.random.choice((30, 10_000))
            while not self.is_done() and (turns > 0 or self.winding_down):
                turns -= 1
                self._take(await consumer.poll(self.random.choice((0, 0.05, 0.5))))
                if self.random.random() < 0.02 and not self.winding_down:
                    self._seek(consumer)
                if not self.winding_down:
                    await self.think(longest_s=self.random.choice((0.0, 0.1)))

    def _seek(self, consumer: aio.Consumer) -> None:
        partition = self.random.randrange(self.simulation.work_partitions)
        self.positions[partition] = self.random.randrange(self.positions[partition] + 1)
        consumer.seek(TopicPartition(self.simulation.work_topic, partition), self.positions[partition])
        self.count("seeks")

    def _take(self, records: list[Record]) -> None:
        by_partition: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            by_partition[record.partition].append(record)
        for partition, some in by_partition.items():
            key = self.simulation.key_of(self.simulation.work_topic, partition)
            committed_only = self._isolation_level == "read_committed"
            self.positions[partition] = self.book.given(
                key, self.positions[partition], some, committed_only=committed_only
            )
            self.count("records")

    def is_done(self) -> bool:
        """Whether everything is read, and nothing more will come."""
        return self.simulation.nothing_more_comes() and self.is_behind() is None

    def is_behind(self) -> str | None:
        """Return what it has yet to read."""
        for partition in range(self.simulation.work_partitions):
            end = self.simulation.ledger.last_readable(self.simulation.key_of(self.simulation.work_topic, partition))
            if self.positions.get(partition, 0) < end:
                return f"{self} stands at {self.positions.get(partition)} of {end} in partition {partition}"
        return None
