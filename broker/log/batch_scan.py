"""Walking over the batches of a `.log` file: with checksums to recover, by headers alone to look something up.

A `.log` file is nothing but record batches (docs/format.md), one after the other from byte 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from broker.log.storage import File
from raftlog.errors import CorruptRecordError, RaftlogError
from raftlog.format import HEADER_BYTES, BatchHeader, parse_batch, parse_header

SCAN_CHUNK_BYTES: Final = 1 << 20
WALK_CHUNK_BYTES: Final = 8 << 10


class ScannedBatch(NamedTuple):
    """A batch and where it begins."""

    position: int
    header: BatchHeader

    @property
    def end_position(self) -> int:
        """The first byte after it."""
        return self.position + self.header.size


class InvalidBatch(Exception):
    """The bytes at `position` are no batch that could follow; everything before is good."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"position {position}: {reason}")
        self.position = position
        self.reason = reason


def scan_batches(file: File, position: int, size: int) -> Iterator[ScannedBatch]:
    """Yield every batch from `position` to `size` after verifying its checksum.

    Raises:
        InvalidBatch: at the first bytes that are not a whole, sound batch.
    """
    chunk, start = b"", position
    while position < size:
        offset = position - start
        if len(chunk) - offset < HEADER_BYTES:
            chunk, start, offset = file.read(min(SCAN_CHUNK_BYTES, size - position), position), position, 0
        try:
            header = parse_header(chunk, offset)
            if header.size > size - position:
                raise CorruptRecordError(f"the header claims {header.size} bytes, {size - position} are left")
            if header.size > len(chunk) - offset:
                chunk, start, offset = (
                    file.read(max(header.size, min(SCAN_CHUNK_BYTES, size - position)), position),
                    position,
                    0,
                )
            header = parse_batch(chunk, offset)
        except RaftlogError as error:
            raise InvalidBatch(position, str(error)) from None
        yield ScannedBatch(position, header)
        position += header.size


def walk_headers(file: File, position: int, size: int) -> Iterator[ScannedBatch]:
    """Yield the batches from `position` to `size` by their headers, bodies unread; for bytes known to be good.

    Raises:
        InvalidBatch: a header that is cut short or reaches beyond `size`.
    """
    chunk, start = b"", position
    while position < size:
        offset = position - start
        if offset + HEADER_BYTES > len(chunk):
            chunk, start, offset = file.read(min(WALK_CHUNK_BYTES, size - position), position), position, 0
        if len(chunk) - offset < HEADER_BYTES:
            raise InvalidBatch(position, f"a header has {HEADER_BYTES} bytes, {size - position} are left")
        header = parse_header(chunk, offset)
        if header.size < HEADER_BYTES or header.size > size - position:
            raise InvalidBatch(position, f"the header claims {header.size} bytes, {size - position} are left")
        yield ScannedBatch(position, header)
        position += header.size
