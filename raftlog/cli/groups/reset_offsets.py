"""`raftlog group reset-offsets`: shows and sets the offsets at which a group continues."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import raftlog
from raftlog._core.descriptions import GroupMemberDescription
from raftlog._core.words import counted, some
from raftlog.cli.client_config import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    print_note,
    print_rows,
)
from raftlog.config import parse_duration_ms
from raftlog.errors import GroupIdNotFound, InvalidConfig, InvalidRequestError, NonEmptyGroup, UnknownTopicOrPartition
from raftlog.types import OffsetAndMetadata, TopicPartition

_ISO_DURATION = re.compile(
    r"P(?!$)(?:(?P<d>\d+)D)?(?:T(?!$)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?", re.ASCII
)
_DATE_DIGITS = 8
"""ISO 8601 has dates such as 20261101."""
_SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}


class Reset(NamedTuple):
    """A partition's offset before and after. `why`: why the new offset differs from the requested one, or None."""

    part: TopicPartition
    current: int | None
    new: int
    why: str | None = None

    @property
    def row(self) -> dict[str, object]:
        """The change as a row."""
        return {
            "topic": self.part.topic,
            "partition": self.part.partition,
            "current_offset": self.current,
            "new_offset": self.new,
            "change": None if self.current is None else self.new - self.current,
        }


def bounded(part: TopicPartition, current: int | None, wanted: int, start: int, end: int) -> Reset:
    """Return the change to the wanted offset, or to the nearest one in the partition."""
    new = min(max(wanted, start), end)
    why = None if new == wanted else f"{part} has offsets {start} to {end}, so {new} is used instead of {wanted}"
    return Reset(part, current, new, why)


def parse_selection(texts: Iterable[str]) -> dict[str, set[int] | None]:
    """Return by topic the partitions that `TOPIC` or `TOPIC:0,1` names; None: all of them.

    Raises:
        ValueError: a text is malformed; the message says how to write it.
    """
    found: dict[str, set[int] | None] = {}
    for text in texts:
        topic, colon, numbers = text.partition(":")
        if not topic or (colon and not re.fullmatch(r"[0-9]+(,[0-9]+)*", numbers, re.ASCII)):
            raise ValueError(f"{text!r}: write a topic, or TOPIC:0,1 for some of its partitions")
        chosen = {int(number) for number in numbers.split(",")} if colon else None
        before = found.get(topic, set())
        found[topic] = None if chosen is None or before is None else before | chosen
    return found


def parse_time_ms(text: str) -> int:
    """Return Unix milliseconds for a time in ISO 8601, in UTC unless it has an offset; more than eight digits are
    milliseconds already.

    Raises:
        ValueError: the text is not such a time.
    """
    if len(text) > _DATE_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write for example 2026-11-01T12:30:00Z") from None
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_span_ms(text: str) -> int:
    """Return milliseconds for a duration: `90m`, `2d`, or in ISO 8601 `PT1H30M`.

    Raises:
        ValueError: the text is neither.
    """
    match = _ISO_DURATION.fullmatch(text.upper())
    if match is not None:
        return int(sum(_SECONDS[unit] * float(amount) for unit, amount in match.groupdict().items() if amount) * 1000)
    try:
        found = parse_duration_ms(text)
    except (ValueError, InvalidConfig):
        found = -1
    if found < 0:
        raise ValueError(f"{text!r} is not a duration; write for example 90m, 2d, or PT1H30M")
    return found


