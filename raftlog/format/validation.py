"""What a leader checks of a produced batch before it appends a byte (DESIGN: bad input harms nobody else)."""

from __future__ import annotations

from typing import Final

import pyarrow.compute as pc

from raftlog.errors import CorruptRecordError, InvalidRecord
from raftlog.format.batch import DecodedBatch, decode_batch
from raftlog.format.compression import DEFAULT_LIMITS, InflateLimits, claimed_inflated_size
from raftlog.format.header import CODEC_MASK, HEADER_BYTES, Attributes, BatchHeader, Buffer, parse_header

_TIMESTAMP: Final = int(Attributes.TIMESTAMP)
_FORBIDDEN: Final = int(Attributes.CONTROL | Attributes.SPARSE_OFFSETS | Attributes.LOG_APPEND_TIME)


def validate_produced(batch: Buffer, *, limits: InflateLimits = DEFAULT_LIMITS) -> BatchHeader:
    """Return the header of `batch` if it may be appended as it is.

    Checked, in this order: length, magic, attributes, counts, checksum, stamps still empty, codec, inflated size,
    Arrow message against the schema, row count, timestamps.

    Raises:
        CorruptRecordError: or one of its subclasses; the message names the reason.
        UnsupportedVersion: another magic.
    """
    decoded = decode_batch(batch, limits=limits)
    header = decoded.header
    if header.size != len(batch):
        raise CorruptRecordError(
            f"{len(batch) - header.size} bytes follow the batch: send exactly one batch for a partition"
        )
    if header.base_offset != 0 or header.leader_epoch != -1:
        raise InvalidRecord(
            f"base_offset {header.base_offset} and leader_epoch {header.leader_epoch} are the leader's to stamp; "
            "a producer sends 0 and -1"
        )
    forbidden = header.attributes & _FORBIDDEN
    if forbidden:
        raise InvalidRecord(f"a producer may not set the attributes {Attributes(forbidden)!r}")
    _check_timestamps(decoded)
    return header


def checking_cost_bytes(batch: Buffer) -> int:
    """Return about how many bytes `validate_produced` goes through, from the unchecked header alone."""
    if len(batch) < HEADER_BYTES:
        return len(batch)
    return len(batch) + claimed_inflated_size(batch, parse_header(batch).attributes & CODEC_MASK)


def _check_timestamps(decoded: DecodedBatch) -> None:
    header = decoded.header
    if header.attributes & _TIMESTAMP:
        largest = pc.max(decoded.columns.column(0)).as_py()
    else:
        largest = header.base_timestamp_ms
    if largest != header.max_timestamp_ms:
        raise InvalidRecord(f"max_timestamp_ms says {header.max_timestamp_ms}, the largest timestamp is {largest}")
