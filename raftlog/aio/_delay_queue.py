"""Records that become visible after a delay, for asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

from raftlog._core.arguments import HeadersLike, as_headers, as_topic
from raftlog._core.delays import (
    DEFAULT_LEVELS,
    Delayed,
    DelayLike,
    Levels,
    Outgoing,
    SortedOut,
    as_delay_ms,
    delayed_send,
    sort_out,
)
from raftlog._delay_moving import sender_config
from raftlog._delay_reading import (
    DEFAULT_REPLICAS,
    POLLED_MAX,
    RETENTION,
    ROUND_MAX,
    STOP_POLL_S,
    DelayReading,
    consumer_config,
    sent_now_ms,
    topic_configs,
    unless_lost,
)
from raftlog._delay_round import Round
from raftlog._delivery import AsyncDelivery, Deadline
from raftlog.aio._admin import Admin
from raftlog.aio._consumer import Consumer
from raftlog.aio._delay_moving import Mover
from raftlog.aio._producer import Producer
from raftlog.errors import ClosedError, FencedError, RaftlogError, TopicAlreadyExists
from raftlog.types import Record

logger = logging.getLogger(__name__)


class DelayQueue:
    """As `raftlog.DelayQueue`, awaitable. Belongs to the event loop that runs when it is first used.

    One task polls; any may send.

    >>> import asyncio
    >>> from raftlog import aio
    >>> async def later():
    ...     async with aio.DelayQueue(cluster.bootstrap, "aio-reminders", levels=[0.2, 5]) as queue:
    ...         await (await queue.send(b"feed the cat", delay=0.2))
    ...         return await queue.poll(timeout=30)
    >>> [record.value for record in asyncio.run(later())]
    [b'feed the cat']
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        name: str,
        levels: Iterable[DelayLike] = DEFAULT_LEVELS,
        *,
        target: str | None = None,
        group_id: str | None = None,
        producer_config: Mapping[str, object] | None = None,
        consumer_config: Mapping[str, object] | None = None,
    ) -> None:
        self._name = as_topic(name)
        self._levels = Levels(name, levels)
        self._target = None if target is None else as_topic(target)
        self._bootstrap = bootstrap
        self._group_id = group_id if group_id is not None else f"{name}.delay"
        self._consumer_config = consumer_config
        self._lock = asyncio.Lock()
        self._created = False
        self._closed = False
        self._consumer: Consumer | None = None
        self._producer = Producer(bootstrap, config=sender_config(producer_config))
        self._producer_config = producer_config
        self._mover: Mover | None = None
        self._doubtful: list[Delayed] = []
        """What was being handed over by a transaction whose outcome is not known."""
        self._reading = DelayReading(self._levels)

    @property
    def levels(self) -> list[timedelta]:
        """The delay levels, the shortest first."""
        return [timedelta(milliseconds=level.delay_ms) for level in self._levels.all]

    async def create(
        self,
        partitions: int = 1,
        replication_factor: int | None = None,
        retention: timedelta = RETENTION,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """As `raftlog.DelayQueue.create`."""
        created = []
        async with Admin(self._bootstrap) as admin:
            there = set(await admin.list_topics(timeout=timeout))
            self._levels.found(there)
            for level in self._levels.all:
                topic = self._levels.topic(level)
                if topic in there:
                    continue
                if replication_factor is None:
                    brokers = (await admin.describe_cluster(timeout=timeout)).brokers
                    replication_factor = min(DEFAULT_REPLICAS, len(brokers))
                try:
                    configs = topic_configs(level, retention)
                    await admin.create_topic(topic, partitions, replication_factor, configs, timeout=timeout)
                    created.append(topic)
                except TopicAlreadyExists:
                    pass  # another process was faster
        self._created = True
        return created

    async def _ensure_created(self) -> None:
        if not self._created:
            async with self._lock:
                if not self._created:
                    await self.create()

    # Sending

    async def send(
        self,
        value: bytes | None,
        delay: DelayLike,
        key: bytes | None = None,
        headers: HeadersLike | None = None,
        target: str | None = None,
    ) -> AsyncDelivery:
        """As `raftlog.DelayQueue.send`."""
        sent_ms = sent_now_ms()
        due_ms = sent_ms + as_delay_ms(delay)
        wanted = self._target if target is None else as_topic(target)
        own = as_headers(headers) if headers is not None else ()
        outgoing = delayed_send(self._levels, value, key, own, due_ms, wanted, sent_ms)
        await self._ensure_created()
        if wanted is not None:
            await self._producer._queues(wanted)  # raises if there is no such topic: the sender can still do something
        return await self._send(outgoing)

    async def flush(self, timeout: float | None = None) -> None:
        """As `raftlog.DelayQueue.flush`."""
        await self._producer.flush(timeout)

    # What is due

    async def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """As `raftlog.DelayQueue.poll`."""
        given, _ = await self._round(timeout, max_records or ROUND_MAX, forwards=False)
        return given

    async def commit(self) -> None:
        """As `raftlog.DelayQueue.commit`."""
        self._check_open()
        if self._reading.given and self._consumer is not None:
            try:
                await self._consumer.commit(self._reading.given)
            except FencedError as error:
                self._reading.fenced(error)
            self._reading.given = {}

    async def forward(self, timeout: float | None = 1.0) -> int:
        """As `raftlog.DelayQueue.forward`."""
        _, handed_over = await self._round(timeout, ROUND_MAX, forwards=True)
        return handed_over

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """As `raftlog.DelayQueue.run`."""
        while not (stop is not None and stop.is_set()):
            try:
                await self.forward(STOP_POLL_S)
            except RaftlogError as error:
                if not self._closed:
                    raise
                if not isinstance(error, ClosedError):
                    logger.info("delay queue %s was closed while it handed over: %s", self._name, error)
                return

    async def _round(self, timeout: float | None, limit: int, *, forwards: bool) -> tuple[list[Record], int]:
        consumer = await self._consuming()
        await self._settle(consumer)
        await self.commit()
        deadline = Deadline(timeout)
        round_ = Round(self._reading)
        while True:
            taken = self._reading.take(limit)
            if taken:
                round_.add(taken)
                await self._do(consumer, round_, forwards=forwards)
                if round_.given or (round_.handed_over and forwards and round_.error is None):
                    return round_.given, round_.handed_over
                continue
            if round_.error is not None:
                raise round_.error
            left_s = deadline.left()
            if not await self._fetch(consumer, left_s) and left_s == 0:
                return [], 0

    async def _do(self, consumer: Consumer, round_: Round, *, forwards: bool) -> None:
        while (part := round_.next()) is not None:
            try:
                round_.done(part, await self._hand_over(consumer, part, forwards=forwards))
            except BaseException as error:  # an interrupt too: what was taken is not done
                in_doubt = self._mover is not None and self._mover.in_doubt
                back = round_.failed(part, error, in_doubt=in_doubt)
                self._put_back(consumer, back)
                self._doubtful = round_.doubtful
                if round_.over:
                    raise
                round_.put_off()

    async def _fetch(self, consumer: Consumer, left_s: float | None) -> bool:
        """Wait until there is something to do; return whether records were polled."""
        before = self._reading.before_poll(left_s)
        for partition in before.pause:
            with unless_lost:
                consumer.pause(partition)
        for partition in before.resume:
            with unless_lost:
                consumer.resume(partition)
        polled = await consumer.poll(before.timeout_s, POLLED_MAX)
        for partition, offset in self._reading.after_poll(polled).items():
            with unless_lost:
                consumer.pause(partition)  # at once: nothing is to be fetched that is dropped again
                consumer.seek(partition, offset)
        return bool(polled)

    async def _settle(self, consumer: Consumer) -> None:
        """Learn what became of what was being handed over when the last call was interrupted."""
        if self._mover is None or not self._doubtful:
            return
        try:
            await self._mover.settle()
        except BaseException:
            if not self._mover.in_doubt:
                self._put_back(consumer, self._doubtful)
                self._doubtful = []
            raise
        self._doubtful = []

    async def _hand_over(self, consumer: Consumer, ready: list[Delayed], *, forwards: bool) -> SortedOut:
        """Send on what is not for a worker, with the offsets behind it, and return once that is committed."""
        found = sort_out(self._levels, ready, self._reading.taken_at_ms, forwards=forwards)
        if found.outgoing:
            mover = await self._moving()
            await mover.move(found.outgoing, self._reading.going_on(ready), consumer.group_metadata())
        return found

    async def _moving(self) -> Mover:
        if self._mover is not None and self._mover.is_over:
            await self._mover.close()
            self._mover = None
        if self._mover is None:
            self._mover = Mover(self._bootstrap, self._name, self._producer_config)
        return self._mover

    async def _send(self, outgoing: Outgoing) -> AsyncDelivery:
        topic, value, key, headers, timestamp_ms = outgoing
        return await self._producer.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)

    def _put_back(self, consumer: Consumer, taken: list[Delayed]) -> None:
        """Read again, later, what could not be handed over."""
        if not self._closed:
            for partition, offset in self._reading.put_back(taken, consumer.assignment()).items():
                with unless_lost:
                    consumer.seek(partition, offset)
                    consumer.resume(partition)

    async def _consuming(self) -> Consumer:
        self._check_open()
        if self._consumer is None:
            await self._ensure_created()
            config = consumer_config(self._consumer_config)
            consumer = Consumer(self._bootstrap, group_id=self._group_id, config=config)
            try:
                await consumer.subscribe(self._levels.topics, listener=self._reading)
            except BaseException:
                await consumer.close()
                raise
            self._consumer = consumer
        return self._consumer

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"delay queue {self._name} is closed")

    # End

    async def close(self, timeout: float | None = None) -> None:
        """As `raftlog.DelayQueue.close`."""
        self._closed = True
        try:
            await self._producer.close(timeout)
        finally:
            if self._mover is not None:
                await self._mover.close()
            if self._consumer is not None:
                await self._consumer.close()

    async def __aenter__(self) -> DelayQueue:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
