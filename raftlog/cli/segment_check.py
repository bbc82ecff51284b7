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
from raftlog.format.control import PlacedMarker, placed_markers

_I64 = struct.Struct("<q")
# The entries of the index files, each ended by a CRC-32C of the segment's base offset and the entry before it.
_OFFSET_ENTRY = struct.Struct("<III")
_OFFSET_ENTRY_CRC_AT = 8
_TIME_ENTRY = struct.Struct("<qII")
_TIME_ENTRY_CRC_AT = 12
_TXN_ENTRY = struct.Struct("<qqqqI")
_TXN_ENTRY_CRC_AT = 32
_TXN_CLOSING_ID = -1


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
    unread: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of positions of which it cannot be told which batches are in them; what indexes say of them is moot."""
    index_entries: int | None = None
    time_index_entries: int | None = None
    txn_index_entries: int | None = None
    """Aborted transactions that the `.txnindex` names; None without one."""


def check_segment(path: Path) -> SegmentReport:
    """Return what is in the segment whose `.log` file is at `path`, and in the indexes beside it."""
    try:
        base_offset = int(path.stem)
    except ValueError:
        base_offset = -1
    report = SegmentReport(path, base_offset, path.stat().st_size)
    if base_offset < 0:
        report.problems.append(f"the name is not the segment's base offset: {path.name}")
    anchors = _anchors(report)
    if report.size_bytes:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            _walk(view, report, anchors)
    _check_order(report, anchors)
    if base_offset >= 0:
        _check_offset_index(report)
        _check_time_index(report)
        _check_txn_index(report)
    return report


def read_markers(path: Path, position: int) -> list[PlacedMarker]:
    """Return the markers of the control batch at `position`, in order."""
    return placed_markers(_read_batch(path, position))


def _read_batch(path: Path, position: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        size = parse_header(file.read(HEADER_BYTES)).size
        file.seek(position)
        return file.read(size)


def read_records(path: Path, position: int) -> list[dict[str, Any]]:
    """Return the records of the batch at `position` as plain values, in order."""
    batch = decode_batch(_read_batch(path, position))
    rows: list[dict[str, Any]] = batch.columns.to_pylist()
    for number, row in enumerate(rows):
        row["offset"] = batch.header.base_offset + row.pop("offset_delta", number)
        row.setdefault("timestamp_ms", batch.header.base_timestamp_ms)
    return rows


def _anchors(report: SegmentReport) -> list[tuple[int, int]]:
    """Return (position, offset) of every sound entry of the offset index."""
    path = report.path.with_suffix(".index")
    if report.base_offset < 0 or not path.exists():
        return []
    entries = _entries(path, _OFFSET_ENTRY, _OFFSET_ENTRY_CRC_AT, report.base_offset)
    return [(entry[1], report.base_offset + entry[0]) for entry in entries if entry is not None]


def _walk(data: Buffer, report: SegmentReport, anchors: list[tuple[int, int]]) -> None:
    """Add every batch; behind a header that cannot be, go on where the index says that the next batch begins."""
    position = 0
    while position < len(data):
        header: BatchHeader | None = None
        problem = None
        try:
            header = parse_header(data, position)
            parse_batch(data, position)
        except (CorruptRecordError, UnsupportedVersion) as error:
            problem = str(error)
        if header is None or (problem is not None and not _leads_on(data, position, header)):
            where = f"position {position}" if header is None else f"position {position}, offset {header.base_offset}"
            resumed = _resume(data, position, anchors)
            report.problems.append(f"{where}: {problem}; {resumed - position} bytes are passed over")
            report.unread.append((position, resumed))
            position = resumed
            continue
        if problem is not None:
            report.problems.append(f"position {position}, offset {header.base_offset}: {problem}")
        report.batches.append(BatchAt(position, header, problem))
        position += header.size


def _leads_on(data: Buffer, position: int, header: BatchHeader) -> bool:
    """Whether the length of a damaged batch can be right: the file ends behind it, or another header is there."""
    end = position + header.size
    if header.magic != 1 or header.size < HEADER_BYTES or end > len(data):
        return False
    if end == len(data):
        return True
    try:
        following = parse_header(data, end)
    except CorruptRecordError:
        return False
    return following.magic == 1 and following.base_offset >= header.base_offset


def _resume(data: Buffer, position: int, anchors: list[tuple[int, int]]) -> int:
    """Return where the next batch begins by the index, or the end of the file."""
    for begin, offset in anchors:
        if begin > position and begin + HEADER_BYTES <= len(data):
            (found,) = _I64.unpack_from(data, begin)
            if found == offset:
                return begin
    return len(data)


def _check_order(report: SegmentReport, anchors: list[tuple[int, int]]) -> None:
    """Find batches that lie where they cannot; of two that contradict each other, it is the one that made a leap."""
    expected, leapt = report.base_offset, None
    known = dict(anchors)
    for number, (position, header, problem) in enumerate(report.batches):
        if problem is not None:  # nor can its offsets be relied on
            continue
        begins = f"position {position}: the batch begins at offset {header.base_offset}"
        if header.base_offset < expected and leapt is not None:
            at, leap, _ = report.batches[leapt]
            _blame(report, leapt, f"position {at}: offset {leap.base_offset} in front of offset {header.base_offset}")
        elif header.base_offset < expected:
            _blame(report, number, f"{begins}, expected at least {expected}")
        elif header.base_offset > expected and known.get(position) == expected:
            _blame(report, number, f"{begins}, expected {expected} as the index says")
            continue
        leapt = number if header.base_offset > expected else None
        expected = header.next_offset


def _blame(report: SegmentReport, number: int, sentence: str) -> None:
    found = report.batches[number]
    if found.problem is None:
        report.batches[number] = found._replace(problem=sentence)
        report.problems.append(sentence)


def _entries(path: Path, entry: struct.Struct, crc_at: int, base_offset: int) -> Iterator[tuple[int, int] | None]:
    """Yield the two values of every entry of an index file, None for the first that is damaged, and then no more."""
    for values in _sealed_entries(path, entry, crc_at, base_offset):
        yield None if values is None else (values[0], values[1])


def _sealed_entries(
    path: Path, entry: struct.Struct, crc_at: int, base_offset: int
) -> Iterator[tuple[int, ...] | None]:
    data = path.read_bytes()
    seed = google_crc32c.value(_I64.pack(base_offset))
    for position in range(0, len(data), entry.size):
        raw = data[position : position + entry.size]
        if len(raw) < entry.size:
            yield None
            return
        *values, crc = entry.unpack(raw)
        if google_crc32c.extend(seed, raw[:crc_at]) != crc:
            yield None
            return
        yield tuple(values)


def _check_offset_index(report: SegmentReport) -> None:
    path = report.path.with_suffix(".index")
    if not path.exists():
        return
    begins = {position: header.base_offset for position, header, _ in report.batches}
    moot = {position for position, _, problem in report.batches if problem is not None}
    if report.batches:
        begins[report.size_bytes] = report.batches[-1].header.next_offset
        if report.batches[-1].problem is not None or (report.unread and report.unread[-1][1] == report.size_bytes):
            moot.add(report.size_bytes)
    report.index_entries = 0
    for entry in _entries(path, _OFFSET_ENTRY, _OFFSET_ENTRY_CRC_AT, report.base_offset):
        if entry is None:
            report.problems.append(f"{path.name}: entry {report.index_entries} is damaged")
            return
        offset, position = report.base_offset + entry[0], entry[1]
        known = position not in moot and not any(begin <= position < end for begin, end in report.unread)
        if known and begins.get(position) != offset and not (position == report.size_bytes == 0):
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
    partial = bool(report.unread)  # then one that was not read may have had a larger timestamp
    for entry in _entries(path, _TIME_ENTRY, _TIME_ENTRY_CRC_AT, report.base_offset):
        if entry is None:
            report.problems.append(f"{path.name}: entry {report.time_index_entries} is damaged")
            return
        timestamp_ms, offset = entry[0], report.base_offset + entry[1]
        while upcoming is not None and (upcoming.problem is not None or upcoming.header.base_offset < offset):
            if upcoming.problem is not None:
                partial = True
            else:
                found_ms = upcoming.header.max_timestamp_ms
                largest_ms = found_ms if largest_ms is None else max(largest_ms, found_ms)
            upcoming = next(batches, None)
        if largest_ms is not None and (timestamp_ms < largest_ms or (timestamp_ms != largest_ms and not partial)):
            report.problems.append(
                f"{path.name}: says {timestamp_ms} is the largest timestamp below offset {offset}, it is {largest_ms}"
            )
        report.time_index_entries += 1


def _check_txn_index(report: SegmentReport) -> None:
    """Check the aborted transactions of a segment that is sealed, or was when the server stopped."""
    path = report.path.with_suffix(".txnindex")
    if not path.exists():
        return
    report.txn_index_entries = 0
    markers = {
        offset
        for _, header, problem in report.batches
        if problem is None and header.is_control
        for offset in range(header.base_offset, header.next_offset)
    }
    for entry in _sealed_entries(path, _TXN_ENTRY, _TXN_ENTRY_CRC_AT, report.base_offset):
        if entry is None:
            report.problems.append(f"{path.name}: entry {report.txn_index_entries} is damaged")
            return
        producer_id, first_offset, last_offset, _ = entry
        if producer_id == _TXN_CLOSING_ID:
            continue
        if not report.unread and (last_offset not in markers or first_offset >= last_offset):
            report.problems.append(
                f"{path.name}: says that offset {last_offset} is a marker of producer id {producer_id}, whose "
                f"transaction begins at offset {first_offset}; it is none"
            )
        report.txn_index_entries += 1
