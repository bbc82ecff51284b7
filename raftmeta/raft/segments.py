"""How the write-ahead log lies on the disk: files of frames.

    wal-<first sequence, 20 digits>, little-endian      frame, little-endian
      0   8  magic           b"RLRAFTW1"                  0   4  magic     b"RLWF"
      8  16  directory id    of meta.properties           4   4  length    u32, bytes of the payload
     24   8  first sequence  u64, of the first frame      8   8  sequence  u64, rising by one
     32   4  crc32c          u32 of bytes 0-31           16   4  crc32c    u32 of header's bytes 8-31, then the
                                                                           frame's 4-15, then the payload
                                                         20   n  payload   records, one after the other

    record, little-endian
      0   1  kind            1 entry     8 index, 8 term, 4 length, then the entry's data
                             2 vote      8 term, 4 voted for (i32; -1 nobody, -2 nobody for the rest of the term)
                             3 truncate  8 index: entries from there on are gone
                             4 reset     all entries are gone; the next one may have any index
                             5 commit    8 index: entries up to there were committed, and are never replaced

What is made durable together is one frame, and the next is written only after the sync, so a crash can leave at most
one bad frame, the last of the last file. A bad frame before a valid one is damage to something durable. The first
frame of a file begins with a vote record, so that older files can go. The space behind the last frame is zeros,
reserved. A file gets its name once its first frame and ALLOCATION_BYTES behind it are durable, and never shrinks: a
shorter one was cut off by something else than a crash. The checksum covers the directory and the file, so that a frame
inside a command is none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c

from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftmeta.disk import DAMAGE_REMEDY

PREFIX = "wal-"
TMP = ".tmp"
"""Behind the name of a file that is being made."""
_FILE_MAGIC = b"RLRAFTW1"
_FRAME_MAGIC = b"RLWF"
_HEADER = struct.Struct("<8s16sQI")
_FRAME = struct.Struct("<4sIQI")
_COVERED = struct.Struct("<IQ")
HEADER_BYTES = _HEADER.size
FRAME_OVERHEAD_BYTES = _FRAME.size
assert HEADER_BYTES == 36
assert FRAME_OVERHEAD_BYTES == 20

ENTRY, VOTE, TRUNCATE, RESET, COMMIT = 1, 2, 3, 4, 5
ENTRY_RECORD = struct.Struct("<BQQI")
VOTE_RECORD = struct.Struct("<BQi")
TRUNCATE_RECORD = COMMIT_RECORD = struct.Struct("<BQ")
RESET_RECORD = bytes([RESET])

ALLOCATION_BYTES = 4 << 20
"""Space reserved at a time. A file appears under its name with at least so much."""

Record = tuple[int, int, int, bytes]
"""(kind, index or term, term or voted for, data), zero and empty where the kind has none."""


def file_name(first_sequence: int) -> str:
    """Return the name of the file that begins with this frame."""
    return f"{PREFIX}{first_sequence:020d}"


def first_sequences(names: list[str]) -> list[int]:
    """Return the first sequences of the log's files, rising."""
    rests = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return sorted(int(rest) for rest in rests if len(rest) == 20 and rest.isdecimal())


