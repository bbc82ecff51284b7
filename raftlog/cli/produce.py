"""`raftlog produce`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated

import pyarrow.compute as pc
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import raftlog
from raftlog._delivery import awaited
from raftlog.cli.clients import connect_producer
from raftlog.cli.inputs import Columns, Format, Part, format_of, read
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    key_value_pairs,
    print_json,
    print_note,
)
from raftlog.errors import InvalidRequestError, RaftlogError

_MAX_UNCHECKED_SENDS = 64
_SHORT_S = 0.5
"""How long it may take after Ctrl-C without a word."""
_QUIET_S = 3.0
"""How long a command waits without a word."""


class ProduceFailed(RaftlogError):
    """Not all of the input was sent; the message says what was. Never travels."""


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

    JSON: an object on every line, with any of key and value (text or null, a value also any other JSON), key_base64
    and value_base64 (bytes), headers ({"name": "text"} or [["name", "text"]]), partition, and timestamp (milliseconds
    since 1970). topic and offset are passed over, so that what raftlog consume --output json prints can be sent again.

    CSV: the first line names the columns. Every column is text as it stands in the file: 00501 stays 00501.

    CSV, Parquet: without --value-column a row becomes a JSON object; in it bytes are base64, and NaN is null.
    """
    path = None if file is None or str(file) == "-" else file
    source = format_of(path, format)
    columns = Columns(key_column, value_column, key_separator)
    _check_columns(source, columns)
    settings = {"acks": acks.value, "compression.type": compression.value, **key_value_pairs(config or [])}
    _check_settings(settings)
    started = time.monotonic()
    with ExitStack() as stack:
        stream = _open(stack, path)
        producer = stack.enter_context(connect_producer(bootstrap, settings))
        producer.send_batch(topic, [])  # nothing, but it asks the cluster for the topic, and not only for some input
        progress = stack.enter_context(_progress(path))
        sender = _Sender(producer, topic)
        try:
            for part in sender.watched(read(stream, source, columns)):
                sender.send(part)
                progress.update(stream, sender.records)
            sender.finish()
        except KeyboardInterrupt:
            sender.wind_up()
            raise
    records, data_bytes = sender.records, sender.data_bytes
    seconds = time.monotonic() - started
    if output is Output.JSON:
        print_json({"topic": topic, "records": records, "bytes": data_bytes, "seconds": round(seconds, 3)})
    else:
        rate = records / seconds if seconds else 0.0
        print_note(
            f"{counted(records, 'record')}, {counted(data_bytes, 'byte')} to {topic} "
            f"in {seconds:.2f} s ({rate:,.0f} a second)"
        )


