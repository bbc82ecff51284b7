"""The awaitable side of `raftlog/_delay_queue.py`, generated from it by `./dev aio`: change that file."""

from __future__ import annotations

import contextlib
import logging
from asyncio import Event, Lock
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
from raftlog._delay_queue import (
    DEFAULT_REPLICAS,
    POLLED_MAX,
    RETENTION,
    ROUND_MAX,
    STOP_POLL_S,
    DelayReading,
    Round,
    consumer_config,
    expect_abort,
    is_over,
    is_settled,
    mover_config,
    reason_of,
    sender_config,
    sent_now_ms,
    topic_configs,
    unless_lost,
)
from raftlog._delivery import AsyncDelivery, Deadline
from raftlog.aio._admin import Admin
from raftlog.aio._consumer import Consumer
from raftlog.aio._producer import Producer
from raftlog.errors import (
    ClosedError,
    FencedError,
    InvalidTxnState,
    RaftlogError,
    RetriableError,
    TopicAlreadyExists,
    TransactionAbortable,
)
from raftlog.types import GroupMetadata, Record, TopicPartition

logger = logging.getLogger(__name__)


class Mover:
    """A producer that sends records on and commits the offsets behind them, both or neither."""

    def __init__(self, bootstrap: str | Sequence[str], name: str, config: Mapping[str, object] | None) -> None:
        self._producer = Producer(bootstrap, config=mover_config(name, config))
        self.in_doubt = False
        """Whether a commit was sent whose outcome is not known."""

    @property
    def is_over(self) -> bool:
        """Whether this mover can hand over no more records."""
        return is_over(self._producer._engine)

    async def move(
        self, outgoing: Iterable[Outgoing], ends: Mapping[TopicPartition, int], group: GroupMetadata
    ) -> None:
        """Hand over, and return once the transaction is committed.

        Raises:
            FencedError: other workers have the partitions and hand their records over.
            RaftlogError: a target refused a record, or the cluster did not answer; nothing was handed over.
        """
        producer = self._producer
        try:
            await producer.begin_transaction()
        except InvalidTxnState:  # the previous transaction could not be aborted in time
            await producer.abort_transaction()
            await producer.begin_transaction()
        try:
            for topic, value, key, headers, timestamp_ms in outgoing:
                await producer.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)
            await producer.send_offsets_to_transaction(ends, group)
        except BaseException as error:
            await self._abort()
            if isinstance(error, TransactionAbortable):
                raise reason_of(error) from None
            raise
        self.in_doubt = True
        await self.settle()

    async def settle(self) -> None:
        """Find out the outcome of a transaction in doubt, if there is one; ask again until it is known.

        Raises:
            RaftlogError: the transaction is aborted, nothing was handed over.
            ClosedError: the queue was closed meanwhile.
        """
        while self.in_doubt:
            try:
                await self._producer.commit_transaction()
            except RetriableError:
                continue
            except TransactionAbortable as error:
                self.in_doubt = False
                await self._abort()
                raise reason_of(error) from None
            except ClosedError:
                raise
            except RaftlogError:
                self.in_doubt = False
                if not is_settled(self._producer._engine):
                    raise
            self.in_doubt = False

    async def _abort(self) -> None:
        with contextlib.suppress(RaftlogError):  # the next `move` tries again, or the coordinator times it out
            await self._producer.abort_transaction()

    async def close(self) -> None:
        """Stop; an open transaction is aborted."""
        if self._producer._made is not None:
            expect_abort(self._producer._made)
        await self._producer.close()