class Segment:
    """Encodes and decodes one file."""

    def __init__(self, directory_id: bytes, first_sequence: int) -> None:
        assert len(directory_id) == 16
        self.first_sequence = first_sequence
        self.name = file_name(first_sequence)
        covered = struct.pack("<16sQ", directory_id, first_sequence)
        head = _FILE_MAGIC + covered
        self.header = head + struct.pack("<I", google_crc32c.value(head))
        self._seed: int = google_crc32c.value(covered)

    def frame(self, sequence: int, payload: bytes) -> bytes:
        """Return records as a frame."""
        length = len(payload)
        crc = google_crc32c.extend(google_crc32c.extend(self._seed, _COVERED.pack(length, sequence)), payload)
        return _FRAME.pack(_FRAME_MAGIC, length, sequence, crc) + payload

    def split(self, data: bytes, where: str) -> tuple[list[bytes], int]:
        """Return the payloads of the file's frames, and the position behind the last one.

        What follows it is zeros or what a crash tore: no valid frame begins in it.

        Raises:
            UnsupportedVersion: the magic is of a later format.
            CorruptRecordError: the header is not this file's, or a bad frame has a valid one behind it.
        """
        self._check_header(data, where)
        payloads: list[bytes] = []
        position = HEADER_BYTES
        while (payload := self._payload_at(data, position, self.first_sequence + len(payloads))) is not None:
            payloads.append(payload)
            position += FRAME_OVERHEAD_BYTES + len(payload)
        later = data.find(_FRAME_MAGIC, position + 1)
        while later >= 0:
            if self._payload_at(data, later, None) is not None:
                raise CorruptRecordError(
                    f"{where} is damaged at byte {position}: a bad frame with a valid one behind it, at byte {later}; "
                    f"{DAMAGE_REMEDY}"
                )
            later = data.find(_FRAME_MAGIC, later + 1)
        return payloads, position

    def _check_header(self, data: bytes, where: str) -> None:
        found = data[:HEADER_BYTES]
        if found == self.header:
            return
        if found[:7] == _FILE_MAGIC[:7] and found[7:8] > _FILE_MAGIC[7:]:
            raise UnsupportedVersion(f"{where} has a newer format than this version reads")
        raise CorruptRecordError(
            f"{where} is damaged at byte 0: its header is not that of this file in this directory; {DAMAGE_REMEDY}"
        )

    def _payload_at(self, data: bytes, position: int, expected: int | None) -> bytes | None:
        start = position + FRAME_OVERHEAD_BYTES
        if start > len(data):
            return None
        magic, length, sequence, crc = _FRAME.unpack_from(data, position)
        if magic != _FRAME_MAGIC or start + length > len(data) or expected not in (None, sequence):
            return None
        payload = data[start : start + length]
        covered = google_crc32c.extend(self._seed, data[position + 4 : position + 16])
        return payload if google_crc32c.extend(covered, payload) == crc else None


def torn_entries(data: bytes) -> int:
    """Return how many entries can be told in what a crash left of a frame that begins here; the checksum is wrong."""
    found = 0
    if data[:4] == _FRAME_MAGIC:
        try:
            for kind, index, _, _ in split_records(data[FRAME_OVERHEAD_BYTES:].rstrip(b"\0"), ""):
                found += kind == ENTRY and index > 0
        except CorruptRecordError:
            pass  # to be expected: it is torn
    return found


def split_records(payload: bytes, where: str) -> Iterator[Record]:
    """Yield the records of a frame.

    Raises:
        CorruptRecordError: the checksum was right and the content is not: written by something else.
    """
    position = 0
    try:
        while position < len(payload):
            kind = payload[position]
            if kind == ENTRY:
                _, index, term, length = ENTRY_RECORD.unpack_from(payload, position)
                position += ENTRY_RECORD.size + length
                if position > len(payload):
                    break
                yield ENTRY, index, term, payload[position - length : position]
            elif kind == VOTE:
                _, term, voted_for = VOTE_RECORD.unpack_from(payload, position)
                position += VOTE_RECORD.size
                yield VOTE, term, voted_for, b""
            elif kind in (TRUNCATE, COMMIT):
                _, index = TRUNCATE_RECORD.unpack_from(payload, position)
                position += TRUNCATE_RECORD.size
                yield kind, index, 0, b""
            elif kind == RESET:
                position += 1
                yield RESET, 0, 0, b""
            else:
                raise CorruptRecordError(f"{where} has a record of the unknown kind {kind}; {DAMAGE_REMEDY}")
    except struct.error:
        position = len(payload) + 1
    if position != len(payload):
        raise CorruptRecordError(f"{where} has a record that is longer than its frame; {DAMAGE_REMEDY}")
