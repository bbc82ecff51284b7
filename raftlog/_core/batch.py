"""A batch on its way to the broker: the rows it collects, then the bytes that travel, then the answer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa

from raftlog._core.numbering import NO_NUMBER, Number
from raftlog._core.traceparent import MAX_TRACES, TRACE_ID
from raftlog.errors import RaftlogError
from raftlog.format import HEADERS_TYPE, Codec, Columns, decode_batch, encode_batch, stamp_producer
from raftlog.format.small_batch import FEW, SHORT_BYTES, encode_few
from raftlog.types import Header, RecordMetadata

if TYPE_CHECKING:
    from raftlog._core.partition_queue import PartitionQueue

RECORD_BYTES: Final = 24
"""What a record costs beside its bytes at most: Arrow offsets of three columns, a timestamp, validity bits."""
HEADER_ENTRY_BYTES: Final = 16
BATCH_BYTES: Final = 768
"""Upper bound of the batch header, plus the Arrow message around the columns and its padding."""


def record_bytes(value: bytes | None, key: bytes | None, headers: tuple[Header, ...]) -> int:
    """Return what a record is counted as; never less than the bytes it adds to an uncompressed batch."""
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
        closed   -> encoded   `encode`, by whoever holds `claimed`
        encoded  -> done      acknowledged, or failed for good; `done` is final
        encoded  -> split     refused as too large: `parts` take over, it is done when they are

    `owner` is whoever waits and calls back; the core only hands it on.

    Invariants: rows are appended only while open; `timestamp_runs` begins with index 0.
    """

    __slots__ = (
        "append_time_ms",
        "base_offset",
        "callbacks",
        "claimed",
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
        self.claimed = False
        self.encoded: bytes | None = None
        self.failures = 0
        self.done = False
        self.base_offset = -1
        self.append_time_ms = -1
        self.error: RaftlogError | None = None
        self.parts: tuple[Batch, Batch] | None = None
        self.callbacks: list[Callable[[], None]] | None = None
        self.sent = False
        """Whether it was ever on its way to a broker: else it is certainly not in the log."""
        self.number: Number = NO_NUMBER
        """What the bytes carry, or will: a prediction until it is `numbered`."""
        self.numbered = False
        """Whether the number stays, since it was sent with it."""
        self.place = 0
        """Which of its queue's numbered batches it is."""
        self.in_doubt = False
        """Whether it may be in the log, without an answer that says so."""
        self.traces: dict[str, str] | None = None
        """Of the sampled traces of its records, by trace id: the first span, as W3C traceparent."""

    def append(
        self, value: bytes | None, key: bytes | None, headers: tuple[Header, ...], timestamp_ms: int, size: int
    ) -> int:
        """Add a row and return its index. The caller has seen to it that it fits."""
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
        """Records from `index` on have this timestamp; a run costs nothing per record."""
        self.timestamp_runs.append((index, timestamp_ms))
        self.last_timestamp_ms = timestamp_ms

    def trace(self, traceparent: str) -> None:
        """A record in it belongs to this span of a sampled trace; the first `MAX_TRACES` traces are told on."""
        traces = self.traces
        if traces is None:
            traces = self.traces = {}
        if len(traces) < MAX_TRACES:
            traces.setdefault(traceparent[TRACE_ID], traceparent)

    def close(self) -> None:
        """No more rows."""
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
            timestamps = pa.array(np.repeat(np.array([at for _, at in runs], np.int64), counts))
        columns = Columns(
            pa.array(self.values, pa.binary()),
            key=pa.array(self.keys, pa.binary()) if self.keys is not None else None,
            headers=pa.array(self.headers, HEADERS_TYPE) if self.headers is not None else None,
            timestamp_ms=timestamps,
        )
        return columns, base

    @property
    def _is_small(self) -> bool:
        """Whether these are a few records as `encode_few` takes them."""
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
        """Return the record batch of these rows; the rows themselves are let go."""
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
        """Have the batch carry this number from now on; encoded bytes are stamped anew if they carry another one."""
        if number != self.number:
            self.number = number
            if self.encoded is not None:
                self.encoded = stamp_producer(self.encoded, *number)
        self.numbered = True

    def split_columns(self) -> tuple[Columns, Columns]:
        """Return the rows of an encoded batch in two halves, timestamps always with them."""
        assert self.encoded is not None
        assert self.count > 1
        decoded = decode_batch(self.encoded, check_checksum=False)
        names = decoded.columns.schema.names
        timestamps = pa.array(np.fromiter(map(self.timestamp_ms, range(self.count)), np.int64, self.count))
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
        """Return the timestamp that was sent with the record."""
        if self.timestamps is not None:
            return int(self.timestamps[index].as_py())
        if self.columns is not None and self.columns.timestamp_ms is not None:
            return int(self.columns.timestamp_ms[index].as_py())
        run = bisect_right(self.timestamp_runs, index, key=lambda run: run[0]) - 1
        return self.timestamp_runs[run][1]

    def leaf(self, index: int) -> tuple[Batch, int]:
        """Return the batch that carries the record in the end, and its index there."""
        batch = self
        while batch.parts is not None:
            left, right = batch.parts
            batch, index = (left, index) if index < left.count else (right, index - left.count)
        return batch, index

    def leaves(self) -> list[Batch]:
        """Return the batches that carry the records in the end, in order."""
        if self.parts is None:
            return [self]
        return self.parts[0].leaves() + self.parts[1].leaves()

    def metadata(self, index: int) -> RecordMetadata:
        """Return where the record is; only when done without an error."""
        batch, index = self.leaf(index)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        timestamp_ms = batch.append_time_ms if batch.append_time_ms >= 0 else batch.timestamp_ms(index)
        return RecordMetadata(batch.queue.topic, batch.queue.partition, offset, timestamp_ms)
