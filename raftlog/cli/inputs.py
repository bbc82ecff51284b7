"""What `raftlog produce` reads: lines, JSON lines, CSV and Parquet, as record batches for the producer.

Lines, and columns of CSV and Parquet, go through Arrow as they are. A JSON line, and a row that becomes a JSON value,
are taken apart and put together one by one: that is what they are for.

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
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

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


def format_of(path: Path | None, wanted: Format) -> Format:
    """Return the format to read: the wanted one, or what the file's name ends in, or lines."""
    if wanted is not Format.AUTO:
        return wanted
    return _BY_SUFFIX.get(path.suffix.lower(), Format.LINES) if path is not None else Format.LINES


def read(stream: IO[bytes], source: Format, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Yield the records of a stream in batches.

    Raises:
        InvalidRecord: the input is not of that format; says which line or column.
    """
    try:
        match source:
            case Format.JSON:
                yield from _read_json(stream)
            case Format.CSV:
                yield from _from_rows(_csv_batches(stream), columns)
            case Format.PARQUET:
                whole = pa.py_buffer(stream.read()) if not stream.seekable() else stream
                batches = pa.parquet.ParquetFile(whole).iter_batches(batch_size=_ROWS_PER_BATCH)
                yield from _from_rows(batches, columns)
            case _:
                yield from _read_lines(stream, columns.key_separator)
    except pa.ArrowInvalid as error:
        raise InvalidRecord(f"the input is not {source}: {error}; another format is chosen with --format") from None


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


def _read_lines(stream: IO[bytes], separator: str | None) -> Iterator[pa.RecordBatch]:
    number = 0
    for lines in _blocks_of_lines(stream):
        values = pa.array(lines, pa.binary())
        if separator is None:
            yield pa.record_batch({"value": values})
        else:
            yield _split_keys(values, separator, number)
        number += len(lines)


def _split_keys(lines: pa.Array, separator: str, lines_before: int) -> pa.RecordBatch:
    positions = pc.find_substring(lines, separator.encode())
    missing = pc.index(pc.less(positions, 0), True).as_py()
    if missing >= 0:
        raise InvalidRecord(
            f"line {lines_before + missing + 1} has no {separator!r}, which is to stand between key and value"
        )
    parts = pc.split_pattern(lines, separator.encode(), max_splits=1)
    return pa.record_batch({"key": pc.list_element(parts, 0), "value": pc.list_element(parts, 1)})


def _read_json(stream: IO[bytes]) -> Iterator[pa.RecordBatch]:
    number = 0
    for lines in _blocks_of_lines(stream):
        rows = []
        for line in lines:
            number += 1
            if line.strip():
                rows.append(_json_record(line, number))
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def _json_record(line: bytes, number: int) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidRecord(f"line {number} is not JSON: {error}") from None
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
            "partition": _json_integer(record, "partition"),
            "timestamp": _json_integer(record, "timestamp"),
        }
    except ValueError as error:
        raise InvalidRecord(f"line {number}: {error}") from None


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


def _json_integer(record: dict[str, Any], name: str) -> int | None:
    value = record.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} is {value!r}, expected a whole number")


def _json_headers(headers: Any) -> list[dict[str, object]] | None:
    if headers is None:
        return None
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    try:
        return [{"key": str(key), "value": None if text is None else str(text).encode()} for key, text in pairs]
    except (TypeError, ValueError):
        raise ValueError('headers are {"name": "text", ...} or [["name", "text"], ...]') from None


def _csv_batches(stream: IO[bytes]) -> Iterator[pa.RecordBatch]:
    whole: Any = stream
    yield from pa.csv.open_csv(whole)


def _from_rows(batches: Iterator[pa.RecordBatch], columns: Columns) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows == 0:
            continue
        arrays = {}
        if columns.key is not None:
            arrays["key"] = _bytes_column(batch, columns.key)
        if columns.value is not None:
            arrays["value"] = _bytes_column(batch, columns.value)
        else:
            texts = [json.dumps(row, ensure_ascii=False, default=str) for row in batch.to_pylist()]
            arrays["value"] = pa.array(texts).cast(pa.binary())
        yield pa.record_batch(arrays)


def _bytes_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise InvalidRecord(f"there is no column {name!r}; the input has {', '.join(batch.schema.names)}")
    column = batch.column(position)
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    return column