class _Sender:
    """Sends parts of the input, and knows how much of it arrived when something goes wrong.

    Attributes:
        records: how many were handed to the producer.
        data_bytes: the bytes of their keys and values.
    """

    def __init__(self, producer: raftlog.Producer, topic: str) -> None:
        self.records = 0
        self.data_bytes = 0
        self._producer = producer
        self._topic = topic
        self._unchecked: deque[tuple[raftlog.BatchDelivery, Part]] = deque()
        self._acknowledged = 0
        self._told = False

    def watched(self, parts: Iterator[Part]) -> Iterator[Part]:
        """Yield the parts; input that cannot be read becomes an error that says how much was sent before.

        Raises:
            ProduceFailed: the input is wrong, or a delivery before it failed.
        """
        try:
            yield from parts
        except (RaftlogError, OSError) as error:
            self.finish()
            raise self._failed(str(error)) from None

    def send(self, part: Part) -> None:
        """Queue the records of a part.

        Raises:
            ProduceFailed: one of them cannot be sent, or an earlier delivery failed.
        """
        try:
            delivery = self._producer.send_batch(self._topic, part.records)
        except InvalidRequestError as error:  # nothing was queued: look for the record that it is about
            if part.records.num_rows == 1:
                self.finish()
                raise self._failed(f"{part.place(0)}: {error}") from None
            half = part.records.num_rows // 2
            self.send(Part(part.records[:half], part.unit, part.numbers[:half]))
            self.send(Part(part.records[half:], part.unit, part.numbers[half:]))
            return
        except RaftlogError as error:  # some of the part may have been queued
            self.finish()
            raise self._failed(f"{_places(part)}: {error}", at_least=True) from None
        self._unchecked.append((delivery, part))
        self.records += part.records.num_rows
        self.data_bytes += _payload_bytes(part)
        while len(self._unchecked) > _MAX_UNCHECKED_SENDS:
            self._check_oldest()

    def finish(self) -> None:
        """Wait for every outcome.

        Raises:
            ProduceFailed: a delivery failed.
        """
        with suppress(TimeoutError):
            self._producer.flush(timeout=0)  # nothing lingers any more; outcomes are waited for one by one
        while self._unchecked:
            self._check_oldest()

    def _check_oldest(self) -> None:
        delivery, part = self._unchecked[0]
        try:
            self._wait(delivery)
        except RaftlogError as error:
            self._unchecked.popleft()
            self._producer.flush()
            for later, _ in self._unchecked:
                with suppress(RaftlogError):
                    self._acknowledged += sum(found.record_count for found in later.result())
            self._unchecked.clear()
            raise self._failed(f"{_places(part)}: {error}", at_least=True) from None
        self._unchecked.popleft()
        self._acknowledged += part.records.num_rows

    def wind_up(self) -> None:
        """After Ctrl-C: wait for what was handed over, and say so if it takes long; not any more after a second one.

        What is not acknowledged at the end is counted on stderr; it may be in the log, or not.
        """
        try:
            with suppress(TimeoutError):
                self._producer.flush(timeout=_SHORT_S)
            if left := self._unacknowledged():
                print_note(f"waiting for {counted(left, 'record')}, Ctrl-C again to give up")
                self._producer.flush()
        except KeyboardInterrupt:
            pass
        finally:
            if left := self._unacknowledged():
                print_note(f"{left:,} of {counted(self.records, 'record')} not acknowledged")
            self._producer.close(timeout=0)

    def _unacknowledged(self) -> int:
        leaves = [batch for delivery, _ in self._unchecked for batch in delivery._leaves()]
        return sum(batch.count for batch in leaves if not batch.done or batch.error is not None)

    def _wait(self, delivery: raftlog.BatchDelivery) -> None:
        try:
            delivery.result(_QUIET_S)
        except TimeoutError:
            if not self._told:
                self._told = True
                print_note(f"waiting for acknowledgements of {awaited(delivery)}")
            delivery.result()

    def _failed(self, problem: str, *, at_least: bool = False) -> ProduceFailed:
        # Of a part that failed, pieces for other partitions may have arrived.
        sent = counted(self._acknowledged, "record")
        if at_least and not self._acknowledged:
            return ProduceFailed(f"{problem}; none before was acknowledged")
        if at_least:
            return ProduceFailed(f"{problem}; at least {sent} arrived all the same")
        return ProduceFailed(f"{problem}; {sent} {'was' if self._acknowledged == 1 else 'were'} sent before")


def _places(part: Part) -> str:
    first, last = part.numbers[0], part.numbers[-1]
    return f"{part.unit} {first}" if first == last else f"{part.unit}s {first} to {last}"


def _payload_bytes(part: Part) -> int:
    columns = [part.records.column(name) for name in ("key", "value") if name in part.records.schema.names]
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)


def _check_columns(source: Format, columns: Columns) -> None:
    by_rows = source in (Format.CSV, Format.PARQUET)
    if (columns.key is not None or columns.value is not None) and not by_rows:
        raise typer.BadParameter(f"--key-column and --value-column are for CSV and Parquet, the input is {source}")
    if columns.key_separator is not None and source is not Format.LINES:
        raise typer.BadParameter(f"--key-separator is for lines, the input is {source}")
    if columns.key_separator == "":
        raise typer.BadParameter("--key-separator is empty")


def _check_settings(settings: Iterable[str]) -> None:
    for key in settings:
        if key.replace("_", ".") == "transactional.id":
            raise typer.BadParameter(
                f"--config {key}: records of raftlog produce are in no transaction, each counts once it is there; "
                "leave it out, or send with raftlog.Producer(transactional_id=...)"
            )


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
