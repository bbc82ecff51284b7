"""The accumulator: records become batches, wait in the queue of their partition, and end acknowledged or failed.

From the bottom up:
- `Numbering`: producer id, epoch and sequence of each batch, by which a broker recognizes a retry (KIP-98);
- `murmur2`, `murmur2_column`: Kafka's hash of keys. The same key goes to the same partition as in Kafka:
  `(murmur2(key) & 0x7fffffff) % partitions` (Kafka, Utils.murmur2);
- `Batch`: its rows, then its encoded bytes, then the broker's answer;
- `PartitionQueue`: the batches of one partition, kept in order through refusals;
- `TopicQueues`: the queues of one topic, and which partition a record goes to;
- `Accumulator`: all batches and the memory that they take of `buffer.memory`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from raftlog._core.cluster import TopicView
from raftlog._core.traceparent import MAX_TRACES, TRACE_ID
from raftlog.errors import BrokerUnavailable, InvalidPartitions, InvalidRequestError, MessageTooLarge, RaftlogError
from raftlog.format import MAX_RECORDS, Codec, Columns, decode_batch, encode_batch, stamp_producer
from raftlog.format.columns import binary_array, headers_array, int64_array
from raftlog.format.small_batch import FEW, SHORT_BYTES, encode_few
from raftlog.types import Header, RecordMetadata

SEQUENCES: Final = 1 << 31
"""Sequence numbers are the non-negative signed 32-bit integers; 0 follows the last one."""
LAST_EPOCH: Final = (1 << 15) - 1
"""The largest producer epoch; a producer that has used it up needs a new producer id."""
BATCHES_REMEMBERED: Final = 5
"""A broker recognizes the last five batches of a producer, so no more of a partition may be in flight (KIP-98)."""


class Number(NamedTuple):
    """The producer of a batch, and the sequence number of its first record."""

    producer_id: int
    producer_epoch: int
    base_sequence: int

    def after(self, records: int) -> Number:
        """Return the number of the batch that follows `records` records."""
        return self._replace(base_sequence=(self.base_sequence + records) % SEQUENCES)


NO_NUMBER: Final = Number(-1, -1, -1)
"""The number of a batch without a producer id: no broker recognizes a retry of it."""


class Numbering:
    """The numbers of one partition's batches.

    A producer has one id and, because brokers keep producer state by partition, one epoch for each partition. A batch
    gets its number when it is first sent (`take`) and keeps it through all retries. `predict` guesses the number when
    the batch is closed, so that the encoded bytes rarely need another stamp.

    Transitions:
        without id -> numbering   `adopt`
        numbering  -> numbering   `start_over`: the next epoch, from sequence 0
        numbering  -> without id  `start_over` after the last epoch; `forget`: the id is no longer this producer's

    Invariants: except for wrap-around, `upcoming` is above every number taken in its epoch; an epoch is never used
    again after a later one of the same producer id.
    """

    __slots__ = ("_acknowledged", "_predicted", "upcoming")

    def __init__(self) -> None:
        self.upcoming: Number = NO_NUMBER
        """The number of the next batch that `take` numbers."""
        self._predicted: Number = NO_NUMBER
        self._acknowledged: Number | None = None
        """The number that follows the last acknowledged records."""

    @property
    def has_id(self) -> bool:
        """Whether there is a producer id."""
        return self.upcoming.producer_id >= 0

    def adopt(self, producer_id: int, producer_epoch: int) -> None:
        """Number with this id, from sequence 0; no other producer uses the id in this epoch or a later one."""
        assert producer_id >= 0
        assert 0 <= producer_epoch <= LAST_EPOCH
        self._begin(Number(producer_id, producer_epoch, 0))

    def start_over(self) -> None:
        """Number from 0 in the next epoch; after the last epoch, wait for another id (`adopt`).

        Only when no batch that keeps an older number will be sent, and no batch that gets a new one is in the log.
        """
        assert self.has_id
        producer_id, epoch, _ = self.upcoming
        self._begin(Number(producer_id, epoch + 1, 0) if epoch < LAST_EPOCH else NO_NUMBER)

    def forget(self) -> None:
        """Drop the producer id; `adopt` gives the next one."""
        self._begin(NO_NUMBER)

    def _begin(self, number: Number) -> None:
        self.upcoming = self._predicted = number
        self._acknowledged = None

    def predict(self, records: int) -> Number:
        """Return the number that a batch just closed gets if every batch before it is sent."""
        number = self._predicted
        if number.producer_id >= 0:
            self._predicted = number.after(records)
        return number

    def repredict(self, waiting_records: int) -> None:
        """Predict again: `waiting_records` records wait without a number."""
        if self.has_id:
            self._predicted = self.upcoming.after(waiting_records)

    def take(self, records: int) -> Number:
        """Return the number of a batch that is sent for the first time."""
        assert self.has_id
        number = self.upcoming
        self.upcoming = number.after(records)
        return number

    def on_acknowledged(self, number: Number, records: int) -> None:
        """The broker holds a batch with this number."""
        self._acknowledged = number.after(records)

    def follows_acknowledged(self, number: Number) -> bool:
        """Whether the records directly before this number were acknowledged: they are in the log, or were lost."""
        return number == self._acknowledged


_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_R: Final = 24
_MASK: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF

_FEW_ROWS: Final = 16
"""Fewer rows than this are cheaper to hash one by one than with numpy, however long they are."""

_words = struct.Struct("<I").iter_unpack


def murmur2(data: bytes) -> int:
    """Return the hash as a signed 32-bit number, like Kafka's `Utils.murmur2`."""
    whole = len(data) & ~3
    h = _SEED ^ len(data)
    for (k,) in _words(data[:whole]):
        k = k * _M & _MASK
        k ^= k >> _R
        h = (h * _M ^ k * _M) & _MASK
    tail = data[whole:]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


