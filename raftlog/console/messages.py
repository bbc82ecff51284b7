"""Records for people: where to begin, what to leave out, and how keys and values are shown.

A search reads records from the chosen place on until it has found enough, has looked at `MOST_LOOKED_AT`, has reached
the end, or `PATIENCE_S` have passed; the page says how far it came. Reading joins no group and commits nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import pyarrow as pa

import raftlog
from raftlog.errors import InvalidRequestError
from raftlog.types import Record, TopicPartition

MOST_LOOKED_AT: Final = 50_000
PATIENCE_S: Final = 4.0
MOST_SHOWN: Final = 200
LONGEST_SHOWN: Final = 4_000
"""Characters of a value on the page; the page of the record alone shows `LONGEST_ALONE`."""
LONGEST_ALONE: Final = 1_000_000
BEGINS: Final = ("newest", "oldest", "offset", "time")
FORMS: Final = ("auto", "text", "json", "hex")
VIEWS: Final = ("records", "table")
MOST_COLUMNS: Final = 30
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
    try:
        text = " ".join(data[: longest * 4].decode(errors="strict" if len(data) <= longest * 4 else "ignore").split())
        if not text.isprintable():
            raise ValueError
        return Shown(text[:longest], "text", len(text) > longest or len(data) > longest * 4)
    except ValueError:
        return Shown(data[: longest // 3].hex(" "), "hex", len(data) > longest // 3)


class Column(NamedTuple):
    """A column of a table: a field of JSON objects, and the Arrow type that fits all its values."""

    name: str
    type: str


class Table(NamedTuple):
    """Values as typed columns. `rows`: a record with the text of each cell, None: no such field.

    `others`: how many records have a value that is no JSON object. `left_out`: how many columns there are beyond these.
    """

    columns: list[Column]
    rows: list[tuple[Record, list[str | None]]]
    others: int
    left_out: int


def table_of(records: Sequence[Record]) -> Table:
    """Return the JSON objects among the values as a table; columns are in the order in which they appear first."""
    parsed = [(record, fields) for record in records if (fields := _object(record.value)) is not None]
    names = list(dict.fromkeys(name for _, fields in parsed for name in fields))
    shown_names = names[:MOST_COLUMNS]
    columns = [Column(name, _type_of([fields.get(name) for _, fields in parsed])) for name in shown_names]
    rows = [
        (record, [_cell(fields[name]) if name in fields else None for name in shown_names]) for record, fields in parsed
    ]
    return Table(columns, rows, len(records) - len(parsed), len(names) - len(shown_names))


def _object(value: bytes | None) -> dict[str, object] | None:
    try:
        found = json.loads(value or b"")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _type_of(values: list[object]) -> str:
    try:
        found = str(pa.array(values).type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return "mixed"
    return found if len(found) <= LONGEST_CELL // 2 else f"{found.partition('<')[0]}<…>"


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 1]}…"


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
