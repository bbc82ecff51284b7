"""`raftlog consume`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, StrEnum, auto
from typing import Annotated

import typer

import raftlog
from raftlog._client.offsets import EARLIEST, LATEST, STRAGGLER_GRACE_S
from raftlog._consumer import try_offsets
from raftlog.cli.clients import connect_consumer
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, counted, json_text, print_note
from raftlog.cli.records import json_record, text_of
from raftlog.errors import InvalidPartitions, LeaderNotAvailable, OffsetOutOfRange, RaftlogError, RetriableError

_POLL_S = 0.5
_RETRY_S = 2.0
"""Between attempts to read what could not be read."""
_RETRY_PATIENCE_S = 0.5
"""How long such an attempt may keep those waiting that are read."""
_STALLED_S = 10.0
"""Without --follow and --timeout: a partition that has not reached its end by then will not soon."""
_NAMED = 5
"""How many partitions one line names."""
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
        float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="Stop when nothing came for so long.")
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
    """Print a topic's records.

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
        begin = _Begin.BEGINNING if from_beginning else _Begin.END if offset is None else offset
        reading = _Reading(consumer, _partitions(consumer, topic, partition), begin, follow=follow)
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


class _Begin(Enum):
    """Where reading begins, when it is not an offset."""

    BEGINNING = auto()
    END = auto()


class _Reading:
    """Partitions that are read, those that cannot be and are asked again meanwhile, and where reading ends.

    Attributes:
        unread: why a partition cannot be read for now.

    Raises:
        RaftlogError: no partition can be read.
        OffsetOutOfRange: a partition does not have the offset to begin at.
    """

    def __init__(
        self, consumer: raftlog.Consumer, places: list[raftlog.TopicPartition], begin: _Begin | int, *, follow: bool
    ) -> None:
        self.unread: dict[raftlog.TopicPartition, RaftlogError] = {}
        self._consumer = consumer
        self._begin = begin
        self._follow = follow
        self._several = len(places) > 1
        self._ends: dict[raftlog.TopicPartition, int] = {}
        self._assigned: list[raftlog.TopicPartition] = []
        self._take_in(places, None)
        if self.unread:
            print_note(f"{self._why_unread()}; reading the other partitions and trying again")
        self._retry_at_s = time.monotonic() + _RETRY_S

    def polls(self, timeout_s: float | None) -> Iterator[list[raftlog.Record]]:
        """Yield records as they come; without following, those below the ends, and no longer than until all are
        reached, or nothing has come for _STALLED_S."""
        last_record = time.monotonic()
        limit_s = timeout_s if timeout_s is not None or self._follow else _STALLED_S
        while True:
            ends = self._ends
            if not self._follow:
                ends = self._ends = {place: end for place, end in ends.items() if self._consumer.position(place) < end}
                if not ends:
                    self._retry(last_time=True)
                    if not self._ends:
                        return
                    continue
            wait_s = _POLL_S if limit_s is None else min(_POLL_S, max(0.0, last_record + limit_s - time.monotonic()))
            records = self._consumer.poll(wait_s)
            if records:
                yield [record for record in records if self._follow or _is_before_end(record, ends)]
                last_record = time.monotonic()
            elif limit_s is not None and time.monotonic() >= last_record + limit_s:
                return
            self._retry()

    def check_complete(self) -> None:
        """Without following: see that everything was read.

        Raises:
            LeaderNotAvailable: names the partitions that were not, or not to their ends.
        """
        if self._follow:
            return
        problems = [self._why_unread()] if self.unread else []
        if self._ends:
            places = ", ".join(map(str, sorted(self._ends)))
            problems.append(f"nothing more came from {places}, which did not reach the end")
        if problems:
            raise LeaderNotAvailable("; ".join(problems))

    def _retry(self, *, last_time: bool = False) -> None:
        """Take partitions in that can be read by now."""
        if self.unread and (last_time or time.monotonic() >= self._retry_at_s):
            with suppress(RetriableError):
                self._take_in(sorted(self.unread), _RETRY_PATIENCE_S)
            self._retry_at_s = time.monotonic() + _RETRY_S

    def _take_in(self, places: list[raftlog.TopicPartition], patience_s: float | None) -> None:
        begin = self._begin
        starts = {} if begin is _Begin.END else self._look_up(places, EARLIEST, patience_s)
        needs_ends = begin is not _Begin.BEGINNING or not self._follow
        ends = self._look_up(sorted(starts) or places, LATEST, patience_s) if needs_ends else {}
        found = [place for place in places if (place in ends if needs_ends else place in starts)]
        if not found:
            return
        for place in found:
            self.unread.pop(place, None)
        if isinstance(begin, int):
            _check_offset(begin, starts, {place: ends[place] for place in found}, several=self._several)
        self._assigned += found
        self._consumer.assign(self._assigned)
        for place in found:
            match begin:
                case _Begin.BEGINNING:
                    self._consumer.seek(place, starts[place])
                case _Begin.END:
                    self._consumer.seek(place, ends[place])
                case _:
                    self._consumer.seek(place, begin)
        if not self._follow:
            self._ends |= {place: ends[place] for place in found}

    def _look_up(
        self, places: list[raftlog.TopicPartition], which: int, patience_s: float | None
    ) -> dict[raftlog.TopicPartition, int]:
        found: dict[raftlog.TopicPartition, int] = {}
        grace_s = STRAGGLER_GRACE_S if patience_s is None else patience_s
        for place, answer in try_offsets(self._consumer, places, which, grace_s, patience_s).items():
            if isinstance(answer, RaftlogError):
                self.unread[place] = answer
            else:
                found[place] = answer
        return found

    def _why_unread(self) -> str:
        reasons = [
            str(error) if str(error).startswith(f"{place}") else f"{place}: {error}"
            for place, error in sorted(self.unread.items())
        ]
        more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
        return f"cannot read {counted(len(reasons), 'partition')}: {'; '.join(reasons[:_NAMED])}{more}"


def _check_offset(
    offset: int,
    starts: dict[raftlog.TopicPartition, int],
    ends: dict[raftlog.TopicPartition, int],
    *,
    several: bool,
) -> None:
    for place, end in ends.items():
        if not starts[place] <= offset <= end:
            choice = "; choose one with --partition" if several else ""
            raise OffsetOutOfRange(f"{place} has offsets {starts[place]} to {end}, {offset} is not among them{choice}")


def _is_before_end(record: raftlog.Record, ends: dict[raftlog.TopicPartition, int]) -> bool:
    return record.offset < ends.get(raftlog.TopicPartition(record.topic, record.partition), 0)


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
