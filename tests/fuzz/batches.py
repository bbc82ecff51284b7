"""Record batches: valid ones of every shape, then damaged in bytes or fields, with checksums that are right again."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Final

import pyarrow as pa

from raftlog.errors import RaftlogError
from raftlog.format import (
    HEADER_BYTES,
    HEADERS_TYPE,
    Attributes,
    BatchHeader,
    Codec,
    Columns,
    InflateLimits,
    decode_batch,
    encode_batch,
    iter_headers,
    parse_header,
    schema_for,
    validate_produced,
)
from raftlog.format.aborted import AbortedRanges
from raftlog.format.batch import decode_columns, stamp_producer
from raftlog.format.columns import encode_body
from raftlog.format.control import Marker, decode_control, encode_control, placed_markers
from raftlog.format.header import build_batch, check_header, checksum, pack_header
from raftlog.format.small_batch import encode_few, is_of_few
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.oracle import MIB, refusals, require

LIMITS: Final = InflateLimits(max_bytes=4 * MIB, max_ratio=64, ratio_floor_bytes=64 << 10)
"""Low, so that what goes beyond them is seen."""
BOMB_BYTES: Final = 96 * MIB
"""More than any limit: `decode_control` knows only the default."""
_BOMBS: Final[dict[Codec, bytes]] = {}
_FIELDS: Final = {
    "base_offset": 63, "leader_epoch": 31, "attributes": 16, "last_offset_delta": 32, "record_count": 32,
    "base_timestamp_ms": 63, "max_timestamp_ms": 63, "producer_id": 63, "producer_epoch": 15, "base_sequence": 31,
}  # fmt: skip
"""Fields of the header, and how many bits a value may have."""
_UNSIGNED: Final = {"attributes", "last_offset_delta", "record_count"}


def prepare() -> None:
    """Make the bombs in small steps: the time that this takes counts for no input."""
    piece = bytes(MIB)
    for codec, name in ((Codec.ZSTD, "zstd"), (Codec.GZIP, "gzip"), (Codec.LZ4, "lz4")):
        if codec not in _BOMBS:
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, name) as stream:
                for _ in range(BOMB_BYTES // MIB):
                    stream.write(piece)
            _BOMBS[codec] = sink.getvalue().to_pybytes()
    if Codec.SNAPPY not in _BOMBS:  # a raw block: its size, one zero, then copies of 64 bytes from one byte before
        size = pa.compress(b"", codec="snappy", asbytes=True)
        assert size == b"\0", f"an empty block of snappy must be its size alone, one zero byte, but is {size!r}"
        copies = (BOMB_BYTES - 1) // 64
        _BOMBS[Codec.SNAPPY] = _snappy_size(copies * 64 + 1) + b"\0\0" + b"\xfe\1\0" * copies


def _snappy_size(size: int) -> bytes:
    out = bytearray()
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size])


def valid_batch(choices: Choices, *, base_offset: int = 0, leader_epoch: int = -1) -> bytes:
    """Return a batch that nothing is wrong with: of records, or of markers."""
    kind = choices.below(4)
    rows = 1 + choices.below(5)
    now_ms = 1_000 + choices.below(1_000)
    numbers = {"producer_id": 7, "producer_epoch": 0, "base_sequence": choices.below(100)} if choices.one_in(3) else {}
    if kind == 0:
        keys = [choices.take(3) for _ in range(rows)] if choices.one_in(2) else None
        values = [choices.take(choices.below(20)) for _ in range(rows)]
        return encode_few(keys, values, now_ms, base_offset=base_offset, leader_epoch=leader_epoch, **numbers)
    if kind == 1:
        markers = [Marker(n, choices.below(9), choices.one_in(2), 1, choices.below(9) - 1) for n in range(rows)]
        return encode_control(markers, now_ms, base_offset=base_offset, leader_epoch=leader_epoch)
    columns = Columns(
        value=pa.array(
            [None if choices.one_in(5) else choices.take(choices.below(30)) for _ in range(rows)], pa.binary()
        ),
        key=pa.array([choices.take(2) for _ in range(rows)], pa.binary()) if choices.one_in(2) else None,
        timestamp_ms=pa.array([now_ms + choices.below(9) for _ in range(rows)], pa.int64())
        if choices.one_in(2)
        else None,
        headers=pa.array([[("h", choices.take(2))]] * rows, HEADERS_TYPE) if choices.one_in(2) else None,
        offset_delta=pa.array(range(0, 2 * rows, 2), pa.uint32()) if kind == 3 and choices.one_in(2) else None,
    )
    return encode_batch(
        columns,
        now_ms,
        codec=choices.pick(tuple(Codec)),
        attributes=int(Attributes.TRANSACTIONAL) if numbers and choices.one_in(2) else 0,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        last_offset_delta=2 * rows - 1 if columns.offset_delta is not None else None,
        **numbers,
    )


def bomb(choices: Choices) -> bytes:
    """Return a batch that inflates to much more than it says, or says so."""
    codec = choices.pick((Codec.ZSTD, Codec.GZIP, Codec.LZ4, Codec.SNAPPY))
    packed, claimed = _BOMBS[codec], choices.pick((BOMB_BYTES - 63, 100, 3 * MIB, (1 << 32) - 1, 0))
    header = parse_header(encode_few(None, [b"x"], 1_000))
    return build_batch(header._replace(attributes=int(codec)), struct.pack("<I", claimed) + packed)


def with_fields_changed(batch: bytes, choices: Choices) -> bytes:
    """Return the batch with other values in a few fields of its header, or another body; its checksum is right."""
    if len(batch) < HEADER_BYTES:
        return batch
    header, body = parse_header(batch), batch[HEADER_BYTES:]
    for _ in range(choices.below(4)):
        name = choices.pick(tuple(_FIELDS))
        bits = _FIELDS[name]
        low, high = (0, (1 << bits) - 1) if name in _UNSIGNED else (-(1 << bits), (1 << bits) - 1)
        header = header._replace(**{name: choices.integer(low, high)})  # type: ignore[arg-type] # all of them integers
    if choices.one_in(3):
        body = mutate(body, choices)
    if choices.one_in(8):
        body = _foreign_body(choices)
    return build_batch(header, body)


def _foreign_body(choices: Choices) -> bytes:
    """Return an Arrow message of other columns, or of many more rows than the header says."""
    kind = choices.below(4)
    if kind == 0:
        return bytes(encode_body(pa.record_batch({"value": pa.array(["text"], pa.utf8())})))
    if kind == 1:
        return bytes(pa.record_batch({"value": pa.nulls(1_000_000, pa.null())}).serialize())
    if kind == 2:
        return bytes(pa.schema([("value", pa.binary())]).serialize())
    shape = choices.below(1 << 11)
    schema = schema_for(shape)
    arrays = [pa.nulls(3, field.type) for field in schema]
    return bytes(
        encode_body(pa.RecordBatch.from_arrays(arrays, schema=pa.schema([pa.field(f.name, f.type) for f in schema])))
    )


def any_batch(choices: Choices) -> bytes:
    """Return a batch, valid or not; one in eight consists only of the input's bytes."""
    kind = choices.below(8)
    if kind == 7:
        return choices.rest()
    if kind == 6:
        return bomb(choices)
    batch = valid_batch(choices)
    if kind in (1, 2, 3):
        batch = with_fields_changed(batch, choices)
    if kind in (3, 4, 5):
        batch = mutate(batch, choices)
    if kind == 5:
        batch = checked_again(batch)
    return batch


