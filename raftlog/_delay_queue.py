"""Records that become visible after a delay. `./dev aio` writes raftlog/aio/_delay_queue.py from it; see tools/aio.py.

Round          one call: due records are handed over together, and by partition where a target refuses some
DelayReading   what to do before a poll, which polled records to keep, which offsets to commit
Mover          a transactional producer: hands records over exactly once
DelayQueue     the client
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from threading import Event, Lock
from types import TracebackType
from typing import Final, NamedTuple

from raftlog._admin import Admin
from raftlog._client.producer import ProducerEngine
from raftlog._consumer import Consumer, RebalanceListener
from raftlog._core.arguments import HeadersLike, as_headers, as_topic
from raftlog._core.delays import (
    DEFAULT_LEVELS,
    Delayed,
    DelayLike,
    Level,
    Levels,
    Outgoing,
    SortedOut,
    Waits,
    as_delay_ms,
    by_partition,
    delayed_send,
    ends_of,
    first_runs,
    goes_on,
    sort_out,
    starts_of,
    understood,
)
from raftlog._core.transaction_state import TransactionPhase
from raftlog._delivery import Deadline, Delivery
from raftlog._producer import Producer
from raftlog.errors import (
    BrokerUnavailable,
    ClosedError,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedError,
    InvalidConfig,
    InvalidRequestError,
    InvalidTxnState,
    NotCoordinator,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    TopicAlreadyExists,
    TransactionAbortable,
)
from raftlog.types import GroupMetadata, Record, TopicPartition

logger = logging.getLogger(__name__)

_OF_NO_TARGET: Final = (
    FencedError,
    ClosedError,
    BrokerUnavailable,
    RequestTimedOut,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    NotCoordinator,
)
"""Errors that concern all due records: handing them over by partition would take longer and fail too."""


class Round:
    """The records that one call hands over: all of them in one part, or after a failure one part for each partition.

    Invariants: every added record is done, put back, left to another worker, or in doubt; after the first record of a
    partition has failed, no record of the partition is handed over.
    """

    def __init__(self, reading: DelayReading) -> None:
        self.given: list[Record] = []
        """Records for the worker that polls."""
        self.handed_over = 0
        self.error: RaftlogError | None = None
        """The first failure of a target; notes on it name the partitions."""
        self.over = False
        """Whether the last failure ends the round."""
        self.doubtful: list[Delayed] = []
        """Records of a transaction whose outcome is not known."""
        self._reading = reading
        self._todo: deque[list[Delayed]] = deque()
        self._for_worker: list[Delayed] = []
        self._late: set[TopicPartition] = set()

    def add(self, taken: list[Delayed]) -> None:
        """Add records that are due."""
        self._todo.append(taken)

    def next(self) -> list[Delayed] | None:
        """Return the part to hand over next."""
        return self._todo.popleft() if self._todo else None

    def done(self, part: list[Delayed], found: SortedOut) -> None:
        """Note that a part is handed over."""
        self.given += found.given
        self.handed_over += found.handed_over
        self._for_worker += [each for each in part if self._stays(each)]
        self._reading.done(self._for_worker)

    def _stays(self, delayed: Delayed) -> bool:
        return not goes_on(delayed, self._reading.taken_at_ms)

    def failed(self, part: list[Delayed], error: BaseException, *, in_doubt: bool) -> list[Delayed]:
        """Note that a part was not handed over, or may not have been; return the records to put back."""
        if isinstance(error, FencedError) and not in_doubt:
            self._reading.left_to_others(part, error)
            return part
        if isinstance(error, RaftlogError) and not in_doubt and not isinstance(error, _OF_NO_TARGET):
            apart: dict[TopicPartition, list[Delayed]] = {}
            for each in part:
                apart.setdefault(each.partition, []).append(each)
            if len(apart) > 1:
                self._todo.extendleft(reversed(apart.values()))
                return []
            self._note(part, error)
            return part
        self.over = True
        back = [each for rest in self._todo for each in rest]
        self._todo.clear()
        back += self._for_worker
        self._reading.done([])
        if in_doubt:
            self.doubtful = [each for each in part if not self._stays(each)]
            return back + [each for each in part if self._stays(each)]
        return back + part

    def _note(self, part: list[Delayed], error: RaftlogError) -> None:
        head = part[0]
        self._late.add(head.partition)
        where = f"{head.partition} from offset {head.record.offset} on"
        logger.warning("%s could not be handed over, and waits: %s", where, error)
        if self.error is None:
            self.error = error
            error.add_note(f"({where} could not be handed over, and waits; what is in other partitions goes on)")
        else:
            self.error.add_note(f"({where} neither: {type(error).__name__}: {error})")

    def put_off(self) -> None:
        """Let other partitions go first; records that a target refused are tried again after them."""
        self._reading.put_off(self._late)
        self._late.clear()


POLLED_MAX: Final = 1000
"""Records that one poll of the consumer may return."""
ROUND_MAX: Final = 500
"""Due records that are handed over and committed together."""
STOP_POLL_S: Final = 0.5
"""How often `run` checks whether to stop."""
_PUT_OFF_MS: Final = 500
"""How long a partition waits after its first record could not be handed over."""
DEFAULT_REPLICAS: Final = 3
RETENTION: Final = timedelta(days=7)


unless_lost: Final = contextlib.suppress(InvalidRequestError)
"""Suppresses the error of `pause`, `resume` or `seek` on a partition that was lost since the last poll."""


def now_ms() -> int:
    """Return the wall clock time that due times are compared with."""
    return time.time_ns() // 1_000_000


def sent_now_ms() -> int:
    """Return the wall clock time that delays are added to, rounded up so that no record is due too early."""
    return -(-time.time_ns() // 1_000_000)


def consumer_config(config: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of a queue's consumer."""
    own = {"enable.auto.commit": False, "isolation.level": "read_committed"}
    given = {name: value for name, value in (config or {}).items() if name.replace("_", ".") not in own}
    return {"auto.offset.reset": "earliest", **given, **own}


