"""What clients of transactions have in common: coroutines in virtual time, calls that are made until they are answered.

A request that was sent is sent again now and then, much later and to anybody: what a slow network does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.message import Message

from broker.coordinator.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from broker.coordinator.shards import partition_for
from raftlog._core.positions import Rows, wanted_rows
from raftlog.errors import OffsetOutOfRange, RaftlogError, from_wire
from raftlog.format.aborted import AbortedRange, AbortedRanges
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2
from raftlog.v1.common_pb2 import NONE
from raftmeta.image import NO_LEADER
from tests.simulation.dataplane.clients import Client
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.dataplane.messages import (
    Answer,
    Failed,
    FetchedStable,
    FetchStable,
    PartitionKey,
    Replied,
    Request,
    Rpc,
)
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation

MessageT = TypeVar("MessageT", bound=Message)
RETRY_S = (0.01, 0.15)
REPLAYS = 40


class GaveUp(Exception):
    """No broker has answered for too long."""


def topic_partitions(keys: list[PartitionKey]) -> list[group_pb2.TopicPartitions]:
    """Return partitions as requests have them."""
    return [group_pb2.TopicPartitions(topic_id=topic_id, partitions=[number]) for topic_id, number in keys]


class TransactionClient(Client):
    """A process with coroutines; `run` is its life."""

    simulation: TransactionSimulation

    def __init__(self, simulation: TransactionSimulation, number: int, name: str) -> None:
        super().__init__(simulation, number)
        self.name = name
        self.finished = False
        """It has nothing more to do: the faults are over."""
        self.counts = simulation.counts
        self.loop = SimLoop(self.process, self.random)
        self._number = number
        self._failures: list[BaseException] = []
        self._sent: deque[Request] = deque(maxlen=REPLAYS)
        self.process.after_each = self._look
        self.process.after(self.random.uniform(0.2, 1.5), self._begin)

    def _begin(self) -> None:
        self.spawn(self.run())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine; any error that it raises is a violation."""
        task = self.loop.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._failures.append(error)

        task.add_done_callback(ended)
        return task

    def _look(self) -> None:
        for error in self._failures:
            if isinstance(error, Violation):
                raise error
            raise Violation(f"{self.name}: {type(error).__name__}: {error}") from error

    async def run(self) -> None:
        """Live."""
        raise NotImplementedError

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.simulation.scheduler.now_s

    async def pause(self, least_s: float = RETRY_S[0], most_s: float = RETRY_S[1]) -> None:
        """Wait for a while."""
        await asyncio.sleep(self.random.uniform(least_s, most_s))

    # Requests

    async def ask(self, broker_id: int, request: Request) -> Answer | None:
        """Ask a broker once; None: no answer came."""
        answered: asyncio.Future[Answer | None] = self.loop.create_future()

        def done(answer: Answer | None) -> None:
            if not answered.done():
                answered.set_result(answer)

        self.link(broker_id).ask(request, done)
        return await answered

    def replay_some(self) -> None:
        """Send an earlier request once more, without waiting for the answer."""
        if self._sent and self.random.random() < 0.15:
            self.counts["requests replayed"] += 1
            broker_id = self.random.choice(self.simulation.broker_ids)
            request = self.random.choice(self._sent)
            leader = self._leader_of(request)
            if leader is not None and self.random.random() < 0.8:
                broker_id = leader
            self.link(broker_id).ask(request, lambda answer: None)

    def _leader_of(self, request: Request) -> int | None:
        if not isinstance(request, Rpc):
            return self.leader(request.key)
        key = getattr(request.message, "transactional_id", "") or getattr(request.message, "sink_id", "")
        return self.coordinator(TRANSACTION_STATE, key) if key else None

    def remember(self, request: Request) -> None:
        """Keep a request for `replay_some`."""
        self._sent.append(request)

    def leader(self, key: PartitionKey) -> int | None:
        """Return the leader of a partition, as far as it knows."""
        part = self.image.partition(*key)
        return None if part is None or part.leader == NO_LEADER else part.leader

    def coordinator(self, topic_name: str, key: str) -> int | None:
        """Return the coordinator of an id, as far as it knows."""
        topic = self.image.topic(topic_name)
        if topic is None:
            return None
        leader = topic.partitions[partition_for(key, len(topic.partitions))].leader
        return None if leader == NO_LEADER else leader

    async def call(
        self, method: str, message: Message, answer_type: type[MessageT], *, again: bool = True, give_up_s: float = 1e9
    ) -> MessageT:
        """Call a coordinator, again and again while that makes sense. `again`: it may be sent once more, any time.

        Raises:
            GaveUp: no answer in time. RaftlogError: refused.
        """
        request = Rpc(method, type(message).FromString(message.SerializeToString()))
        group_id = getattr(message, "group_id", "")
        key = group_id or getattr(message, "transactional_id", "") or getattr(message, "sink_id", "")
        if again:
            self.remember(request)
        while True:
            if self.now_s > give_up_s:
                raise GaveUp
            coordinator = self.coordinator(CONSUMER_OFFSETS if group_id else TRANSACTION_STATE, key)
            if coordinator is not None:
                answer = await self.ask(coordinator, request)
                error = self._error_of(answer)
                if error is None:
                    assert isinstance(answer, Replied)
                    return cast(MessageT, answer.message)
                self.counts[f"{method} {type(error).__name__}"] += 1
                if not error.retriable:
                    raise error
            await self.pause()
            if self.random.random() < 0.7:
                self.image = self.simulation.invariants.truth

    @staticmethod
    def _error_of(answer: Answer | None) -> RaftlogError | None:
        if isinstance(answer, Failed):
            return answer.error
        if not isinstance(answer, Replied):
            return _Silence("no answer")
        error = cast(Any, answer.message).error
        if error.code != NONE:
            return from_wire(error)
        for result in getattr(answer.message, "results", ()):
            if result.error.code != NONE:
                return from_wire(result.error)
        return None

    # Reading

    async def read(
        self, key: PartitionKey, position: int, *, follower: bool = False
    ) -> tuple[FetchedStable, list[Rows]]:
        """Read what is committed from a position on, once; check that it is.

        Raises:
            GaveUp: that has not worked.
        """
        leader = self.leader(key)
        part = self.image.partition(*key)
        if leader is None or part is None:
            raise GaveUp
        source = self.random.choice(part.replicas) if follower else leader
        answer = await self.ask(source, FetchStable(key, part.leader_epoch, position, follower))
        self.heard(answer)
        if not isinstance(answer, FetchedStable):
            if isinstance(answer, Failed):
                self.counts[f"read {type(answer.error).__name__}"] += 1
                if isinstance(answer.error, OffsetOutOfRange):
                    raise Violation(
                        f"{self.name}: offset {position} of partition {key[1]} was refused as out of range: "
                        f"{answer.error}"
                    )
            raise GaveUp
        rows = self.committed_rows(
            key, position, answer.next_offset, answer.records, answer.last_stable_offset, answer.aborted
        )
        return answer, rows

    def committed_rows(
        self,
        key: PartitionKey,
        begin: int,
        end: int,
        records: bytes,
        last_stable_offset: int,
        aborted: Iterable[AbortedRange],
    ) -> list[Rows]:
        """Return the SDK's result for an answer for [begin, end), and check it against the committed records."""
        found = wanted_rows(
            TopicPartition(key[0].hex()[:4], key[1]),
            records,
            begin,
            check_crcs=True,
            end_offset=last_stable_offset,
            aborted=AbortedRanges(aborted),
        )
        rows = [each for each in found if isinstance(each, Rows)]
        offsets = [offset for each in rows for offset in range(each.first_offset, each.first_offset + len(each))]
        self.simulation.transaction_ledger.check_read(key, begin, end, offsets)
        self.counts["aborted ranges told"] += bool(aborted)
        self.counts["committed records read"] += len(offsets)
        return rows


class _Silence(RaftlogError):
    """No answer came."""

    @property
    def retriable(self) -> bool:
        return True