def parse_plan(text: str) -> dict[TopicPartition, int]:
    """Return offsets by partition from lines of `topic,partition,offset`, as `format_plan` writes them.

    Raises:
        ValueError: a line is malformed or repeats a partition; the message names the line.
    """
    found: dict[TopicPartition, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            cells = [cell.strip() for cell in next(csv.reader([line]), [])]
            if not cells or (number == 1 and cells == ["topic", "partition", "offset"]):
                continue
            topic, partition, offset = cells
            part = TopicPartition(topic, int(partition))
            where = int(offset)
            if not topic or part.partition < 0 or where < 0:
                raise ValueError
        except (ValueError, csv.Error):
            beginning = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
            raise ValueError(f"line {number}: {beginning!r}: write topic,partition,offset") from None
        if part in found:
            raise ValueError(f"line {number}: {part} is in the file twice")
        found[part] = where
    return found


def format_plan(offsets: Mapping[TopicPartition, int]) -> str:
    """Return offsets in the format that `parse_plan` reads."""
    return "".join(f"{part.topic},{part.partition},{offset}\n" for part, offset in offsets.items())


_COLUMNS = ("topic", "partition", "current_offset", "new_offset", "change")
_NAMED = 5
"""How many members or partitions a message names."""
_SHOWN = 60
"""How many characters a message shows of a line that it refuses."""

TopicOption = Annotated[
    list[str],
    typer.Option(
        "--topic", "-t", metavar="TOPIC[:0,1]", help="This topic, or some of its partitions; may be repeated."
    ),
]


class Target(NamedTuple):
    """Where the group continues: exactly one field is set."""

    earliest: bool
    latest: bool
    current: bool
    offset: int | None
    shift: int | None
    time_ms: int | None
    plan: dict[TopicPartition, int] | None


def reset_offsets(
    group: Annotated[str, typer.Argument(metavar="GROUP", show_default=False)],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", "-t", metavar="TOPIC[:0,1]", help="This topic, or some of its partitions; may be repeated."
        ),
    ] = None,
    all_topics: Annotated[
        bool,
        typer.Option("--all-topics", metavar="", help="All partitions that the group has committed an offset for."),
    ] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", metavar="", help="To the oldest record.")] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", metavar="", help="To the end of the log: only new records.")
    ] = False,
    to_current: Annotated[
        bool,
        typer.Option(
            "--to-current", metavar="", help="To the committed offset, within the log; for use with --export."
        ),
    ] = False,
    to_datetime: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="To the first record at or after this time, such as 2026-11-01T12:30:00Z; UTC by default.",
        ),
    ] = None,
    by_duration: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="To the first record that is not older than this: 90m, 2d, PT1H30M."),
    ] = None,
    to_offset: Annotated[int | None, typer.Option(min=0, help="To this offset, in every partition.")] = None,
    shift_by: Annotated[
        int | None, typer.Option(metavar="N", help="Forward by N offsets, or back: --shift-by=-100.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="To the offsets in this file: lines of topic,partition,offset.",
        ),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", metavar="", help="Set the offsets; without it they are only shown.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write the new offsets to this file, for --from-file."),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the offsets at which a group would continue; --execute sets them, if the group has no members.

    An offset before the log's start, or after its end, becomes the start or the end. A missing group is created.

    Example: raftlog group reset-offsets billing --topic orders --to-earliest

    Example: raftlog group reset-offsets billing --all-topics --by-duration 2h --execute

    Example: raftlog group reset-offsets billing --topic orders:0,1 --shift-by=-100 --export to.csv
    """
    target = _target(to_earliest, to_latest, to_current, to_offset, shift_by, to_datetime, by_duration, from_file)
    if target.plan is not None and (topic or all_topics):
        raise typer.BadParameter("--from-file already names the partitions; leave --topic and --all-topics out")
    if target.plan is None and bool(topic) == all_topics:
        raise typer.BadParameter("say which partitions: --topic, or --all-topics")
    with _as_parameter():
        parse_selection(topic or [])
    with connect_admin(bootstrap) as admin:
        committed = admin.group_offsets(group)
        parts = list(target.plan) if target.plan is not None else _parts(admin, group, topic, committed)
        resets = resets_to(admin, group, target, parts, committed)
        members = _members(admin, group)
        if execute and members:
            raise NonEmptyGroup(_why_not(group, members))
        new = {each.part: each.new for each in resets}
        with _exported(export, format_plan(new)):
            if execute:
                admin.alter_group_offsets(group, new)
    for each in resets:
        if each.why is not None:
            print_note(f"note: {each.why}")
    rows = [each.row for each in resets]
    print_rows(rows, _COLUMNS, output, documents={"group_id": group, "executed": execute, "offsets": rows})
    if members is None:
        print_note(
            f"note: group {group!r} did not exist"
            if execute
            else f"note: group {group!r} does not exist; it is created"
        )
    if execute:
        print_note(f"{counted(len(resets), 'offset')} of group {group} set")
    else:
        print_note("nothing was changed; --execute sets these offsets")
        if members:
            print_note(f"note: --execute would be refused now: {_why_not(group, members)}")


def _target(
    earliest: bool,
    latest: bool,
    current: bool,
    offset: int | None,
    shift: int | None,
    moment: str | None,
    span: str | None,
    file: Path | None,
) -> Target:
    """Return the target that the options name.

    Raises:
        typer.BadParameter: not exactly one target is given, or it is malformed.
    """
    given = [earliest, latest, current, *(each is not None for each in (offset, shift, moment, span, file))]
    if sum(given) != 1:
        raise typer.BadParameter(
            "give exactly one of --to-earliest, --to-latest, --to-current, --to-datetime, --by-duration, --to-offset, "
            "--shift-by or --from-file"
        )
    with _as_parameter():
        time_ms = parse_time_ms(moment) if moment is not None else None
        if span is not None:
            time_ms = int(time.time() * 1000) - parse_span_ms(span)
        plan = None
        if file is not None:
            plan = parse_plan(file.read_text())
            if not plan:
                raise ValueError(f"{file} has no line of topic,partition,offset")
    return Target(earliest, latest, current, offset, shift, time_ms, plan)


@contextmanager
def _as_parameter() -> Any:
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def selected(texts: Sequence[str], among: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Return the partitions of `among` that `TOPIC[:0,1]` names.

    Raises:
        typer.BadParameter: a text is malformed.
    """
    with _as_parameter():
        wanted = parse_selection(texts)
    return [part for part in among if part.topic in wanted and _has(wanted[part.topic], part.partition)]


def _has(numbers: set[int] | None, number: int) -> bool:
    return numbers is None or number in numbers


def _parts(
    admin: raftlog.Admin, group: str, texts: Sequence[str] | None, committed: Mapping[TopicPartition, Any]
) -> list[TopicPartition]:
    """Return the named partitions, or without names the ones with committed offsets of the group.

    Raises:
        GroupIdNotFound: there are none. UnknownTopicOrPartition: a named partition does not exist.
    """
    if not texts:
        if not committed:
            admin.describe_group(group)  # raises if the group does not exist
            raise GroupIdNotFound(f"group {group} has committed nothing; name topics with --topic")
        return list(committed)
    wanted = parse_selection(texts)
    found = []
    for topic in admin.describe_topics(list(wanted)):
        count = len(topic.partitions)
        numbers = wanted[topic.name]
        absent = sorted(each for each in numbers or () if each >= count)
        if absent:
            raise UnknownTopicOrPartition(f"topic {topic.name} has no partition {absent[0]}; it has {count}, from 0")
        found += [TopicPartition(topic.name, each) for each in range(count) if _has(numbers, each)]
    return sorted(found)


def resets_to(
    admin: raftlog.Admin,
    group: str,
    target: Target,
    parts: Sequence[TopicPartition],
    committed: Mapping[TopicPartition, OffsetAndMetadata],
) -> list[Reset]:
    """Return what a reset to the target would change.

    Raises:
        InvalidRequestError: the target is relative to a committed offset, and a partition has none.
    """
    starts = admin.list_offsets(dict.fromkeys(parts, "earliest"))
    ends = admin.list_offsets(dict.fromkeys(parts, "latest"))
    at = admin.list_offsets(dict.fromkeys(parts, target.time_ms)) if target.time_ms is not None else {}
    absent = [part for part in parts if part not in committed]
    if absent and (target.current or target.shift is not None):
        raise InvalidRequestError(
            f"group {group} has committed nothing for {', '.join(map(str, absent[:_NAMED]))}: choose another target"
        )
    resets = []
    for part in parts:
        first, last = starts[part], ends[part]
        assert first is not None
        assert last is not None
        start, end = first.offset, last.offset
        current = committed[part].offset if part in committed else None
        if target.earliest:
            resets.append(Reset(part, current, start))
        elif target.latest:
            resets.append(Reset(part, current, end))
        elif target.time_ms is not None:
            later = at[part]
            why = f"{part} has no record that new, so its end is used" if later is None else None
            resets.append(Reset(part, current, end if later is None else later.offset, why))
        else:
            wanted = target.offset if target.plan is None else target.plan[part]
            if wanted is None:
                wanted = (current or 0) + (target.shift or 0)
            resets.append(bounded(part, current, wanted, start, end))
    return resets


@contextmanager
def _exported(path: Path | None, text: str) -> Iterator[None]:
    """Write a file beside its place before the block, and move it there when the block has succeeded.

    Raises:
        InvalidRequestError: the file cannot be written; the message says why, and whether the block has run.
    """
    if path is None:
        yield
        return
    if path.exists() and not path.is_file():  # a terminal, a pipe: it cannot be replaced
        yield
        path.write_text(text)
        return
    target = path.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.write_text(text)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise InvalidRequestError(f"{_not_written(path, error)}; nothing was changed") from None
    try:
        yield
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    try:
        aside.replace(target)
    except OSError as error:
        raise InvalidRequestError(f"{_not_written(path, error)}; the new offsets are in {aside}") from None


def _not_written(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} cannot be created: the directory {path.parent} does not exist"
    return f"{path} cannot be written: {error.strerror}"


def _members(admin: raftlog.Admin, group: str) -> list[str] | None:
    """Return the members with their clients and hosts; None: the group does not exist."""
    try:
        found = admin.describe_group(group)
    except GroupIdNotFound:
        return None
    return list(map(_member_text, found.members))


def _member_text(member: GroupMemberDescription) -> str:
    parts = [f"{member.client_id} on {member.host}"] if member.host else []
    if member.instance_id and not member.connected:
        parts.append(f"{member.instance_id}, disconnected: in the group until its session times out")
    return f"{member.member_id} ({'; '.join(parts)})" if parts else member.member_id


def _why_not(group: str, members: Sequence[str]) -> str:
    them = "it" if len(members) == 1 else "them"
    return f"group {group} has {counted(len(members), 'member')}, stop {them} first: {some(members, _NAMED)}"
