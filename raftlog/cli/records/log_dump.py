"""`raftlog log ...`: prints and checks a partition's segment files on disk; it needs no server and changes nothing."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import google_crc32c
import typer

from raftlog._core.words import counted
from raftlog.cli.output import Output, OutputOption, print_error, print_json, print_note, print_rows
from raftlog.cli.records.internal_records import json_record, readable
from raftlog.errors import CorruptRecordError, UnsupportedVersion
from raftlog.format import HEADER_BYTES, BatchHeader, Buffer, decode_batch, parse_batch, parse_header
from raftlog.format.control import Marker, PlacedMarker, placed_markers

_I64 = struct.Struct("<q")
# Entries of index files. Each ends with a CRC-32C of the segment's base offset and of the entry's other bytes.
_OFFSET_ENTRY = struct.Struct("<III")
_OFFSET_ENTRY_CRC_AT = 8
_TIME_ENTRY = struct.Struct("<qII")
_TIME_ENTRY_CRC_AT = 12
_TXN_ENTRY = struct.Struct("<qqqqI")
_TXN_ENTRY_CRC_AT = 32
_TXN_CLOSING_ID = -1


class BatchAt(NamedTuple):
    """A batch and its position in the file; `problem` is None for a valid batch."""

    position: int
    header: BatchHeader
    problem: str | None


@dataclass(slots=True)
class SegmentReport:
    """The batches of a segment, and a sentence for each problem."""

    path: Path
    base_offset: int
    size_bytes: int
    batches: list[BatchAt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of positions that could not be read; index entries for them are not checked."""
    index_entries: int | None = None
    time_index_entries: int | None = None
    txn_index_entries: int | None = None
    """Aborted transactions that the `.txnindex` names; None without one."""


def check_segment(path: Path) -> SegmentReport:
    """Check the segment whose `.log` file is `path`, and the indexes beside it."""
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
    """Return (position, offset) of every undamaged entry of the offset index."""
    path = report.path.with_suffix(".index")
    if report.base_offset < 0 or not path.exists():
        return []
    entries = _entries(path, _OFFSET_ENTRY, _OFFSET_ENTRY_CRC_AT, report.base_offset)
    return [(entry[1], report.base_offset + entry[0]) for entry in entries if entry is not None]


def _walk(data: Buffer, report: SegmentReport, anchors: list[tuple[int, int]]) -> None:
    """Add every batch; after an impossible header, continue where the index has the next batch."""
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
            report.problems.append(f"{where}: {problem}; {resumed - position} bytes are skipped")
            report.unread.append((position, resumed))
            position = resumed
            continue
        if problem is not None:
            report.problems.append(f"position {position}, offset {header.base_offset}: {problem}")
        report.batches.append(BatchAt(position, header, problem))
        position += header.size


def _leads_on(data: Buffer, position: int, header: BatchHeader) -> bool:
    """Return whether a damaged batch's length is plausible: after it the file ends, or another header follows."""
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
    """Return the position of the next batch in the index, or the end of the file."""
    for begin, offset in anchors:
        if begin > position and begin + HEADER_BYTES <= len(data):
            (found,) = _I64.unpack_from(data, begin)
            if found == offset:
                return begin
    return len(data)


def _check_order(report: SegmentReport, anchors: list[tuple[int, int]]) -> None:
    """Report batches out of order; if two contradict each other, the one whose offset jumped ahead is wrong."""
    expected, leapt = report.base_offset, None
    known = dict(anchors)
    for number, (position, header, problem) in enumerate(report.batches):
        if problem is not None:  # its offsets are unreliable too
            continue
        begins = f"position {position}: the batch begins at offset {header.base_offset}"
        if header.base_offset < expected and leapt is not None:
            at, leap, _ = report.batches[leapt]
            _blame(report, leapt, f"position {at}: offset {leap.base_offset} comes before offset {header.base_offset}")
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


def _entries(path: Path, entry: struct.Struct, crc_at: int, base_offset: int) -> Iterator[tuple[int, ...] | None]:
    """Yield the values of every index entry without its CRC, up to the first damaged one, which is None."""
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
    partial = bool(report.unread)  # a skipped batch may have a larger timestamp
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
                f"{path.name}: the largest timestamp below offset {offset} is {largest_ms}, not {timestamp_ms}"
            )
        report.time_index_entries += 1


def _check_txn_index(report: SegmentReport) -> None:
    """Check the index of aborted transactions, if the segment has one."""
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
    for entry in _entries(path, _TXN_ENTRY, _TXN_ENTRY_CRC_AT, report.base_offset):
        if entry is None:
            report.problems.append(f"{path.name}: entry {report.txn_index_entries} is damaged")
            return
        producer_id, first_offset, last_offset, _ = entry
        if producer_id == _TXN_CLOSING_ID:
            continue
        if not report.unread and (last_offset not in markers or first_offset >= last_offset):
            report.problems.append(
                f"{path.name}: offset {last_offset} is not a marker of producer id {producer_id}, whose transaction "
                f"begins at offset {first_offset}"
            )
        report.txn_index_entries += 1


app = typer.Typer(no_args_is_help=True, help="Print and check a partition's files, without a server.")