def checked_again(batch: bytes) -> bytes:
    """Return the batch with the length and the checksum that its bytes call for."""
    return build_batch(parse_header(batch), batch[HEADER_BYTES:]) if len(batch) >= HEADER_BYTES else batch


def target(data: bytes) -> None:
    """All readers of batches: an accepted batch is what it says, by every way of reading it."""
    needs_keys, batch = bool(data[:1] > b"\x7f"), any_batch(Choices(data))
    with refusals():
        validated = validate_produced(batch, limits=LIMITS, needs_keys=needs_keys)
        require(
            validated.size == len(batch),
            f"a batch with further bytes behind it was accepted: {len(batch)} bytes, of which it takes "
            f"{validated.size}",
        )
        require(
            validated.base_offset == 0 and validated.leader_epoch == -1,
            f"a produced batch was accepted with offset {validated.base_offset} and leader epoch "
            f"{validated.leader_epoch}, which only leaders stamp",
        )
        require(
            not validated.is_control and not validated.attributes & Attributes.SPARSE_OFFSETS,
            "a produced batch was accepted that is a control batch or has sparse offsets",
        )
        require(
            validated.record_count == validated.last_offset_delta + 1 > 0,
            f"a produced batch was accepted with {validated.record_count} records and offsets up to "
            f"{validated.last_offset_delta}",
        )
        _check_decodes(batch, validated)
    with refusals():
        _check_decodes(batch, decode_batch(batch, limits=LIMITS).header)
    with refusals():
        markers = decode_control(batch)
        require(parse_header(batch).is_control, "markers were read from a batch that is no control batch")
        if markers:
            again = decode_control(encode_control(markers, 1))
            require(again == markers, "markers that were written and read again differ")
        offsets = [placed.offset for placed in placed_markers(batch)]
        require(offsets == sorted(set(offsets)), "the offsets of markers do not rise")
    with refusals():
        parse_header(stamp_producer(batch, 1, 2, 3))
    position = 0
    with refusals():
        for start, header in iter_headers(batch + batch):
            require(
                start == position and header.size >= HEADER_BYTES,
                f"the walk over the batches skipped bytes, or stood still, at position {position}",
            )
            position += header.size


