"""The leader's checks of a produced batch before it appends any byte, so that bad input harms no other client."""

from __future__ import annotations

from typing import Any, Final

import pyarrow.compute as pc

from raftlog.errors import CorruptRecordError, InvalidRecord, MessageTooLarge
from raftlog.format.batch import decode_columns, parse_batch
from raftlog.format.compression import DEFAULT_LIMITS, InflateLimits, claimed_inflated_size
from raftlog.format.control import MAX_PRODUCER_EPOCH
from raftlog.format.header import (
    CODEC_MASK,
    HEADER_BYTES,
    NO_PRODUCER_ID,
    Attributes,
    BatchHeader,
    Buffer,
    parse_header,
)
from raftlog.format.small_batch import is_of_few

MAX_RECORDS: Final = 1_000_000
"""The most records of a produced batch: a few bytes may hold a hundred million, and readers handle each of them. Logs
may have larger batches from before."""
_KEY: Final = int(Attributes.KEY)
_TIMESTAMP: Final = int(Attributes.TIMESTAMP)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)
_FORBIDDEN: Final = int(Attributes.CONTROL | Attributes.SPARSE_OFFSETS | Attributes.LOG_APPEND_TIME)


def validate_produced(
    batch: Buffer, *, limits: InflateLimits = DEFAULT_LIMITS, needs_keys: bool = False
) -> BatchHeader:
    """Return the header of `batch` if it may be appended as it is.

    Checked, in this order: length, magic, attributes, counts, checksum, number of records, stamps still empty, codec,
    inflated size, Arrow message against the schema, row count, producer id and sequence, timestamps; with `needs_keys`
    (a compacted topic) that every record has a key.

    Raises:
        MessageTooLarge: more than `MAX_RECORDS` records. A producer splits such a batch.
        CorruptRecordError: or one of its subclasses; the message names the reason.
        UnsupportedVersion: the batch has another magic.
    """
    header = parse_batch(batch)
    if header.record_count > MAX_RECORDS:
        raise MessageTooLarge(
            f"the batch has {header.record_count} records, at most {MAX_RECORDS} fit one; send smaller batches"
        )
    columns = None if is_of_few(batch, header) else decode_columns(batch, 0, header, limits)
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
    if header.producer_id != NO_PRODUCER_ID or header.producer_epoch != -1 or header.base_sequence != -1:
        _check_producer(header)
    elif header.attributes & _TRANSACTIONAL:
        raise InvalidRecord("a transactional batch without a producer id belongs to no transaction")
    _check_timestamps(header, columns)
    if needs_keys:
        _check_keys(header, columns)
    return header


def checking_cost_bytes(batch: Buffer) -> int:
    """Estimate from the unchecked header how many bytes `validate_produced` has to read."""
    if len(batch) < HEADER_BYTES:
        return len(batch)
    return len(batch) + claimed_inflated_size(batch, parse_header(batch).attributes & CODEC_MASK)


def _check_producer(header: BatchHeader) -> None:
    """Check that a batch has either all numbers of an idempotent producer or none (KIP-98)."""
    if header.producer_id < 0 or header.producer_epoch < 0 or header.base_sequence < 0:
        raise InvalidRecord(
            f"producer_id {header.producer_id}, producer_epoch {header.producer_epoch} and base_sequence "
            f"{header.base_sequence} make no sense together: an idempotent batch has none below 0, any other has -1 in "
            "all three"
        )
    if header.producer_epoch >= MAX_PRODUCER_EPOCH and header.attributes & _TRANSACTIONAL:
        raise InvalidRecord(
            f"producer_epoch {header.producer_epoch} of producer id {header.producer_id} has no transactions, as no "
            f"marker could end one; they have the epochs up to {MAX_PRODUCER_EPOCH - 1}, then the id is used up"
        )


def _check_keys(header: BatchHeader, columns: Any) -> None:
    """Refuse records without a key. `columns` None: no value is null."""
    if not header.attributes & _KEY:
        missing = header.record_count
    else:
        missing = 0 if columns is None else columns.column(columns.schema.get_field_index("key")).null_count
    if missing:
        raise InvalidRecord(
            f"{missing} of {header.record_count} records have no key: the topic is compacted, so every record "
            "needs one (cleanup.policy)"
        )


def _check_timestamps(header: BatchHeader, columns: Any) -> None:
    if header.attributes & _TIMESTAMP:
        largest = pc.max(columns.column(0)).as_py()
    else:
        largest = header.base_timestamp_ms
    if largest != header.max_timestamp_ms:
        raise InvalidRecord(f"max_timestamp_ms says {header.max_timestamp_ms}, the largest timestamp is {largest}")
