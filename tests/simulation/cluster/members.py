"""Applications that read as members of groups: with auto-commit, or with commits of processed records by themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from raftlog import aio
from raftlog._consumer import RebalanceListener
from raftlog.errors import RaftlogError
from raftlog.types import Record, TopicPartition
from tests.simulation.cluster.client import QUICK, Application
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from raftlog._core.membership import Membership
    from tests.simulation.cluster.schedule import ClusterSimulation


class _Listener(RebalanceListener):
    """Forgets where a partition stands that goes, or comes anew."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        await self._member.go(partitions, lost=False)

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        await self._member.go(partitions, lost=True)


class Member(Application):
    """A member of a group."""

    def __init__(self, simulation: ClusterSimulation, number: int, group_id: str, *, auto_commit: bool) -> None:
        super().__init__(simulation, number, f"member of {group_id}")
        self.group_id = group_id
        self._auto_commit = auto_commit
        self._identity = {"group_instance_id": f"static-{number}"} if self.random.random() < 0.3 else {}
        self._positions: dict[TopicPartition, int] = {}
        self._out: list[Record] = []
        """Records that the application was given, and is at work on."""
        self.consumer: aio.Consumer | None = None

    def _options(self) -> dict[str, Any]:
        chance = self.random
        return {
            **QUICK,
            **self._identity,
            "group_id": self.group_id,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": self._auto_commit,
            "auto_commit_interval_ms": chance.choice((50, 300, 1_000)),
            "max_poll_interval_ms": chance.choice((1_500, 300_000)),
            "default_api_timeout_ms": 3_000,
            "fetch_max_bytes": chance.choice((2_000, 50 << 20)),
            "max_poll_records": chance.choice((3, 50, 500)),
        }

    def born(self) -> None:
        """It knows nothing, and owns nothing."""
        self._forget()

    def died(self) -> None:
        """The records that it was processing are not processed."""
        self._forget()

    def _forget(self) -> None:
        self.consumer = None
        self._positions = {}
        self._out = []

    @property
    def membership(self) -> Membership | None:
        """The SDK's state of its membership, while there is one."""
        engine: Any = None if self.consumer is None else self.consumer._made
        return None if engine is None else engine.membership

    def sure_of(self) -> frozenset[TopicPartition]:
        """Return what it owns, as it would act on it now."""
        membership = self.membership
        if membership is None or not self.process.alive:
            return frozenset()
        sure = self.host.local_s() * 1_000 < membership.session_deadline_ms
        return frozenset(membership.owned) if sure else frozenset()

    def look(self) -> None:
        """Check that no other member owns its partitions.

        Raises:
            Violation: another member does, and both are sure of their sessions.
        """
        mine = self.sure_of()
        for other in self.simulation.members_of(self.group_id) if mine else ():
            both = () if other is self else mine & other.sure_of()
            for part in sorted(both):
                raise Violation(f"{self.group_id}: {part} is owned by two members at once, {self} and {other}")

    async def work(self) -> None:
        """Read until everything is read and committed; come and go meanwhile."""
        consumer = aio.Consumer(self.bootstrap, **self._options())
        self.consumer = consumer
        polls = self.random.random() < 0.7
        try:
            await consumer.subscribe([self.simulation.work_topic], listener=_Listener(self))
            turns = self.random.choice((10, 50, 10_000))
            while not self._is_over() and (turns > 0 or self.winding_down):
                turns -= 1
                await (self._poll(consumer) if polls else self._iterate(consumer))
                if not self.winding_down:
                    await self.think(longest_s=self.random.choice((0.0, 0.1, 0.1, 1.0)))
        except RaftlogError as error:
            self.count(f"ends by {type(error).__name__}")
        self._done()
        await self.attempt(consumer.close())
        self._forget()

    def _is_over(self) -> bool:
        return self.simulation.nothing_more_comes() and self.simulation.group_behind(self.group_id) is None

    async def _poll(self, consumer: aio.Consumer) -> None:
        self._done()
        records = await consumer.poll(self.random.choice((0, 0.05, 0.3)))
        self._given(records)
        if not self._auto_commit and (self.winding_down or (self._out and self.random.random() < 0.5)):
            await self.think(longest_s=0.02)
            self._done()
            if self.random.random() < 0.3:
                consumer.commit_async()
            else:
                await self.attempt(consumer.commit())

    async def _iterate(self, consumer: aio.Consumer) -> None:
        """Take a few records, one by one."""
        iterator = aiter(consumer)
        for _ in range(self.random.choice((1, 5, 20))):
            self._done()
            if self._is_over():
                return
            try:
                async with asyncio.timeout(0.5):
                    record = await anext(iterator)
            except TimeoutError:
                break
            self._given([record])
        if not self._auto_commit and (self._out or self.winding_down):
            self._done()
            await self.attempt(consumer.commit())

    def _given(self, records: list[Record]) -> None:
        by_partition: dict[TopicPartition, list[Record]] = {}
        for record in records:
            by_partition.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
        for part, some in by_partition.items():
            key = self.simulation.key_of(*part)
            begin = self._positions.get(part)
            if begin is None:
                begin = self.simulation.offsets.committed.get((self.group_id, key), 0)
            self._positions[part] = self.book.given(key, begin, some, committed_only=True)
            self.count("records")
        self._out += records

    def _done(self) -> None:
        """The application has processed the records that it was given."""
        for record in self._out:
            key = self.simulation.key_of(record.topic, record.partition)
            self.simulation.offsets.done(self.group_id, key, record.offset)
        self._out = []

    async def go(self, partitions: list[TopicPartition], *, lost: bool) -> None:
        """Partitions go to others."""
        self.count("partitions lost" if lost else "partitions revoked")
        if not lost and not self._auto_commit and self.consumer is not None and self.random.random() < 0.7:
            self._done()
            await self.attempt(self.consumer.commit())
        for part in partitions:
            self._positions.pop(part, None)
