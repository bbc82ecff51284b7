"""`raftlog group reset-offsets`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import raftlog
from raftlog._core.words import some
from raftlog._group_descriptions import GroupMemberDescription
from raftlog.cli.clients import connect_admin
from raftlog.cli.offset_plans import (
    Reset,
    bounded,
    format_plan,
    parse_plan,
    parse_selection,
    parse_span_ms,
    parse_time_ms,
)
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_json,
    print_note,
    print_rows,
)
from raftlog.errors import GroupIdNotFound, InvalidRequestError, NonEmptyGroup, UnknownTopicOrPartition
from raftlog.types import OffsetAndMetadata, TopicPartition

_COLUMNS = ("topic", "partition", "current_offset", "new_offset", "change")
_NAMED = 5
"""How many members a refusal names."""

TopicOption = Annotated[
    list[str],
    typer.Option("--topic", "-t", metavar="TOPIC[:0,1]", help="This topic, or some partitions; may be repeated."),
]


class Target(NamedTuple):
    """Where to: one of them is set."""

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
        typer.Option("--topic", "-t", metavar="TOPIC[:0,1]", help="This topic, or some partitions; may be repeated."),
    ] = None,
    all_topics: Annotated[
        bool, typer.Option("--all-topics", metavar="", help="Whatever the group has committed an offset for.")
    ] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", metavar="", help="The oldest record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", metavar="", help="Only what comes from now on.")] = False,
    to_current: Annotated[
        bool, typer.Option("--to-current", metavar="", help="Where it is, within what is there; with --export.")
    ] = False,
    to_datetime: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The first record at or after it, as 2026-11-01T12:30:00Z; UTC by default."),
    ] = None,
    by_duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The first record that is not older: 90m, 2d, PT1H30M.")
    ] = None,
    to_offset: Annotated[int | None, typer.Option(min=0, help="This one, in every partition.")] = None,
    shift_by: Annotated[
        int | None, typer.Option(metavar="N", help="So many further, or back: --shift-by=-100.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Lines of topic,partition,offset."),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", metavar="", help="Do it; else it is only shown.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the new offsets for --from-file.")
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where a group would go on reading, and with --execute have it go on there. It must not have members then.

    Offsets that a partition does not have become its oldest or its newest. A group that there is not is made.

    Examples:

      raftlog group reset-offsets billing --topic orders --to-earliest

      raftlog group reset-offsets billing --all-topics --by-duration 2h --execute

      raftlog group reset-offsets billing --topic orders:0,1 --shift-by=-100 --export to.csv
    """
    target = _target(to_earliest, to_latest, to_current, to_offset, shift_by, to_datetime, by_duration, from_file)
    if target.plan is not None and (topic or all_topics):
        raise typer.BadParameter("--from-file names the partitions already; leave --topic and --all-topics out")
    if target.plan is None and bool(topic) == all_topics:
        raise typer.BadParameter("say which partitions: --topic, or --all-topics")
    with _as_parameter():
        parse_selection(topic or [])
    with connect_admin(bootstrap) as admin:
        committed = admin.group_offsets(group)
        parts = list(target.plan) if target.plan is not None else _parts(admin, group, topic, committed)
        resets = _plan(admin, group, target, parts, committed)
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
    if output is Output.JSON:
        print_json({"group_id": group, "executed": execute, "offsets": rows})
    else:
        print_rows(rows, _COLUMNS, output)
    if members is None:
        print_note(
            f"note: there was no group {group!r}" if execute else f"note: there is no group {group!r}; it is made"
        )
    if execute:
        print_note(f"{counted(len(resets), 'offset')} of group {group} set")
    else:
        print_note("this is what --execute would do; nothing was changed")
        if members:
            print_note(f"note: it would be refused at the moment: {_why_not(group, members)}")


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
    """Return where to.

    Raises:
        typer.BadParameter: not exactly one is given, or it cannot be understood.
    """
    given = [earliest, latest, current, *(each is not None for each in (offset, shift, moment, span, file))]
    if sum(given) != 1:
        raise typer.BadParameter(
            "say where to, once: --to-earliest, --to-latest, --to-current, --to-datetime, --by-duration, --to-offset, "
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
    """Return those partitions that `TOPIC[:0,1]` names.

    Raises:
        typer.BadParameter: it cannot be understood.
    """
    with _as_parameter():
        wanted = parse_selection(texts)
    return [part for part in among if part.topic in wanted and _has(wanted[part.topic], part.partition)]


def _has(numbers: set[int] | None, number: int) -> bool:
    return numbers is None or number in numbers


def _parts(
    admin: raftlog.Admin, group: str, texts: Sequence[str] | None, committed: Mapping[TopicPartition, Any]
) -> list[TopicPartition]:
    """Return the partitions that are named, or those that the group has committed offsets for.

    Raises:
        GroupIdNotFound: it has not. UnknownTopicOrPartition: one is not there.
    """
    if not texts:
        if not committed:
            admin.describe_group(group)  # which may not be there at all
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


def _plan(
    admin: raftlog.Admin,
    group: str,
    target: Target,
    parts: Sequence[TopicPartition],
    committed: Mapping[TopicPartition, OffsetAndMetadata],
) -> list[Reset]:
    starts = admin.list_offsets(dict.fromkeys(parts, "earliest"))
    ends = admin.list_offsets(dict.fromkeys(parts, "latest"))
    at = admin.list_offsets(dict.fromkeys(parts, target.time_ms)) if target.time_ms is not None else {}
    absent = [part for part in parts if part not in committed]
    if absent and (target.current or target.shift is not None):
        raise InvalidRequestError(
            f"group {group} has committed nothing for {', '.join(map(str, absent[:_NAMED]))}: say where to go instead"
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
            why = f"{part} has no record that new, so it is read from its end" if later is None else None
            resets.append(Reset(part, current, end if later is None else later.offset, why))
        else:
            wanted = target.offset if target.plan is None else target.plan[part]
            if wanted is None:
                wanted = (current or 0) + (target.shift or 0)
            resets.append(bounded(part, current, wanted, start, end))
    return resets


@contextmanager
def _exported(path: Path | None, text: str) -> Iterator[None]:
    """Write a file that is there once what happens meanwhile has succeeded; nothing happens if it cannot be written.

    Raises:
        InvalidRequestError: it cannot be; says why, and whether anything has happened.
    """
    if path is None:
        yield
        return
    if path.exists() and not path.is_file():  # a terminal, a pipe: nothing to be kept until then
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
        return f"{path} cannot be made: there is no directory {path.parent}"
    return f"{path} cannot be written: {error.strerror}"


def _members(admin: raftlog.Admin, group: str) -> list[str] | None:
    """Return the members, as people may find them; None: there is no such group."""
    try:
        found = admin.describe_group(group)
    except GroupIdNotFound:
        return None
    return list(map(_who, found.members))


def _who(member: GroupMemberDescription) -> str:
    parts = [f"{member.client_id} on {member.host}"] if member.host else []
    if member.instance_id and not member.connected:
        parts.append(f"{member.instance_id}, away: in the group until its session timeout is over")
    return f"{member.member_id} ({'; '.join(parts)})" if parts else member.member_id


def _why_not(group: str, members: Sequence[str]) -> str:
    them = "it" if len(members) == 1 else "them"
    return f"group {group} has {counted(len(members), 'member')}, stop {them} first: {some(members, _NAMED)}"