class DelayQueue:
    """A queue of records that no consumer sees before they are due.

    Each delay level is a topic, `<name>.delay.<level>` (`reminders.delay.30s`). Its records are due in the order in
    which they were sent, so the queue watches only the first record of each partition and fetches nothing in between.
    `levels` are seconds or timedeltas. A delay between two levels waits at the lower level first, and then again for
    the rest. Below the smallest level a record may be late by that level at most; no record is ever early. Due times
    come from the sender's clock and are compared with the reader's clock. Any number of processes may send, and any
    number may take due records, as one consumer group (`group_id`, by default `<name>.delay`).

    A due record goes to its `target` topic if it has one, and otherwise to a worker's `poll`. Delivery to a target is
    exactly once: sending and committing are one transaction, so consumers of the target must read committed records
    (their default). `poll` is at least once: if a worker dies before it calls again, another worker gets its records.
    Waiting records survive every restart.

    Belongs to the event loop that runs when it is first used.

    >>> import asyncio
    >>> from raftlog import aio
    >>> async def later():
    ...     async with aio.DelayQueue(cluster.bootstrap, "aio-reminders", levels=[0.2, 5]) as queue:
    ...         await (await queue.send(b"feed the cat", delay=0.2))
    ...         return await queue.poll(timeout=30)
    >>> [record.value for record in asyncio.run(later())]
    [b'feed the cat']

    Raises:
        InvalidRequestError: no levels were given, or a level is not a delay.
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
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
        self._creating = Lock()
        self._created = False
        self._closed = False
        self._consumer: Consumer | None = None
        self._producer = Producer(bootstrap, config=sender_config(producer_config))
        self._producer_config = producer_config
        self._mover: Mover | None = None
        self._doubtful: list[Delayed] = []
        """Records in a transaction whose outcome is not known."""
        self._reading = DelayReading(self._levels)

    @property
    def levels(self) -> list[timedelta]:
        """The delay levels, shortest first."""
        return [timedelta(milliseconds=level.delay_ms) for level in self._levels.all]

    async def create(
        self,
        partitions: int = 1,
        replication_factor: int | None = None,
        retention: timedelta = RETENTION,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """Create the missing topics of the levels, and return their names.

        The first `send` or `poll` does this with the defaults. More partitions let more workers share the queue.
        `replication_factor` is 3 by default, or the number of brokers if there are fewer. A due record is kept for
        `retention` while no worker runs.

        Raises:
            RaftlogError: as `Admin.create_topic`.
        """
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
            async with self._creating:
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
        """Queue one record that is due after `delay` (seconds, or a timedelta) from now.

        The delivery is done when the record is in the log of its level. `target` is the topic that gets the record, by
        default the queue's target; without either, a worker polls it. Records with the same key and the same delay
        stay in order.

        Raises:
            InvalidRequestError: a negative delay, or a header whose name the queue uses itself.
            UnknownTopicOrPartition: there is no topic `target`.
            RaftlogError, TypeError: as `Producer.send`.
        """
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
        """Wait until every sent record is acknowledged or has failed, as `Producer.flush`."""
        await self._producer.flush(timeout)

    # What is due

    async def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """Return due records without a target, waiting up to `timeout` seconds (None: without a limit) for one.

        The records are as they were sent, without the queue's own headers; topic, partition and offset are those in the
        level's topic. The next `poll`, or `commit`, finishes the records of this one; if this worker dies before that,
        another worker gets them. Meanwhile the call hands due records with a target over.

        Raises:
            RaftlogError: as `Consumer.poll` and `Consumer.commit`, or a target refused a record. No record is lost:
                the next call tries again. A refused record delays only its own partition of the level; notes on the
                error name these partitions. (If there are records to return, the error is logged instead.)
        """
        given, _ = await self._round(timeout, max_records or ROUND_MAX, forwards=False)
        return given

    async def commit(self) -> None:
        """Finish the records of the last poll.

        Raises:
            RaftlogError: as `Consumer.commit`; the next call tries again.
        """
        self._check_open()
        if self._reading.given and self._consumer is not None:
            try:
                await self._consumer.commit(self._reading.given)
            except FencedError as error:
                self._reading.fenced(error)
            self._reading.given = {}

    async def forward(self, timeout: float | None = 1.0) -> int:
        """Hand due records over to their targets, and return how many.

        Waits up to `timeout` seconds for the first record to become due. One transaction makes the records visible in
        their targets and finishes them in the queue.

        Raises:
            InvalidRequestError: a due record has no target; use `poll` for this queue.
            RaftlogError: as `poll`.
        """
        _, handed_over = await self._round(timeout, ROUND_MAX, forwards=True)
        return handed_over

    async def run(self, stop: Event | None = None) -> None:
        """Call `forward` until `stop` is set or another thread closes the queue. Raises as `forward`."""
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
            except BaseException as error:  # an interrupt too: the taken records are not finished
                in_doubt = self._mover is not None and self._mover.in_doubt
                back = round_.failed(part, error, in_doubt=in_doubt)
                self._put_back(consumer, back)
                self._doubtful = round_.doubtful
                if round_.over:
                    raise
                round_.put_off()

    async def _fetch(self, consumer: Consumer, left_s: float | None) -> bool:
        """Wait until a record is due or records arrive; return whether records were polled."""
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
                consumer.pause(partition)
                consumer.seek(partition, offset)
        return bool(polled)

    async def _settle(self, consumer: Consumer) -> None:
        """Find out the outcome of the transaction that was open when the last call was interrupted."""
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
        """Hand over the records that are not for a worker, with their offsets; return once that is committed."""
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
        """Seek back to the records that could not be handed over."""
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
        """Flush for at most `timeout` seconds, then stop. Closing twice is allowed.

        The records of the last `poll` are finished only if `commit` was called; otherwise a worker gets them again.
        """
        self._closed = True
        try:
            await self._producer.close(timeout)
        finally:
            if self._mover is not None:
                await self._mover.close()
            if self._consumer is not None:
                await self._consumer.close()

    def __repr__(self) -> str:
        kind = "aio.DelayQueue"
        return f"<{kind} {self._name!r} group_id={self._group_id!r} {'closed' if self._closed else 'open'}>"

    async def __aenter__(self) -> DelayQueue:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
