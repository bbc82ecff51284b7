"""`send_batch`: from Arrow data to pieces, each one batch for one partition, without a Python loop over rows. Pure.

The caller's data (list, array, record batch, table) becomes `Rows` of Arrow's binary type, is sorted by partition
(stably, so order within a partition is kept), and is cut into pieces by size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raftlog._core.accumulator import (
    BATCH_BYTES,
    HEADER_ENTRY_BYTES,
    MOST_BATCH_BYTES,
    RECORD_BYTES,
    Accumulator,
    TopicQueues,
    murmur2_column,
)
from raftlog._core.arguments import AFTER_THE_LAST, LAST_TIMESTAMP_MS, as_batches
from raftlog.errors import InvalidPartitions, InvalidRequestError
from raftlog.format import HEADERS_TYPE, Columns
from raftlog.format.columns import int64_array
from raftlog.types import Header

_MAX_ROWS_BYTES: Final = 1 << 30
"""Rows are handled in slices of at most this size, well below the 2 GiB that Arrow's binary columns address."""
_COLUMNS: Final = ("value", "key", "headers", "partition", "timestamp")
HEADER_TYPES: Final = (pa.utf8(), pa.binary())
_HEADERS_STRUCT: Final = pa.list_(pa.struct([("key", pa.utf8()), ("value", pa.binary())]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of one length: Arrow arrays, or None. `timestamp_ms` is int64; None: all have `base_timestamp_ms`."""

    value: Any
    key: Any
    headers: Any
    partition: Any
    timestamp_ms: Any
    base_timestamp_ms: int

    def slice(self, start: int, length: int) -> Rows:
        """Return a slice of the rows, sharing their memory."""

        def cut(column: Any) -> Any:
            return column.slice(start, length) if column is not None else None

        return Rows(
            cut(self.value),
            cut(self.key),
            cut(self.headers),
            cut(self.partition),
            cut(self.timestamp_ms),
            self.base_timestamp_ms,
        )

    def take(self, order: Any) -> Rows:
        """Return a copy of the rows in another order, without their partitions."""

        def pick(column: Any) -> Any:
            return column.take(order) if column is not None else None

        return Rows(
            pick(self.value), pick(self.key), pick(self.headers), None, pick(self.timestamp_ms), self.base_timestamp_ms
        )

    def first_timestamp_ms(self) -> int:
        """Return the timestamp of the first row."""
        return self.base_timestamp_ms if self.timestamp_ms is None else int(self.timestamp_ms[0].as_py())

    def columns(self) -> Columns:
        """Return the columns to encode as a record batch."""
        key = self.key
        if key is not None and key.null_count == len(key):
            key = None
        headers = self.headers
        if headers is not None and headers.null_count == len(headers):
            headers = None
        return Columns(self.value, key=key, headers=headers, timestamp_ms=self.timestamp_ms)


def _binary(column: Any, name: str) -> Any:
    """Return the column as Arrow binary; text counts as UTF-8."""
    kind = column.type
    if kind == pa.binary():
        return column
    if kind == pa.utf8():
        return column.view(pa.binary())
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.binary())
    if pa.types.is_dictionary(kind):
        return _binary(column.dictionary_decode(), name)
    if (
        pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_string_view(kind)
    ):
        return column.cast(pa.binary())
    raise InvalidRequestError(f"column {name!r} has the type {kind}; it must be binary or string (taken as UTF-8)")


def _headers(column: Any) -> Any:
    if column.type == HEADERS_TYPE:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), HEADERS_TYPE)
    try:
        if pa.types.is_map(column.type):
            return column.cast(HEADERS_TYPE)
        entries = column.cast(_HEADERS_STRUCT)
        flat = entries.flatten()
        names, contents = flat.flatten()  # a null entry has null for both
        lengths = np.asarray(pc.fill_null(pc.list_value_length(entries), 0), np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        if names.null_count:
            row = np.searchsorted(ends, pc.index(names.is_null(), True).as_py(), side="right")
            raise InvalidRequestError(
                f"column 'headers': a header in row {row} has null for its name (key); give it a name, or drop it"
            )
        # A null in the offsets marks a null map. `flatten` has left out what null rows hide, and so do the lengths.
        mask = np.append(np.asarray(entries.is_null()), False) if entries.null_count else None
        offsets = pa.array(np.append(np.int32(0), ends), pa.int32(), mask=mask)
        return pa.MapArray.from_arrays(offsets, names, contents.cast(pa.binary()))
    except (pa.ArrowException, ValueError) as error:
        raise InvalidRequestError(
            f"column 'headers' has the type {column.type}; it must be map<string, binary> or "
            f"list<struct<key: string, value: binary>>: {error}"
        ) from None


def header_entries(headers: Any) -> tuple[Any, Any, NDArray[np.int64]]:
    """Return names, contents and row number of all headers in a column."""
    offsets = np.asarray(headers.offsets, np.int64)
    names, contents = headers.keys, headers.items
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    if len(names) > count:  # a slice still has the entries of the whole column
        names, contents = names.slice(first, count), contents.slice(first, count)
    row_of_entry = np.repeat(np.arange(len(headers)), np.diff(offsets))
    if headers.null_count:  # a null row may hide entries
        there = np.asarray(headers.is_valid())[row_of_entry]
        names, contents = names.filter(pa.array(there)), contents.filter(pa.array(there))
        row_of_entry = row_of_entry[there]
    return names, contents, row_of_entry


def with_headers(rows: Rows, more: tuple[Header, ...]) -> Rows:
    """Return the rows with these headers added, in place of headers of the same names."""
    count, added = len(rows.value), len(more)
    names, contents = (pa.array(part, kind) for part, kind in zip(zip(*more, strict=True), HEADER_TYPES, strict=True))
    kept = np.zeros(count, np.int64)
    order = np.tile(np.arange(added), count)
    if rows.headers is not None:
        own_names, own_contents, row_of_entry = header_entries(rows.headers)
        stays = ~np.asarray(pc.is_in(own_names, names))
        kept = np.bincount(row_of_entry[stays], minlength=count)
        order = np.insert(order, np.repeat(np.arange(count) * added, kept), np.flatnonzero(stays) + added)
        names, contents = pa.concat_arrays([names, own_names]), pa.concat_arrays([contents, own_contents])
    offsets = pa.array(np.concatenate([[0], np.cumsum(kept + added)]), pa.int32())
    return replace(rows, headers=pa.MapArray.from_arrays(offsets, names.take(order), contents.take(order)))


def _timestamps(column: Any) -> Any:
    if pa.types.is_timestamp(column.type):
        try:  # finer units are truncated; seconds must not overflow
            column = column.cast(pa.timestamp("ms"), safe=column.type.unit == "s").view(pa.int64())
        except pa.ArrowInvalid:
            raise InvalidRequestError(f"a timestamp {AFTER_THE_LAST}") from None
    elif pa.types.is_integer(column.type):
        column = column.cast(pa.int64())
    else:
        raise InvalidRequestError(
            f"column 'timestamp' has the type {column.type}; it must be a timestamp, or int64 milliseconds"
        )
    return column


def check_timestamps(rows: Rows, first_row: int) -> None:
    """Refuse timestamps that `as_timestamp` refuses.

    Raises:
        InvalidRequestError: the message names the first such row.
    """
    if rows.timestamp_ms is None:
        return
    least, most = pc.min_max(rows.timestamp_ms).as_py().values()
    if least >= 0 and most <= LAST_TIMESTAMP_MS:
        return
    at_ms = np.asarray(rows.timestamp_ms)
    row = int(np.argmax((at_ms < 0) | (at_ms > LAST_TIMESTAMP_MS)))
    wrong = "is negative; it counts milliseconds since 1970" if at_ms[row] < 0 else AFTER_THE_LAST
    raise InvalidRequestError(f"row {first_row + row} cannot be sent: timestamp_ms {at_ms[row]} {wrong}")


def rows_from_batch(batch: Any, now_ms: int) -> Rows:
    """Return the rows of a `pyarrow.RecordBatch`; a null timestamp means now.

    Raises:
        InvalidRequestError: no column `value`, an unknown column, or an unsupported type.
    """
    names = batch.schema.names
    unknown = [name for name in names if name not in _COLUMNS]
    if "value" not in names or unknown:
        wrong = f"unknown columns: {', '.join(unknown)}" if unknown else "no column 'value'"
        raise InvalidRequestError(
            f"the Arrow data has {wrong}; it needs 'value' and may have 'key', 'headers', 'partition', 'timestamp'"
        )
    found = {name: batch.column(name) for name in names}
    timestamps = _timestamps(found["timestamp"]) if "timestamp" in found else None
    if timestamps is not None and timestamps.null_count:
        timestamps = timestamps.fill_null(now_ms)
    partition = found.get("partition")
    if partition is not None:
        if not pa.types.is_integer(partition.type):
            raise InvalidRequestError(f"column 'partition' has the type {partition.type}; it must be an integer")
        partition = partition.cast(pa.int32())
    return Rows(
        _binary(found["value"], "value"),
        _binary(found["key"], "key") if "key" in found else None,
        _headers(found["headers"]) if "headers" in found else None,
        partition,
        timestamps,
        now_ms,
    )


def _lengths(column: Any) -> NDArray[np.int64]:
    """Return the bytes of each row of a binary column."""
    rows = len(column)
    buffer = column.buffers()[1]
    if buffer is None or rows == 0:
        return np.zeros(rows, np.int64)
    return np.diff(np.frombuffer(buffer, np.int32, rows + 1, column.offset * 4)).astype(np.int64)


def _cumulative(column: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(_lengths(column))])


def row_bytes(rows: Rows) -> NDArray[np.int64]:
    """Return the counted size of each row, as `record_bytes` does for one."""
    sizes = _lengths(rows.value) + RECORD_BYTES
    if rows.key is not None:
        sizes += _lengths(rows.key)
    if rows.headers is not None:
        offsets = np.asarray(rows.headers.offsets, np.int64)
        base = rows.headers.keys
        names, contents = _cumulative(base), _cumulative(rows.headers.items)
        offsets = offsets - offsets[0] if len(base) < offsets[-1] else offsets
        sizes += np.diff(names[offsets] + contents[offsets] + offsets * HEADER_ENTRY_BYTES)
    return sizes


def stretches(rows: Rows, sizes: NDArray[np.int64]) -> Iterator[Rows]:
    """Yield the rows in slices small enough for Arrow to reorder."""
    for start, end in cut(sizes, _MAX_ROWS_BYTES):
        yield rows.slice(start, end - start)


def cut(sizes: NDArray[np.int64], limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of consecutive rows of at most `limit_bytes` together, at least one row each."""
    ends = np.cumsum(sizes)
    start, done = 0, 0
    while start < len(sizes):
        end = max(start + 1, int(np.searchsorted(ends, done + limit_bytes, side="right")))
        yield start, end
        start, done = end, int(ends[end - 1])


def partitions_of(rows: Rows, queues: TopicQueues) -> NDArray[np.int32] | None:
    """Return the partition of each row, -1 for the sticky one; None: the sticky one for all.

    Raises:
        InvalidPartitions: a row names a partition that does not exist.
    """
    chosen: NDArray[np.int32] | None = None
    if queues.custom:
        keys = rows.key.to_pylist() if rows.key is not None else [None] * len(rows.value)
        chosen = np.fromiter(map(queues.ask_partitioner, keys), np.int32, len(keys))
        _check(chosen, queues)
    elif rows.key is not None and rows.key.null_count < len(rows.key):
        hashes = murmur2_column(rows.key) & np.int32(0x7FFFFFFF)
        chosen = (hashes % np.int32(queues.partition_count)).astype(np.int32)
        if rows.key.null_count:
            chosen[np.asarray(rows.key.is_null())] = -1
    if rows.partition is not None:
        given = np.asarray(rows.partition.fill_null(-1), np.int32)
        named = np.asarray(rows.partition.is_valid())
        _check(given[named], queues)
        chosen = np.where(named, given, chosen if chosen is not None else np.int32(-1))
    return chosen


def _check(partitions: NDArray[np.int32], queues: TopicQueues) -> None:
    wrong = partitions[(partitions < 0) | (partitions >= queues.partition_count)]
    if len(wrong):
        raise InvalidPartitions(
            f"topic {queues.topic!r} has partitions 0 to {queues.partition_count - 1}, there is no partition {wrong[0]}"
        )


def with_sticky(
    rows: Rows, partitions: NDArray[np.int32] | None, queues: TopicQueues, limit_bytes: int
) -> NDArray[np.int32] | None:
    """Return the partition of each row, with sticky partitions chosen if only some rows take them.

    Rows of both kinds may meet in a partition and must keep their order. So this chooses the sticky partitions before
    the sort, another one after every `limit_bytes` of rows. If every row takes the sticky partition, there is nothing
    to sort, and all rows keep -1.
    """
    if partitions is None:
        return None
    sticky = partitions < 0
    count = int(np.count_nonzero(sticky))
    if count in (0, len(partitions)):
        return partitions
    ends = np.cumsum(row_bytes(rows)[sticky])
    turn_of_row = (ends - 1) // limit_bytes
    turns = np.array(queues.sticky_turns(int(turn_of_row[-1]) + 1), np.int32)
    settled = partitions.copy()
    settled[sticky] = turns[turn_of_row]
    return settled


def by_partition(rows: Rows, partitions: NDArray[np.int32] | None) -> Iterator[tuple[int, Rows]]:
    """Yield each partition with its rows in order; -1 is the sticky one."""
    if partitions is None or len(partitions) == 0:
        yield -1, rows
        return
    first = int(partitions[0])
    if (partitions == first).all():
        yield first, rows
        return
    narrow = partitions.astype(np.int16) if partitions.max() < 1 << 15 else partitions  # radix sort
    order = np.argsort(narrow, kind="stable")
    ordered = partitions[order]
    moved = rows.take(int64_array(order))
    edges = np.flatnonzero(np.diff(ordered)) + 1
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(ordered)], strict=True):
        yield int(ordered[start]), moved.slice(start, end - start)


