"""`raftlog consume`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer

import raftlog
from raftlog.cli.clients import connect_consumer
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, json_text
from raftlog.cli.reading import Begin, Reading
from raftlog.cli.records import json_record, text_of
from raftlog.errors import InvalidPartitions

_SEPARATOR = "\t"


class RecordOutput(StrEnum):
    """What `--output` of this command takes."""

    TEXT = "text"
    JSON = "json"
    RAW = "raw"


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    from_beginning: Annotated[
        bool,
        typer.Option("--from-beginning", metavar="", help="From the oldest record; else only what comes from now on."),
    ] = False,
    offset: Annotated[
        int | None, typer.Option(min=0, help="From this offset, which every partition read must have.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")] = None,
    max_records: Annotated[int | None, typer.Option("--max", "-n", min=1, help="Stop after so many records.")] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", metavar="", help="--no-follow: stop at what is the end at the start."),
    ] = True,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            metavar="SECONDS",
            help="Stop when nothing came for so long; an error if a leader was out of reach.",
        ),
    ] = None,
    output: Annotated[
        RecordOutput,
        typer.Option("--output", "-o", help="text: a line each; json: an object each; raw: the values' bytes."),
    ] = RecordOutput.TEXT,
    print_key: Annotated[bool, typer.Option("--print-key", metavar="", help="Text: the key before the value.")] = False,
    print_headers: Annotated[
        bool, typer.Option("--print-headers", metavar="", help="Text: the headers, as name=value,...")
    ] = False,
    print_timestamp: Annotated[
        bool, typer.Option("--print-timestamp", metavar="", help="Text: milliseconds since 1970.")
    ] = False,
    print_offset: Annotated[bool, typer.Option("--print-offset", metavar="", help="Text: partition:offset.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
) -> None:
    """Print a topic's records; of all its partitions, also those that are added later.

    As text, a key or a value that is not there is ␀, and bytes that are not UTF-8 are \\x... . What --output json
    prints, raftlog produce --format json takes.

    Examples:

      raftlog consume events

      raftlog consume events --from-beginning --no-follow --output json

      raftlog consume events --partition 0 --offset 100 --max 10 --print-key
    """
    if offset is not None and from_beginning:
        raise typer.BadParameter("--offset and --from-beginning contradict each other")
    with connect_consumer(bootstrap, "earliest" if offset is None else "none") as consumer:
        begin = Begin.BEGINNING if from_beginning else Begin.END if offset is None else offset
        places = _partitions(consumer, topic, partition)
        reading = Reading(consumer, places, begin, follow=follow, topic=topic if partition is None else None)
        printer = _Printer(output, print_key, print_headers, print_timestamp, print_offset)
        left = max_records
        for records in reading.polls(timeout_s):
            for record in records[:left]:
                printer.print(record)
            printer.flush()
            if left is not None:
                left -= len(records)
                if left <= 0:
                    return
        reading.check_complete()


def _partitions(consumer: raftlog.Consumer, topic: str, wanted: int | None) -> list[raftlog.TopicPartition]:
    found = consumer.partitions_for(topic)
    if wanted is not None and wanted >= len(found):
        raise InvalidPartitions(f"topic {topic} has no partition {wanted}; it has {len(found)}, from 0")
    return [place for place in found if wanted in (None, place.partition)]


class _Printer:
    """Prints records to standard output."""

    def __init__(self, output: RecordOutput, key: bool, headers: bool, timestamp: bool, offset: bool) -> None:
        self._output = output
        self._key = key
        self._headers = headers
        self._timestamp = timestamp
        self._offset = offset

    def print(self, record: raftlog.Record) -> None:
        """Print one record."""
        match self._output:
            case RecordOutput.RAW:
                sys.stdout.buffer.write(record.value or b"")
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

    def flush(self) -> None:
        """Let everything out that was printed."""
        sys.stdout.flush()

    def _cells(self, record: raftlog.Record) -> Iterator[str]:
        if self._offset:
            yield f"{record.partition}:{record.offset}"
        if self._timestamp:
            yield str(record.timestamp_ms)
        if self._headers:
            yield ",".join(f"{name}={text_of(data)}" for name, data in record.headers)
        if self._key:
            yield text_of(record.key)
        yield text_of(record.value)
