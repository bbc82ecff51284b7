"""Control batches: markers go in and come out, and what is none is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import CorruptRecordError, InvalidRecord
from raftlog.format import Attributes, Columns, encode_batch, parse_batch, validate_produced
from raftlog.format.control import Marker, PlacedMarker, decode_control, encode_control, placed_markers

CONTROL = int(Attributes.CONTROL | Attributes.TRANSACTIONAL)
markers = st.builds(
    Marker,
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 15) - 1),
    st.booleans(),
    st.integers(-1, (1 << 31) - 1),
    st.integers(-1, (1 << 63) - 1),
)


@given(st.lists(markers, min_size=1, max_size=20), st.integers(0, 1 << 50))
def test_markers_come_out_as_they_went_in(given_markers: list[Marker], base_offset: int) -> None:
    batch = encode_control(given_markers, 1_000, base_offset=base_offset, leader_epoch=3)
    header = parse_batch(batch)
    assert (header.is_control, header.is_transactional) == (True, True)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert header.max_timestamp_ms == 1_000
    assert header.next_offset == base_offset + len(given_markers), "each marker must have an offset of its own"
    assert decode_control(batch) == given_markers
    assert placed_markers(b"front" + batch, 5, check_checksum=False) == [
        PlacedMarker(*place) for place in enumerate(given_markers, base_offset)
    ]


def test_without_markers_there_is_no_batch() -> None:
    with pytest.raises(InvalidRecord):
        encode_control([], 0)


def control(key: bytes | None, value: bytes | None, **fields: object) -> bytes:
    columns = Columns(value=pa.array([value], pa.binary()), key=pa.array([key], pa.binary()))
    return encode_batch(columns, 0, attributes=CONTROL)


KEY, VALUE = bytes.fromhex("000001000c000000000000000400"), bytes(12)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (control(b"\x01" + KEY[1:], VALUE), "version 1 and type 1"),
        (control(KEY[:2] + b"\x02" + KEY[3:], VALUE), "version 0 and type 2"),
        (control(KEY[:-1], VALUE), "for a key"),
        (control(KEY, VALUE[:-1]), "for a value"),
        (control(None, VALUE), "None for a key"),
        (control(KEY, None), "None for a value"),
        (encode_batch(Columns(pa.array([VALUE], pa.binary())), 0, attributes=CONTROL), "no keys"),
        (encode_batch(Columns(pa.array([VALUE], pa.binary())), 0), "records, not markers"),
        (control(KEY, VALUE)[:-1], "cut short"),
        (control(KEY, VALUE)[:-1] + b"\xff", "checksum"),
    ],
)
def test_what_is_no_marker_is_refused(batch: bytes, words: str) -> None:
    assert decode_control(control(KEY, VALUE)) == [Marker(12, 4, True, 0, 0)]
    with pytest.raises(CorruptRecordError, match=words):
        decode_control(batch)


def test_rows_that_compaction_has_left_keep_their_offsets() -> None:
    columns = Columns(
        value=pa.array([VALUE, VALUE], pa.binary()),
        key=pa.array([KEY, KEY], pa.binary()),
        offset_delta=pa.array([1, 4], pa.uint32()),
    )
    batch = encode_batch(columns, 0, attributes=CONTROL, base_offset=10, last_offset_delta=6)
    assert [placed.offset for placed in placed_markers(batch)] == [11, 14]


def test_compaction_may_have_left_none() -> None:
    columns = Columns(value=pa.array([], pa.binary()), offset_delta=pa.array([], pa.uint32()))
    batch = encode_batch(columns, 0, attributes=CONTROL, base_offset=10, last_offset_delta=6)
    assert placed_markers(batch) == []


def test_a_client_appends_no_markers() -> None:
    with pytest.raises(InvalidRecord, match="CONTROL"):
        validate_produced(encode_control([Marker(1, 1, True, 0)], 0))
