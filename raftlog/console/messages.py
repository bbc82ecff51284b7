"""Records for people: where to begin, what to leave out, and how keys and values are shown.

Values that are JSON objects, or Arrow data as Arrow's IPC format has it, are also shown as tables.

A search reads records from the chosen place on until it has found enough, has looked at `MOST_LOOKED_AT`, has reached
the end, or `PATIENCE_S` have passed; the page says how far it came. Reading joins no group and commits nothing.

Values come from any client that may write to a topic, and all users share the process. A value of some hundred bytes
may be Arrow data with billions of nulls, or JSON that is a thousand times as long once it is indented. So no more of a
value is made into Python objects or text than is shown, and the records of a search have `MOST_FOUND_BYTES` together.
"""

from __future__ import annotations

import heapq
import json
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, NamedTuple

import raftlog
from raftlog._core.words import counted
from raftlog.errors import InvalidRequestError
from raftlog.types import Record, TopicPartition

MOST_LOOKED_AT: Final = 50_000
PATIENCE_S: Final = 4.0
MOST_SHOWN: Final = 200
MOST_FOUND_BYTES: Final = 8 << 20
"""Of the records of a page together, or one record that is longer."""
LONGEST_PARSED: Final = 2 << 20
"""Bytes of a value that is read as JSON; parsed it takes 20 times as much memory."""
LONGEST_SHOWN: Final = 4_000
"""Characters of a value on the page; the page of the record alone shows `LONGEST_ALONE`."""
LONGEST_ALONE: Final = 1_000_000
BEGINS: Final = ("newest", "oldest", "offset", "time")
FORMS: Final = ("auto", "text", "json", "hex", "arrow")
VIEWS: Final = ("records", "table")
MOST_COLUMNS: Final = 30
MOST_NAMES: Final = 1_000
"""Fields of an object that are looked at, and names of fields that are counted."""
MOST_TABLE_ROWS: Final = 500
LONGEST_CELL: Final = 80
_STEP: Final = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d+)\]|\[['\"]([^'\"]+)['\"]\]")


class JsonPath(NamedTuple):
    """`$.a.b[0]`, or `$.a.b == text` to compare."""

    steps: tuple[str | int, ...]
    wanted: str | None

    @classmethod
    def parse(cls, text: str) -> JsonPath:
        """Return the path that a text names.

        Raises:
            InvalidRequestError: it is no path.
        """
        path, equal, wanted = text.partition("==")
        path = path.strip().removeprefix("$")
        if not path.startswith((".", "[")):
            path = f".{path}"
        steps: list[str | int] = []
        position = 0
        while position < len(path):
            step = _STEP.match(path, position)
            if step is None:
                raise InvalidRequestError(
                    f"{text!r} is no JSON path; write for example $.flight.carrier or $.flight.carrier == AA"
                )
            steps.append(int(step[2]) if step[2] is not None else step[1] or step[3])
            position = step.end()
        return cls(tuple(steps), wanted.strip().strip("'\"") if equal else None)

    def matches(self, value: bytes | None) -> bool:
        """Whether a value is JSON, has the path, and equals what is wanted there."""
        try:
            found = _parsed(value)
            for step in self.steps:
                found = found[step]
        except (ValueError, RecursionError, LookupError, TypeError):
            return False
        if self.wanted is None:
            return True
        return found == self.wanted if isinstance(found, str) else json.dumps(found) == self.wanted


class AuditFilter(NamedTuple):
    """Which audit records to show: parts of texts, and how it ended. Empty: all."""

    who: str = ""
    what: str = ""
    on: str = ""
    host: str = ""
    outcome: str = ""

    def matches(self, value: bytes | None) -> bool:
        """Whether a record of the audit topic is one of these."""
        line = audit_line(value)
        texts = (
            (self.who, line.get("principal", "")),
            (self.what, line.get("operation", "")),
            (self.on, f"{line.get('resource_type', '')} {line.get('resource', '')}"),
            (self.host, line.get("host", "")),
        )
        if not all(wanted.lower() in str(found).lower() for wanted, found in texts):
            return False
        return not self.outcome or line.get("event") == self.outcome


OUTCOMES: Final = ("refused", "allowed", "changed", "may have been changed", "dropped")


def audit_line(value: bytes | None) -> dict[str, object]:
    """Return the fields of an audit record (docs/security.md); none if it is something else."""
    return _object(value) or {}


@dataclass(frozen=True, slots=True)
class Query:
    """What to show of a topic. `offset`, `time_ms`: where to begin if `begin` says so."""

    begin: str = "newest"
    partition: int | None = None
    offset: int = 0
    time_ms: int = 0
    limit: int = 50
    key: str = ""
    value: str = ""
    header: str = ""
    path: JsonPath | None = None
    form: str = "auto"
    view: str = "records"
    audit: AuditFilter | None = None

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Query:
        """Return the query of a form.

        Raises:
            InvalidRequestError: a field is malformed; says how to write it.
        """

        def number(name: str, default: int, most: int) -> int:
            text = fields.get(name, "").strip()
            if not text:
                return default
            if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) > most:
                raise InvalidRequestError(f"{name} {text!r}: write a whole number up to {most}")
            return int(text)

        begin = fields.get("begin") or "newest"
        form = fields.get("form") or "auto"
        view = fields.get("view") or "records"
        if begin not in BEGINS or form not in FORMS or view not in VIEWS:
            raise InvalidRequestError(
                f"begin is one of {', '.join(BEGINS)}, form one of {', '.join(FORMS)}, view one of {', '.join(VIEWS)}"
            )
        partition = number("partition", -1, 1 << 31)
        path = fields.get("path", "").strip()
        return cls(
            begin=begin,
            partition=None if partition < 0 else partition,
            offset=number("offset", 0, 1 << 62),
            time_ms=_time_ms(fields.get("time", "").strip()) if begin == "time" else 0,
            limit=max(1, number("limit", 50, MOST_SHOWN)),
            key=fields.get("key", ""),
            value=fields.get("value", ""),
            header=fields.get("header", "").strip(),
            path=JsonPath.parse(path) if path else None,
            form=form,
            view=view,
        )

    @property
    def filters(self) -> bool:
        """Whether some records are left out."""
        return bool(self.key or self.value or self.header or self.path or (self.audit and any(self.audit)))

    def wants(self, record: Record) -> bool:
        """Whether a record passes the filters."""
        if self.key and self.key.encode() not in (record.key or b""):
            return False
        if self.value and self.value.encode() not in (record.value or b""):
            return False
        if self.header:
            name, equal, wanted = self.header.partition("=")
            found = [value for key, value in record.headers if key == name]
            if not found or (equal and wanted.encode() not in found):
                return False
        if self.audit is not None and not self.audit.matches(record.value):
            return False
        return self.path is None or self.path.matches(record.value)


