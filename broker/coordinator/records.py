"""A coordinator's records as a batch, and batches as records. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from broker.coordinator.core import Record
from raftlog.errors import CorruptRecordError
from raftlog.format import BatchHeader, Buffer, Columns, decode_batch, encode_batch, iter_headers, parse_header
from raftlog.format.small_batch import FEW, encode_few


def encode(records: Sequence[Record], wall_ms: int) -> tuple[bytes, BatchHeader]:
    """Return the records as one batch, and its header; there is at least one."""
    keys = [key for key, _ in records]
    written = [value for _, value in records if value is not None]
    if len(keys) == len(written) <= FEW:
        batch = encode_few(keys, written, wall_ms)
    else:
        values = pa.array([value for _, value in records], pa.binary())
        batch = encode_batch(Columns(value=values, key=pa.array(keys, pa.binary())), wall_ms)
    return batch, parse_header(batch)


def decode(data: Buffer) -> Iterator[tuple[int, bytes, bytes | None]]:
    """Yield (offset, key, value) of every record in whole batches, in order; control batches hold none.

    Raises:
        CorruptRecordError: a batch does not check, or a record has no key; the message names the offset.
    """
    for position, header in iter_headers(data):
        if header.is_control or not header.record_count:
            continue
        try:
            columns = decode_batch(data, position).columns
        except CorruptRecordError as error:
            raise CorruptRecordError(f"the batch at offset {header.base_offset}: {error}") from None
        names = columns.schema.names
        deltas = columns.column("offset_delta").to_pylist() if "offset_delta" in names else range(header.record_count)
        keys = columns.column("key").to_pylist() if "key" in names else [None] * header.record_count
        values = columns.column("value").to_pylist()
        for delta, key, value in zip(deltas, keys, values, strict=True):
            offset = header.base_offset + delta
            if key is None:
                raise CorruptRecordError(f"the record at offset {offset} has no key")
            yield offset, key, value
