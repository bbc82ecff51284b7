"""Records for people: where to begin, what to leave out, and how keys and values are shown.

Values that are JSON objects, or Arrow data as Arrow's IPC format has it, are also shown as tables.

A search reads records from the chosen place on until it has found enough, has looked at `MOST_LOOKED_AT`, has reached
the end, or `PATIENCE_S` have passed; the page says how far it came. Reading joins no group and commits nothing.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import raftlog
from raftlog._core.words import counted
from raftlog.errors import InvalidRequestError
from raftlog.types import Record, TopicPartition

MOST_LOOKED_AT: Final = 50_000
PATIENCE_S: Final = 4.0
MOST_SHOWN: Final = 200
LONGEST_SHOWN: Final = 4_000
"""Characters of a value on the page; the page of the record alone shows `LONGEST_ALONE`."""
LONGEST_ALONE: Final = 1_000_000
BEGINS: Final = ("newest", "oldest", "offset", "time")
FORMS: Final = ("auto", "text", "json", "hex", "arrow")
VIEWS: Final = ("records", "table")
MOST_COLUMNS: Final = 30
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
            found = json.loads(value or b"")
            for step in self.steps:
                found = found[step]
        except (ValueError, LookupError, TypeError):
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
    """The records found, the newest first. `looked_at`: how many were read; `done`: whether the end was reached."""

    records: list[Record]
    looked_at: int
    done: bool


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
    found: list[Record] = []
    looked_at = 0
    newest = query.begin == "newest"
    while left and looked_at < MOST_LOOKED_AT and now_s() < deadline_s:
        for record in consumer.poll(0.2):
            if record.offset < ends[TopicPartition(record.topic, record.partition)]:
                looked_at += 1
                if query.wants(record):
                    found.append(record)
        if not newest and len(found) >= query.limit:
            break
        passed = {part for part in left if consumer.position(part) >= ends[part]}
        for part in passed:
            consumer.pause(part)
        left -= passed
    found.sort(key=lambda record: (record.timestamp_ms, record.partition, record.offset))
    shown = found[-query.limit :] if newest else found[: query.limit]
    return Found(shown[::-1] if newest else shown, looked_at, not left)


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
            indented = json.dumps(json.loads(data), indent=2, ensure_ascii=False)
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
    parsed: list[tuple[Record, Mapping[str, object]]] = []
    types: dict[str, set[str]] = {}
    others, more_rows = 0, False
    for record in records:
        if (arrow := arrow_of(record.value)) is not None:
            for column in arrow.columns:
                types.setdefault(column.name, set()).add(column.type)
            parsed += ((record, row) for row in arrow.rows)
            more_rows |= arrow.total > len(arrow.rows)
        elif (fields := _object(record.value)) is not None:
            parsed.append((record, fields))
        else:
            others += 1
    more_rows |= len(parsed) > MOST_TABLE_ROWS
    del parsed[MOST_TABLE_ROWS:]
    names = list(dict.fromkeys([*types, *(name for _, fields in parsed for name in fields)]))
    shown_names = names[:MOST_COLUMNS]
    columns = []
    for name in shown_names:
        told = types.get(name, set())
        columns.append(Column(name, min(told) if len(told) == 1 else _type_of([row.get(name) for _, row in parsed])))
    rows = [
        (record, [_cell(fields[name]) if name in fields else None for name in shown_names]) for record, fields in parsed
    ]
    return Table(columns, rows, others, len(names) - len(shown_names), more_rows)


class ArrowRows(NamedTuple):
    """A value that is Arrow data: its columns, its first rows, and how many rows it has."""

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
            texts = [[_python(each) for each in column] for column in left.columns]
            rows += (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*texts, strict=True))
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


def _python(scalar: Any) -> object:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):  # such as nanoseconds, which Python's times do not have
        return str(scalar)


def _object(value: bytes | None) -> dict[str, object] | None:
    try:
        found = json.loads(value or b"")
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


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_other)
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