def _time_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(f"time {text!r}: write for example 2026-11-01T12:30 (UTC)") from None
    return round((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)


class Found(NamedTuple):
    """The records found, the newest first.

    `looked_at`: how many were read; `done`: whether the end was reached; `cut`: whether some were left out because all
    together have more than `MOST_FOUND_BYTES`.
    """

    records: list[Record]
    looked_at: int
    done: bool
    cut: bool = False


class _Kept:
    """The records that a page shows, of those found so far: the newest ones, or the oldest."""

    def __init__(self, query: Query) -> None:
        self._limit = query.limit
        self._newest = query.begin == "newest"
        self._heap: list[tuple[tuple[int, int, int], Record]] = []
        """The one that gives way first, first."""
        self._bytes = 0
        self.is_cut = False

    def add(self, record: Record) -> None:
        """Keep a record, or leave it out, or let others give way."""
        age = (record.timestamp_ms, record.partition, record.offset)
        heapq.heappush(self._heap, (age if self._newest else (-age[0], -age[1], -age[2]), record))
        self._bytes += _size_of(record)
        while len(self._heap) > self._limit or (self._bytes > MOST_FOUND_BYTES and len(self._heap) > 1):
            self.is_cut |= len(self._heap) <= self._limit
            self._bytes -= _size_of(heapq.heappop(self._heap)[1])

    @property
    def is_full(self) -> bool:
        """Whether records that come later change nothing."""
        return not self._newest and (len(self._heap) >= self._limit or self.is_cut)

    def in_order(self) -> list[Record]:
        """Return them, the newest first where the newest are wanted, else the oldest."""
        return [record for _, record in sorted(self._heap, key=lambda each: each[0], reverse=True)]


def _size_of(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def search(consumer: raftlog.Consumer, topic: str, query: Query, now_s: Callable[[], float] = time.monotonic) -> Found:
    """Return the records of a topic that a query asks for.

    Raises:
        UnknownTopicOrPartition: there is no such topic, or no such partition.
        RaftlogError: the cluster does not answer, or this user may not read the topic.
    """
    parts = consumer.partitions_for(topic)
    if query.partition is not None:
        parts = [TopicPartition(topic, query.partition)]
    ends = consumer.end_offsets(parts)
    starts = consumer.beginning_offsets(parts)
    left = {part for part in parts if ends[part] > starts[part]}
    begins = _begins(consumer, query, starts, ends)
    left = {part for part in left if begins[part] < ends[part]}
    if not left:
        return Found([], 0, True)
    consumer.assign(sorted(left))
    for part in left:
        consumer.seek(part, begins[part])
    deadline_s = now_s() + PATIENCE_S
    kept = _Kept(query)
    looked_at = 0
    while left and looked_at < MOST_LOOKED_AT and now_s() < deadline_s:
        for record in consumer.poll(0.2):
            if record.offset < ends[TopicPartition(record.topic, record.partition)]:
                looked_at += 1
                if query.wants(record):
                    kept.add(record)
        if kept.is_full:
            break
        passed = {part for part in left if consumer.position(part) >= ends[part]}
        for part in passed:
            consumer.pause(part)
        left -= passed
    return Found(kept.in_order(), looked_at, not left, kept.is_cut)


def _begins(
    consumer: raftlog.Consumer,
    query: Query,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    match query.begin:
        case "newest":
            back = MOST_LOOKED_AT // max(1, len(ends)) if query.filters else query.limit
            return {part: max(starts[part], ends[part] - back) for part in ends}
        case "offset":
            return {part: max(starts[part], query.offset) for part in ends}
        case "time":
            found = consumer.offsets_for_times(dict.fromkeys(ends, query.time_ms))
            return {part: place.offset if (place := found.get(part)) is not None else end for part, end in ends.items()}
        case _:
            return dict(starts)


# Showing


class Shown(NamedTuple):
    """Bytes as text. `form`: null, text, json or hex. `cut`: whether more is there."""

    text: str
    form: str
    cut: bool = False


def shown(data: bytes | None, form: str = "auto", longest: int = LONGEST_SHOWN) -> Shown:
    """Return bytes as a person reads them: JSON indented, other text as it is, anything else in hexadecimal digits."""
    if data is None:
        return Shown("null", "null")
    if form in ("auto", "json") and data[:1] in (b"{", b"["):
        try:
            indented = _indented(data, longest)
            return Shown(indented[:longest], "json", len(indented) > longest)
        except (ValueError, RecursionError):
            pass
    if form != "hex":
        text: str | None
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None if form == "auto" else data.decode(errors="backslashreplace")
        if text is not None and (form != "auto" or all(each.isprintable() or each in "\r\n\t" for each in text)):
            return Shown(text[:longest], "text", len(text) > longest)
    lines = [
        f"{at:08x}  {data[at : at + 16].hex(' '):<47}  "
        + "".join(chr(each) if 32 <= each < 127 else "." for each in data[at : at + 16])
        for at in range(0, min(len(data), longest // 4), 16)
    ]
    return Shown("\n".join(lines), "hex", len(data) > longest // 4)


def _parsed(value: bytes | None) -> Any:
    """Return the JSON value.

    Raises:
        ValueError: it is none, or too long to be parsed.
        RecursionError: it is too deep.
    """
    if value is not None and len(value) > LONGEST_PARSED:
        raise ValueError(f"{len(value)} bytes are too many to parse")
    return json.loads(value or b"")


def _indented(data: bytes, longest: int) -> str:
    """Return JSON with indentation, or its beginning if it is longer than `longest`. Raises as `_parsed`."""
    pieces: list[str] = []
    length = 0
    for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(_parsed(data)):
        pieces.append(piece)
        length += len(piece)
        if length > longest:
            break
    return "".join(pieces)


def brief(data: bytes | None, longest: int = 120) -> Shown:
    """Return bytes on one line, for a row of a table."""
    if data is None:
        return Shown("null", "null")
    if (arrow := arrow_of(data, 0)) is not None:
        return Shown(f"Arrow: {counted(len(arrow.columns), 'column')}, {counted(arrow.total, 'row')}", "arrow")
    try:
        text = " ".join(data[: longest * 4].decode(errors="strict" if len(data) <= longest * 4 else "ignore").split())
        if not text.isprintable():
            raise ValueError
        return Shown(text[:longest], "text", len(text) > longest or len(data) > longest * 4)
    except ValueError:
        return Shown(data[: longest // 3].hex(" "), "hex", len(data) > longest // 3)


class Column(NamedTuple):
    """A column of a table: a field of JSON objects or of Arrow data, and the Arrow type that fits all its values."""

    name: str
    type: str


class Table(NamedTuple):
    """Values as typed columns. `rows`: a record with the text of each cell, None: no such field.

    `others`: how many records have a value that is neither a JSON object nor Arrow data. `left_out`: how many columns
    there are beyond these. `more_rows`: whether Arrow data have more rows than these.
    """

    columns: list[Column]
    rows: list[tuple[Record, list[str | None]]]
    others: int
    left_out: int
    more_rows: bool = False


def table_of(records: Sequence[Record]) -> Table:
    """Return the JSON objects and the rows of Arrow data among the values; columns are in the order of appearance."""
    parsed: list[tuple[Record, dict[str, str]]] = []
    types: dict[str, set[str]] = {}
    """Of the columns of Arrow data."""
    seen: dict[str, list[object]] = {}
    """Values of each field, as far as they tell its type."""
    others, more_rows = 0, False
    for record in records:
        room = MOST_TABLE_ROWS - len(parsed)
        if (arrow := arrow_of(record.value, max(0, min(room, MOST_SHOWN)))) is not None:
            for column in arrow.columns[:MOST_NAMES]:
                types.setdefault(column.name, set()).add(column.type)
            objects: Sequence[Mapping[str, object]] = arrow.rows
            more_rows |= arrow.total > len(arrow.rows)
        elif (fields := _object(record.value)) is None:
            others += 1
            continue
        else:
            objects = [fields] if room else []
            more_rows |= not room
        for row in objects:
            cells: dict[str, str] = {}
            for name in islice(row, MOST_NAMES):
                text = _text(row[name])
                cells[name] = _cell(text)
                if name in seen or len(seen) < MOST_NAMES:
                    seen.setdefault(name, []).append(_typical(row[name], text))
            parsed.append((record, cells))
    every = list(dict.fromkeys([*types, *seen]))
    shown_names = every[:MOST_COLUMNS]
    columns = []
    for name in shown_names:
        told = types.get(name, set())
        columns.append(Column(name, min(told) if len(told) == 1 else _type_of(seen.get(name, []))))
    rows = [(record, [cells.get(name) for name in shown_names]) for record, cells in parsed]
    return Table(columns, rows, others, len(every) - len(shown_names), more_rows)


class ArrowRows(NamedTuple):
    """A value that is Arrow data: its columns, its first rows with `MOST_COLUMNS` columns, and how many rows it has."""

    columns: list[Column]
    rows: list[dict[str, object]]
    total: int


def arrow_of(value: bytes | None, most_rows: int = MOST_SHOWN) -> ArrowRows | None:
    """Return the rows of a value in Arrow's IPC format, a stream or a file; None if it is something else.

    Compressed data are not unpacked, because a small value could become a very large one.
    """
    if value is None or not _looks_like_arrow(value):
        return None
    import pyarrow as pa  # here: most pages of the console never need it

    # A file is a stream between a magic number and a footer.
    stream = pa.py_buffer(value[8:] if value[:6] == _ARROW_FILE else value)
    try:
        if any(_is_compressed(message.metadata.to_pybytes()) for message in pa.ipc.MessageReader.open_stream(stream)):
            return None
        reader = pa.ipc.open_stream(stream)
        rows: list[dict[str, object]] = []
        total = 0
        for batch in reader:
            batch.validate(full=True)
            total += batch.num_rows
            left = batch.slice(0, max(0, most_rows - len(rows)))
            texts = [[_python(each, [LONGEST_CELL + 1]) for each in column] for column in left.columns[:MOST_COLUMNS]]
            names = batch.schema.names[:MOST_COLUMNS]
            rows += (dict(zip(names, row, strict=True)) for row in zip(*texts, strict=True))
        return ArrowRows([Column(field.name, _type_text(field.type)) for field in reader.schema], rows, total)
    except (pa.ArrowException, OSError, EOFError, LookupError, ValueError, struct.error):
        return None


_ARROW_FILE: Final = b"ARROW1"
_CONTINUES: Final = b"\xff\xff\xff\xff"
_RECORD_BATCH: Final = 3
_DICTIONARY_BATCH: Final = 2
_INT: Final = struct.Struct("<i")
_SHORT: Final = struct.Struct("<H")


def _looks_like_arrow(value: bytes) -> bool:
    if value[:6] == _ARROW_FILE:
        return True
    return value[:4] == _CONTINUES and len(value) >= 8 and 0 < _INT.unpack_from(value, 4)[0] <= len(value) - 8


def _is_compressed(metadata: bytes) -> bool:
    """Whether a message is a batch with a compressed body (Arrow's Message.fbs: RecordBatch.compression)."""

    def field(table: int, number: int) -> int | None:
        entries = table - _INT.unpack_from(metadata, table)[0]
        place = 4 + 2 * number
        offset = (
            _SHORT.unpack_from(metadata, entries + place)[0] if place < _SHORT.unpack_from(metadata, entries)[0] else 0
        )
        return table + offset if offset else None

    def table_in(table: int, number: int) -> int | None:
        at = field(table, number)
        return None if at is None else at + _INT.unpack_from(metadata, at)[0]

    message = _INT.unpack_from(metadata, 0)[0]
    kind, header = field(message, 1), table_in(message, 2)
    if kind is None or header is None:
        return False
    if metadata[kind] == _DICTIONARY_BATCH:
        header = table_in(header, 1)
    elif metadata[kind] != _RECORD_BATCH:
        return False
    return header is not None and field(header, 3) is not None


def _python(scalar: Any, left: list[int]) -> object:
    """Return a value of Arrow data, or the first `left[0]` values that it is made of: a cell shows no more.

    Each of them takes a character at least. A list is a view of values that may be billions, or the same for each row.
    """
    import pyarrow as pa

    left[0] -= 1
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.MapScalar):
        pairs = (_python(each, left) for each in _some(scalar.values, left))
        return [tuple(pair.values()) if isinstance(pair, dict) else pair for pair in pairs]
    if isinstance(scalar, pa.ListScalar):  # and its kin
        return [_python(each, left) for each in _some(scalar.values, left)]
    if isinstance(scalar, pa.StructScalar):
        return {scalar.type[at].name: _python(scalar[at], left) for at in _some(range(len(scalar.type)), left)}
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar | pa.RunEndEncodedScalar | pa.UnionScalar):
        return _python(scalar.value, left)
    if isinstance(scalar, pa.BinaryScalar):  # a text, too
        data = bytes(scalar.as_buffer()[: 4 * (LONGEST_CELL + 2)])
        return data.decode(errors="ignore") if isinstance(scalar, pa.StringScalar) else data
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):  # such as nanoseconds, which Python's times do not have
        return str(scalar)


def _some(values: Any, left: list[int]) -> Iterator[Any]:
    """Yield values as long as there is room."""
    for at in range(len(values)):
        if left[0] <= 0:
            return
        yield values[at]


def _object(value: bytes | None) -> dict[str, object] | None:
    try:
        found = _parsed(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _type_of(values: list[object]) -> str:
    import pyarrow as pa  # here: most pages of the console never need it

    try:
        return _type_text(pa.array(values).type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return "mixed"


def _type_text(arrow_type: object) -> str:
    found = str(arrow_type)
    return found if len(found) <= LONGEST_CELL // 2 else f"{found.partition('<')[0]}<…>"


def _typical(value: object, text: str) -> object:
    """Return a short value with the type of `value`; None, which is of every type, if it is too long to tell.

    `text`: the whole of it.
    """
    if isinstance(value, str):
        return _cell(text)
    return value if len(text) <= LONGEST_SHOWN else None


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_other)
    except RecursionError:
        return "…"


def _cell(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 1]}…"


def _other(value: object) -> str:
    """Return a value that JSON does not have, as text."""
    return value.hex(" ") if isinstance(value, bytes) else str(value)


def parse_headers(text: str) -> list[tuple[str, bytes | None]]:
    """Return the headers that lines of `name=value` write.

    Raises:
        InvalidRequestError: a line has no `=`.
    """
    found: list[tuple[str, bytes | None]] = []
    for line in text.splitlines():
        if line.strip():
            name, equal, value = line.partition("=")
            if not equal or not name.strip():
                raise InvalidRequestError(f"header {line!r}: write name=value, one on each line")
            found.append((name.strip(), value.encode()))
    return found