def _check_decodes(batch: bytes, header: BatchHeader) -> None:
    """Check what is true of every batch that was accepted."""
    decoded = decode_columns(batch, 0, header, LIMITS)
    require(
        decoded.num_rows == header.record_count,
        f"the batch has {decoded.num_rows} rows, but its header says {header.record_count}",
    )
    require(
        decoded.schema.equals(schema_for(header.attributes)),
        "the decoded schema is not the one that the attributes call for",
    )
    require(checksum(batch, 0, header.size) == header.crc32c, "a batch with a wrong checksum was accepted")
    check_header(header)
    require(pack_header(header) == batch[:HEADER_BYTES], "the header was written again, and differs")
    trusted = decode_columns(batch, 0, header, LIMITS, trusted=True)
    require(trusted.equals(decoded), "reading with and without trust in the batch gives different rows")
    decoded.to_pylist()


def few_target(data: bytes) -> None:
    """`is_of_few` vouches for bodies without Arrow: what it passes decodes. `encode_few` writes what Arrow writes."""
    choices = Choices(data)
    rows = 1 + choices.below(6)
    keys = [choices.take(choices.below(9)) for _ in range(rows)] if choices.one_in(2) else None
    values = [choices.take(choices.below(9)) for _ in range(rows)]
    few = encode_few(keys, values, 5)
    arrays = Columns(pa.array(values, pa.binary()), key=None if keys is None else pa.array(keys, pa.binary()))
    require(few == encode_batch(arrays, 5), "encode_few and encode_batch write different bytes")
    batch = checked_again(mutate(few, choices))
    if choices.one_in(2):
        batch = with_fields_changed(batch, choices)
    try:
        header = parse_header(batch)
        check_header(header)
    except RaftlogError:
        return
    if header.size <= len(batch) and is_of_few(batch, header):
        decoded = decode_batch(batch).columns
        require(
            all(column.null_count == 0 for column in decoded.columns),
            "there is a null in a batch that is_of_few takes for one without",
        )


class _Range:
    def __init__(self, producer_id: int, first_offset: int, last_offset: int) -> None:
        self.producer_id, self.first_offset, self.last_offset = producer_id, first_offset, last_offset


def aborted_target(data: bytes) -> None:
    """Ranges of aborted transactions, as a broker sends them: a batch is in one or it is not."""
    choices = Choices(data)
    ranges = [_Range(choices.below(3), choices.integer(), choices.integer()) for _ in range(choices.below(12))]
    held = AbortedRanges(ranges)
    header = parse_header(encode_few(None, [b"x"], 1, producer_id=1, producer_epoch=0, base_sequence=0))
    header = header._replace(attributes=int(Attributes.TRANSACTIONAL))
    own = sorted((r.first_offset, r.last_offset) for r in ranges if r.producer_id == 1)
    apart = all(a[1] < b[0] for a, b in pairwise(own)) and all(a <= b for a, b in own)
    for _ in range(8):
        offset = choices.integer()
        found = held.hold(header._replace(base_offset=offset))
        if apart:
            require(
                found == any(a <= offset <= b for a, b in own),
                f"offset {offset} must count as aborted only if it is in the ranges {own}, but the answer is {found}",
            )