def topic_configs(level: Level, retention: timedelta) -> dict[str, str]:
    """Return the configs of a level's topic: records stay until they are due, and for `retention` after that.

    Raises:
        TypeError, InvalidRequestError: `retention` is not a duration.
    """
    return {"retention.ms": str(level.delay_ms + as_delay_ms(retention, "retention"))}


class BeforePoll(NamedTuple):
    """Which partitions to pause and resume before a poll, and how long the poll may wait."""

    pause: list[TopicPartition]
    resume: list[TopicPartition]
    timeout_s: float | None


class DelayReading(RebalanceListener):
    """The queue's place in its levels. As the consumer's listener it forgets partitions that other members get."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._waits = Waits()
        self.taken_at_ms = 0
        """When `take` was called last."""
        self.given: dict[TopicPartition, int] = {}
        """The offsets to commit once the worker has finished the records that it got last."""

    def take(self, limit: int) -> list[Delayed]:
        """Return records that are due at their level; of one partition, all are for a target or all for a worker."""
        self.taken_at_ms = now_ms()
        taken, rest = first_runs(self._waits.take(self.taken_at_ms, limit), self.taken_at_ms)
        self._waits.give_back(rest)
        return taken

    def going_on(self, taken: Iterable[Delayed]) -> dict[TopicPartition, int]:
        """Return the offsets to commit once the records that are not for a worker are handed over."""
        return ends_of(each for each in taken if goes_on(each, self.taken_at_ms))

    def before_poll(self, left_s: float | None) -> BeforePoll:
        """Return what to do when no record is due."""
        at_ms = now_ms()
        reading = self._waits.reading(at_ms)
        next_ms = self._waits.next_at_ms()
        if next_ms is not None:
            until_s = max(0, next_ms - at_ms) / 1000
            left_s = until_s if left_s is None else min(left_s, until_s)
        return BeforePoll(reading.pause, reading.resume, left_s)

    def after_poll(self, polled: Iterable[Record]) -> dict[TopicPartition, int]:
        """Keep records that are due soon; return where to pause and seek, to fetch the others again later."""
        at_ms = now_ms()
        seeks: dict[TopicPartition, int] = {}
        for partition, records in by_partition(polled).items():
            level = self._levels.of(partition.topic)
            later = self._waits.offer(partition, [understood(record, level) for record in records], at_ms)
            if later is not None:
                seeks[partition] = later
        return seeks

    def done(self, taken: Iterable[Delayed]) -> None:
        """Note that these are handed over; a worker has finished its records when it calls again."""
        self.given = ends_of(each for each in taken if not goes_on(each, self.taken_at_ms))

    def put_back(self, taken: Iterable[Delayed], assigned: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Forget records that could not be handed over; return where to seek to fetch them again."""
        starts = starts_of(taken)
        self._waits.forget(starts)
        mine = set(assigned)
        return {partition: offset for partition, offset in starts.items() if partition in mine}

    def put_off(self, partitions: Iterable[TopicPartition]) -> None:
        """Let other partitions go first while the target of these refuses records."""
        self._waits.put_off(partitions, now_ms() + _PUT_OFF_MS)

    def fenced(self, error: FencedError) -> None:
        """Log that a commit came too late: another worker gets these records again, as at-least-once allows."""
        parts = ", ".join(map(str, sorted(self.given)))
        logger.warning("delay queue %s: another worker has %s and repeats: %s", self._levels.name, parts, error)

    def left_to_others(self, taken: Iterable[Delayed], error: FencedError) -> None:
        """Log that another worker hands these records over."""
        parts = ", ".join(map(str, sorted(self.going_on(taken))))
        logger.info("delay queue %s: another worker has %s and hands over: %s", self._levels.name, parts, error)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """Forget their records. Records handed over are committed already: every round begins with a commit."""
        self._waits.forget(partitions)


