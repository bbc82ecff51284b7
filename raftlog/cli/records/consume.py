"""`raftlog consume`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Final

import typer

import raftlog
from raftlog.cli.client_config import connect_consumer
from raftlog.cli.groups.reset_offsets import parse_span_ms, parse_time_ms
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, json_text, orderly_end
from raftlog.cli.records.internal_records import json_record, readable, text_of
from raftlog.cli.records.reading import Begin, Beginning, FromTime, GroupReading, LastRecords, Reading
from raftlog.errors import InvalidPartitions

_SEPARATOR = "\t"


class IsolationLevel(StrEnum):
    """The values of `--isolation-level`."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class RecordOutput(StrEnum):
    """The values of this command's `--output`."""

    TEXT = "text"
    JSON = "json"
    RAW = "raw"


def consume(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False)],
    group: Annotated[
        str | None,
        typer.Option(
            "--group", "-g", help="Join this group: share its partitions, and continue at its committed offsets."
        ),
    ] = None,
    from_beginning: Annotated[
        bool,
        typer.Option(
            "--from-beginning", metavar="", help="Begin at the oldest record; by default only new records are printed."
        ),
    ] = False,
    offset: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Begin at this offset, which every printed partition must have."),
    ] = None,
    from_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Begin at the first record at or after this time: 2026-11-01T12:30:00Z, milliseconds since 1970, or "
            "90m for 90 minutes ago.",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Begin N offsets before the end of each partition.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", metavar="N", min=0, help="Only this partition.")
    ] = None,
    max_records: Annotated[
        int | None, typer.Option("--max", "-n", metavar="N", min=1, help="Stop after this number of records.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow", metavar="", help="--no-follow: stop at the offset that was the end at the start."
        ),
    ] = True,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            metavar="SECONDS",
            help="Stop after this time without a record; an error if a leader was unreachable.",
        ),
    ] = None,
    isolation_level: Annotated[
        IsolationLevel,
        typer.Option(
            metavar="LEVEL",
            help="read_committed, or read_uncommitted: also records of open and aborted transactions.",
        ),
    ] = IsolationLevel.READ_COMMITTED,
    output: Annotated[
        RecordOutput,
        typer.Option(
            "--output", "-o", help="text: a line per record; json: an object per record; raw: the values' bytes."
        ),
    ] = RecordOutput.TEXT,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="TEXT",
            help="The form of a printed record, as in kcat: %t topic, %p partition, %o offset, %T timestamp, %k key, "
            "%v or %s value, %h headers, %K and %S lengths of key and value (-1: none), %% a percent sign; \\n, \\t.",
        ),
    ] = None,
    print_key: Annotated[bool, typer.Option("--print-key", metavar="", help="Text: the key before the value.")] = False,
    print_headers: Annotated[
        bool, typer.Option("--print-headers", metavar="", help="Text: the headers, as name=value,...")
    ] = False,
    print_timestamp: Annotated[
        bool, typer.Option("--print-timestamp", metavar="", help="Text: milliseconds since 1970.")
    ] = False,
    print_offset: Annotated[
        bool,
        typer.Option(
            "--print-offset", metavar="", help="Text: partition:offset, or topic:partition:offset of several topics."
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
) -> None:
    """Print the records of all partitions of topics, including partitions that are added later.

    In text output, ␀ is an absent key or value, and \\x.. a byte that is not UTF-8. raftlog produce --format json reads
    the output of --output json. Records of __consumer_offsets and __transaction_state are decoded to JSON.

    --format prints the bytes of keys and values unchanged, and nothing for an absent one.

    With --group, the command commits the records that it has printed: the group continues after them. --from-beginning
    then applies only to partitions without a committed offset.

    Example: raftlog consume events

    Example: raftlog consume events --from-beginning --no-follow --output json

    Example: raftlog consume events --partition 0 --offset 100 --max 10 --print-key

    Example: raftlog consume events orders --from-time 2h --no-follow --format '%t %p %o %T %k %v\\n'

    Example: raftlog consume events --group billing --from-beginning
    """
    begins = [from_beginning, *(each is not None for each in (offset, from_time, last))]
    if sum(begins) > 1:
        raise typer.BadParameter("--from-beginning, --offset, --from-time and --last contradict each other; give one")
    if group == "":
        raise typer.BadParameter("--group is empty; name a group, or leave it out")
    if format is not None and (
        output is not RecordOutput.TEXT or print_key or print_headers or print_timestamp or print_offset
    ):
        raise typer.BadParameter("--format alone defines the output; leave --output and --print-... out")
    topics = list(dict.fromkeys(topics))
    printer = _Printer(output, print_key, print_headers, print_timestamp, print_offset, len(topics) > 1, format)
    if group is not None:
        if partition is not None or any(begins[1:]):
            raise typer.BadParameter(
                "with --group the group chooses the partitions and offsets; leave --offset, --from-time, --last and "
                "--partition out, or see raftlog group reset-offsets"
            )
        begin_at = "earliest" if from_beginning else "latest"
        with (
            orderly_end(),
            connect_consumer(
                bootstrap, begin_at, group, patience_s=timeout_s, isolation_level=isolation_level
            ) as consumer,
        ):
            for topic in topics:
                consumer.partitions_for(topic)  # fails for an unknown topic, for which a group would wait
            for records in GroupReading(consumer, topics, follow=follow).polls(timeout_s, max_records):
                printer.print_all(records)
        return
    out_of_range = "earliest" if offset is None else "none"
    with connect_consumer(bootstrap, out_of_range, isolation_level=isolation_level) as consumer:
        places = [place for topic in topics for place in _partitions(consumer, topic, partition)]
        begin = _beginning(from_beginning, offset, from_time, last)
        reading = Reading(consumer, places, begin, follow=follow, topics=topics if partition is None else ())
        left = max_records
        for records in reading.polls(timeout_s):
            printer.print_all(records[:left])
            if left is not None:
                left -= len(records)
                if left <= 0:
                    return
        reading.check_complete()


def _beginning(from_beginning: bool, offset: int | None, from_time: str | None, last: int | None) -> Beginning:
    """Return the place at which reading begins.

    Raises:
        typer.BadParameter: the time is malformed.
    """
    if from_time is not None:
        try:
            return FromTime(parse_time_ms(from_time))
        except ValueError:
            pass
        try:
            return FromTime(int(time.time() * 1000) - parse_span_ms(from_time))
        except ValueError:
            raise typer.BadParameter(
                f"--from-time {from_time}: write a time such as 2026-11-01T12:30:00Z, milliseconds since 1970, or a "
                "duration such as 90m"
            ) from None
    if last is not None:
        return LastRecords(last)
    if offset is not None:
        return offset
    return Begin.BEGINNING if from_beginning else Begin.END


_FIELDS: Final[dict[str, Callable[[raftlog.Record], bytes]]] = {
    "%": lambda record: b"%",
    "t": lambda record: record.topic.encode(),
    "p": lambda record: str(record.partition).encode(),
    "o": lambda record: str(record.offset).encode(),
    "T": lambda record: str(record.timestamp_ms).encode(),
    "k": lambda record: record.key or b"",
    "v": lambda record: record.value or b"",
    "s": lambda record: record.value or b"",
    "K": lambda record: str(-1 if record.key is None else len(record.key)).encode(),
    "S": lambda record: str(-1 if record.value is None else len(record.value)).encode(),
    "h": lambda record: ",".join(f"{name}={text_of(data)}" for name, data in record.headers).encode(),
}
"""The letters after a percent sign in `--format`."""
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_FORMAT_PART: Final = re.compile(r"%(.?)|\\x([0-9a-fA-F]{2})|\\(.?)|([^%\\]+)", re.DOTALL)


def format_parts(text: str) -> list[bytes | Callable[[raftlog.Record], bytes]]:
    """Return the parts of a `--format` text: bytes, and functions that return a record's field.

    Raises:
        typer.BadParameter: a percent sign or a backslash is followed by a letter without a meaning.
    """
    found: list[bytes | Callable[[raftlog.Record], bytes]] = []
    for match in _FORMAT_PART.finditer(text):
        field, byte, escape, plain = match.groups()
        if plain is not None:
            found.append(plain.encode())
        elif byte is not None:
            found.append(bytes.fromhex(byte))
        elif field in _FIELDS:
            found.append(_FIELDS[field])
        elif escape in _ESCAPES:
            found.append(_ESCAPES[escape])
        else:
            raise typer.BadParameter(
                f"--format: {match.group()} has no meaning; there are {', '.join(f'%{each}' for each in _FIELDS)}, "
                + ", ".join(f"\\{each}" for each in _ESCAPES)
                + " and \\x0a"
            )
    return found


def _partitions(consumer: raftlog.Consumer, topic: str, wanted: int | None) -> list[raftlog.TopicPartition]:
    found = consumer.partitions_for(topic)
    if wanted is not None and wanted >= len(found):
        raise InvalidPartitions(f"topic {topic} has no partition {wanted}; it has {len(found)}, from 0")
    return [place for place in found if wanted in (None, place.partition)]


class _Printer:
    """Prints records to standard output."""

    def __init__(
        self,
        output: RecordOutput,
        key: bool,
        headers: bool,
        timestamp: bool,
        offset: bool,
        several_topics: bool,
        format: str | None,
    ) -> None:
        self._output = output
        self._several_topics = several_topics
        self._format = None if format is None else format_parts(format)
        self._key = key
        self._headers = headers
        self._timestamp = timestamp
        self._offset = offset

    def print_all(self, records: Iterable[raftlog.Record]) -> None:
        """Print records, and flush."""
        if self._format is not None:
            for record in records:
                sys.stdout.buffer.write(
                    b"".join(each if isinstance(each, bytes) else each(record) for each in self._format)
                )
        else:
            for record in records:
                self.print(record)
        sys.stdout.flush()

    def print(self, record: raftlog.Record) -> None:
        """Print one record."""
        match self._output:
            case RecordOutput.RAW:
                sys.stdout.buffer.write(record.value or b"")
            case _ if (content := readable(record.topic, record.key, record.value)) is not None:
                place: dict[str, object] = {}
                if self._output is RecordOutput.JSON:
                    place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
                    place["timestamp"] = record.timestamp_ms
                print(json_text({**place, **content}))
            case RecordOutput.JSON:
                printed = json_record(
                    topic=record.topic,
                    partition=record.partition,
                    offset=record.offset,
                    timestamp_ms=record.timestamp_ms,
                    key=record.key,
                    value=record.value,
                    headers=record.headers,
                )
                print(json_text(printed))
            case _:
                print(_SEPARATOR.join(self._cells(record)))

    def _cells(self, record: raftlog.Record) -> Iterator[str]:
        if self._offset:
            yield f"{f'{record.topic}:' if self._several_topics else ''}{record.partition}:{record.offset}"
        if self._timestamp:
            yield str(record.timestamp_ms)
        if self._headers:
            yield ",".join(f"{name}={text_of(data)}" for name, data in record.headers)
        if self._key:
            yield text_of(record.key)
        yield text_of(record.value)
