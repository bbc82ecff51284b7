"""`raftlog produce`: reads lines, JSON lines, CSV and Parquet as record batches for the producer.

Lines, and columns of CSV and Parquet, stay in Arrow. JSON lines, and rows that become JSON values, are converted one
by one.

Every CSV column is text, never a number, a date or null: `00501` stays `00501`. In a row that becomes a JSON value,
bytes are base64, and numbers that JSON lacks (NaN, infinities) are null.

A JSON line is an object with any of these fields, as `raftlog consume --output json` prints it:

    key, value     text, null, or any other JSON for a value, which is then sent as JSON
    key_base64, value_base64   bytes, instead of key and value
    headers        {"name": "text", ...} or [["name", "text"], ...]
    partition      a number
    timestamp      milliseconds since 1970, UTC
    topic, offset  ignored
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import raftlog
from raftlog._core.words import counted
from raftlog._delivery import awaited
from raftlog.cli.client_config import connect_producer
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    key_value_pairs,
    print_json,
    print_note,
)
from raftlog.errors import InvalidRecord, InvalidRequestError, RaftlogError

_BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 20_000
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("partition", pa.int32()),
        ("timestamp", pa.int64()),
    ]
)
_JSON_FIELDS = frozenset(
    {"key", "value", "key_base64", "value_base64", "headers", "partition", "timestamp", "topic", "offset"}
)


class Format(StrEnum):
    """The values of `--format`."""

    AUTO = "auto"
    LINES = "lines"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


_BY_SUFFIX = {
    ".csv": Format.CSV,
    ".json": Format.JSON,
    ".jsonl": Format.JSON,
    ".ndjson": Format.JSON,
    ".parquet": Format.PARQUET,
}


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns, or parts of a line, that become key and value."""

    key: str | None = None
    value: str | None = None
    key_separator: str | None = None


class Part(NamedTuple):
    """Records that are sent together, and their numbers in the input: `unit` is `line` or `row`, counted from 1."""

    records: pa.RecordBatch
    unit: str
    numbers: Sequence[int]

    def place(self, index: int) -> str:
        """Return a record's place in the input."""
        return f"{self.unit} {self.numbers[index]}"


def format_of(path: Path | None, wanted: Format) -> Format:
    """Return the format to read: the wanted one, or that of the file's suffix, or lines."""
    if wanted is not Format.AUTO:
        return wanted
    return _BY_SUFFIX.get(path.suffix.lower(), Format.LINES) if path is not None else Format.LINES


def read(stream: IO[bytes], source: Format, columns: Columns) -> Iterator[Part]:
    """Yield the records of a stream in batches.

    Raises:
        InvalidRecord: the input is not of that format; the message names the line or column. Valid lines before it have
            been yielded.
    """
    try:
        match source:
            case Format.JSON:
                yield from _read_json(stream)
            case Format.CSV:
                yield from _from_rows(_csv_batches(stream), columns)
            case Format.PARQUET:
                whole = pa.py_buffer(stream.read()) if not stream.seekable() else stream
                # On this thread only: other threads would continue to read the stream of a damaged file.
                with pa.parquet.ParquetFile(whole, pre_buffer=False) as file:
                    batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, use_threads=False)
                    yield from _from_rows(batches, columns)
            case _:
                yield from _read_lines(stream, columns.key_separator)
    except (pa.ArrowInvalid, UnicodeDecodeError, csv.Error) as error:
        raise _not_of(source, error) from None
    except OSError as error:
        if error.errno is not None:  # otherwise it is Arrow's error for a damaged Parquet file
            raise
        raise _not_of(source, error) from None


def _not_of(source: Format, error: Exception) -> InvalidRecord:
    return InvalidRecord(f"the input is not {source}: {error}; choose another format with --format")


