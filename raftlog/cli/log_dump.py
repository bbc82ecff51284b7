"""`raftlog log ...`: a partition's files, without a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raftlog.cli import internal_records
from raftlog.cli.output import Output, OutputOption, counted, print_error, print_json, print_note, print_rows
from raftlog.cli.records import json_record
from raftlog.cli.segment_check import BatchAt, SegmentReport, check_segment, read_markers, read_records
from raftlog.format.control import Marker

app = typer.Typer(no_args_is_help=True, help="Look at a partition's files, without a server.")

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
    """Keep `dump` a command of its own although there is only one."""


@app.command()
def dump(
    path: Annotated[
        Path, typer.Argument(metavar="FILE|DIR", exists=True, show_default=False, help="A .log file, or a directory.")
    ],
    records: Annotated[bool, typer.Option("--records", metavar="", help="Also print every record.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the batches of segment files and check them: checksums, order of offsets, indexes.

    Exit code 1 when something is wrong. Changes nothing; a server may be running, whose newest batch may then seem
    cut short. Records of __consumer_offsets are printed as what they say.

    Example: raftlog log dump ./data/events-0 --records
    """
    files = [path] if path.is_file() else _segments_below(path)
    if not files:
        raise typer.BadParameter(f"{path} holds no segments, which are files named by 20 digits and .log")
    problems = batches = rows = 0
    for file in files:
        report = check_segment(file)
        if output is Output.JSON:
            print_json(_as_json(report, records))
        else:
            _print(report, records)
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
    """Return a directory's segments; a server's own log lies beside them."""
    return sorted(file for file in directory.rglob("*.log") if _SEGMENT_NAME.fullmatch(file.name))


def _row(batch: BatchAt) -> dict[str, object]:
    header = batch.header
    return {
        "position": batch.position,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "leader_epoch": header.leader_epoch,
        "codec": _codec(batch),
        "bytes": header.size,
        "producer_id": _known(header.producer_id),
        "producer_epoch": _known(header.producer_epoch),
        "base_sequence": _known(header.base_sequence),
        "transactional": "markers" if header.is_control else "yes" if header.is_transactional else "no",
        "max_timestamp_ms": header.max_timestamp_ms,
        "checked": "ok" if batch.problem is None else "BAD",
    }


def _known(number: int) -> int | None:
    """Return a producer's number; None without one."""
    return number if number >= 0 else None


def _codec(batch: BatchAt) -> str:
    return batch.header.codec.name.lower() if batch.problem is None else "?"


def _records(report: SegmentReport, batch: BatchAt) -> Sequence[dict[str, Any]]:
    if batch.problem is not None:
        return []
    if batch.header.is_control:
        return [_marker(offset, marker, batch) for offset, marker in read_markers(report.path, batch.position)]
    topic = report.path.absolute().parent.name.rpartition("-")[0]
    return [_record(row, topic) for row in read_records(report.path, batch.position)]


def _record(row: dict[str, Any], topic: str) -> dict[str, Any]:
    key, value = row.get("key"), row["value"]
    found = internal_records.readable(topic, key, value)
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


def _print(report: SegmentReport, with_records: bool) -> None:
    indexes = [
        f"{name}: {'none' if count is None else counted(count, 'entry', 'entries')}"
        for name, count in (("index", report.index_entries), ("time index", report.time_index_entries))
    ]
    if report.txn_index_entries is not None:
        indexes.append(counted(report.txn_index_entries, "aborted transaction"))
    print(f"{report.path}: {report.size_bytes:,} bytes, {', '.join(indexes)}")
    if with_records:
        for batch in report.batches:
            print_rows([_row(batch)], _COLUMNS, Output.TABLE)
            for record in _records(report, batch):
                print_json(record)
    elif report.batches:
        print_rows([_row(batch) for batch in report.batches], _COLUMNS, Output.TABLE)
    for problem in report.problems:
        print_error(f"{report.path}: {problem}")