@lru_cache(maxsize=8192)
def _short_key_hash(key: bytes) -> int:
    return murmur2(key) & _POSITIVE


def key_hash(key: bytes) -> int:
    """Return the non-negative hash that is taken modulo the number of partitions."""
    return _short_key_hash(key) if len(key) <= 64 else murmur2(key) & _POSITIVE


def _offsets_and_data(column: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the n + 1 offsets and the bytes of a `pyarrow.BinaryArray`, without copying the bytes."""
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return offsets, data


def murmur2_column(column: Any) -> NDArray[np.int32]:
    """Return the hash of every row of a `pyarrow.BinaryArray` (nulls hash as empty).

    Loops over word positions, not rows: a step mixes the next four bytes of every row that still has them. Rows are
    sorted by length, longest first, so those rows always come first; the last few long rows are hashed one by one.
    """
    rows = len(column)
    if rows == 0:
        return np.empty(0, np.int32)
    offsets, data = _offsets_and_data(column)
    lengths = np.diff(offsets)
    uniform = bool((lengths == lengths[0]).all())
    order = None if uniform else np.argsort(-lengths, kind="stable")
    starts = offsets[:-1] if order is None else offsets[:-1][order]
    sizes = lengths if order is None else lengths[order]
    m = np.uint32(_M)
    h = np.uint32(_SEED) ^ sizes.astype(np.uint32)
    words = sizes >> 2
    first_single = 0  # rows before this one are hashed singly at the end
    if len(data) >= 4:
        unaligned = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
        for word in range(int(words[0])):
            active = rows if words[-1] > word else int(np.searchsorted(-words, -word, side="left"))
            if active < _FEW_ROWS and active < rows:
                first_single = active
                break
            k = unaligned[starts[:active] + 4 * word] * m
            k ^= k >> np.uint32(_R)
            k *= m
            h[:active] *= m
            h[:active] ^= k
    tails = sizes & 3
    ends = starts + 4 * words
    for byte in (2, 1, 0):
        has = np.flatnonzero(tails > byte)
        if len(has):
            h[has] ^= data[ends[has] + byte].astype(np.uint32) << np.uint32(8 * byte)
    h[tails > 0] *= m
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    for row in range(first_single):
        start = int(starts[row])
        h[row] = murmur2(data[start : start + int(sizes[row])].tobytes()) & _MASK
    if order is None:
        return h.view(np.int32)
    hashes = np.empty(rows, np.uint32)
    hashes[order] = h
    return hashes.view(np.int32)


RECORD_BYTES: Final = 24
"""An upper bound of a record's overhead: Arrow offsets of three columns, a timestamp, validity bits."""
HEADER_ENTRY_BYTES: Final = 16
BATCH_BYTES: Final = 768
"""An upper bound of a batch's overhead: its header, the Arrow message around the columns, and padding."""

MOST_BATCH_BYTES: Final = MAX_RECORDS * RECORD_BYTES + BATCH_BYTES
"""A batch of several records is no larger, so that it has no more than brokers accept."""


def record_bytes(value: bytes | None, key: bytes | None, headers: tuple[Header, ...]) -> int:
    """Return the size that a record counts with: at least the bytes that it adds to an uncompressed batch."""
    size = RECORD_BYTES + (len(value) if value is not None else 0)
    if key is not None:
        size += len(key)
    for name, content in headers:
        size += HEADER_ENTRY_BYTES + 4 * len(name) + (len(content) if content is not None else 0)
    return size


class Batch:
    """Records of one partition that travel together.

    Transitions:
        open     -> closed    full, lingered long enough, flushed, or waited for
        closed   -> encoded   `encode`
        encoded  -> done      acknowledged, or failed for good; `done` is final
        encoded  -> split     refused as too large: `parts` replace it, and it is done when both are

    `owner` is the engine that deliveries wait on; the core only stores it.

    Invariants: rows are appended only while open; `timestamp_runs` begins with index 0.
    """

    __slots__ = (
        "append_time_ms",
        "base_offset",
        "callbacks",
        "columns",
        "count",
        "deadline_ms",
        "done",
        "encoded",
        "error",
        "failures",
        "headers",
        "in_doubt",
        "keys",
        "last_timestamp_ms",
        "limit_bytes",
        "linger_until_ms",
        "number",
        "numbered",
        "order",
        "owner",
        "parts",
        "place",
        "queue",
        "reserved_bytes",
        "sent",
        "size_bytes",
        "timestamp_runs",
        "timestamps",
        "traces",
        "values",
    )

    def __init__(
        self,
        queue: PartitionQueue,
        order: tuple[int, ...],
        limit_bytes: int,
        deadline_ms: float,
        linger_until_ms: float,
    ) -> None:
        self.queue = queue
        self.order = order
        self.owner: Any = None
        self.limit_bytes = limit_bytes
        self.deadline_ms = deadline_ms
        self.linger_until_ms = linger_until_ms
        self.reserved_bytes = 0
        self.size_bytes = BATCH_BYTES
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.headers: list[tuple[Header, ...] | None] | None = None
        self.timestamp_runs: list[tuple[int, int]] = []
        self.timestamps: Any = None
        self.last_timestamp_ms = -1
        self.columns: Columns | None = None
        self.count = 0
        self.encoded: bytes | None = None
        self.failures = 0
        self.done = False
        self.base_offset = -1
        self.append_time_ms = -1
        self.error: RaftlogError | None = None
        self.parts: tuple[Batch, Batch] | None = None
        self.callbacks: list[Callable[[], None]] | None = None
        self.sent = False
        """Whether it was ever sent: if not, it is certainly not in the log."""
        self.number: Number = NO_NUMBER
        """The number in the encoded bytes; a prediction until the batch is `numbered`."""
        self.numbered = False
        """Whether the batch was sent with its number, and so keeps it."""
        self.place = 0
        """Its position among the numbered batches of its queue."""
        self.in_doubt = False
        """Whether the batch may be in the log although no response says so."""
        self.traces: dict[str, str] | None = None
        """The first span (W3C traceparent) of each sampled trace of its records, by trace id."""

    def append(
        self, value: bytes | None, key: bytes | None, headers: tuple[Header, ...], timestamp_ms: int, size: int
    ) -> int:
        """Add a row and return its index. The caller has checked that it fits."""
        index = len(self.values)
        if key is not None and self.keys is None:
            self.keys = [None] * index
        if headers and self.headers is None:
            self.headers = [None] * index
        self.values.append(value)
        if self.keys is not None:
            self.keys.append(key)
        if self.headers is not None:
            self.headers.append(headers or None)
        if timestamp_ms != self.last_timestamp_ms:
            self.note_timestamp(index, timestamp_ms)
        self.size_bytes += size
        return index

    def note_timestamp(self, index: int, timestamp_ms: int) -> None:
        """Give the records from `index` on this timestamp; a run of equal timestamps is stored once."""
        self.timestamp_runs.append((index, timestamp_ms))
        self.last_timestamp_ms = timestamp_ms

    def trace(self, traceparent: str) -> None:
        """Note the span of a sampled record; the first `MAX_TRACES` traces go to the broker."""
        traces = self.traces
        if traces is None:
            traces = self.traces = {}
        if len(traces) < MAX_TRACES:
            traces.setdefault(traceparent[TRACE_ID], traceparent)

    def close(self) -> None:
        """Take no more rows."""
        if self.columns is None:
            self.count = len(self.values)

    def _columns(self) -> tuple[Columns, int]:
        if self.columns is not None:
            timestamps = self.columns.timestamp_ms
            base = self.timestamp_runs[0][1] if self.timestamp_runs else timestamps[0].as_py()
            return self.columns, base
        runs = self.timestamp_runs
        base = runs[0][1]
        timestamps = None
        if len(runs) > 1:
            starts = [index for index, _ in runs]
            counts = np.diff(np.array([*starts, self.count]))
            timestamps = int64_array(np.repeat(np.array([at for _, at in runs], np.int64), counts))
        columns = Columns(
            binary_array(self.values),
            key=binary_array(self.keys) if self.keys is not None else None,
            headers=headers_array(self.headers) if self.headers is not None else None,
            timestamp_ms=timestamps,
        )
        return columns, base

    @property
    def _is_small(self) -> bool:
        """Whether `encode_few` can encode the batch."""
        return (
            self.columns is None
            and self.count <= FEW
            and self.size_bytes <= SHORT_BYTES
            and self.headers is None
            and len(self.timestamp_runs) == 1
            and None not in self.values
            and (self.keys is None or None not in self.keys)
        )

    def encode(self, codec: Codec, level: int | None, attributes: int = 0) -> bytes:
        """Return the encoded record batch, and drop the rows."""
        producer_id, producer_epoch, base_sequence = self.number
        if codec is Codec.NONE and self._is_small:
            self.encoded = encode_few(
                cast("list[bytes] | None", self.keys),
                cast("list[bytes]", self.values),
                self.timestamp_runs[0][1],
                attributes=attributes,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence,
            )
            self.values = []
            self.keys = None
            return self.encoded
        columns, base_timestamp_ms = self._columns()
        self.encoded = encode_batch(
            columns,
            base_timestamp_ms,
            codec=codec,
            level=level,
            attributes=attributes,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
        if self.columns is not None:
            self.timestamps = columns.timestamp_ms
        self.columns = None
        self.values = []
        self.keys = self.headers = None
        return self.encoded

    def stamp(self, number: Number) -> None:
        """Give the batch its number; stamp the encoded bytes again if they carry another one."""
        if number != self.number:
            self.number = number
            if self.encoded is not None:
                self.encoded = stamp_producer(self.encoded, *number)
        self.numbered = True

    def split_columns(self) -> tuple[Columns, Columns]:
        """Return the rows of an encoded batch in two halves, always with a timestamp column."""
        assert self.encoded is not None
        assert self.count > 1
        decoded = decode_batch(self.encoded, check_checksum=False, trusted=True)
        names = decoded.columns.schema.names
        timestamps = int64_array(np.fromiter(map(self.timestamp_ms, range(self.count)), np.int64, self.count))
        found = {name: decoded.columns.column(name) for name in names}
        middle = self.count // 2

        def part(start: int, length: int) -> Columns:
            def cut(name: str) -> Any:
                return found[name].slice(start, length) if name in found else None

            return Columns(
                cut("value"), key=cut("key"), headers=cut("headers"), timestamp_ms=timestamps.slice(start, length)
            )

        return part(0, middle), part(middle, self.count - middle)

    def timestamp_ms(self, index: int) -> int:
        """Return the timestamp that the producer gave the record."""
        if self.timestamps is not None:
            return int(self.timestamps[index].as_py())
        if self.columns is not None and self.columns.timestamp_ms is not None:
            return int(self.columns.timestamp_ms[index].as_py())
        run = bisect_right(self.timestamp_runs, index, key=lambda run: run[0]) - 1
        return self.timestamp_runs[run][1]

    def leaf(self, index: int) -> tuple[Batch, int]:
        """Return the batch that carries the record after all splits, and its index there."""
        batch = self
        while batch.parts is not None:
            left, right = batch.parts
            batch, index = (left, index) if index < left.count else (right, index - left.count)
        return batch, index

    def leaves(self) -> list[Batch]:
        """Return the batches that carry the records after all splits, in order."""
        if self.parts is None:
            return [self]
        return self.parts[0].leaves() + self.parts[1].leaves()

    def metadata(self, index: int) -> RecordMetadata:
        """Return the partition, offset and timestamp of a record. The batch must be done, without an error."""
        batch, index = self.leaf(index)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        timestamp_ms = batch.append_time_ms if batch.append_time_ms >= 0 else batch.timestamp_ms(index)
        return RecordMetadata(batch.queue.topic, batch.queue.partition, offset, timestamp_ms)


class PartitionQueue:
    """The batches of one partition: waiting for its leader, in flight to it, and refused by it.

    Transitions:
        flowing     -> recovering  an in-flight batch is refused, or its stream breaks
        recovering  -> flowing     every in-flight batch has its answer; the refused ones go back in front, in order,
                                   under a larger `chain`

    While recovering the queue sends nothing new, so no batch overtakes a refused one: the broker refuses the batches
    that were in flight behind it until it sees the larger chain.

    With `numbering` the producer is idempotent. A batch keeps its number through all retries. A batch that fails for
    good leaves a gap in the numbers, and later batches keep theirs, because the failed batch may be in the log. Only
    when the broker denies the first batch in flight (`on_denied`) is it certain that neither that batch nor a later
    one is in the log: the queue then numbers all of them again, once every answer has arrived (docs/adr/0012).

    Invariants: `waiting` is ordered by `Batch.order`, and comes after everything in flight, except while recovering;
    all in-flight batches were sent to `node_id`; numbered batches wait before those without a number; the first batch
    in flight is among the last five sent, so that the broker recognizes it.
    """

    __slots__ = (
        "chain",
        "failures",
        "in_flight",
        "last_error",
        "last_order",
        "node_id",
        "not_before_ms",
        "numbering",
        "open",
        "partition",
        "places",
        "recovering",
        "refused",
        "refused_since_ms",
        "renumbered",
        "sent_epoch",
        "topic",
        "waiting",
        "wants_id",
        "wants_number",
    )

    def __init__(self, topic: str, partition: int, numbering: Numbering | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None
        self.waiting: deque[Batch] = deque()
        self.in_flight: dict[Batch, None] = {}
        """In the order of sending."""
        self.refused: list[Batch] = []
        self.recovering = False
        self.chain = 0
        self.node_id = -1
        self.sent_epoch = -1
        """The leader epoch that the last batch was sent under."""
        self.failures = 0
        """Refusals in a row, for the backoff."""
        self.refused_since_ms: float | None = None
        self.last_error: RaftlogError | None = None
        self.not_before_ms = 0.0
        self.last_order = 0
        self.numbering = numbering
        """None: batches have no numbers, and a retried batch may be in the log twice."""
        self.places = 0
        """How many batches were numbered; the place of the next one."""
        self.wants_number = False
        """Whether the queue numbers all batches again once it has recovered."""
        self.wants_id = False
        """Whether the new numbers need another producer id."""
        self.renumbered = 0
        """How often the queue was numbered again since the broker last accepted a batch."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def next_order(self) -> tuple[int, ...]:
        """Return the order of the next batch."""
        self.last_order += 1
        return (self.last_order,)

    @property
    def sendable(self) -> bool:
        """Whether the queue flows and its first waiting batch is encoded; callers check pause, leader and limits."""
        if self.recovering:
            return False
        first = next((batch for batch in self.waiting if not batch.done), None)
        return first is not None and first.encoded is not None

    @property
    def lacks_id(self) -> bool:
        """Whether the queue waits for a producer id."""
        return self.numbering is not None and not self.numbering.has_id

    def close(self, batch: Batch) -> None:
        """Queue a closed batch, with its predicted number to encode."""
        if self.numbering is not None:
            batch.number = self.numbering.predict(batch.count)
        self.waiting.append(batch)

    @property
    def is_crowded(self) -> bool:
        """Whether a further batch would wait even if all that may be in flight were."""
        return len(self.waiting) >= BATCHES_REMEMBERED

    @property
    def busy(self) -> bool:
        """Whether any closed batch is unsent or unanswered."""
        return bool(self.waiting or self.in_flight or self.refused)

    def take(self, node_id: int, room_bytes: int, *, at_least_one: bool, leader_epoch: int = -1) -> list[Batch]:
        """Move encoded batches of at most `room_bytes` in all from waiting to in flight, and return them.

        Returns none while batches are in flight to another node, because answers of two leaders would race; the caller
        that gives those answers up calls `on_refused` first. Batches of an idempotent producer get their numbers here.
        """
        taken: list[Batch] = []
        if self.recovering or (self.in_flight and self.node_id != node_id) or self.lacks_id:
            return taken
        waiting, numbering = self.waiting, self.numbering
        mispredicted = False
        while waiting:
            batch = waiting[0]
            if batch.done:  # timed out meanwhile
                waiting.popleft()
                mispredicted = True
                continue
            if batch.encoded is None:
                break
            if numbering is not None and self.in_flight:
                place = batch.place if batch.numbered else self.places
                if place - next(iter(self.in_flight)).place >= BATCHES_REMEMBERED:
                    break
            size = len(batch.encoded)
            if size > room_bytes and not (at_least_one and not taken):
                break
            room_bytes -= size
            batch.sent = True
            if numbering is not None and not batch.numbered:
                batch.stamp(numbering.take(batch.count))
                batch.place = self.places
                self.places += 1
            taken.append(waiting.popleft())
            self.in_flight[batch] = None
        if mispredicted:
            self._repredict()
        if taken:
            self.node_id = node_id
            self.sent_epoch = leader_epoch
        return taken

    def on_accepted(self, batch: Batch) -> None:
        """The broker has acknowledged the batch."""
        self.in_flight.pop(batch, None)
        self.failures = self.renumbered = 0
        self.refused_since_ms = None
        if self.numbering is not None:
            self.numbering.on_acknowledged(batch.number, batch.count)

    def is_first_in_flight(self, batch: Batch) -> bool:
        """Whether every batch sent before this one is acknowledged or has failed for good."""
        return next(iter(self.in_flight), None) is batch and not any(
            before.order < batch.order and not before.done for before in self.refused
        )

    def on_denied(self, batch: Batch) -> None:
        """The broker says that records before this batch are missing in its log, and so is the batch.

        For the first batch in flight this is final: the broker appends in order only, and denies only batches that no
        in-sync replica may have, so neither this batch nor a later one is in the log. The queue numbers all of them
        again. For any other batch the denial proves nothing yet, and the batch is sent again.
        """
        self.wants_number |= self.is_first_in_flight(batch)
        self.on_refused(batch, resend=True, counts=self.renumbered > 0)

    def on_fenced(self, batch: Batch) -> list[Batch]:
        """Another producer has used the producer id in a later epoch: continue with another id.

        Returns the batches that may be in the log from an earlier attempt. The caller fails them, because under
        another id they could be in the log twice.
        """
        if not self.is_first_in_flight(batch):
            self.on_refused(batch, resend=True, counts=False)
            return []
        doubtful = [each for each in (*self.in_flight, *self.refused, *self.waiting) if each.in_doubt and not each.done]
        self.wants_number = self.wants_id = True
        self.on_refused(batch, resend=not batch.in_doubt, counts=self.renumbered > 0)
        return doubtful

    def on_refused(self, batch: Batch, *, resend: bool, counts: bool) -> None:
        """The broker has refused the batch, or the stream broke. `counts`: the backoff counts it as a failure."""
        self.in_flight.pop(batch, None)
        self.recovering = True
        if counts:
            self.failures += 1
        if resend and not batch.done:
            self.refused.append(batch)

    def on_late_refusal(self, error: RaftlogError) -> None:
        """The broker has refused a batch sent with acks=0, which counts as accepted: send no more of them for now."""
        self.note_failure(error)
        self.recovering = True
        self.failures += 1

    def note_failure(self, error: RaftlogError) -> None:
        """Remember why batches do not get through. The backoff restarts when a broker becomes reachable or
        unreachable: the first refusal after an outage is not the last of many."""
        if isinstance(error, BrokerUnavailable) != isinstance(self.last_error, BrokerUnavailable):
            self.failures = 0
        self.last_error = error

    def forgive(self) -> None:
        """Another broker leads now: drop the backoff that the previous leader caused."""
        self.failures = 0
        self.refused_since_ms = None
        self.not_before_ms = 0.0

    def replace(self, batch: Batch, parts: tuple[Batch, Batch]) -> None:
        """The broker has refused the batch as too large: its halves take its place."""
        self.in_flight.pop(batch, None)
        self.recovering = True
        if batch.numbered:  # two batches in place of one
            for later in (*self.in_flight, *self.refused, *self.waiting):
                later.place += later.numbered and later.place > batch.place
            self.places += 1
        self.refused.extend(parts)

    def recovered(self) -> bool:
        """Flow again if no batch is in flight any more; return whether that happened."""
        if not self.recovering or self.in_flight:
            return False
        self.refused.sort(key=lambda batch: batch.order)
        self.waiting.extendleft(reversed(self.refused))
        self.refused.clear()
        self.recovering = False
        self.chain += 1
        if self.wants_number:
            self._number_anew()
        self._check_invariants()
        return True

    def _number_anew(self) -> None:
        assert self.numbering is not None
        self.renumbered += 1
        if self.wants_id:
            self.numbering.forget()
        elif self.numbering.has_id:
            self.numbering.start_over()
        self.wants_number = self.wants_id = False
        for batch in self.waiting:
            batch.numbered = batch.in_doubt = False
        self._repredict()

    def adopt(self, producer_id: int, producer_epoch: int) -> None:
        """Number batches with this producer id from now on."""
        assert self.numbering is not None
        assert all(batch.done for batch in self.in_flight), "batches under another producer id are done"
        self.numbering.adopt(producer_id, producer_epoch)
        self._repredict()

    def drop_id(self) -> None:
        """Drop the producer id at the end of its transaction; `adopt` starts the next one at sequence 0."""
        assert self.numbering is not None
        assert all(batch.done or not batch.numbered for batch in (*self.in_flight, *self.refused, *self.waiting))
        self.numbering.forget()

    def _repredict(self) -> None:
        """Correct the prediction: waiting batches get other numbers than predicted, and so do later ones."""
        if self.numbering is not None:
            self.numbering.repredict(
                sum(batch.count for batch in self.waiting if not batch.numbered and not batch.done)
            )

    def take_out(self) -> list[Batch]:
        """Remove and return all batches that are not in flight; the caller completes them with an error."""
        failed = [*self.refused, *self.waiting]
        if self.open is not None:
            failed.append(self.open)
        self.refused.clear()
        self.waiting.clear()
        self.open = None
        return failed

    def _check_invariants(self) -> None:
        orders = [batch.order for batch in self.waiting]
        assert orders == sorted(orders), "waiting batches are ordered"
        if self.numbering is not None:
            numbered = [batch.numbered for batch in self.waiting if not batch.done]
            assert numbered == sorted(numbered, reverse=True), "numbered batches wait in front"


Partitioner = Callable[[str, bytes | None, int], int]
"""A custom partitioner: (topic, key, number of partitions) -> partition."""


class TopicQueues:
    """Queues by partition, and the sticky partition for records that name neither partition nor key.

    Records without a key fill a batch of the sticky partition, then the next partition becomes sticky: few large
    batches instead of many small ones (KIP-480), spread evenly. While any partition has a leader, partitions without
    one are skipped.

    `first`: the number of the partition to begin with, modulo their count. Processes should begin with different ones,
    or those that send only a record or two would all send to the same partition.
    """

    def __init__(
        self, view: TopicView, partitioner: Partitioner | None, *, idempotent: bool = False, first: int = 0
    ) -> None:
        self.topic = view.name
        self.topic_id = view.topic_id
        self.queues: list[PartitionQueue] = []
        self.sticky = first % max(1, len(view.partitions))
        self._available: list[int] = []
        self._partitioner = partitioner
        self._idempotent = idempotent
        self.update(view)

    def update(self, view: TopicView) -> None:
        """Take over newer metadata. A topic that was deleted and created again may have fewer partitions."""
        self.topic_id = view.topic_id
        for partition in range(len(self.queues), len(view.partitions)):
            self.queues.append(PartitionQueue(self.topic, partition, Numbering() if self._idempotent else None))
        self.partition_count = len(view.partitions)
        led = [part.partition for part in view.partitions if part.leader >= 0]
        self._available = led or [part.partition for part in view.partitions]
        if self.sticky not in self._available:
            self.next_sticky()

    def next_sticky(self) -> int:
        """Make the next available partition the sticky one, and return it."""
        self.sticky = next((part for part in self._available if part > self.sticky), self._available[0])
        return self.sticky

    def sticky_turns(self, count: int) -> list[int]:
        """Return the next `count` sticky partitions, the current one first, and move on past them."""
        turns = []
        for _ in range(count):
            turns.append(self.sticky)
            self.next_sticky()
        return turns

    def queue_for(self, key: bytes | None, partition: int | None) -> PartitionQueue:
        """Return the queue of a record: the named one, else by custom partitioner, by key, or the sticky one.

        Raises:
            InvalidPartitions: there is no such partition.
        """
        if partition is None:
            if self._partitioner is not None:
                partition = self.ask_partitioner(key)
            elif key is not None:
                partition = key_hash(key) % self.partition_count
            else:
                partition = self.sticky
        self.check_partition(partition)
        return self.queues[partition]

    @property
    def sticky_backlog_bytes(self) -> int:
        """The bytes that wait for each partition, at least; 0 while the queue of any is not crowded.

        It bounds the batch of the sticky partition. So all partitions get larger batches in turn, and that of a slow
        broker no more than others (KIP-794).
        """
        # Mostly the first queue already is not crowded: each batch of a topic of thousands of partitions asks this.
        if not all(self.queues[partition].is_crowded for partition in self._available):
            return 0
        waiting = (self.queues[partition].waiting for partition in self._available)
        return min(sum(batch.size_bytes for batch in each) for each in waiting)

    @property
    def custom(self) -> bool:
        """Whether a custom partitioner decides."""
        return self._partitioner is not None

    def ask_partitioner(self, key: bytes | None) -> int:
        """Return what the custom partitioner says.

        Raises:
            InvalidRequestError: it did not return an int.
        """
        assert self._partitioner is not None
        partition = self._partitioner(self.topic, key, self.partition_count)
        if not isinstance(partition, int):
            raise InvalidRequestError(f"the partitioner returned {partition!r} for topic {self.topic!r}; return an int")
        return partition

    def check_partition(self, partition: int) -> None:
        """Refuse a partition that does not exist.

        Raises:
            InvalidPartitions: the message names the topic and its partitions.
        """
        if not 0 <= partition < self.partition_count:
            raise InvalidPartitions(
                f"topic {self.topic!r} has partitions 0 to {self.partition_count - 1}, "
                f"there is no partition {partition}"
            )


CROWDED_GROWTH: Final = 4
"""A batch that is opened in a crowded queue (`PartitionQueue.is_crowded`) may grow to this many times `batch.size`."""
STICKY_GROWTH: Final = 16
"""The same for the sticky partition's batch. A topic has only one, so it may take more of `buffer.memory`."""
HURRIED: Final = float("-inf")
"""The `linger_until_ms` of a batch that must close now, even in a crowded queue."""


@dataclass(frozen=True, slots=True)
class AccumulatorConfig:
    """Sizes in bytes, times in ms; the producer's keys of the same names."""

    batch_size_bytes: int
    buffer_memory_bytes: int
    max_request_size_bytes: int
    linger_ms: float
    delivery_timeout_ms: float


class Accumulator:
    """Open and closed batches of all partitions, and the memory they take.

    An open batch reserves `batch.size`, or more if its first record needs more; a closed batch keeps its real size; a
    batch that is done returns it.

    Not thread-safe: the shell holds its lock around every call.

    Invariants: `used_bytes` is the sum of `reserved_bytes` over `incomplete`; `incomplete` is in the order of
    creation, and so of deadlines (except for the halves of a split batch, which keep the deadline of their parent).
    """

    def __init__(self, config: AccumulatorConfig, owner: object = None) -> None:
        self.owner = owner
        self.config = config
        self.used_bytes = 0
        self.incomplete: dict[Batch, None] = {}
        self.lingering: deque[Batch] = deque()
        self.crowded: dict[Batch, None] = {}
        """Open batches that have lingered behind `BATCHES_REMEMBERED` closed ones, and so may grow (KIP-480)."""
        self.ready: dict[PartitionQueue, None] = {}
        """Queues with closed batches that the shell has not routed yet."""

    def check_size(self, value: bytes | None, key: bytes | None, headers: tuple[Header, ...]) -> int:
        """Return the size that the record counts with.

        Raises:
            MessageTooLarge: no batch can hold it.
        """
        size = record_bytes(value, key, headers)
        self.check_fits(size, "the record")
        return size

    def check_fits(self, size: int, what: str) -> None:
        """Refuse `what`, which takes `size` bytes, if no batch can hold it.

        Raises:
            MessageTooLarge: the message names the sizes.
        """
        limit = min(self.config.max_request_size_bytes, self.config.buffer_memory_bytes)
        if size + BATCH_BYTES > limit:
            raise MessageTooLarge(
                f"{what} takes {size + BATCH_BYTES} bytes as a batch of its own, more than "
                f"max.request.size={self.config.max_request_size_bytes} or "
                f"buffer.memory={self.config.buffer_memory_bytes} allows; send it in pieces or raise the limit"
            )

    def has_room(self, size: int) -> bool:
        """Whether a new batch for a record of this size would fit into `buffer.memory`."""
        return self.used_bytes + self._reservation(size) <= self.config.buffer_memory_bytes

    def _reservation(self, size: int) -> int:
        return min(max(self.config.batch_size_bytes, size + BATCH_BYTES), self.config.buffer_memory_bytes)

    def open_batch_for(self, queue: PartitionQueue, size: int) -> Batch | None:
        """Return the open batch of the queue if the record fits into it."""
        batch = queue.open
        return batch if batch is not None and batch.size_bytes + size <= batch.limit_bytes else None

    def open(
        self, queue: PartitionQueue, size: int, now_ms: float, *, sticky_backlog_bytes: int | None = None
    ) -> Batch:
        """Open a batch for a record of this size; the caller has closed the previous one and asked `has_room`.

        In a crowded queue it may be larger than `batch.size`, as few large batches cost less than many small ones.

        `sticky_backlog_bytes`: of a batch of the sticky partition, `TopicQueues.sticky_backlog_bytes`. The batch may
        grow to half of it: it goes out later than all that, and partitions stay about as full as each other.
        """
        assert queue.open is None
        reservation = self._reservation(size)
        if queue.numbering is not None and queue.is_crowded:
            larger = CROWDED_GROWTH * self.config.batch_size_bytes
            if sticky_backlog_bytes is not None:
                larger = min(sticky_backlog_bytes // 2, STICKY_GROWTH * self.config.batch_size_bytes)
            larger = min(larger, self.config.max_request_size_bytes)
            if self.used_bytes + larger <= self.config.buffer_memory_bytes:
                reservation = max(reservation, larger)
        batch = Batch(
            queue,
            queue.next_order(),
            max(min(reservation, MOST_BATCH_BYTES), size + BATCH_BYTES),
            now_ms + self.config.delivery_timeout_ms,
            now_ms + self.config.linger_ms,
        )
        self._reserve(batch, reservation)
        queue.open = batch
        self.lingering.append(batch)
        return batch

    def close(self, batch: Batch) -> bool:
        """Close an open batch and queue it. Return False if it is not open."""
        queue = batch.queue
        if queue.open is not batch:
            return False
        queue.open = None
        batch.close()
        self.used_bytes -= batch.reserved_bytes - batch.size_bytes
        batch.reserved_bytes = batch.size_bytes
        queue.close(batch)
        self.ready[queue] = None
        return True

    def close_lingered(self, now_ms: float) -> list[Batch]:
        """Close the open batches that have lingered long enough, and return them.

        A batch behind `BATCHES_REMEMBERED` closed ones stays open: it could not be sent yet, so it may grow, and a
        backlog goes out in full batches instead of one for each `linger.ms`. The first call after the queue has become
        shorter closes it.
        """
        closed = []
        for batch in list(self.crowded):
            if batch.queue.open is not batch or not self._is_crowded(batch):
                del self.crowded[batch]
                if self.close(batch):
                    closed.append(batch)
        lingering = self.lingering
        while lingering and (lingering[0].linger_until_ms <= now_ms or lingering[0].queue.open is not lingering[0]):
            batch = lingering.popleft()
            if batch.queue.open is batch and self._is_crowded(batch):
                self.crowded[batch] = None
            elif self.close(batch):
                closed.append(batch)
        return closed

    @staticmethod
    def _is_crowded(batch: Batch) -> bool:
        return batch.queue.is_crowded and batch.linger_until_ms > HURRIED

    def open_batches(self) -> Iterator[Batch]:
        """Yield every open batch, the oldest first."""
        for batch in (*self.crowded, *self.lingering):
            if batch.queue.open is batch:
                yield batch

    def close_all(self) -> list[Batch]:
        """Close every open batch, and return them."""
        closed = [batch for batch in self.open_batches() if self.close(batch)]
        self.crowded.clear()
        self.lingering.clear()
        return closed

    def hurry(self) -> None:
        """Stop all lingering: a caller waits for the memory that open batches hold."""
        for batch in self.open_batches():
            batch.linger_until_ms = HURRIED

    def next_linger_ms(self) -> float | None:
        """Return when the next open batch has lingered long enough; crowded batches do not count."""
        return self.lingering[0].linger_until_ms if self.lingering else None

    def add_columns(
        self, queue: PartitionQueue, columns: Columns, base_timestamp_ms: int, size: int, now_ms: float
    ) -> Batch:
        """Queue Arrow columns as a closed batch, behind all earlier records.

        The caller has asked `has_columns_room`.
        """
        if queue.open is not None:
            self.close(queue.open)
        batch = Batch(queue, queue.next_order(), size, now_ms + self.config.delivery_timeout_ms, now_ms)
        self._set_columns(batch, columns, base_timestamp_ms, size)
        self._reserve(batch, size)
        queue.close(batch)
        self.ready[queue] = None
        return batch

    def has_columns_room(self, size: int) -> bool:
        """Whether columns of this size fit. Without incomplete batches any size fits: large ones never starve."""
        return self.used_bytes + size <= self.config.buffer_memory_bytes or not self.incomplete

    @staticmethod
    def _set_columns(batch: Batch, columns: Columns, base_timestamp_ms: int, size: int) -> None:
        batch.columns = columns
        batch.count = len(columns.value)
        batch.size_bytes = size
        batch.timestamps = columns.timestamp_ms
        batch.note_timestamp(0, base_timestamp_ms)

    def _reserve(self, batch: Batch, size: int) -> None:
        batch.owner = self.owner
        batch.reserved_bytes = size
        self.used_bytes += size
        self.incomplete[batch] = None

    def split(self, batch: Batch) -> tuple[Batch, Batch]:
        """Replace an encoded batch by two halves in its queue; return the halves, not encoded yet."""
        columns = batch.split_columns()
        halves: list[Batch] = []
        for index, half in enumerate(columns):
            part = Batch(
                batch.queue, (*batch.order, index), batch.limit_bytes, batch.deadline_ms, batch.linger_until_ms
            )
            self._set_columns(part, half, int(half.timestamp_ms[0].as_py()), batch.size_bytes // 2)
            part.failures = batch.failures
            part.sent = batch.failures > 0  # the broker refused this attempt; it may have appended an earlier one
            part.in_doubt = batch.in_doubt
            part.traces = batch.traces
            part.numbered, part.place = batch.numbered, batch.place + index
            part.number = batch.number.after(halves[0].count) if index and batch.numbered else batch.number
            halves.append(part)
        self.release(batch)
        for part in halves:
            self._reserve(part, batch.size_bytes // 2)
        batch.parts = (halves[0], halves[1])
        batch.encoded = None
        batch.queue.replace(batch, batch.parts)
        return batch.parts

    def release(self, batch: Batch) -> None:
        """Return the batch's memory."""
        if batch in self.incomplete:
            del self.incomplete[batch]
            self.used_bytes -= batch.reserved_bytes
            batch.reserved_bytes = 0

    def complete(
        self, batch: Batch, *, base_offset: int = -1, append_time_ms: int = -1, error: RaftlogError | None = None
    ) -> bool:
        """Finish a batch; return False if it was already done. The shell then runs its `callbacks`."""
        if batch.done:
            return False
        batch.base_offset = base_offset
        batch.append_time_ms = append_time_ms
        batch.error = error
        batch.done = True
        batch.encoded = None
        batch.columns = None
        batch.values = []
        self.release(batch)
        return True

    def expired(self, now_ms: float) -> Iterable[Batch]:
        """Return the incomplete batches whose `delivery.timeout.ms` has passed."""
        found = []
        for batch in self.incomplete:
            if batch.deadline_ms > now_ms:
                break
            found.append(batch)
        return found
