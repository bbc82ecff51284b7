"""`send_batch` from arguments to pieces, each one batch for one partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raftlog._core.accumulator import Accumulator
from raftlog._core.arguments import as_batches
from raftlog._core.batch import BATCH_BYTES
from raftlog._core.rows import (
    Rows,
    by_partition,
    check_timestamps,
    cut,
    partitions_of,
    row_bytes,
    rows_from_batch,
    stretches,
    with_headers,
    with_sticky,
)
from raftlog._core.topic_queues import TopicQueues
from raftlog.format import Columns
from raftlog.types import Header


class Piece(NamedTuple):
    """Rows that travel as one batch. `partition` is -1 where the sticky one serves."""

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
    """Return the rows with their sizes, after checking all that can be checked before the topic is known.

    `more_headers`: of every row, besides its own.

    Raises:
        TypeError, InvalidRequestError: data of a kind that does not fit.
        MessageTooLarge: a row that no batch can hold.
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


def pieces_of(given: Sized, queues: TopicQueues, limit_bytes: int) -> Iterator[Piece]:
    """Yield the rows as pieces of at most `limit_bytes`, in the order of each partition.

    Raises:
        InvalidPartitions: a row names a partition that is not there; raised before the first piece.
    """
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