def _blocks_of_lines(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield lists of lines without line ends; one read gives a list, so a slow pipe does not delay its lines."""
    rest = b""
    read_some = getattr(stream, "read1", stream.read)
    while block := read_some(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _read_lines(stream: IO[bytes], separator: str | None) -> Iterator[Part]:
    first = 1
    for lines in _blocks_of_lines(stream):
        values = pa.array(lines, pa.binary())
        numbers = range(first, first + len(lines))
        if separator is None:
            yield Part(pa.record_batch({"value": values}), "line", numbers)
        else:
            yield from _split_keys(values, separator, numbers)
        first += len(lines)


def _split_keys(lines: pa.Array, separator: str, numbers: range) -> Iterator[Part]:
    positions = pc.find_substring(lines, separator.encode())
    missing = pc.index(pc.less(positions, 0), True).as_py()
    good = lines if missing < 0 else lines[:missing]
    if len(good):
        pairs = pc.split_pattern(good, separator.encode(), max_splits=1)
        keyed = pa.record_batch({"key": pc.list_element(pairs, 0), "value": pc.list_element(pairs, 1)})
        yield Part(keyed, "line", numbers[: len(good)])
    if missing >= 0:
        raise InvalidRecord(f"line {numbers[missing]} has no {separator!r} between key and value")


def _read_json(stream: IO[bytes]) -> Iterator[Part]:
    number = 0
    for lines in _blocks_of_lines(stream):
        rows: list[dict[str, object]] = []
        numbers: list[int] = []
        wrong: InvalidRecord | None = None
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                rows.append(_json_record(line, number))
            except InvalidRecord as error:
                wrong = error
                break
            numbers.append(number)
        if rows:
            yield Part(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA), "line", numbers)
        if wrong is not None:
            raise wrong


def _json_record(line: bytes, number: int) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidRecord(f"line {number} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRecord(f"line {number} is nested too deep") from None
    if not isinstance(record, dict):
        raise InvalidRecord(f"line {number} is not an object with key and value but {type(record).__name__}")
    unknown = record.keys() - _JSON_FIELDS
    if unknown:
        raise InvalidRecord(
            f"line {number} has unknown fields {', '.join(sorted(unknown))}; use {', '.join(sorted(_JSON_FIELDS))} "
            "(--format lines sends whole lines as values)"
        )
    try:
        return {
            "key": _json_bytes(record, "key"),
            "value": _json_bytes(record, "value"),
            "headers": _json_headers(record.get("headers")),
            "partition": _json_integer(record, "partition", 31),
            "timestamp": _json_integer(record, "timestamp", 63),
        }
    except ValueError as error:
        raise InvalidRecord(f"line {number}: {error}") from None
    except RecursionError:
        raise InvalidRecord(f"line {number} is nested too deep") from None


def _json_bytes(record: dict[str, Any], name: str) -> bytes | None:
    encoded = record.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (TypeError, binascii.Error):
            raise ValueError(f"{name}_base64 is not base64") from None
    value = record.get(name)
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()


def _json_integer(record: dict[str, Any], name: str, bits: int) -> int | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        if -1 << bits <= value < 1 << bits:
            return value
        raise ValueError(f"{name} has {value.bit_length()} bits, more than {bits}")
    raise ValueError(f"{name} is {value!r}, expected a whole number")


def _json_headers(headers: Any) -> list[dict[str, object]] | None:
    if headers is None:
        return None
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    try:
        return [{"key": str(key), "value": None if text is None else str(text).encode()} for key, text in pairs]
    except (TypeError, ValueError):
        raise ValueError('headers must be {"name": "text", ...} or [["name", "text"], ...]') from None


class _PutBack(io.RawIOBase):
    """A stream that returns bytes already read from it once more, then the rest."""

    def __init__(self, data: bytes, rest: IO[bytes]) -> None:
        self._data = memoryview(data)
        self._rest = rest

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer with one read."""
        data: Any = self._data[: len(buffer)] or self._rest.read(len(buffer))
        self._data = self._data[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _csv_batches(stream: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the rows with all columns as text. Arrow needs the column names in advance, so the header is read twice."""
    head = stream.read(_BLOCK_BYTES)
    names = next(filter(None, csv.reader(io.StringIO(head.decode("utf-8-sig", "replace"), newline=""))), [])
    _check_names(names)
    reader = pa.csv.open_csv(
        _for_arrow(head, stream),
        # One thread, so that Arrow knows the number of a bad row; a quoted field may contain line ends.
        read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
    with reader:
        guessed = [field.name for field in reader.schema if field.type != pa.string()]
        if guessed:
            raise InvalidRecord(f"the CSV header cannot be parsed near {', '.join(guessed)}; its columns are {names}")
        yield from reader


def _for_arrow(head: bytes, stream: IO[bytes]) -> Any:
    """Return a source from which Arrow reads the stream from its start; `head` is already read.

    Arrow reads ahead on its own thread, even after an error in the file, which has crashed the process when the file
    was a Python object. So only pipes, for which there is no other way, are read through Python.
    """
    if not stream.seekable():
        return io.BufferedReader(_PutBack(head, stream), _BLOCK_BYTES)
    name = getattr(stream, "name", None)
    if isinstance(name, str) and os.path.isfile(name):
        return pa.OSFile(name)
    stream.seek(0)
    return pa.BufferReader(stream.read())


def _check_names(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidRecord(
            f"{'column' if len(twice) == 1 else 'columns'} {', '.join(map(repr, twice))} more than once; "
            "give each column of the input a different name"
        )


def _from_rows(batches: Iterator[pa.RecordBatch], columns: Columns) -> Iterator[Part]:
    first = 1
    for batch in batches:
        _check_names(batch.schema.names)
        if batch.num_rows == 0:
            continue
        arrays = {}
        if columns.key is not None:
            arrays["key"] = _bytes_column(batch, columns.key)
        if columns.value is not None:
            arrays["value"] = _bytes_column(batch, columns.value)
        else:
            arrays["value"] = pa.array([_json_of(row) for row in _rows(batch)]).cast(pa.binary())
        yield Part(pa.record_batch(arrays), "row", range(first, first + batch.num_rows))
        first += batch.num_rows


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows. Python's times end at microseconds, so one with nanoseconds is text.

    Raises:
        InvalidRecord: a column has a value for which Python has no type.
    """
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(_exact_times(column) if _counts_nanoseconds(column.type) else column.to_pylist())
        except UnicodeDecodeError:
            raise
        except (ValueError, OverflowError) as error:
            raise InvalidRecord(
                f"column {name!r} is {column.type}, and has a value that is not represented in JSON here "
                f"({str(error).partition('.')[0]}); cast it in the input, for example to a string"
            ) from None
    for index in range(batch.num_rows):
        yield {name: column[index] for name, column in zip(batch.schema.names, columns, strict=True)}


def _counts_nanoseconds(kind: pa.DataType) -> bool:
    is_time = pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind)
    return bool(is_time and kind.unit == "ns")


def _exact_times(column: pa.Array) -> list[object]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        coarse = pa.timestamp("us", kind.tz)
    else:
        coarse = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    counts = column.cast(pa.int64()).to_pylist()
    whole = pa.array([None if count is None else count // 1_000 for count in counts], pa.int64())
    return [
        at if count is None or count % 1_000 == 0 else _with_nanoseconds(at, count % 1_000)
        for at, count in zip(whole.cast(coarse).to_pylist(), counts, strict=True)
    ]


def _with_nanoseconds(at: Any, nanoseconds: int) -> str:
    text, point, rest = str(at).partition(".")
    if point:
        return f"{text}.{rest[:6]}{nanoseconds:03}{rest[6:]}"
    zone = text[-6:] if getattr(at, "tzinfo", None) is not None else ""
    return f"{text.removesuffix(zone)}.000000{nanoseconds:03}{zone}"


def _json_of(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_json_default)
    except ValueError:  # a number that JSON lacks
        return json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False, default=_json_default)


def _json_default(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _without_nan(part) for name, part in value.items()}
        case list() | tuple():
            return [_without_nan(part) for part in value]
        case _:
            return value


def _bytes_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise InvalidRecord(f"no column {name!r}; the input has {', '.join(batch.schema.names)}")
    column = batch.column(position)
    try:
        if _is_bytes(column.type):
            return column.cast(pa.binary())
        return column.cast(pa.string()).cast(pa.binary())
    except pa.ArrowNotImplementedError:
        raise InvalidRecord(
            f"column {name!r} is {column.type}, which cannot be a key or value; without --value-column the whole "
            "row is sent as JSON"
        ) from None


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


_MAX_UNCHECKED_SENDS = 64
_SHORT_S = 0.5
"""How long Ctrl-C waits for acknowledgements before a note."""
_QUIET_S = 3.0
"""How long the command waits for acknowledgements before a note."""


class ProduceFailed(RaftlogError):
    """Not all of the input was sent; the message says how much was. It has no wire code."""


class Acks(StrEnum):
    """The values of `--acks`."""

    ALL = "all"
    LEADER = "1"
    NONE = "0"


class Compression(StrEnum):
    """The values of `--compression`."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


CompressionOption = Annotated[
    Compression, typer.Option("--compression", "-z", metavar="CODEC", help="none, gzip, snappy, lz4 or zstd.")
]


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", show_default=False, help="By default, or as -, standard input.")
    ] = None,
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="lines, json, csv or parquet; auto: by the file's suffix, else lines.",
        ),
    ] = Format.AUTO,
    key_column: Annotated[str | None, typer.Option(metavar="NAME", help="CSV, Parquet: the column of the key.")] = None,
    value_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="CSV, Parquet: the column of the value; by default the row as JSON."),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Lines: the text between key and value.")
    ] = None,
    compression: CompressionOption = Compression.NONE,
    acks: Annotated[
        Acks, typer.Option(help="all: wait until all in-sync replicas have it; 1: the leader; 0: do not wait.")
    ] = Acks.ALL,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="KEY=VALUE", help="Any producer setting; may be repeated."),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send records from a file or standard input to a topic.

    Example: echo hello | raftlog produce events

    Example: raftlog produce events orders.csv --key-column customer --compression zstd

    Example: raftlog produce events records.jsonl --output json

    JSON: an object on every line, with any of key and value (text or null; a value may be any JSON), key_base64 and
    value_base64 (bytes), headers ({"name": "text"} or [["name", "text"]]), partition, and timestamp (milliseconds since
    1970). topic and offset are ignored, so that the output of raftlog consume --output json can be sent again.

    CSV: the first line names the columns. Every column is text as in the file: 00501 stays 00501.

    CSV, Parquet: without --value-column a row becomes a JSON object, with bytes as base64 and NaN as null.
    """
    path = None if file is None or str(file) == "-" else file
    source = format_of(path, format)
    columns = Columns(key_column, value_column, key_separator)
    _check_columns(source, columns)
    settings = {"acks": acks.value, "compression.type": compression.value, **key_value_pairs(config or [])}
    check_settings(settings)
    started = time.monotonic()
    with ExitStack() as stack:
        stream = _open(stack, path)
        producer = stack.enter_context(connect_producer(bootstrap, settings))
        producer.send_batch(topic, [])  # sends nothing, but fails for an unknown topic before any input
        show_progress = stack.enter_context(_progress(path))
        sender = _Sender(producer, topic)
        try:
            for part in sender.watched(read(stream, source, columns)):
                sender.send(part)
                show_progress(stream, sender.records)
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
    """Sends parts of the input, and counts acknowledged records for error messages.

    Attributes:
        records: how many the producer has got.
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
        """Yield the parts; an error of the input becomes one that says how much was sent before it.

        Raises:
            ProduceFailed: the input is wrong, or an earlier delivery failed.
        """
        try:
            yield from parts
        except (RaftlogError, OSError) as error:
            self.finish()
            raise self._failed(str(error)) from None

    def send(self, part: Part) -> None:
        """Queue the records of a part.

        Raises:
            ProduceFailed: a record cannot be sent, or an earlier delivery failed.
        """
        try:
            delivery = self._producer.send_batch(self._topic, part.records)
        except InvalidRequestError as error:  # nothing was queued: find the wrong record
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
            self._producer.flush(timeout=0)  # ends lingering; the outcomes are awaited one by one
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
        """After Ctrl-C: wait for acknowledgements, with a note if it takes long; a second Ctrl-C ends the wait.

        The number of unacknowledged records goes to stderr; these may or may not be in the log.
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
                print_note(f"waiting for acknowledgements: {awaited(delivery)}")
            delivery.result()

    def _failed(self, problem: str, *, at_least: bool = False) -> ProduceFailed:
        # Records of the failed part may have arrived at other partitions.
        sent = counted(self._acknowledged, "record")
        if at_least and not self._acknowledged:
            return ProduceFailed(f"{problem}; no record was acknowledged before")
        if at_least:
            return ProduceFailed(f"{problem}; at least {sent} arrived")
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
        raise typer.BadParameter(f"--key-column and --value-column are for CSV and Parquet; the input is {source}")
    if columns.key_separator is not None and source is not Format.LINES:
        raise typer.BadParameter(f"--key-separator is for lines; the input is {source}")
    if columns.key_separator == "":
        raise typer.BadParameter("--key-separator is empty")


def check_settings(settings: Iterable[str]) -> None:
    """Refuse a transactional id, because these commands begin and commit no transactions.

    Raises:
        typer.BadParameter: a setting would begin one.
    """
    for key in settings:
        if key.replace("_", ".") == "transactional.id":
            raise typer.BadParameter(
                f"--config {key}: this command uses no transactions; leave it out, or send with "
                "raftlog.Producer(transactional_id=...)"
            )


def _open(stack: ExitStack, path: Path | None) -> IO[bytes]:
    if path is None:
        return sys.stdin.buffer
    return stack.enter_context(path.open("rb"))


@contextmanager
def _progress(path: Path | None) -> Iterator[Callable[[IO[bytes], int], None]]:
    """Yield a function that shows on a terminal how much of the input is read, and how many records were sent."""
    shown = sys.stderr.isatty() and (path is not None or not sys.stdin.isatty())
    with Progress(
        SpinnerColumn(),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[records]:,} records"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not shown,
    ) as bar:
        task = bar.add_task("sending", total=path.stat().st_size if shown and path is not None else None, records=0)

        def update(stream: IO[bytes], records: int) -> None:
            if shown:
                position = stream.tell() if stream.seekable() and not stream.closed else 0
                bar.update(task, completed=position, records=records)

        yield update