class Piece(NamedTuple):
    """The rows of one batch. `partition` -1: the sticky one."""

    partition: int
    columns: Columns
    base_timestamp_ms: int
    size_bytes: int


Sized = list[tuple[Rows, NDArray[np.int64]]]


def prepare(
    accumulator: Accumulator,
    now_ms: int,
    values: Any,
    key: Any,
    partition: Any,
    headers: Any,
    timestamp_ms: Any,
    more_headers: tuple[Header, ...] = (),
) -> Sized:
    """Return the rows with their sizes, after all checks that do not need the topic.

    `more_headers`: further headers for every row.

    Raises:
        TypeError, InvalidRequestError: the data has an unsupported type or form.
        MessageTooLarge: no batch can hold one of the rows.
    """
    sized = []
    first = 0
    for batch in as_batches(values, key, partition, headers, timestamp_ms):
        if not batch.num_rows:
            continue
        rows = rows_from_batch(batch, now_ms)
        check_timestamps(rows, first)
        if more_headers:
            rows = with_headers(rows, more_headers)
        sizes = row_bytes(rows)
        largest = int(np.argmax(sizes))
        accumulator.check_fits(int(sizes[largest]), f"row {first + largest}")
        sized.append((rows, sizes))
        first += batch.num_rows
    return sized


