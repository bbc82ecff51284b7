"""The producer. `./dev aio` writes raftlog/aio/_producer.py from this file; tools/aio.py says how."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Unpack

from raftlog._client.background import Client
from raftlog._client.groups import checked
from raftlog._client.keywords import Acks, ProducerKeywords
from raftlog._client.options import Bootstrap, ProducerOptions, taken_apart
from raftlog._client.producer import LAST_ABORT_S, ProducerEngine, Transactions
from raftlog._client.tracing_choice import producer_tracing
from raftlog._core.accumulator import RECORD_BYTES, Batch, Partitioner, TopicQueues
from raftlog._core.arguments import (
    HeadersLike,
    as_bytes,
    as_converter,
    as_headers,
    as_partition,
    as_timestamp,
    as_topic,
    converted,
)
from raftlog._core.rows import Piece, highest_partition, pieces_of, prepare
from raftlog._core.transaction_state import TransactionPhase
from raftlog._delivery import BatchDelivery, Deadline, Delivery, wait_all
from raftlog.errors import (
    InvalidRequestError,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
)
from raftlog.types import GroupMetadata, Header, K, OffsetAndMetadata, RecordMetadata, TopicPartition, V

if TYPE_CHECKING:
    from raftlog._tracing import Sending


OffsetsArgument = Mapping[TopicPartition, int | OffsetAndMetadata]


def transactions_of(engine: ProducerEngine) -> Transactions:
    """Return the transactions of a producer.

    Raises:
        InvalidTxnState: the producer has no transactional id.
    """
    if engine.transactions is None:
        raise InvalidTxnState(
            "this producer has no transactions: make it with transactional_id=..., a name that stays the same over "
            "restarts and that no other producer uses"
        )
    return engine.transactions


def group_of(given: GroupMetadata | str) -> GroupMetadata:
    """Return the group that was given to `send_offsets_to_transaction`.

    Raises:
        InvalidRequestError: it is neither group metadata nor a group id.
    """
    if isinstance(given, GroupMetadata):
        return given
    if isinstance(given, str) and given:
        return GroupMetadata(given, "", -1)
    raise InvalidRequestError(f"{given!r} is not a group: pass consumer.group_metadata()")


def check_not_ended(transactions: Transactions) -> None:
    """Check at the end of a `with producer.transaction():` block that the transaction is still open.

    Raises:
        InvalidTxnState: it was committed or aborted inside the block.
    """
    if transactions.state.phase in (TransactionPhase.NEW, TransactionPhase.READY):
        raise InvalidTxnState(
            f"{transactions.state} was ended inside its `with producer.transaction():`; the block commits at its end "
            "and aborts on an exception: do not end the transaction yourself, or use begin_transaction() instead"
        )


def abort_timeout(error: BaseException) -> float | None:
    """Return for how many seconds an abort after this exception may try; None: the default."""
    return None if isinstance(error, Exception) else LAST_ABORT_S


def give_up_timeout(error: BaseException) -> float | None:
    """Return for how many seconds an abort after this failed commit may try; None: the default."""
    return None if isinstance(error, TransactionAbortable) else LAST_ABORT_S


def note_undecided(error: BaseException) -> None:
    """Add to an error that interrupted a commit that the outcome is unknown."""
    error.add_note(
        "(the commit was sent and its outcome is not known: call commit_transaction() again to learn it, before "
        "anything else)"
    )


def note_failed_abort(error: BaseException, failed: RaftlogError) -> None:
    """Add to the error that caused an abort that the abort failed too.

    Raises:
        ProducerFenced: the transaction could not be committed because the producer is fenced.
    """
    if isinstance(failed, InvalidTxnState):  # it was ended inside the block
        return
    if isinstance(failed, ProducerFenced) and isinstance(error, TransactionAbortable):
        raise failed from error
    error.add_note(f"(aborting the transaction failed too; its coordinator aborts it after its timeout: {failed})")


_time_ns = time.time_ns
_EMPTY: Any = b""


class Producer(Client[ProducerEngine], Generic[K, V]):
    """Sends records to a cluster. Thread-safe: make one producer and share it.

    >>> from raftlog import Producer
    >>> with Producer(cluster.bootstrap, acks="all") as producer:
    ...     delivery = producer.send("greetings", b"hello", key=b"en")
    ...     delivery.result(timeout=10).offset
    0

    `bootstrap` names one or more brokers, "host:port,host:port" or a list; it may also be called `bootstrap_servers`.
    Options are Kafka's keys with underscores (`linger_ms=5`), or with dots in `config={"linger.ms": 5}`, which may
    stand in place of the addresses (`Producer({"bootstrap.servers": ...})`); docs/configuration.md lists them. The most
    used are `acks` ("all", 1 or 0), `linger_ms`, `batch_size`, `buffer_memory`, `compression_type` (none, gzip, snappy,
    lz4, zstd), `delivery_timeout_ms`. `partitioner(topic, key, partition_count)` returns a partition's number; it
    replaces the default partitioner, which chooses the same partition for a key as Kafka's.

    `key_serializer` and `value_serializer` are functions that turn what `send` gets into bytes; None stays None. They
    run in the thread that sends, once for each record, and make `send` several times as slow as with bytes.
    `send_batch` does not use them.

    >>> with Producer(cluster.bootstrap, value_serializer=str.encode) as producer:
    ...     producer.send_and_wait("greetings", "hola").topic
    'greetings'

    Records keep the order of `send` within a partition, even if batches have to be sent again. With acks="all" the
    producer is idempotent: brokers recognise batches that are sent again, and every record is in the log once
    (`enable_idempotence`). That holds within one producer object: a program that calls `send` again, for example
    after a `DeliveryTimeout`, adds another record. Closing flushes first. A producer that is not closed does not keep
    the interpreter from exiting, and then loses the records that it has not sent yet.

    With `transactional_id` every record belongs to a transaction (`transaction`, or `begin_transaction` and
    `commit_transaction`), which becomes visible as a whole, in all partitions, or not at all. Closing aborts an open
    transaction.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
    """

    # aio-doc: >>> import asyncio
    # aio-doc: >>> from raftlog import aio
    # aio-doc: >>> async def greet():
    # aio-doc: ...     async with aio.Producer(cluster.bootstrap) as producer:
    # aio-doc: ...         delivery = await producer.send("aio-greetings", b"hello")
    # aio-doc: ...         return await delivery
    # aio-doc: >>> asyncio.run(greet()).offset
    # aio-doc: 0

    _converts = False
    """Whether keys or values go through a serializer."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        acks: Acks = "all",
        *,
        partitioner: Partitioner | None = None,
        key_serializer: Callable[[K], bytes | None] | None = None,
        value_serializer: Callable[[V], bytes | None] | None = None,
        config: Mapping[str, object] | None = None,
        **options: Unpack[ProducerKeywords],
    ) -> None:
        self._key_serializer = as_converter("key_serializer", key_serializer)
        self._value_serializer = as_converter("value_serializer", value_serializer)
        self._converts = key_serializer is not None or value_serializer is not None
        given = taken_apart(bootstrap, config, options)
        self._addresses = given.addresses
        if "acks" not in given.config:
            given.keywords["acks"] = acks
        self._options = ProducerOptions.make(given.config, given.keywords)
        self._partitioner = partitioner
        self._tracing = producer_tracing(self._options)
        self._lock = threading.Lock()
        self._lean: dict[str, Batch] = {}
        """By topic: the open batch that takes a plain record (value only) without further checks."""
        self._start()

    def _make(self, loop: asyncio.AbstractEventLoop) -> ProducerEngine:
        engine = ProducerEngine(self._addresses, self._options, self._partitioner, loop)
        self._lock = engine.lock
        if self._tracing is None and not self._converts:  # else it stays empty, and `send` takes the long way
            self._lean = engine.lean
        return engine

    def _abandon(self) -> None:  # sync
        self._engine.abandon_after_fork()
        self._lock = self._engine.lock

    # Sending

    def send(
        self,
        topic: str,
        value: V | None = _EMPTY,
        key: K | None = None,
        partition: int | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery:
        """Queue one record and return its delivery, without waiting for the acknowledgement.

        Waits only while `buffer.memory` is full or the topic is not known yet, at most `max.block.ms`. A `value` of
        None is a tombstone. Without `partition`, the key decides; without a key, batches go to the partitions in turn.
        `headers` are pairs of a name and bytes, or a mapping. `timestamp_ms` (ms since 1970) is the present time by
        default.

        >>> with Producer(cluster.bootstrap) as producer:
        ...     delivery = producer.send("greetings", b"bonjour", headers={"lang": b"fr"}, partition=0)
        ...     delivery.result(timeout=10).partition
        0

        Raises:
            TypeError: value or key is not bytes, or its serializer returned something else.
            MessageTooLarge: larger than `max.request.size` or `buffer.memory` allows.
            UnknownTopicOrPartition, InvalidPartitions: there is no such topic, or no such partition.
            BufferExhausted: `buffer.memory` stayed full for `max.block.ms`.
            BrokerUnavailable: the producer does not know the topic yet, and no broker answered within `max.block.ms`.
            TransactionAbortable, InvalidTxnState, ProducerFenced: with a `transactional_id`: no transaction is open, or
                the open one can only be aborted.
            ClosedError: the producer is closed.
        """
        given: Any = value
        if key is None and partition is None and headers is None and timestamp_ms is None and given.__class__ is bytes:
            now_ms = _time_ns() // 1_000_000
            with self._lock:
                batch = self._lean.get(topic)
                if batch is not None:
                    size_bytes = batch.size_bytes + len(given) + RECORD_BYTES
                    if size_bytes <= batch.limit_bytes:
                        values = batch.values
                        index = len(values)
                        if now_ms != batch.last_timestamp_ms:
                            batch.note_timestamp(index, now_ms)
                        values.append(given)
                        batch.size_bytes = size_bytes
                        return Delivery(batch, index)
        return self._send(topic, value, key, partition, headers, timestamp_ms)

    def send_and_wait(
        self,
        topic: str,
        value: V | None = _EMPTY,
        key: K | None = None,
        partition: int | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        *,
        timeout: float | None = None,
    ) -> RecordMetadata:
        """Send one record, wait for the acknowledgement, and return the place of the record.

        Each call is a round trip to the replicas: for more than a few records, call `send` for all and wait
        afterwards. `timeout` is in seconds; without it `delivery.timeout.ms` is the limit.

        >>> with Producer(cluster.bootstrap) as producer:
        ...     producer.send_and_wait("greetings", b"guten Tag", key=b"de").topic_partition
        TopicPartition(topic='greetings', partition=0)

        Raises:
            TimeoutError: no acknowledgement yet; the delivery continues.
            RaftlogError: the record could not be sent, as `send`, or its delivery has failed for good.
        """
        delivery = self.send(topic, value, key, partition, headers, timestamp_ms)
        return delivery.result(timeout)  # aio: return await delivery.result(timeout)

    def _send(
        self,
        topic: str,
        value: Any,
        key: Any,
        partition: int | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
    ) -> Delivery:
        engine = self._engine
        try:
            if self._converts:
                key = converted(self._key_serializer, key, "key_serializer", f"a record of topic {topic!r}")
                value = converted(self._value_serializer, value, "value_serializer", f"a record of topic {topic!r}")
            if self._tracing is not None:
                sending = self._tracing.begin(topic, as_headers(headers))
                return self._place_traced(sending, topic, value, key, partition, timestamp_ms)
            return self._place(topic, value, key, partition, headers, timestamp_ms)
        except Exception as error:
            engine.not_sent(error)
            raise

    def _place_traced(
        self,
        sending: Sending,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Delivery:
        try:
            delivery = self._place(topic, value, key, partition, sending.headers, timestamp_ms, sending.traceparent)
        except BaseException as error:
            sending.fail(error)
            raise
        sending.follow([delivery._batch], delivery._index)
        return delivery

    def _place(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
        traceparent: str | None = None,
    ) -> Delivery:
        engine = self._engine
        value = as_bytes(value, "value")
        key = as_bytes(key, "key")
        pairs: tuple[Header, ...] = as_headers(headers) if headers is not None else ()
        at_ms = _time_ns() // 1_000_000 if timestamp_ms is None else as_timestamp(timestamp_ms)
        if partition is not None:
            as_partition(partition)
        size = engine.accumulator.check_size(value, key, pairs)
        queues = self._queues(topic, -1 if partition is None else partition)
        deadline: Deadline | None = None
        while True:
            with self._lock:
                engine.check_may_send()
                placed = engine.place(queues, value, key, partition, pairs, at_ms, size)
                if placed is None:
                    deadline = deadline or Deadline(engine.options.max_block_ms / 1000)
                    given_back = engine.want_room(size, deadline)  # sync
                else:
                    batch, index, full = placed
                    if traceparent is not None:
                        batch.trace(traceparent)
            if placed is None:
                assert deadline is not None
                engine.wait_for_room(given_back, deadline)  # aio: await engine.room_given_back(size, deadline)
                continue
            if full is not None or not index:
                engine.after_place(full)
            return Delivery(batch, index)

    def _queues(self, topic: str, partition: int = -1) -> TopicQueues:
        """Return the queues of a topic; ask the cluster if the topic, or the partition, is not known."""
        queues = self._engine.topics.get(topic)
        if queues is None or partition >= queues.partition_count:
            as_topic(topic)
            self._engine.check_open()
            queues = self._thread.run(self._engine.load_topic(topic, fresh=queues is not None))
        return queues

    def send_batch(
        self,
        topic: str,
        values: Any,
        key: Any = None,
        partition: Any = None,
        headers: HeadersLike | None = None,
        timestamp_ms: Any = None,
    ) -> BatchDelivery:
        """Queue many records at once and return their delivery.

        `values` is either a list of bytes or an Arrow array, with `key`, `partition` and `timestamp_ms` given once for
        all records or once for each. Or it is a `pyarrow.RecordBatch` or `pyarrow.Table` with a column `value` (binary,
        or string taken as UTF-8) and optional columns `key`, `headers` (map<string, binary>), `partition` and
        `timestamp`. Python does not loop over Arrow data: keys are hashed and rows are ordered by column.

        >>> import pyarrow as pa
        >>> table = pa.table({"key": ["a", "b", "a"], "value": ["1", "2", "3"]})
        >>> with Producer(cluster.bootstrap) as producer:
        ...     sent = producer.send_batch("letters", table).result(timeout=10)
        ...     sum(part.record_count for part in sent)
        3

        Raises:
            TypeError, InvalidRequestError: data of the wrong kind; nothing was queued.
            MessageTooLarge: one row is larger than `max.request.size` allows; nothing was queued.
            BufferExhausted: as `send`; earlier rows may have been queued.
        """
        engine = self._engine
        sending = None if self._tracing is None else self._tracing.begin(topic)
        try:
            return self._send_batch(topic, values, key, partition, headers, timestamp_ms, sending)
        except BaseException as error:
            if sending is not None:
                sending.fail(error)
            if isinstance(error, Exception):
                engine.not_sent(error)
            raise

    def _send_batch(
        self,
        topic: str,
        values: Any,
        key: Any,
        partition: Any,
        headers: HeadersLike | None,
        timestamp_ms: Any,
        sending: Sending | None,
    ) -> BatchDelivery:
        engine, now_ms = self._engine, _time_ns() // 1_000_000
        more, traceparent = (sending.headers, sending.traceparent) if sending is not None else ((), None)
        given = prepare(engine.accumulator, now_ms, values, key, partition, headers, timestamp_ms, more)
        queues = self._queues(topic, highest_partition(given))
        pieces = pieces_of(given, queues, engine.slice_limit_bytes())
        batches = [self._send_piece(queues, piece, traceparent) for piece in pieces]
        if sending is not None:
            sending.follow(batches)
        return BatchDelivery(batches)

    def _send_piece(self, queues: TopicQueues, piece: Piece, traceparent: str | None) -> Batch:
        engine = self._engine
        deadline: Deadline | None = None
        while True:
            with self._lock:
                engine.check_may_send()
                placed = engine.place_columns(queues, piece)
                if placed is None:
                    deadline = deadline or Deadline(engine.options.max_block_ms / 1000)
                    given_back = engine.want_room(piece.size_bytes, deadline)  # sync
                elif traceparent is not None:
                    placed[-1].trace(traceparent)
            if placed is None:
                assert deadline is not None
                # aio: await engine.room_given_back(piece.size_bytes, deadline)
                engine.wait_for_room(given_back, deadline)  # sync
                continue
            engine.encode(placed)
            # aio: await asyncio.sleep(0)  # encoding takes a while: other tasks run between the pieces
            return placed[-1]

    # Transactions

    def init_transactions(self, timeout: float | None = None) -> None:
        """Take over the transactional id: fence the previous producer and wait until its open transaction is aborted.

        The first `begin_transaction` does this if the program has not. It takes at most `timeout` seconds, by default
        `max.block.ms`.

        Raises:
            InvalidTransactionTimeout: transaction.timeout.ms is above the server's transaction.max.timeout.ms.
            ProducerFenced: another producer has taken over the id from this one.
            RequestTimedOut: the coordinator did not answer in time; call again.
            InvalidTxnState: the producer has no transactional id.
        """
        self._thread.run(transactions_of(self._engine).init(timeout))

    def begin_transaction(self) -> None:
        """Begin a transaction: the records sent from now on become visible together, with `commit_transaction`.

        >>> from raftlog import Producer
        >>> with Producer(cluster.bootstrap, transactional_id="transfers") as producer:
        ...     producer.begin_transaction()
        ...     paid = producer.send("accounts", b"-10", key=b"ada")
        ...     got = producer.send("accounts", b"+10", key=b"bob")
        ...     producer.commit_transaction()
        ...     paid.done() and got.done()
        True

        Raises:
            InvalidTxnState: a transaction is open already, or the previous one has not ended.
            ProducerFenced: another producer has the transactional id now, or an operator has aborted this producer's
                transaction; close the producer.
            RaftlogError: as `init_transactions`, which this call includes the first time.
        """
        transactions = transactions_of(self._engine)
        while True:
            with self._engine.lock:
                if transactions.begin():
                    return
            self._thread.run(transactions.init(None))

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Send the remaining records and commit. When it returns, readers see all records, and offsets are committed.

        (If a partition has no leader for more than a second at that moment, its records become visible once it has
        one.)

        It takes at most `timeout` seconds. By default the records have `delivery.timeout.ms`, and then the decision has
        `max.block.ms`.

        Raises:
            TransactionAbortable: a record or an offset failed (even one that `send` refused at once), or the
                transaction timed out: none of it becomes visible. Call `abort_transaction`, then repeat the work in
                another transaction. The exception's cause is the first failure.
            RequestTimedOut: the outcome is unknown: call `commit_transaction` again, before anything else.
            ProducerFenced: as `begin_transaction`; this transaction is aborted.
            InvalidTxnState: no transaction is open.
        """
        transactions = transactions_of(self._engine)
        self._engine.close_batches()
        self._thread.run(transactions.commit(timeout))

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort the transaction: `read_committed` consumers never see its records. Unacknowledged records fail.

        It takes at most `timeout` seconds, by default `max.block.ms`.

        Raises:
            RequestTimedOut: the coordinator did not answer; call again.
            ProducerFenced: as `begin_transaction`; the coordinator aborts the transaction.
            InvalidTxnState: no transaction is open, or its commit has begun.
        """
        self._thread.run(transactions_of(self._engine).abort(timeout))

    def send_offsets_to_transaction(
        self, offsets: OffsetsArgument, group: GroupMetadata | str, timeout: float | None = None
    ) -> None:
        """Commit a consumer group's offsets as part of the transaction (KIP-98, KIP-447).

        `offsets` are the offsets of the next records to read. `group` is `consumer.group_metadata()`, read after the
        records were polled. The consumer needs enable_auto_commit=False. The call takes at most `timeout` seconds, by
        default `max.block.ms`.

        Raises:
            FencedError: the group has given the partitions to another member: abort, and poll again.
            TransactionAbortable, InvalidTxnState, ProducerFenced: as `send`.
            RaftlogError: the group's coordinator refused, or did not answer in time; the transaction can only be
                aborted.
        """
        transactions = transactions_of(self._engine)
        self._thread.run(transactions.send_offsets(checked(offsets), group_of(group), timeout))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in a transaction: commit at its end, abort when an exception leaves it.

        An exception that interrupts the commit aborts too, unless the decision was sent already: then a note on the
        exception says so, and another call of `commit_transaction` returns the outcome.

        >>> from raftlog import Producer
        >>> with Producer(cluster.bootstrap, transactional_id="transfers") as producer:
        ...     with producer.transaction():
        ...         for number in range(3):
        ...             sent = producer.send("accounts", b"%d" % number)

        Raises:
            TransactionAbortable: the commit failed and the transaction is aborted: repeat it in another one.
            InvalidTxnState: the block itself committed or aborted the transaction, which stays so.
            RaftlogError: as `begin_transaction` and `commit_transaction`.
        """
        # aio-doc: >>> import asyncio
        # aio-doc: >>> from raftlog import aio
        # aio-doc: >>> async def transfer():
        # aio-doc: ...     async with aio.Producer(cluster.bootstrap, transactional_id="aio-transfers") as producer:
        # aio-doc: ...         async with producer.transaction():
        # aio-doc: ...             await producer.send("accounts", b"-10", key=b"ada")
        # aio-doc: ...             got = await producer.send("accounts", b"+10", key=b"bob")
        # aio-doc: ...         return got.done()
        # aio-doc: >>> asyncio.run(transfer())
        # aio-doc: True
        self.begin_transaction()
        try:
            yield
        except BaseException as error:
            self._abort_for(error)
            raise
        check_not_ended(transactions_of(self._engine))
        try:
            self.commit_transaction()
        except BaseException as error:
            self._give_up_for(error)
            raise

    def _give_up_for(self, error: BaseException) -> None:
        try:
            if not self._thread.run(transactions_of(self._engine).give_up(give_up_timeout(error))):
                note_undecided(error)
        except RaftlogError as failed:
            note_failed_abort(error, failed)

    def _abort_for(self, error: BaseException) -> None:
        try:
            self.abort_transaction(abort_timeout(error))
        except RaftlogError as failed:
            note_failed_abort(error, failed)

    # Metrics and the end

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the producer's metrics by group, under the names of Kafka's client metrics.

        Rates (per second), averages and maxima cover the last half minute; a `-total` counts from the producer's
        creation; times are in ms. `raftlog.prometheus.ClientCollector` exports them to Prometheus; docs/metrics.md
        explains each one.

        >>> with Producer(cluster.bootstrap) as producer:
        ...     _ = producer.send("greetings", b"hallo").result(timeout=10)
        ...     producer.metrics()["producer-metrics"]["record-send-total"]
        1.0
        """
        # aio: if self._made is None:
        # aio:     return {}
        return self._engine.metrics()

    def flush(self, timeout: float | None = None) -> None:
        """Send all queued records now and wait until each is acknowledged or has failed.

        >>> with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        ...     delivery = producer.send("greetings", b"ciao")
        ...     producer.flush(timeout=10)
        ...     delivery.done()
        True

        Raises:
            TimeoutError: not done within `timeout` seconds; the deliveries go on.
        """
        engine = self._made
        if engine is None:
            return
        engine.close_batches()
        with self._lock:
            waiting = list(engine.accumulator.incomplete)
        try:
            wait_all(waiting, timeout)
        except TimeoutError:
            left = sum(not batch.done for batch in waiting)
            raise TimeoutError(f"{left} batches are not acknowledged after {timeout} s; they go on") from None

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds, then stop. Records without an acknowledgement fail with `ClosedError`.

        An open transaction is aborted; if that takes longer than `timeout` seconds, its coordinator aborts it after the
        transaction's timeout. Closing twice is allowed.
        """
        # aio: self._closed = True
        engine = self._made
        if engine is None or engine.closed is not None:
            return
        try:
            engine.check_open()  # sync
            if engine.transactions is None:
                self.flush(timeout)
        except TimeoutError:
            pass  # the deliveries that are left fail with ClosedError
        finally:
            if engine.closed is None:
                self._thread.run(engine.close(timeout))

    def __enter__(self) -> Producer[K, V]:
        # aio: assert self._engine is not None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
