"""How the journal and the snapshots of the metadata lie on the disk.

    file header, 20 bytes, little-endian          frame, little-endian
     0  8  magic    b"RLMETAJ1" journal,           0  4  length   u32, bytes of the payload, at least 1
                    b"RLMETAS1" snapshot           4  4  crc32c   u32 of length and payload
     8  8  offset   i64                            8  n  payload  protobuf
    16  4  crc32c   u32 of bytes 0-15

Journal: any number of frames of `MetadataEntries`; its offset is that of the entry before the first one. What is made
durable together is one frame, and the next one is written only after the fsync: a crash can leave at most one bad
frame, at the end. So a bad frame with a valid one after it is damage, not a crash.

Snapshot: exactly one frame of one `MetadataEntry`, the image as records; the offset is the image's.
"""

from __future__ import annotations

import struct

import google_crc32c

from raftlog.errors import CorruptRecordError, UnsupportedVersion

JOURNAL_MAGIC = b"RLMETAJ1"
SNAPSHOT_MAGIC = b"RLMETAS1"

_HEADER = struct.Struct("<8sqI")
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
FRAME_OVERHEAD_BYTES = _FRAME.size
MAX_PAYLOAD_BYTES = 1 << 30
assert HEADER_BYTES == 20
assert FRAME_OVERHEAD_BYTES == 8


def encode_header(magic: bytes, offset: int) -> bytes:
    """Return the header of a file."""
    return _HEADER.pack(magic, offset, _crc(struct.pack("<8sq", magic, offset)))


def check_header(data: bytes, magic: bytes, offset: int, name: str) -> None:
    """Check that a file is what its name says.

    Raises:
        UnsupportedVersion: the magic is of a later format.
        CorruptRecordError: it is something else, or damaged.
    """
    if len(data) >= HEADER_BYTES:
        found_magic, found_offset, crc = _HEADER.unpack_from(data)
        intact = crc == _crc(data[: HEADER_BYTES - 4])
        if intact and (found_magic, found_offset) == (magic, offset):
            return
        if intact and found_magic[:7] == magic[:7] and found_magic > magic:
            raise UnsupportedVersion(
                f"{name} has a newer format than this version reads; run the version that wrote it"
            )
    raise CorruptRecordError(f"{name} is damaged: its first {HEADER_BYTES} bytes are not the header it should have")


def encode_frame(payload: bytes) -> bytes:
    """Return a payload as a frame."""
    assert 1 <= len(payload) <= MAX_PAYLOAD_BYTES, len(payload)
    length = _LENGTH.pack(len(payload))
    return length + _LENGTH.pack(google_crc32c.extend(_crc(length), payload)) + payload


def split_frames(data: bytes, name: str) -> tuple[list[bytes], int]:
    """Return the payloads after the header, and the position behind the last valid frame.

    What follows that position, if anything, is the tail that a crash tore: no valid frame begins in it.

    Raises:
        CorruptRecordError: a bad frame with a valid one after it; nothing may be dropped here.
    """
    payloads = []
    position = HEADER_BYTES
    while (payload := _frame_at(data, position)) is not None:
        payloads.append(payload)
        position += FRAME_OVERHEAD_BYTES + len(payload)
    for later in range(position + 1, len(data) - FRAME_OVERHEAD_BYTES):
        if _frame_at(data, later) is not None:
            raise CorruptRecordError(
                f"{name} is damaged: the frame at byte {position} does not match its checksum, and a valid one follows "
                f"at byte {later}. Nothing was changed; restore the directory from a copy, or from another node"
            )
    return payloads, position


def _frame_at(data: bytes, position: int) -> bytes | None:
    start = position + FRAME_OVERHEAD_BYTES
    if start > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, position)
    if not 1 <= length <= min(MAX_PAYLOAD_BYTES, len(data) - start):
        return None
    payload = data[start : start + length]
    return payload if google_crc32c.extend(_crc(data[position : position + 4]), payload) == crc else None


def _crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def single_frame(data: bytes, name: str) -> bytes:
    """Return the payload of a file that is one frame.

    Raises:
        CorruptRecordError: it is not.
    """
    payload = _frame_at(data, HEADER_BYTES)
    if payload is None or HEADER_BYTES + FRAME_OVERHEAD_BYTES + len(payload) != len(data):
        raise CorruptRecordError(
            f"{name} is damaged: its content does not match its checksum. Nothing was changed; "
            "restore the directory from a copy, or from another node"
        )
    return payload