TIMEOUT_MS: Final = 15_000
"""After this time the transaction of a worker that died is aborted, and other workers continue."""
_CONTRADICTING: Final = frozenset(
    {"acks", "enable_idempotence", "retries", "max_in_flight_requests_per_connection", "transactional_id"}
)


def mover_config(name: str, config: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of the producer that hands over: the queue's own, and a transactional id.

    The transactional id is new each time: the consumer group fences a worker that has lost a partition, since the
    group's offsets are part of the transaction (KIP-447).
    """
    own = {key.replace("_", "."): value for key, value in (config or {}).items() if not _contradicts(key)}
    return {
        "transaction.timeout.ms": TIMEOUT_MS,
        **own,
        "transactional.id": f"{name[:200]}.delay-{uuid.uuid4().hex}",
    }


def sender_config(config: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of the producer that puts records into the queue: it has no transactions.

    Raises:
        InvalidConfig: a transactional id was given; the queue makes its own.
    """
    found = {key.replace("_", "."): value for key, value in (config or {}).items()}
    if found.get("transactional.id") is not None:
        raise InvalidConfig(
            "producer_config has a transactional.id, but records enter a delay queue without a transaction, and leave "
            "it with ids of the queue's own; leave it out"
        )
    return found


def _contradicts(key: str) -> bool:
    return key.replace(".", "_") in _CONTRADICTING


def is_over(engine: ProducerEngine) -> bool:
    """Whether the producer can begin no more transactions."""
    assert engine.transactions is not None
    return engine.transactions.state.phase is TransactionPhase.FATAL


def is_settled(engine: ProducerEngine) -> bool:
    """Whether no transaction is open: then a commit whose caller was interrupted has succeeded."""
    assert engine.transactions is not None
    return engine.transactions.state.phase in (TransactionPhase.NEW, TransactionPhase.READY)


def expect_abort(engine: ProducerEngine) -> None:
    """Tell the producer before closing that aborting its transaction is fine: the records are handed over later."""
    assert engine.transactions is not None
    engine.transactions.aborts_on_close = True


def reason_of(error: TransactionAbortable) -> RaftlogError:
    """Return the error that made the transaction abortable."""
    return error.__cause__ if isinstance(error.__cause__, RaftlogError) else error


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

    def move(self, outgoing: Iterable[Outgoing], ends: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        """Hand over, and return once the transaction is committed.

        Raises:
            FencedError: other workers have the partitions and hand their records over.
            RaftlogError: a target refused a record, or the cluster did not answer; nothing was handed over.
        """
        producer = self._producer
        try:
            producer.begin_transaction()
        except InvalidTxnState:  # the previous transaction could not be aborted in time
            producer.abort_transaction()
            producer.begin_transaction()
        try:
            for topic, value, key, headers, timestamp_ms in outgoing:
                producer.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)
            producer.send_offsets_to_transaction(ends, group)
        except BaseException as error:
            self._abort()
            if isinstance(error, TransactionAbortable):
                raise reason_of(error) from None
            raise
        self.in_doubt = True
        self.settle()

    def settle(self) -> None:
        """Find out the outcome of a transaction in doubt, if there is one; ask again until it is known.

        Raises:
            RaftlogError: the transaction is aborted, nothing was handed over.
            ClosedError: the queue was closed meanwhile.
        """
        while self.in_doubt:
            try:
                self._producer.commit_transaction()
            except RetriableError:
                continue
            except TransactionAbortable as error:
                self.in_doubt = False
                self._abort()
                raise reason_of(error) from None
            except ClosedError:
                raise
            except RaftlogError:
                self.in_doubt = False
                if not is_settled(self._producer._engine):
                    raise
            self.in_doubt = False

    def _abort(self) -> None:
        with contextlib.suppress(RaftlogError):  # the next `move` tries again, or the coordinator times it out
            self._producer.abort_transaction()

    def close(self) -> None:
        """Stop; an open transaction is aborted."""
        if self._producer._made is not None:
            expect_abort(self._producer._made)
        self._producer.close()


class DelayQueue:
    """A queue of records that no consumer sees before they are due.

    >>> from raftlog import DelayQueue
    >>> with DelayQueue(cluster.bootstrap, "reminders") as queue:
    ...     sent = queue.send(b"water the plants", delay=2).result(timeout=30)
    ...     early = queue.poll(timeout=0)
    ...     late = queue.poll(timeout=30)
    >>> early, [record.value for record in late]
    ([], [b'water the plants'])

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

    Not thread-safe except for `send`, `flush` and `close`: one thread polls.

    Raises:
        InvalidRequestError: no levels were given, or a level is not a delay.
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
    """

    # aio-doc: >>> import asyncio
    # aio-doc: >>> from raftlog import aio
    # aio-doc: >>> async def later():
    # aio-doc: ...     async with aio.DelayQueue(cluster.bootstrap, "aio-reminders", levels=[0.2, 5]) as queue:
    # aio-doc: ...         await (await queue.send(b"feed the cat", delay=0.2))
    # aio-doc: ...         return await queue.poll(timeout=30)
    # aio-doc: >>> [record.value for record in asyncio.run(later())]
    # aio-doc: [b'feed the cat']

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

    def create(
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
        with Admin(self._bootstrap) as admin:
            there = set(admin.list_topics(timeout=timeout))
            self._levels.found(there)
            for level in self._levels.all:
                topic = self._levels.topic(level)
                if topic in there:
                    continue
                if replication_factor is None:
                    brokers = admin.describe_cluster(timeout=timeout).brokers
                    replication_factor = min(DEFAULT_REPLICAS, len(brokers))
                try:
                    configs = topic_configs(level, retention)
                    admin.create_topic(topic, partitions, replication_factor, configs, timeout=timeout)
                    created.append(topic)
                except TopicAlreadyExists:
                    pass  # another process was faster
        self._created = True
        return created

    def _ensure_created(self) -> None:
        if not self._created:
            with self._creating:
                if not self._created:
                    self.create()

    # Sending

    def send(
        self,
        value: bytes | None,
        delay: DelayLike,
        key: bytes | None = None,
        headers: HeadersLike | None = None,
        target: str | None = None,
    ) -> Delivery:
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
        self._ensure_created()
        if wanted is not None:
            self._producer._queues(wanted)  # raises if there is no such topic: the sender can still do something
        return self._send(outgoing)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every sent record is acknowledged or has failed, as `Producer.flush`."""
        self._producer.flush(timeout)

    # What is due

    def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """Return due records without a target, waiting up to `timeout` seconds (None: without a limit) for one.

        The records are as they were sent, without the queue's own headers; topic, partition and offset are those in the
        level's topic. The next `poll`, or `commit`, finishes the records of this one; if this worker dies before that,
        another worker gets them. Meanwhile the call hands due records with a target over.

        Raises:
            RaftlogError: as `Consumer.poll` and `Consumer.commit`, or a target refused a record. No record is lost:
                the next call tries again. A refused record delays only its own partition of the level; notes on the
                error name these partitions. (If there are records to return, the error is logged instead.)
        """
        given, _ = self._round(timeout, max_records or ROUND_MAX, forwards=False)
        return given

    def commit(self) -> None:
        """Finish the records of the last poll.

        Raises:
            RaftlogError: as `Consumer.commit`; the next call tries again.
        """
        self._check_open()
        if self._reading.given and self._consumer is not None:
            try:
                self._consumer.commit(self._reading.given)
            except FencedError as error:
                self._reading.fenced(error)
            self._reading.given = {}

    def forward(self, timeout: float | None = 1.0) -> int:
        """Hand due records over to their targets, and return how many.

        Waits up to `timeout` seconds for the first record to become due. One transaction makes the records visible in
        their targets and finishes them in the queue.

        Raises:
            InvalidRequestError: a due record has no target; use `poll` for this queue.
            RaftlogError: as `poll`.
        """
        _, handed_over = self._round(timeout, ROUND_MAX, forwards=True)
        return handed_over

    def run(self, stop: Event | None = None) -> None:
        """Call `forward` until `stop` is set or another thread closes the queue. Raises as `forward`."""
        while not (stop is not None and stop.is_set()):
            try:
                self.forward(STOP_POLL_S)
            except RaftlogError as error:
                if not self._closed:
                    raise
                if not isinstance(error, ClosedError):
                    logger.info("delay queue %s was closed while it handed over: %s", self._name, error)
                return

    def _round(self, timeout: float | None, limit: int, *, forwards: bool) -> tuple[list[Record], int]:
        consumer = self._consuming()
        self._settle(consumer)
        self.commit()
        deadline = Deadline(timeout)
        round_ = Round(self._reading)
        while True:
            taken = self._reading.take(limit)
            if taken:
                round_.add(taken)
                self._do(consumer, round_, forwards=forwards)
                if round_.given or (round_.handed_over and forwards and round_.error is None):
                    return round_.given, round_.handed_over
                continue
            if round_.error is not None:
                raise round_.error
            left_s = deadline.left()
            if not self._fetch(consumer, left_s) and left_s == 0:
                return [], 0

    def _do(self, consumer: Consumer, round_: Round, *, forwards: bool) -> None:
        while (part := round_.next()) is not None:
            try:
                round_.done(part, self._hand_over(consumer, part, forwards=forwards))
            except BaseException as error:  # an interrupt too: the taken records are not finished
                in_doubt = self._mover is not None and self._mover.in_doubt
                back = round_.failed(part, error, in_doubt=in_doubt)
                self._put_back(consumer, back)
                self._doubtful = round_.doubtful
                if round_.over:
                    raise
                round_.put_off()

    def _fetch(self, consumer: Consumer, left_s: float | None) -> bool:
        """Wait until a record is due or records arrive; return whether records were polled."""
        before = self._reading.before_poll(left_s)
        for partition in before.pause:
            with unless_lost:
                consumer.pause(partition)
        for partition in before.resume:
            with unless_lost:
                consumer.resume(partition)
        polled = consumer.poll(before.timeout_s, POLLED_MAX)
        for partition, offset in self._reading.after_poll(polled).items():
            with unless_lost:
                consumer.pause(partition)
                consumer.seek(partition, offset)
        return bool(polled)

    def _settle(self, consumer: Consumer) -> None:
        """Find out the outcome of the transaction that was open when the last call was interrupted."""
        if self._mover is None or not self._doubtful:
            return
        try:
            self._mover.settle()
        except BaseException:
            if not self._mover.in_doubt:
                self._put_back(consumer, self._doubtful)
                self._doubtful = []
            raise
        self._doubtful = []

    def _hand_over(self, consumer: Consumer, ready: list[Delayed], *, forwards: bool) -> SortedOut:
        """Hand over the records that are not for a worker, with their offsets; return once that is committed."""
        found = sort_out(self._levels, ready, self._reading.taken_at_ms, forwards=forwards)
        if found.outgoing:
            mover = self._moving()
            mover.move(found.outgoing, self._reading.going_on(ready), consumer.group_metadata())
        return found

    def _moving(self) -> Mover:
        if self._mover is not None and self._mover.is_over:
            self._mover.close()
            self._mover = None
        if self._mover is None:
            self._mover = Mover(self._bootstrap, self._name, self._producer_config)
        return self._mover

    def _send(self, outgoing: Outgoing) -> Delivery:
        topic, value, key, headers, timestamp_ms = outgoing
        return self._producer.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)

    def _put_back(self, consumer: Consumer, taken: list[Delayed]) -> None:
        """Seek back to the records that could not be handed over."""
        if not self._closed:
            for partition, offset in self._reading.put_back(taken, consumer.assignment()).items():
                with unless_lost:
                    consumer.seek(partition, offset)
                    consumer.resume(partition)

    def _consuming(self) -> Consumer:
        self._check_open()
        if self._consumer is None:
            self._ensure_created()
            config = consumer_config(self._consumer_config)
            consumer = Consumer(self._bootstrap, group_id=self._group_id, config=config)
            try:
                consumer.subscribe(self._levels.topics, listener=self._reading)
            except BaseException:
                consumer.close()
                raise
            self._consumer = consumer
        return self._consumer

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"delay queue {self._name} is closed")

    # End

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds, then stop. Closing twice is allowed.

        The records of the last `poll` are finished only if `commit` was called; otherwise a worker gets them again.
        """
        self._closed = True
        try:
            self._producer.close(timeout)
        finally:
            if self._mover is not None:
                self._mover.close()
            if self._consumer is not None:
                self._consumer.close()

    def __repr__(self) -> str:
        kind = "DelayQueue"  # aio: kind = "aio.DelayQueue"
        return f"<{kind} {self._name!r} group_id={self._group_id!r} {'closed' if self._closed else 'open'}>"

    def __enter__(self) -> DelayQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
