"""The synchronous producer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raftlog._client.background import abandon_after_fork, loop_thread
from raftlog._client.options import ProducerOptions
from raftlog._client.producer import ProducerEngine
from raftlog._client.tracing_choice import producer_tracing
from raftlog._core.arguments import HeadersLike, as_bytes, as_headers, as_partition, as_timestamp, as_topic
from raftlog._core.batch import RECORD_BYTES, Batch
from raftlog._core.bootstrap import parse_bootstrap
from raftlog._core.send_batch import Piece, pieces_of, prepare
from raftlog._core.topic_queues import Partitioner, TopicQueues
from raftlog._delivery import BatchDelivery, Deadline, Delivery, wait_sync
from raftlog._transactions import TransactionMethods
from raftlog.types import Header

if TYPE_CHECKING:
    from raftlog._tracing import Sending

_time_ns = time.time_ns


class Producer(TransactionMethods):
    """Sends records to a cluster. Thread-safe; make one and share it.

    >>> from raftlog import Producer
    >>> with Producer(cluster.bootstrap, acks="all") as producer:
    ...     delivery = producer.send("greetings", b"hello", key=b"en")
    ...     delivery.result(timeout=10).offset
    0

    `bootstrap` names one or more brokers, "host:port,host:port" or a list. Options are Kafka's keys with
    underscores (`linger_ms=5`), or with dots in `config={"linger.ms": 5}`; docs/configuration.md lists them. The
    most used: `acks` ("all", 1 or 0), `linger_ms`, `batch_size`, `buffer_memory`, `compression_type` (none, gzip,
    snappy, lz4, zstd), `delivery_timeout_ms`. `partitioner(topic, key, partition_count)` replaces the default one,
    which puts the same key where Kafka would put it.

    Order within a partition is the order of `send`, also when batches have to be sent again. With acks="all" the
    producer is idempotent: brokers recognise what is sent again, and every record is in the log once
    (`enable_idempotence`). That holds for one producer object: who sends a record again himself, after a
    `DeliveryTimeout` say, makes another one of it. Closing flushes first;
    a producer that is not closed never keeps the interpreter from exiting, and loses what was not sent yet.

    With `transactional_id` every record belongs to a transaction (`transaction`, or `begin_transaction` and
    `commit_transaction`), which becomes visible as a whole, in all partitions, or not at all. Closing aborts what is
    open.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        acks: str | int = "all",
        *,
        partitioner: Partitioner | None = None,
        config: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        addresses = parse_bootstrap(bootstrap)
        if config is None or "acks" not in config:
            options["acks"] = acks
        resolved = ProducerOptions.make(config, options)
        self._tracing = producer_tracing(resolved)
        self._thread = loop_thread()

        async def make() -> ProducerEngine:
            return ProducerEngine(addresses, resolved, partitioner, self._thread.loop)

        self._engine = self._thread.run(make())
        self._lock = self._engine.lock
        self._lean = self._engine.lean if self._tracing is None else {}  # with nothing there, `send` takes the long way
        abandon_after_fork(self)

    def _abandon(self) -> None:
        self._engine.abandon_after_fork()
        self._lock = self._engine.lock

    def send(
        self,
        topic: str,
        value: bytes | None = b"",
        key: bytes | None = None,
        partition: int | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery:
        """Queue one record and return a claim on its acknowledgement, without waiting for it.

        `value` None is a tombstone. Without `partition`, the key decides; without a key too, batches go to the
        partitions in turn. `headers` are pairs of a name and bytes, or a mapping. `timestamp_ms` is now by default.

        >>> with Producer(cluster.bootstrap) as producer:
        ...     delivery = producer.send("greetings", b"bonjour", headers={"lang": b"fr"}, partition=0)
        ...     delivery.result(timeout=10).partition
        0

        Raises:
            TypeError: value or key is not bytes.
            MessageTooLarge: larger than `max.request.size` or `buffer.memory` allows.
            UnknownTopicOrPartition, InvalidPartitions: there is no such topic, no such partition.
            BufferExhausted: `buffer.memory` stayed full for `max.block.ms`.
            BrokerUnavailable: the topic was not used before and nobody could be asked, for `max.block.ms`.
            ClosedError: the producer is closed.
        """
        if key is None and partition is None and headers is None and timestamp_ms is None and value.__class__ is bytes:
            now_ms = _time_ns() // 1_000_000
            with self._lock:
                batch = self._lean.get(topic)
                if batch is not None:
                    size_bytes = batch.size_bytes + len(value) + RECORD_BYTES
                    if size_bytes <= batch.limit_bytes:
                        values = batch.values
                        index = len(values)
                        if now_ms != batch.last_timestamp_ms:
                            batch.note_timestamp(index, now_ms)
                        values.append(value)
                        batch.size_bytes = size_bytes
                        return Delivery(batch, index)
        return self._send(topic, value, key, partition, headers, timestamp_ms)

    def _send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
    ) -> Delivery:
        try:
            if self._tracing is not None:
                sending = self._tracing.begin(topic, as_headers(headers))
                return self._place_traced(sending, topic, value, key, partition, timestamp_ms)
            return self._place(topic, value, key, partition, headers, timestamp_ms)
        except Exception as error:
            self._engine.not_sent(error)
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
        queues = self._queues(topic)
        deadline: Deadline | None = None
        while True:
            with self._lock:
                engine.check_may_send()
                placed = engine.place(queues, value, key, partition, pairs, at_ms, size)
                if placed is None:
                    given_back = engine.want_room()
                else:
                    batch, index, full = placed
                    if traceparent is not None:
                        batch.trace(traceparent)
            if placed is None:
                deadline = deadline or Deadline(engine.options.max_block_ms / 1000)
                engine.wait_for_room(given_back, size, deadline)
                continue
            if full is not None or not index:
                engine.after_place(full)
            return Delivery(batch, index)

    def _queues(self, topic: str) -> TopicQueues:
        queues = self._engine.topics.get(topic)
        if queues is None:
            as_topic(topic)
            self._engine.check_open()
            queues = self._thread.run(self._engine.load_topic(topic))
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
        """Queue many records at once and return a claim on their acknowledgement.

        `values` is a list of bytes or an Arrow array, and key, partition and timestamp_ms are one for all or one
        for each; or it is a `pyarrow.RecordBatch` or `pyarrow.Table` with a column `value` (binary, or string taken
        as UTF-8) and, as wanted, `key`, `headers` (map<string, binary>), `partition` and `timestamp`. Arrow data is
        not looped over in Python: keys are hashed and rows put in order by column.

        >>> import pyarrow as pa
        >>> table = pa.table({"key": ["a", "b", "a"], "value": ["1", "2", "3"]})
        >>> with Producer(cluster.bootstrap) as producer:
        ...     sent = producer.send_batch("letters", table).result(timeout=10)
        ...     sum(part.record_count for part in sent)
        3

        Raises:
            TypeError, InvalidRequestError: data of a kind that does not fit; nothing was queued.
            MessageTooLarge: one row is larger than `max.request.size` allows; nothing was queued.
            BufferExhausted: as `send`; the rows before may have been queued.
        """
        sending = None if self._tracing is None else self._tracing.begin(topic)
        try:
            return self._send_batch(topic, values, key, partition, headers, timestamp_ms, sending)
        except BaseException as error:
            if sending is not None:
                sending.fail(error)
            if isinstance(error, Exception):
                self._engine.not_sent(error)
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
        queues = self._queues(topic)
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
                    given_back = engine.want_room()
                elif traceparent is not None:
                    placed[-1].trace(traceparent)
            if placed is None:
                deadline = deadline or Deadline(engine.options.max_block_ms / 1000)
                engine.wait_for_room(given_back, piece.size_bytes, deadline)
                continue
            engine.encode(placed)
            return placed[-1]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return what this producer counts, under the names of Kafka's client metrics, by group.

        Rates, averages and maxima are of the last half minute, `-total` since the producer was made; times are in ms.
        `raftlog.prometheus.ClientCollector` shows the same to Prometheus, docs/metrics.md says what each figure means.

        >>> with Producer(cluster.bootstrap) as producer:
        ...     _ = producer.send("greetings", b"hallo").result(timeout=10)
        ...     producer.metrics()["producer-metrics"]["record-send-total"]
        1.0
        """
        return self._engine.metrics()

    def flush(self, timeout: float | None = None) -> None:
        """Send everything at once and wait until all of it is acknowledged or has failed.

        >>> with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        ...     delivery = producer.send("greetings", b"ciao")
        ...     producer.flush(timeout=10)
        ...     delivery.done()
        True

        Raises:
            TimeoutError: not done within `timeout` seconds; the deliveries go on.
        """
        engine = self._engine
        engine.close_batches()
        with self._lock:
            waiting = list(engine.accumulator.incomplete)
        deadline = Deadline(timeout)
        for batch in waiting:
            try:
                wait_sync(batch, deadline.left())
            except TimeoutError:
                left = sum(not batch.done for batch in waiting)
                raise TimeoutError(f"{left} batches are not acknowledged after {timeout} s; they go on") from None

    def close(self, timeout: float | None = None) -> None:
        """Flush, `timeout` seconds at most, then stop; what is still not acknowledged ends with `ClosedError`.

        A transaction that is open is aborted, in `timeout` seconds at most, and else by its coordinator after its own
        timeout. Closing twice is allowed.
        """
        engine = self._engine
        if engine.closed is not None:
            return
        try:
            engine.check_open()
            if engine.transactions is None:
                self.flush(timeout)
        except TimeoutError:
            pass  # the deliveries that are left say so
        finally:
            if engine.closed is None:
                self._thread.run(engine.close(timeout))

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
