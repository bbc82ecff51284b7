"""A consumer's positions: from fetched frames to the rows that a poll returns, without I/O.

- `wanted_rows` decodes the batches of a frame into `Rows` from a position on; `table` makes an Arrow table of them,
  without copying values: one chunk for each batch, constant columns from shared buffers.
- `PartitionState` holds the position and the unread frames of one partition, `Positions` those of all.
- `read_source` names the replica to fetch from: the leader, or a follower that the leader has named (KIP-392).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raftlog._core.cluster import ClusterCache
from raftlog.errors import CorruptRecordError, RaftlogError, UnsupportedVersion
from raftlog.format import HEADERS_TYPE, Attributes, BatchHeader, Buffer, decode_batch, parse_batch, parse_header
from raftlog.format.aborted import AbortedRanges
from raftlog.format.columns import binary_array, int64_array
from raftlog.format.header import check_header
from raftlog.types import Record, TopicPartition

_new_record = tuple.__new__
_PLACE: Final = struct.Struct("<q4xi")
"""base_offset and leader_epoch of a batch."""
_CONTROL: Final = int(Attributes.CONTROL)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one batch from the position on. The columns share the memory of the frame.

    `first_offset` is the offset of the first row. `offsets` holds the offsets of all rows of a batch with sparse
    offsets, otherwise None.
    """

    topic_partition: TopicPartition
    header: BatchHeader
    columns: Any
    first_offset: int
    offsets: NDArray[np.int64] | None

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    @property
    def timestamp_ms(self) -> int | None:
        """The common timestamp of all rows; None if each row has its own."""
        attributes = self.header.attributes
        if attributes & Attributes.LOG_APPEND_TIME or not attributes & Attributes.TIMESTAMP:
            return self.header.base_timestamp_ms
        return None

    def column(self, name: str) -> Any:
        """Return a column, or None if the batch does not have it."""
        index = self.columns.schema.get_field_index(name)
        return self.columns.column(index) if index >= 0 else None

    def head(self, rows: int) -> Rows:
        """Return the first `rows` rows."""
        offsets = self.offsets[:rows] if self.offsets is not None else None
        return Rows(self.topic_partition, self.header, self.columns.slice(0, rows), self.first_offset, offsets)

    def tail(self, rows: int) -> Rows:
        """Return the rows after the first `rows` rows."""
        offsets = self.offsets[rows:] if self.offsets is not None else None
        first = int(offsets[0]) if offsets is not None else self.first_offset + rows
        return Rows(self.topic_partition, self.header, self.columns.slice(rows), first, offsets)

    def offset_after(self, rows: int) -> int:
        """Return the position after the first `rows` rows."""
        if rows == len(self):
            return self.header.next_offset
        return int(self.offsets[rows - 1]) + 1 if self.offsets is not None else self.first_offset + rows

    def below(self, end: int) -> Rows:
        """Return the rows below the offset `end`."""
        if self.header.next_offset <= end:
            return self
        if self.offsets is not None:
            return self.head(int(np.searchsorted(self.offsets, end)))
        return self.head(min(len(self), max(0, end - self.first_offset)))

    def records(self) -> list[Record]:
        """Return the rows as records."""
        count = len(self)
        at_ms = self.timestamp_ms
        key, headers = self.column("key"), self.column("headers")
        row = zip(
            repeat(self.topic_partition.topic, count),
            repeat(self.topic_partition.partition),
            range(self.first_offset, self.first_offset + count) if self.offsets is None else self.offsets.tolist(),
            repeat(at_ms) if at_ms is not None else self.column("timestamp_ms").to_pylist(),
            repeat(None) if key is None else key.to_pylist(),
            self.column("value").to_pylist(),
            repeat(()) if headers is None else map(_headers, headers.to_pylist()),
            strict=False,
        )
        return list(map(_new_record, repeat(Record), row))  # Record._make, but without a Python call for each row


class Skipped(NamedTuple):
    """Offsets without rows for the application: the position moves past them."""

    next_offset: int
    leader_epoch: int


