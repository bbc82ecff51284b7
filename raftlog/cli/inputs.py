"""What `raftlog produce` reads: lines, JSON lines, CSV and Parquet, as record batches for the producer.

Lines, and columns of CSV and Parquet, go through Arrow as they are. A JSON line, and a row that becomes a JSON value,
are taken apart and put together one by one: that is what they are for.

Every CSV column is text, never taken for a number, a date or null: `00501` stays `00501`. In a row that becomes a JSON
value, bytes are base64, and numbers that JSON lacks (NaN, infinities) are null.

A JSON line is an object with any of these, all optional, which is also what `raftlog consume --output json` prints:

    key, value     text, null, or any other JSON for a value, which is then sent as JSON
    key_base64, value_base64   bytes, in place of key and value
    headers        {"name": "text", ...} or [["name", "text"], ...]
    partition      a number
    timestamp      milliseconds since 1970, UTC
    topic, offset  passed over
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from raftlog.errors import InvalidRecord

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
    """What `--format` takes."""

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
    """Which columns or parts of a line become what."""

    key: str | None = None
    value: str | None = None
    key_separator: str | None = None


class Part(NamedTuple):
    """Records that go together, and where in the input each was: `unit` is `line` or `row`, both counted from 1."""

    records: pa.RecordBatch
    unit: str
    numbers: Sequence[int]

    def place(self, index: int) -> str:
        """Say where in the input a record was."""
        return f"{self.unit} {self.numbers[index]}"


def format_of(path: Path | None, wanted: Format) -> Format:
    """Return the format to read: the wanted one, or what the file's name ends in, or lines."""
    if wanted is not Format.AUTO:
        return wanted
    return _BY_SUFFIX.get(path.suffix.lower(), Format.LINES) if path is not None else Format.LINES


def read(stream: IO[bytes], source: Format, columns: Columns) -> Iterator[Part]:
    """Yield the records of a stream in batches.

    Raises:
        InvalidRecord: the input is not of that format; says which line or column. What was good before it has been
            yielded as far as it was lines.
    """
    try:
        match source:
            case Format.JSON:
                yield from _read_json(stream)
            case Format.CSV:
                yield from _from_rows(_csv_batches(stream), columns)
            case Format.PARQUET:
                whole = pa.py_buffer(stream.read()) if not stream.seekable() else stream
                # On this thread: others would go on reading the stream after a file turned out to be damaged.
                with pa.parquet.ParquetFile(whole, pre_buffer=False) as file:
                    batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, use_threads=False)
                    yield from _from_rows(batches, columns)
            case _:
                yield from _read_lines(stream, columns.key_separator)
    except (pa.ArrowInvalid, UnicodeDecodeError, csv.Error) as error:
        raise _not_of(source, error) from None
    except OSError as error:
        if error.errno is not None:  # else it is what Arrow says of a Parquet file that is damaged
            raise
        raise _not_of(source, error) from None


def _not_of(source: Format, error: Exception) -> InvalidRecord:
    return InvalidRecord(f"the input is not {source}: {error}; another format is chosen with --format")


def _blocks_of_lines(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield lists of lines without their ends; a block is what can be read at the moment, so a pipe is not held up."""
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
        raise InvalidRecord(f"line {numbers[missing]} has no {separator!r}, which is to stand between key and value")


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
        raise InvalidRecord(f"line {number} is not an object with key and value, but {type(record).__name__}")
    unknown = record.keys() - _JSON_FIELDS
    if unknown:
        raise InvalidRecord(
            f"line {number} has {', '.join(sorted(unknown))}; a record has {', '.join(sorted(_JSON_FIELDS))} "
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
        raise ValueError(f"{name} is a number of {value.bit_length()} bits, {bits} are the most")
    raise ValueError(f"{name} is {value!r}, expected a whole number")


def _json_headers(headers: Any) -> list[dict[str, object]] | None:
    if headers is None:
        return None
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    try:
        return [{"key": str(key), "value": None if text is None else str(text).encode()} for key, text in pairs]
    except (TypeError, ValueError):
        raise ValueError('headers are {"name": "text", ...} or [["name", "text"], ...]') from None


class _PutBack(io.RawIOBase):
    """A stream with bytes before it that were read from it already."""

    def __init__(self, data: bytes, rest: IO[bytes]) -> None:
        self._data = memoryview(data)
        self._rest = rest

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as one read does."""
        data: Any = self._data[: len(buffer)] or self._rest.read(len(buffer))
        self._data = self._data[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _csv_batches(stream: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the rows with every column as text; Arrow wants the columns named before, so the header is read twice."""
    head = stream.read(_BLOCK_BYTES)
    names = next(filter(None, csv.reader(io.StringIO(head.decode("utf-8-sig", "replace"), newline=""))), [])
    _check_names(names)
    reader = pa.csv.open_csv(
        _for_arrow(head, stream),
        # One thread, so that Arrow knows the number of a bad row; a field in quotes may hold line ends.
        read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
    with reader:
        guessed = [field.name for field in reader.schema if field.type != pa.string()]
        if guessed:
            raise InvalidRecord(f"the header of the CSV is not understood near {', '.join(guessed)}; it has {names}")
        yield from reader


def _for_arrow(head: bytes, stream: IO[bytes]) -> Any:
    """Return a stream, whose head was read, for Arrow to read from its start.

    Arrow reads ahead on a thread of its own, also after it has given up on a file; with Python's files that has crashed
    the process. So only what cannot be read otherwise, a pipe, is read through Python.
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
            "give each column of the input a name of its own"
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
            arrays["value"] = pa.array([_json_of(row) for row in batch.to_pylist()]).cast(pa.binary())
        yield Part(pa.record_batch(arrays), "row", range(first, first + batch.num_rows))
        first += batch.num_rows


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
        raise InvalidRecord(f"there is no column {name!r}; the input has {', '.join(batch.schema.names)}")
    column = batch.column(position)
    try:
        if _is_bytes(column.type):
            return column.cast(pa.binary())
        return column.cast(pa.string()).cast(pa.binary())
    except pa.ArrowNotImplementedError:
        raise InvalidRecord(
            f"column {name!r} is {column.type}, which is no key or value by itself; without --value-column the whole "
            "row is sent as JSON"
        ) from None


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
