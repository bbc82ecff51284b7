"""Control batches: the markers that end transactions in a partition (KIP-98).

A batch with the attributes CONTROL and TRANSACTIONAL and without a producer in its header. Each row is one marker with
its own offset, so one batch ends the transactions of many producers. Integers are little-endian:

    key      version            i16  0
             type               i16  0 abort, 1 commit
             producer_id        i64
             producer_epoch     i16  of the producer's next transaction (KIP-890)
    value    coordinator_epoch  i32
             first_offset       i64  first record of the transaction in this partition; -1: it has none here

The leader writes `first_offset`, so that a segment alone tells readers of committed records which of its transactions
were aborted (`broker/log/index.py`). Rows of another version or type are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from raftlog.errors import CorruptRecordError
from raftlog.format.batch import Columns, DecodedBatch, decode_batch, encode_batch
from raftlog.format.header import Attributes, Buffer
from raftlog.format.small_batch import FEW, encode_few

CONTROL_VERSION: Final = 0
NO_OFFSET: Final = -1
MAX_PRODUCER_EPOCH: Final = (1 << 15) - 1
"""The highest epoch, which only markers carry: a transaction of this epoch could not be ended by a higher one."""

_KEY = struct.Struct("<hhqh")
_VALUE = struct.Struct("<iq")
_ABORT: Final = 0
_COMMIT: Final = 1
_ATTRIBUTES: Final = int(Attributes.CONTROL | Attributes.TRANSACTIONAL)


class Marker(NamedTuple):
    """The end of one producer's transaction in one partition."""

    producer_id: int
    producer_epoch: int
    """The epoch of the producer's next transaction: from here on the log refuses batches with a lower epoch."""
    commit: bool
    coordinator_epoch: int
    first_offset: int = NO_OFFSET
    """The transaction's first offset in this partition; the leader sets it when it appends the marker."""


class PlacedMarker(NamedTuple):
    """A marker and its offset in the log."""

    offset: int
    marker: Marker


def encode_control(markers: Sequence[Marker], now_ms: int, *, base_offset: int = 0, leader_epoch: int = -1) -> bytes:
    """Return the control batch of these markers, in their order; by default unstamped.

    Raises:
        InvalidRecord: there are no markers.
    """
    keys = [
        _KEY.pack(CONTROL_VERSION, _COMMIT if marker.commit else _ABORT, marker.producer_id, marker.producer_epoch)
        for marker in markers
    ]
    values = [_VALUE.pack(marker.coordinator_epoch, marker.first_offset) for marker in markers]
    if len(keys) <= FEW:
        return encode_few(
            keys, values, now_ms, attributes=_ATTRIBUTES, base_offset=base_offset, leader_epoch=leader_epoch
        )
    return encode_batch(
        Columns(value=pa.array(values, pa.binary()), key=pa.array(keys, pa.binary())),
        now_ms,
        attributes=_ATTRIBUTES,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
    )


def decode_control(batch: Buffer, position: int = 0, *, check_checksum: bool = True) -> list[Marker]:
    """Return the markers of the control batch at `position`, in their order.

    Raises:
        CorruptRecordError: the batch is not a control batch, is corrupt, or does not decode.
    """
    return [placed.marker for placed in placed_markers(batch, position, check_checksum=check_checksum)]


def placed_markers(batch: Buffer, position: int = 0, *, check_checksum: bool = True) -> list[PlacedMarker]:
    """Return the markers of a control batch of a log, each with its offset.

    Their contents are always checked: a follower has them from its leader, which may have checked none of them.

    Raises:
        CorruptRecordError: as `decode_control`.
    """
    decoded = decode_batch(batch, position, check_checksum=check_checksum)
    if not decoded.header.is_control:
        raise CorruptRecordError(f"the batch at offset {decoded.header.base_offset} holds records, not markers")
    names = decoded.columns.schema.names
    if not decoded.header.record_count:  # compaction has removed all
        return []
    if "key" not in names:
        raise CorruptRecordError(f"the control batch at offset {decoded.header.base_offset} has no keys")
    keys = decoded.columns.column(names.index("key")).to_pylist()
    values = decoded.columns.column(names.index("value")).to_pylist()
    rows = zip(_offsets(decoded, names), keys, values, strict=True)
    return [PlacedMarker(offset, _marker(offset, key, value)) for offset, key, value in rows]


def _offsets(decoded: DecodedBatch, names: Sequence[str]) -> Sequence[int]:
    base_offset = decoded.header.base_offset
    if "offset_delta" not in names:
        return range(base_offset, base_offset + decoded.header.record_count)
    deltas = decoded.columns.column(names.index("offset_delta")).to_pylist()
    return [base_offset + delta for delta in deltas]


def _marker(offset: int, key: bytes | None, value: bytes | None) -> Marker:
    if key is None or value is None or len(key) != _KEY.size or len(value) != _VALUE.size:
        raise CorruptRecordError(f"the marker at offset {offset} has {key!r} for a key and {value!r} for a value")
    version, kind, producer_id, producer_epoch = _KEY.unpack(key)
    if version != CONTROL_VERSION or kind not in (_ABORT, _COMMIT):
        raise CorruptRecordError(
            f"the marker at offset {offset} is of version {version} and type {kind}; this version reads version "
            f"{CONTROL_VERSION}, types {_ABORT} (abort) and {_COMMIT} (commit)"
        )
    coordinator_epoch, first_offset = _VALUE.unpack(value)
    return Marker(producer_id, producer_epoch, kind == _COMMIT, coordinator_epoch, first_offset)
