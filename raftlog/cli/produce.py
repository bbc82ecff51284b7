"""`raftlog produce`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import raftlog
from raftlog.cli.clients import connect_producer
from raftlog.cli.inputs import Columns, Format, format_of, read
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    key_value_pairs,
    print_json,
    print_note,
)

_MAX_UNCHECKED_SENDS = 64


class Acks(StrEnum):
    """What `--acks` takes."""

    ALL = "all"
    LEADER = "1"
    NONE = "0"


class Compression(StrEnum):
    """What `--compression` takes."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", show_default=False, help="Without it, or with -: standard input.")
    ] = None,
    format: Annotated[
        Format, typer.Option("--format", "-f", help="auto: by the file's ending, else lines.")
    ] = Format.AUTO,
    key_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="CSV, Parquet: the column with the key.")
    ] = None,
    value_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="CSV, Parquet: the column with the value; else the row as JSON.")
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Lines: what stands between key and value.")
    ] = None,
    compression: Annotated[Compression, typer.Option("--compression", "-z")] = Compression.NONE,
    acks: Annotated[
        Acks, typer.Option(help="all: held by every in-sync replica; 1: by the leader; 0: no answer.")
    ] = Acks.ALL,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="KEY=VALUE", help="Any producer setting; may be repeated."),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send records from a file or standard input to a topic.

    Examples:

      echo hello | raftlog produce events

      raftlog produce events orders.csv --key-column customer --compression zstd

      raftlog produce events records.jsonl --output json
    """
    path = None if file is None or str(file) == "-" else file
    source = format_of(path, format)
    columns = Columns(key_column, value_column, key_separator)
    _check_columns(source, columns)
    settings = {"acks": acks.value, "compression.type": compression.value, **key_value_pairs(config or [])}
    started = time.monotonic()
    with ExitStack() as stack:
        stream = _open(stack, path)
        producer = stack.enter_context(connect_producer(bootstrap, settings))
        progress = stack.enter_context(_progress(path))
        records, data_bytes = _send_all(producer, topic, read(stream, source, columns), stream, progress)
    seconds = time.monotonic() - started
    if output is Output.JSON:
        print_json({"topic": topic, "records": records, "bytes": data_bytes, "seconds": round(seconds, 3)})
    else:
        rate = records / seconds if seconds else 0.0
        print_note(f"{records:,} records, {data_bytes:,} bytes to {topic} in {seconds:.2f} s ({rate:,.0f} a second)")


def _send_all(
    producer: raftlog.Producer, topic: str, batches: Iterator[Any], stream: IO[bytes], progress: _Meter
) -> tuple[int, int]:
    """Send every batch and wait for every outcome; return how many records and Arrow bytes there were."""
    records = data_bytes = 0
    unchecked: deque[Any] = deque()
    for batch in batches:
        unchecked.append(producer.send_batch(topic, batch))
        records += batch.num_rows
        data_bytes += batch.nbytes
        while len(unchecked) > _MAX_UNCHECKED_SENDS:
            unchecked.popleft().result()
        progress.update(stream, records)
    producer.flush()
    while unchecked:
        unchecked.popleft().result()
    return records, data_bytes


def _check_columns(source: Format, columns: Columns) -> None:
    by_rows = source in (Format.CSV, Format.PARQUET)
    if (columns.key is not None or columns.value is not None) and not by_rows:
        raise typer.BadParameter(f"--key-column and --value-column are for CSV and Parquet, the input is {source}")
    if columns.key_separator is not None and source is not Format.LINES:
        raise typer.BadParameter(f"--key-separator is for lines, the input is {source}")
    if columns.key_separator == "":
        raise typer.BadParameter("--key-separator is empty")


def _open(stack: ExitStack, path: Path | None) -> IO[bytes]:
    if path is None:
        return sys.stdin.buffer
    return stack.enter_context(path.open("rb"))


class _Meter:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, bar: Progress | None, total_bytes: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task("sending", total=total_bytes, records=0) if bar is not None else None

    def update(self, stream: IO[bytes], records: int) -> None:
        """Show how far the input has been read and how many records were sent."""
        if self._bar is not None and self._task is not None:
            position = stream.tell() if stream.seekable() and not stream.closed else 0
            self._bar.update(self._task, completed=position, records=records)


@contextmanager
def _progress(path: Path | None) -> Iterator[_Meter]:
    if not sys.stderr.isatty() or (path is None and sys.stdin.isatty()):
        yield _Meter(None, None)
        return
    known_size = path.stat().st_size if path is not None else None
    with Progress(
        SpinnerColumn(),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[records]:,} records"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        yield _Meter(bar, known_size)
