"""Frames: golden bytes, torn tails, and damage that must not be taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftmeta.frames import (
    HEADER_BYTES,
    JOURNAL_MAGIC,
    SNAPSHOT_MAGIC,
    check_header,
    encode_frame,
    encode_header,
    single_frame,
    split_frames,
)

payloads = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def journal(parts: list[bytes]) -> bytes:
    return encode_header(JOURNAL_MAGIC, 7) + b"".join(map(encode_frame, parts))


def test_golden_bytes() -> None:
    """Another implementation reads these: magic, offset, CRC-32C; length, CRC-32C of length and payload, payload."""
    assert encode_header(JOURNAL_MAGIC, 7).hex() == "524c4d4554414a310700000000000000" + "4748bcee"
    assert encode_frame(b"raftlog").hex() == "07000000" + "f1a7dd2f" + b"raftlog".hex()


@given(payloads)
def test_frames_come_back(parts: list[bytes]) -> None:
    data = journal(parts)
    check_header(data, JOURNAL_MAGIC, 7, "file")
    assert split_frames(data, "file") == (parts, len(data))


@given(payloads, st.data())
def test_cut_anywhere_a_prefix_of_whole_frames_is_left(parts: list[bytes], data: st.DataObject) -> None:
    whole = journal(parts)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole)))
    found, end = split_frames(whole[:cut], "file")
    assert found == parts[: len(found)]
    assert end == len(journal(found)) <= cut
    assert len(found) == len(parts) or cut < len(journal(parts[: len(found) + 1]))


@given(payloads.filter(bool), st.data())
def test_a_flipped_bit_is_refused_or_in_the_last_frame(parts: list[bytes], data: st.DataObject) -> None:
    """The length is under the checksum too: a length that points beyond the end is no torn tail."""
    whole = bytearray(journal(parts))
    position = data.draw(st.integers(HEADER_BYTES, len(whole) - 1))
    whole[position] ^= 1 << data.draw(st.integers(0, 7))
    if position < len(journal(parts[:-1])):
        with pytest.raises(CorruptRecordError, match=r"Nothing was changed"):
            split_frames(bytes(whole), "file")
    else:
        assert split_frames(bytes(whole), "file") == (parts[:-1], len(journal(parts[:-1])))


def test_zeros_at_the_end_are_a_torn_tail() -> None:
    """A file system may have made the file longer before it wrote what belongs there."""
    data = journal([b"one"])
    assert split_frames(data + bytes(100), "file") == ([b"one"], len(data))


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_a_damaged_header_is_refused(position: int) -> None:
    data = bytearray(journal([b"one"]))
    data[position] ^= 0x10
    with pytest.raises(CorruptRecordError, match="file is damaged: its first 20 bytes"):
        check_header(bytes(data), JOURNAL_MAGIC, 7, "file")


def test_a_header_of_another_file_is_refused() -> None:
    for magic, offset in ((SNAPSHOT_MAGIC, 7), (JOURNAL_MAGIC, 8)):
        with pytest.raises(CorruptRecordError):
            check_header(journal([]), magic, offset, "file")
    with pytest.raises(CorruptRecordError):
        check_header(journal([])[:-1], JOURNAL_MAGIC, 7, "file")


def test_a_newer_format_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedVersion, match="file has a newer format"):
        check_header(encode_header(b"RLMETAJ2", 7), JOURNAL_MAGIC, 7, "file")


def test_a_single_frame_is_the_whole_file() -> None:
    whole = journal([b"image"])
    assert single_frame(whole, "file") == b"image"
    for bad in (whole[:-1], whole + b"x", journal([]), journal([b"image", b"image"])):
        with pytest.raises(CorruptRecordError, match="file is damaged"):
            single_frame(bad, "file")
