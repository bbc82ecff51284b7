"""Records that become visible after a delay."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

from raftlog._admin import Admin
from raftlog._consumer import Consumer
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
from raftlog._delay_moving import Mover, sender_config
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
from raftlog._delivery import Deadline, Delivery
from raftlog._producer import Producer
from raftlog.errors import ClosedError, FencedError, RaftlogError, TopicAlreadyExists
from raftlog.types import Record

logger = logging.getLogger(__name__)


class DelayQueue:
    """Records that nobody sees before they are due.

    >>> from raftlog import DelayQueue
    >>> with DelayQueue(cluster.bootstrap, "reminders") as queue:
    ...     sent = queue.send(b"water the plants", delay=0.2).result(timeout=30)
    ...     early = queue.poll(timeout=0)
    ...     late = queue.poll(timeout=30)
    >>> early, [record.value for record in late]
    ([], [b'water the plants'])

    Each delay level is a topic, `<name>.delay.<level>` (`reminders.delay.30s`), whose records are due in the order in
    which they were sent, so that only the head of each partition is watched: in between nothing is fetched. `levels`
    are seconds or timedeltas. A delay that is none of them waits at the largest level below it, and then again for the
    rest; below the smallest level a record may be late by that level at most, and none is ever early. Due times are
    taken from the clock of the sender and compared with the clock of the reader. Any number of processes may send, and
    any number may take what is due, as one consumer group (`group_id`, by default `<name>.delay`).

    A due record goes to the topic that `target` names, if one does, else to a worker's `poll`. To its target it goes
    exactly once: sent and done with in one transaction, so consumers of the target read what is committed (their
    default). `poll` is at least once: a worker that dies before it has come back leaves its records to be given to
    another one. What waits survives every restart.

    Not thread-safe but for `send`, `flush` and `close`: one thread polls.

    Raises:
        InvalidRequestError: no levels, or one that is no delay.
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
        self._lock = threading.Lock()
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

    def create(
        self,
        partitions: int = 1,
        replication_factor: int | None = None,
        retention: timedelta = RETENTION,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """Create the topics of the levels that are not there yet, and return the names of these.

        The first `send` or `poll` does it, with the defaults. More partitions let more workers share the queue;
        `replication_factor` is 3 by default, or the number of brokers if there are fewer. `retention`: for how long a
        record that is due is kept while no worker runs.

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
            with self._lock:
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

        The delivery says when it is in the log of its level. `target` is the topic to hand it over to, by default the
        queue's; without either a worker polls it. Records with the same key and the same delay stay in order.

        Raises:
            InvalidRequestError: a negative delay, or a header with a name of the queue's own.
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
        """Wait until everything sent is acknowledged or has failed, as `Producer.flush`."""
        self._producer.flush(timeout)

    # What is due

    def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """Return records that are due and have no target, waiting up to `timeout` seconds (None: for ever) for one.

        Records come as they were sent, without the queue's own headers; topic, partition and offset are those of the
        level's topic. With the next `poll`, or `commit`, those of the last one are done with; until then another worker
        gets them if this one dies. Records with a target that become due meanwhile are handed over.

        Raises:
            RaftlogError: as `Consumer.poll` and `Consumer.commit`, or a target refused a record; nothing is lost, and
                what was not done is tried again by the next call. A target that refuses holds up the partition of the
                level that the record is in, and no other: notes on the error name these. (While there are records to
                return it is logged instead.)
        """
        given, _ = self._round(timeout, max_records or ROUND_MAX, forwards=False)
        return given

    def commit(self) -> None:
        """Say that the records of the last poll are done with.

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
        """Hand due records over to their targets, and return how many that were.

        Waits up to `timeout` seconds for the first one to be due. They become visible in their targets in the moment in
        which the queue is done with them.

        Raises:
            InvalidRequestError: a record has no target, so that `poll` is what takes it.
            RaftlogError: as `poll`.
        """
        _, handed_over = self._round(timeout, ROUND_MAX, forwards=True)
        return handed_over

    def run(self, stop: threading.Event | None = None) -> None:
        """`forward` until `stop` is set, or the queue is closed by another thread. Raises as `forward`."""
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
            except BaseException as error:  # an interrupt too: what was taken is not done
                in_doubt = self._mover is not None and self._mover.in_doubt
                back = round_.failed(part, error, in_doubt=in_doubt)
                self._put_back(consumer, back)
                self._doubtful = round_.doubtful
                if round_.over:
                    raise
                round_.put_off()

    def _fetch(self, consumer: Consumer, left_s: float | None) -> bool:
        """Wait until there is something to do; return whether records were polled."""
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
                consumer.pause(partition)  # at once: nothing is to be fetched that is dropped again
                consumer.seek(partition, offset)
        return bool(polled)

    def _settle(self, consumer: Consumer) -> None:
        """Learn what became of what was being handed over when the last call was interrupted."""
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
        """Send on what is not for a worker, with the offsets behind it, and return once that is committed."""
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
        """Read again, later, what could not be handed over."""
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
        """Flush, `timeout` seconds at most, then stop. Closing twice is allowed.

        What the last `poll` returned is not done with unless `commit` said so: it is given again.
        """
        self._closed = True
        try:
            self._producer.close(timeout)
        finally:
            if self._mover is not None:
                self._mover.close()
            if self._consumer is not None:
                self._consumer.close()

    def __enter__(self) -> DelayQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
