"""Reads a segment's files as they lie on disk and says what is wrong with them. Changes nothing, needs no server."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftlog.format import HEADER_BYTES, BatchHeader, Buffer, decode_batch, parse_batch, parse_header

_I64 = struct.Struct("<q")
# The entries of the two index files, each ended by a CRC-32C of the segment's base offset and the entry before it.
_OFFSET_ENTRY = struct.Struct("<III")
_OFFSET_ENTRY_CRC_AT = 8
_TIME_ENTRY = struct.Struct("<qII")
_TIME_ENTRY_CRC_AT = 12


class BatchAt(NamedTuple):
    """A batch and where in the file it begins; `problem` is None for a good one."""

    position: int
    header: BatchHeader
    problem: str | None


@dataclass(slots=True)
class SegmentReport:
    """What was found in one segment: its batches, and sentences about what is wrong."""

    path: Path
    base_offset: int
    size_bytes: int
    batches: list[BatchAt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    index_entries: int | None = None
    time_index_entries: int | None = None


def check_segment(path: Path) -> SegmentReport:
    """Return what is in the segment whose `.log` file is at `path`, and in the indexes beside it."""
    try:
        base_offset = int(path.stem)
    except ValueError:
        base_offset = -1
    report = SegmentReport(path, base_offset, path.stat().st_size)
    if base_offset < 0:
        report.problems.append(f"the name is not the segment's base offset: {path.name}")
    if report.size_bytes:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            _walk(view, report)
    _check_order(report)
    if base_offset >= 0:
        _check_offset_index(report)
        _check_time_index(report)
    return report


def read_records(path: Path, position: int) -> list[dict[str, Any]]:
    """Return the records of the batch at `position` as plain values, in order."""
    with path.open("rb") as file:
        file.seek(position)
        size = parse_header(file.read(HEADER_BYTES)).size
        file.seek(position)
        batch = decode_batch(file.read(size))
    rows: list[dict[str, Any]] = batch.columns.to_pylist()
    for number, row in enumerate(rows):
        row["offset"] = batch.header.base_offset + row.pop("offset_delta", number)
        row.setdefault("timestamp_ms", batch.header.base_timestamp_ms)
    return rows


def _walk(data: Buffer, report: SegmentReport) -> None:
    """Add every batch; a header that cannot be ends the walk, since nobody knows where the next batch begins."""
    position = 0
    while position < len(data):
        try:
            header = parse_header(data, position)
            problem = None
            try:
                parse_batch(data, position)
            except (CorruptRecordError, UnsupportedVersion) as error:
                problem = str(error)
                report.problems.append(f"position {position}, offset {header.base_offset}: {error}")
        except CorruptRecordError as error:
            report.problems.append(f"position {position}: {error}")
            return
        if problem is not None and (header.magic != 1 or position + header.size > len(data)):
            return
        report.batches.append(BatchAt(position, header, problem))
        position += header.size


def _check_order(report: SegmentReport) -> None:
    expected = report.base_offset
    for position, header, _ in report.batches:
        if header.base_offset < expected:
            report.problems.append(
                f"position {position}: the batch begins at offset {header.base_offset}, expected at least {expected}"
            )
        expected = header.next_offset


def _entries(path: Path, entry: struct.Struct, crc_at: int, base_offset: int) -> Iterator[tuple[int, int] | None]:
    """Yield the two values of every entry of an index file, None for the first that is damaged, and then no more."""
    data = path.read_bytes()
    seed = google_crc32c.value(_I64.pack(base_offset))
    for position in range(0, len(data), entry.size):
        raw = data[position : position + entry.size]
        if len(raw) < entry.size:
            yield None
            return
        first, second, crc = entry.unpack(raw)
        if google_crc32c.extend(seed, raw[:crc_at]) != crc:
            yield None
            return
        yield first, second


def _check_offset_index(report: SegmentReport) -> None:
    path = report.path.with_suffix(".index")
    if not path.exists():
        return
    begins = {position: header.base_offset for position, header, _ in report.batches}
    if report.batches:
        begins[report.size_bytes] = report.batches[-1].header.next_offset
    report.index_entries = 0
    for entry in _entries(path, _OFFSET_ENTRY, _OFFSET_ENTRY_CRC_AT, report.base_offset):
        if entry is None:
            report.problems.append(f"{path.name}: entry {report.index_entries} is damaged")
            return
        offset, position = report.base_offset + entry[0], entry[1]
        if begins.get(position) != offset and not (position == report.size_bytes == 0):
            report.problems.append(f"{path.name}: no batch with offset {offset} begins at position {position}")
        report.index_entries += 1


def _check_time_index(report: SegmentReport) -> None:
    path = report.path.with_suffix(".timeindex")
    if not path.exists():
        return
    report.time_index_entries = 0
    batches = iter(report.batches)
    upcoming = next(batches, None)
    largest_ms: int | None = None
    for entry in _entries(path, _TIME_ENTRY, _TIME_ENTRY_CRC_AT, report.base_offset):
        if entry is None:
            report.problems.append(f"{path.name}: entry {report.time_index_entries} is damaged")
            return
        timestamp_ms, offset = entry[0], report.base_offset + entry[1]
        while upcoming is not None and upcoming.header.base_offset < offset:
            found_ms = upcoming.header.max_timestamp_ms
            largest_ms = found_ms if largest_ms is None else max(largest_ms, found_ms)
            upcoming = next(batches, None)
        if largest_ms is not None and largest_ms != timestamp_ms:
            report.problems.append(
                f"{path.name}: says {timestamp_ms} is the largest timestamp below offset {offset}, it is {largest_ms}"
            )
        report.time_index_entries += 1