_SEGMENT_NAME = re.compile(r"[0-9]{20}\.log")
_COLUMNS = (
    "position",
    "base_offset",
    "last_offset",
    "records",
    "leader_epoch",
    "codec",
    "bytes",
    "producer_id",
    "producer_epoch",
    "base_sequence",
    "transactional",
    "max_timestamp_ms",
    "checked",
)


@app.callback()
def group() -> None:
    """Keep `dump` a subcommand, although it is the only one."""


@app.command()
def dump(
    path: Annotated[
        Path, typer.Argument(metavar="FILE|DIR", exists=True, show_default=False, help="A .log file, or a directory.")
    ],
    records: Annotated[bool, typer.Option("--records", metavar="", help="Also print every record.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the batches of segment files, and check checksums, order of offsets and indexes.

    Exit code 1: problems were found. It changes nothing. While a server is running, its newest batch may look cut
    short. Records of __consumer_offsets and __transaction_state are decoded.

    Example: raftlog log dump ./data/events-0 --records
    """
    files = [path] if path.is_file() else _segments_below(path)
    if not files:
        raise typer.BadParameter(f"{path} has no segment files, whose names are 20 digits and .log")
    problems = batches = rows = 0
    for file in files:
        report = check_segment(file)
        if output is Output.JSON:
            print_json(_as_json(report, records))
        else:
            _print(report, records, output)
        problems += len(report.problems)
        batches += len(report.batches)
        rows += sum(batch.header.record_count for batch in report.batches)
    print_note(
        f"{counted(len(files), 'segment')}, {counted(batches, 'batch', 'batches')}, {counted(rows, 'record')}, "
        f"{counted(problems, 'problem')}"
    )
    if problems:
        raise typer.Exit(1)


def _segments_below(directory: Path) -> list[Path]:
    """Return a directory's segments, without a server's own log."""
    return sorted(file for file in directory.rglob("*.log") if _SEGMENT_NAME.fullmatch(file.name))


def _row(batch: BatchAt) -> dict[str, object]:
    header = batch.header
    return {
        "position": batch.position,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "leader_epoch": header.leader_epoch,
        "codec": header.codec.name.lower() if batch.problem is None else "?",
        "bytes": header.size,
        "producer_id": _known(header.producer_id),
        "producer_epoch": _known(header.producer_epoch),
        "base_sequence": _known(header.base_sequence),
        "transactional": "markers" if header.is_control else "yes" if header.is_transactional else "no",
        "max_timestamp_ms": header.max_timestamp_ms,
        "checked": "ok" if batch.problem is None else "BAD",
    }


def _known(number: int) -> int | None:
    """Return a number of a producer; None if it is negative, which means none."""
    return number if number >= 0 else None


def _records(report: SegmentReport, batch: BatchAt) -> Sequence[dict[str, Any]]:
    if batch.problem is not None:
        return []
    if batch.header.is_control:
        return [_marker(offset, marker, batch) for offset, marker in read_markers(report.path, batch.position)]
    topic = report.path.absolute().parent.name.rpartition("-")[0]
    return [_record(row, topic) for row in read_records(report.path, batch.position)]


def _record(row: dict[str, Any], topic: str) -> dict[str, Any]:
    key, value = row.get("key"), row["value"]
    found = readable(topic, key, value)
    if found is not None:
        return {"offset": row["offset"], "timestamp": row["timestamp_ms"], **found}
    return json_record(
        key=key, value=value, headers=row.get("headers"), timestamp_ms=row["timestamp_ms"], offset=row["offset"]
    )


def _marker(offset: int, marker: Marker, batch: BatchAt) -> dict[str, Any]:
    contents = {
        "ends": "commit" if marker.commit else "abort",
        "producer_id": marker.producer_id,
        "producer_epoch": marker.producer_epoch,
        "coordinator_epoch": marker.coordinator_epoch,
        "first_offset": _known(marker.first_offset),
    }
    return {"offset": offset, "timestamp": batch.header.base_timestamp_ms, "marker": contents}


def _as_json(report: SegmentReport, with_records: bool) -> dict[str, object]:
    return {
        "file": str(report.path),
        "bytes": report.size_bytes,
        "index_entries": report.index_entries,
        "time_index_entries": report.time_index_entries,
        "aborted_transactions": report.txn_index_entries,
        "problems": report.problems,
        "batches": [
            {**_row(batch), **({"contents": _records(report, batch)} if with_records else {})}
            for batch in report.batches
        ],
    }


def _print(report: SegmentReport, with_records: bool, output: Output) -> None:
    indexes = [
        f"{name}: {'none' if count is None else counted(count, 'entry', 'entries')}"
        for name, count in (("index", report.index_entries), ("time index", report.time_index_entries))
    ]
    if report.txn_index_entries is not None:
        indexes.append(counted(report.txn_index_entries, "aborted transaction"))
    print(f"{report.path}: {report.size_bytes:,} bytes, {', '.join(indexes)}")
    if with_records:
        for batch in report.batches:
            print_rows([_row(batch)], _COLUMNS, output)
            for record in _records(report, batch):
                print_json(record)
    elif report.batches:
        print_rows([_row(batch) for batch in report.batches], _COLUMNS, output)
    for problem in report.problems:
        print_error(f"{report.path}: {problem}")