def _headers(pairs: list[tuple[str, bytes | None]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(pairs) if pairs else ()


def wanted_rows(
    topic_partition: TopicPartition,
    records: Buffer,
    position: int,
    *,
    check_crcs: bool,
    end_offset: int | None = None,
    aborted: AbortedRanges | None = None,
) -> Iterator[Rows | Skipped]:
    """Yield the rows from `position` on, batch by batch.

    Drops rows of the first batch that lie before the position. Skips control batches, batches of `aborted`
    transactions, and batches that compaction has emptied. The position never goes back.

    A skipped batch is checked against its checksum too, because the attributes that cause the skip may be corrupt. The
    checksum covers neither the offset nor the leader epoch of a batch: these are compared with the neighbouring
    batches, and the offset with `end_offset`, below which every sent offset must lie.

    Raises:
        CorruptRecordError: a batch is cut short, fails its checksum, does not decode, or has an impossible offset or
            epoch; the message names the position.
    """
    at, end, reached = 0, len(records), (0, -1)
    while at < end:
        try:
            header = parse_header(records, at)
            check_header(header)
            if header.size > end - at:
                raise CorruptRecordError(f"the batch claims {header.size} bytes, {end - at} are there")
            reached = _check_place(header, reached, records, at + header.size, end_offset)
            wanted = header.next_offset > position
            if wanted:
                passed_over = header.attributes & _CONTROL or (aborted is not None and aborted.hold(header))
                if not passed_over:
                    decoded = decode_batch(records, at, check_checksum=check_crcs, trusted=not check_crcs)
                elif check_crcs:
                    parse_batch(records, at)
        except RaftlogError as error:
            raise type(error)(f"{topic_partition} at offset {position}: {error}") from None
        at += header.size
        if not wanted:
            continue
        if passed_over:
            position = header.next_offset
            yield Skipped(position, header.leader_epoch)
            continue
        rows = _from(topic_partition, header, decoded.columns, position)
        position = header.next_offset
        yield rows if len(rows) else Skipped(position, header.leader_epoch)


def _check_place(
    header: BatchHeader, reached: tuple[int, int], records: Buffer, end: int, end_offset: int | None
) -> tuple[int, int]:
    """Return the next offset and the epoch after a batch; neither may be below that of an earlier batch.

    `reached`: next offset and epoch of the previous batch. The next batch begins at byte `end`.
    """
    next_offset, epoch = header.next_offset, header.leader_epoch
    if header.base_offset < reached[0]:
        raise CorruptRecordError(f"offset {header.base_offset} where {reached[0]} or more must follow")
    if 0 <= epoch < reached[1]:
        raise CorruptRecordError(f"leader epoch {epoch} after epoch {reached[1]}")
    if end_offset is not None and next_offset > end_offset:
        raise CorruptRecordError(f"offset {header.base_offset} where nothing lies beyond {end_offset}")
    leaps, rises = header.base_offset > reached[0], epoch > reached[1]
    if (leaps or rises) and end + _PLACE.size <= len(records):
        following, following_epoch = _PLACE.unpack_from(records, end)
        if leaps and following < next_offset:
            raise CorruptRecordError(f"offset {header.base_offset} in front of offset {following}")
        if rises and 0 <= following_epoch < epoch:
            raise CorruptRecordError(f"leader epoch {epoch} in front of epoch {following_epoch}")
    return next_offset, epoch


def _from(topic_partition: TopicPartition, header: BatchHeader, columns: Any, position: int) -> Rows:
    base = header.base_offset
    if header.attributes & Attributes.SPARSE_OFFSETS:
        offsets = np.asarray(columns.column("offset_delta")).astype(np.int64) + base
        skip = int(np.searchsorted(offsets, position))
        offsets = offsets[skip:]
        first = int(offsets[0]) if len(offsets) else position
        return Rows(topic_partition, header, columns.slice(skip), first, offsets)
    skip = max(0, position - base)
    return Rows(topic_partition, header, columns.slice(skip) if skip else columns, base + skip, None)


TIMESTAMP_TYPE: Final = pa.timestamp("ms", tz="UTC")
TABLE_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int32(), pa.utf8()), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", TIMESTAMP_TYPE, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""The schema of the tables that `poll_arrow` returns."""


def _rounded(rows: int) -> int:
    """Return the next power of two, so that few cached buffers serve all sizes."""
    return max(1024, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=256)
def _constant_buffer(value: int, rows: int) -> Any:
    return pa.py_buffer(np.full(rows, value, np.int32))


@lru_cache(maxsize=32)
def _nulls(kind: Any, rows: int) -> Any:
    return pa.nulls(rows, kind)


def _constant(value: int, rows: int) -> Any:
    return pa.Array.from_buffers(pa.int32(), rows, [None, _constant_buffer(value, _rounded(rows))], 0)


def table(chunks: Iterable[Rows], topics: Sequence[str]) -> Any:
    """Return the rows as a `pyarrow.Table` of `TABLE_SCHEMA`.

    `topics` is the dictionary of the topic column; it must name the topic of every chunk.
    """
    dictionary = binary_array([topic.encode() for topic in topics]).view(pa.utf8())
    index_of = {topic: index for index, topic in enumerate(topics)}
    batches = [_batch(rows, index_of[rows.topic_partition.topic], dictionary) for rows in chunks]
    return pa.Table.from_batches(batches, schema=TABLE_SCHEMA)


def _batch(rows: Rows, topic_index: int, dictionary: Any) -> Any:
    count = len(rows)
    at_ms = rows.timestamp_ms
    if rows.offsets is not None:
        offsets = rows.offsets
    else:
        offsets = np.arange(rows.first_offset, rows.first_offset + count, dtype=np.int64)
    if at_ms is None:
        timestamps = rows.column("timestamp_ms").view(TIMESTAMP_TYPE)
    else:
        timestamps = int64_array(np.full(count, at_ms, np.int64), TIMESTAMP_TYPE)
    key, headers = rows.column("key"), rows.column("headers")
    return pa.RecordBatch.from_arrays(
        [
            pa.DictionaryArray.from_arrays(_constant(topic_index, count), dictionary, safe=False),
            _constant(rows.topic_partition.partition, count),
            int64_array(offsets),
            timestamps,
            key if key is not None else _nulls(pa.binary(), _rounded(count)).slice(0, count),
            rows.column("value"),
            headers if headers is not None else _nulls(HEADERS_TYPE, _rounded(count)).slice(0, count),
        ],
        schema=TABLE_SCHEMA,
    )


MAX_COMPLAINTS: Final = 6
"""How often a corrupt batch is fetched again: another replica may have an intact copy."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The records of one frame, the subscription that they came under, and the session that gets the credit back.

    `aborted`: the ranges of aborted transactions in them, if any (isolation.level=read_committed).
    """

    subscription_id: int
    records: Buffer
    source: Any
    aborted: AbortedRanges | None = None


class NearReplica(NamedTuple):
    """A follower to read from (KIP-392), as long as `leader_epoch` is the current one and until `until_ms`."""

    node_id: int
    leader_epoch: int
    until_ms: float


class Mark(NamedTuple):
    """The place of a partition before a poll took rows from it."""

    position: int
    last_epoch: int
    topic_id: bytes


class PartitionState:
    """One partition that the consumer reads.

    Transitions:
        unplaced    -> placed      the start was looked up, or `seek`
        placed      -> subscribed  the shell subscribed at `position`; frames of that subscription count
        subscribed  -> placed      seek, pause, refusal, broken stream, another leader or a nearer replica, a corrupt
                                   batch: frames of the old subscription are stale
        any         -> unplaced    out of range, with a policy to start over
        any         -> failed      polls raise `error`, repeatedly and with pauses, until a seek
        failed      -> as before   a poll has raised an error that may pass: the next attempt follows after a pause

    Invariants: frames are kept only under the current subscription; `position` is the offset of the next record for
    the application and moves only forward, except by `seek`, a look-up of the start, and `Positions.take_back`.
    """

    __slots__ = (
        "complaints",
        "error",
        "failures",
        "frames",
        "high_watermark",
        "last_epoch",
        "leader_epoch",
        "missing_since_ms",
        "near",
        "node_id",
        "not_before_ms",
        "paused",
        "position",
        "queued",
        "raise_not_before_ms",
        "raised",
        "refusal",
        "reset",
        "rows",
        "source",
        "subscription_id",
        "topic_id",
        "topic_partition",
    )

    def __init__(self, topic_partition: TopicPartition, topic_id: bytes, reset: str) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.position: int | None = None
        self.reset = reset
        """Where an unplaced partition begins: `earliest`, `latest`, `none`, or `committed` (with a group)."""
        self.refusal: RaftlogError | None = None
        """The last error that answered the look-up of its start."""
        self.last_epoch = -1
        """Leader epoch of the record before `position`, to detect truncation (KIP-320); -1: unknown."""
        self.paused = False
        self.error: RaftlogError | None = None
        self.subscription_id: int | None = None
        self.node_id = -1
        self.leader_epoch = -1
        """The leader epoch of the last subscription."""
        self.missing_since_ms: float | None = None
        """Since when no broker serves its records or its start: it has no leader, or another one than the metadata
        says."""
        self.near: NearReplica | None = None
        """The nearer follower that the leader has named."""
        self.frames: deque[Fetched] = deque()
        self.source: Iterator[Rows | Skipped] | None = None
        self.rows: Rows | None = None
        self.queued = False
        self.high_watermark = -1
        self.failures = 0
        self.not_before_ms = 0.0
        """When to ask a broker again, after `failures` refusals in a row."""
        self.complaints = 0
        """How often the batch at `position` was corrupt. Above zero, the next subscription tells the broker.

        The broker then checks its log, and another replica takes over from a damaged one.
        """
        self.raised = 0
        """How many errors polls have raised for this partition since its last record."""
        self.raise_not_before_ms = 0.0

    def place(self, position: int) -> list[Fetched]:
        """Continue at `position`; return the stale frames."""
        self.position = position
        self.last_epoch = -1
        self.error = None
        self.failures = self.raised = self.complaints = 0
        self.not_before_ms = self.raise_not_before_ms = 0.0
        return self.unsubscribe()

    def unplace(self, reset: str) -> list[Fetched]:
        """Look up the start again; return the stale frames."""
        self.position = None
        self.reset = reset
        self.last_epoch = -1
        self.error = None
        self.complaints = 0
        return self.unsubscribe()

    def unsubscribe(self) -> list[Fetched]:
        """Drop the subscription and its frames; return the frames, whose credit goes back."""
        self.subscription_id = None
        self.node_id = -1
        stale = list(self.frames)
        self.frames.clear()
        self.source = self.rows = None
        return stale

    @property
    def fetchable(self) -> bool:
        """Whether the partition needs a subscription."""
        return self.position is not None and not self.paused and self.error is None and self.subscription_id is None

    @property
    def unplaced(self) -> bool:
        """Whether the partition's start must be looked up."""
        return self.position is None and self.error is None

    @property
    def has_data(self) -> bool:
        """Whether the partition may have rows for the application."""
        return self.rows is not None or self.source is not None or bool(self.frames)

    def take(self, max_rows: int, spent: list[Fetched], *, check_crcs: bool) -> Rows | None:
        """Return the next rows, of at most one batch, and move past them; add used-up frames to `spent`.

        Raises:
            CorruptRecordError: drops the frames and the subscription; the position stays before the corrupt batch. Any
                other exception, such as KeyboardInterrupt, does the same.
        """
        try:
            return self._take(max_rows, spent, check_crcs)
        except BaseException:  # the generator has ended: its remaining rows must not count as read
            spent += self.unsubscribe()
            raise

    def _take(self, max_rows: int, spent: list[Fetched], check_crcs: bool) -> Rows | None:
        while self.rows is None:
            if self.source is None:
                if not self.frames:
                    return None
                assert self.position is not None
                self.source = wanted_rows(
                    self.topic_partition,
                    self.frames[0].records,
                    self.position,
                    check_crcs=check_crcs,
                    end_offset=self.high_watermark if self.high_watermark >= 0 else None,
                    aborted=self.frames[0].aborted,
                )
            found = next(self.source, None)
            if found is None:
                self.source = None
                spent.append(self.frames.popleft())
            elif isinstance(found, Skipped):
                self._advance(found.next_offset)
                self.last_epoch = found.leader_epoch
            else:
                self.rows = found
        rows = self.rows
        if len(rows) > max_rows:
            self._advance(rows.offset_after(max_rows))
            self.rows = rows.tail(max_rows)
            rows = rows.head(max_rows)
        else:
            self._advance(rows.header.next_offset)
            self.rows = None
        self.last_epoch = rows.header.leader_epoch
        self.raised = self.complaints = 0
        return rows

    def complain(self) -> bool:
        """Count a corrupt batch at the position; return whether to fetch it again before reporting the error."""
        self.complaints += 1
        return self.complaints <= MAX_COMPLAINTS

    def _advance(self, position: int) -> None:
        assert self.position is not None
        assert position >= self.position, "a position never goes back on its own"
        self.position = position


class Positions:
    """All partitions of a consumer; `take` serves them in turn, so that none waits until another is used up."""

    def __init__(self) -> None:
        self.states: dict[TopicPartition, PartitionState] = {}
        self._turn: deque[PartitionState] = deque()
        self.doubtful: list[tuple[PartitionState, RaftlogError]] = []
        """Partitions whose next batch is corrupt and must be fetched again, after a pause."""
        self.passed = 0
        """Grows whenever a position moves over offsets without rows for the application."""

    def add(self, state: PartitionState) -> None:
        """Start reading a partition."""
        self.states[state.topic_partition] = state

    def remove(self, topic_partition: TopicPartition) -> list[Fetched]:
        """Stop reading a partition; return its frames, whose credit goes back."""
        return self.states.pop(topic_partition).unsubscribe()

    def receive(self, state: PartitionState, fetched: Fetched) -> bool:
        """Keep a frame; return False if it is stale."""
        if state.subscription_id != fetched.subscription_id or self.states.get(state.topic_partition) is not state:
            return False
        if not state.queued:
            self._turn.append(state)  # before the flag: a signal between the two may queue it twice, but never lose it
            state.queued = True
        state.frames.append(fetched)
        return True

    def take(
        self, max_rows: int, spent: list[Fetched], *, check_crcs: bool, marks: dict[PartitionState, Mark] | None = None
    ) -> list[Rows]:
        """Return at most `max_rows` rows in all; each call begins with another partition.

        Before a partition moves, its place is stored in `marks`, unless it is there already: `take_back` undoes a take
        whose rows did not reach the application. A partition whose next batch is corrupt goes to `doubtful`, to fetch
        it again, or gets the `error` after `MAX_COMPLAINTS` attempts; the other partitions continue.
        """
        taken: list[Rows] = []
        left = max_rows
        turn = self._turn
        while left > 0 and turn:
            state = turn[0]
            if marks is not None and state not in marks and state.position is not None:
                marks[state] = Mark(state.position, state.last_epoch, state.topic_id)
            position = state.position
            try:
                rows = state.take(left, spent, check_crcs=check_crcs)
            except RaftlogError as error:
                state.queued = False
                turn.popleft()
                if isinstance(error, (CorruptRecordError, UnsupportedVersion)) and state.complain():
                    self.doubtful.append((state, error))
                else:
                    state.error = error
                continue
            if rows is None:  # its frames are used up or stale
                self.passed += state.position != position
                state.queued = False
                turn.popleft()
                continue
            taken.append(rows)
            left -= len(rows)
        if turn:
            turn.rotate(-1)
        return taken

    def take_back(self, marks: dict[PartitionState, Mark]) -> list[Fetched]:
        """Move partitions back to their marks, because the application did not get the rows; return stale frames.

        A partition of a topic that was created again stays where it is. An interrupted call may be repeated: `marks`
        keeps the partitions that are left.
        """
        stale: list[Fetched] = []
        for state in list(marks):
            mark = marks[state]
            current = self.states.get(state.topic_partition) is state and state.topic_id == mark.topic_id
            if current and state.position is not None and state.position >= mark.position:
                stale += state.unsubscribe()
                state.position, state.last_epoch = mark.position, mark.last_epoch
            del marks[state]
        return stale

    def failed(self, now_ms: float) -> PartitionState | None:
        """Return the first partition whose error is due to be raised."""
        return next(
            (
                state
                for state in self.states.values()
                if state.error is not None and state.raise_not_before_ms <= now_ms
            ),
            None,
        )


class ReadSource(NamedTuple):
    """The broker to subscribe at, and the leader epoch to subscribe under."""

    node_id: int
    leader_epoch: int
    from_follower: bool


def read_source(state: PartitionState, cluster: ClusterCache, now_ms: float) -> ReadSource | None:
    """Return the broker to read a partition from, or None if no leader is known.

    A follower may have served records of a later leader epoch than the metadata knows. An earlier leader does not have
    them and would report truncation, so the partition has no leader until the metadata knows that epoch (KIP-320).

    A near replica counts under the leader epoch that named it, until `NearReplica.until_ms`, and while its broker is an
    unfenced member of the cluster (KIP-392); otherwise the leader is asked again.
    """
    view = cluster.partition(state.topic_partition)
    leader = cluster.leader(*state.topic_partition)
    if view is None or leader is None or view.leader_epoch < state.last_epoch:
        return None
    near = state.near
    if near is not None and near.leader_epoch == view.leader_epoch and now_ms < near.until_ms:
        broker = cluster.brokers.get(near.node_id)
        if broker is not None and not broker.fenced:
            return ReadSource(near.node_id, view.leader_epoch, from_follower=True)
    return ReadSource(leader.broker_id, view.leader_epoch, from_follower=False)


def has_moved(state: PartitionState, source: ReadSource) -> bool:
    """Whether a subscribed partition must be read from another broker now.

    A subscription at the leader stays until a later epoch is known: metadata may lag behind a leader hint, and must
    not send the consumer back.
    """
    if state.subscription_id is None or state.node_id == source.node_id:
        return False
    return state.near is not None or source.leader_epoch > state.leader_epoch


def leads_anew(state: PartitionState, source: ReadSource | None) -> bool:
    """Whether a leader of a later epoch is known: refusals of the earlier leader no longer count (KIP-951)."""
    return source is not None and source.leader_epoch > state.leader_epoch >= 0
