"""`raftlog consume`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated

import typer

import raftlog
from raftlog.cli import internal_records
from raftlog.cli.clients import connect_consumer
from raftlog.cli.group_reading import GroupReading
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, json_text
from raftlog.cli.reading import Begin, Reading
from raftlog.cli.records import json_record, text_of
from raftlog.cli.signals import orderly_end
from raftlog.errors import InvalidPartitions

_SEPARATOR = "\t"


class IsolationLevel(StrEnum):
    """What `--isolation-level` takes."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class RecordOutput(StrEnum):
    """What `--output` of this command takes."""

    TEXT = "text"
    JSON = "json"
    RAW = "raw"


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    group: Annotated[
        str | None,
        typer.Option(
            "--group", "-g", help="Share the partitions with the group's other members, and go on where it was."
        ),
    ] = None,
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
    isolation_level: Annotated[
        IsolationLevel,
        typer.Option(help="read_uncommitted: also records of transactions that are open, or were aborted."),
    ] = IsolationLevel.READ_COMMITTED,
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
    prints, raftlog produce --format json takes. Records of __consumer_offsets are printed as what they say, in JSON.

    With --group, what was printed is committed: whoever reads for the group next goes on after it. --from-beginning
    counts only where the group has committed nothing.

    Examples:

      raftlog consume events

      raftlog consume events --from-beginning --no-follow --output json

      raftlog consume events --partition 0 --offset 100 --max 10 --print-key

      raftlog consume events --group billing --from-beginning
    """
    if offset is not None and from_beginning:
        raise typer.BadParameter("--offset and --from-beginning contradict each other")
    if group == "":
        raise typer.BadParameter("--group is empty; name a group, or leave it out")
    printer = _Printer(output, print_key, print_headers, print_timestamp, print_offset)
    if group is not None:
        if offset is not None or partition is not None:
            raise typer.BadParameter(
                "with --group it is the group that says which partitions are read, and from where; leave --offset and "
                "--partition out, or see raftlog group reset-offsets"
            )
        begin_at = "earliest" if from_beginning else "latest"
        with (
            orderly_end(),
            connect_consumer(
                bootstrap, begin_at, group, patience_s=timeout_s, isolation_level=isolation_level
            ) as consumer,
        ):
            consumer.partitions_for(topic)  # a group would wait for a topic that there is not
            for records in GroupReading(consumer, topic, follow=follow).polls(timeout_s, max_records):
                printer.print_all(records)
        return
    out_of_range = "earliest" if offset is None else "none"
    with connect_consumer(bootstrap, out_of_range, isolation_level=isolation_level) as consumer:
        begin = Begin.BEGINNING if from_beginning else Begin.END if offset is None else offset
        places = _partitions(consumer, topic, partition)
        reading = Reading(consumer, places, begin, follow=follow, topic=topic if partition is None else None)
        left = max_records
        for records in reading.polls(timeout_s):
            printer.print_all(records[:left])
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


def _of_coordinators(record: raftlog.Record) -> dict[str, object] | None:
    """Return what a record of __consumer_offsets or __transaction_state says; None for any other."""
    return internal_records.readable(record.topic, record.key, record.value)


class _Printer:
    """Prints records to standard output."""

    def __init__(self, output: RecordOutput, key: bool, headers: bool, timestamp: bool, offset: bool) -> None:
        self._output = output
        self._key = key
        self._headers = headers
        self._timestamp = timestamp
        self._offset = offset

    def print_all(self, records: Iterable[raftlog.Record]) -> None:
        """Print records, and let everything out."""
        for record in records:
            self.print(record)
        sys.stdout.flush()

    def print(self, record: raftlog.Record) -> None:
        """Print one record."""
        match self._output:
            case RecordOutput.RAW:
                sys.stdout.buffer.write(record.value or b"")
            case _ if (content := _of_coordinators(record)) is not None:
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
            yield f"{record.partition}:{record.offset}"
        if self._timestamp:
            yield str(record.timestamp_ms)
        if self._headers:
            yield ",".join(f"{name}={text_of(data)}" for name, data in record.headers)
        if self._key:
            yield text_of(record.key)
        yield text_of(record.value)