def highest_partition(given: Sized) -> int:
    """Return the highest partition that a row names; -1: none does."""
    named = (rows.partition for rows, _ in given if rows.partition is not None)
    highest = (pc.max(partition).as_py() for partition in named)
    return max((partition for partition in highest if partition is not None), default=-1)


def pieces_of(given: Sized, queues: TopicQueues, limit_bytes: int) -> Iterator[Piece]:
    """Yield the rows as pieces of at most `limit_bytes`, and at most `MAX_RECORDS`, in the order of each partition.

    Raises:
        InvalidPartitions: a row names a partition that does not exist; raised before the first piece.
    """
    limit_bytes = min(limit_bytes, MOST_BATCH_BYTES - BATCH_BYTES)
    prepared = [
        (stretch, partitions_of(stretch, queues)) for rows, sizes in given for stretch in stretches(rows, sizes)
    ]
    for stretch, partitions in prepared:
        settled = with_sticky(stretch, partitions, queues, limit_bytes)
        for target, part in by_partition(stretch, settled):
            sizes = row_bytes(part)
            for start, end in cut(sizes, limit_bytes):
                piece = part.slice(start, end - start)
                size_bytes = int(sizes[start:end].sum()) + BATCH_BYTES
                yield Piece(target, piece.columns(), piece.first_timestamp_ms(), size_bytes)
