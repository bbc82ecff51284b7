"""`raftlog group ...`: rows for tables, documents for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

import raftlog
from raftlog._core.descriptions import STATES, GroupDescription, GroupListing, GroupMemberDescription, PartitionLag
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.groups import reset_offsets
from raftlog.cli.groups.reset_offsets import TopicOption
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    YesOption,
    check_complete,
    checked_states,
    confirm_at_terminal,
    described,
    did_you_mean,
    on_terminal,
    print_done,
    print_note,
    print_rows,
    refusals,
    tell,
)
from raftlog.errors import GroupIdNotFound, RaftlogError
from raftlog.types import TopicPartition

LAG_COLUMNS: Final = (
    "group",
    "topic",
    "partition",
    "current_offset",
    "log_end_offset",
    "lag",
    "lag_seconds",
    "member_id",
    "host",
    "client_id",
)
MEMBER_COLUMNS: Final = (
    "group",
    "member_id",
    "instance_id",
    "client_id",
    "host",
    "epoch",
    "partitions",
    "assigned",
    "to_get",
    "to_let_go",
    "last_heartbeat_ms",
    "connected",
    "subscription",
)

LAG_OPTIONAL: Final = ("member_id", "lag_seconds", "host", "client_id")
MEMBER_OPTIONAL: Final = (
    "assigned",
    "to_get",
    "to_let_go",
    "instance_id",
    "last_heartbeat_ms",
    "connected",
    "subscription",
    "host",
    "client_id",
)
"""Columns that a narrow terminal leaves out, the last one first."""

CLASSIC: Final = "classic"
"""The type of a group of Kafka's clients, in which a member assigns the partitions."""
Lags = Mapping[TopicPartition, PartitionLag]


def listed(group: GroupListing) -> dict[str, Any]:
    """Return a listed group with the field names of `document`."""
    return {
        "group_id": group.group_id,
        "state": group.state,
        "member_count": group.members,
        "coordinator_id": group.coordinator_id,
        "type": group.type,
    }


def headline(group: GroupDescription) -> str:
    """Return a line about the whole group."""
    parts = [group.state, counted(len(group.members), "member")]
    if group.assignor:
        parts.append(f"assignor {group.assignor}")
    parts.append(f"coordinator {group.coordinator_id} (__consumer_offsets-{group.offsets_partition})")
    if group.type == CLASSIC:
        return f"{group.group_id}: {', '.join([*parts, f'classic, generation {group.group_epoch}'])}"
    parts.append(f"group epoch {group.group_epoch}")
    if group.assignment_epoch < group.group_epoch:
        parts.append(f"assigned in epoch {group.assignment_epoch}")
    return f"{group.group_id}: {', '.join(parts)}"


def lag_rows(group: GroupDescription, lags: Lags) -> list[dict[str, Any]]:
    """Return a row for each partition, and one for each member without partitions."""
    members = {member.member_id: member for member in group.members}
    rows = [_lag_row(group.group_id, part, lag, members.get(lag.member_id)) for part, lag in lags.items()]
    busy = {lag.member_id for lag in lags.values()}
    rows += [
        {"group": group.group_id, **_member_cells(member)} for member in group.members if member.member_id not in busy
    ]  # idle: more members than partitions, or their partitions are not assigned yet
    return rows


def _lag_row(
    group_id: str, part: TopicPartition, lag: PartitionLag, member: GroupMemberDescription | None
) -> dict[str, Any]:
    return {
        "group": group_id,
        "topic": part.topic,
        "partition": part.partition,
        "current_offset": lag.offset,
        "log_end_offset": lag.log_end_offset,
        "lag": lag.lag,
        "lag_seconds": None if lag.lag_seconds is None else round(lag.lag_seconds, 1),
        "member_id": lag.member_id or None,
        **_member_cells(member),
    }


def _member_cells(member: GroupMemberDescription | None) -> dict[str, Any]:
    if member is None:
        return {}
    return {"member_id": member.member_id, "host": member.host or None, "client_id": member.client_id or None}


def member_rows(group: GroupDescription) -> list[dict[str, Any]]:
    """Return a row for each member."""
    return [
        {
            "group": group.group_id,
            "member_id": member.member_id,
            "instance_id": member.instance_id or None,
            "client_id": member.client_id or None,
            "host": member.host or None,
            "epoch": member.member_epoch,
            "partitions": len(member.assigned),
            "assigned": compact(member.assigned),
            "to_get": compact(set(member.target) - set(member.assigned)),
            "to_let_go": compact(member.pending_revocation),
            "last_heartbeat_ms": member.last_heartbeat_ms if member.last_heartbeat_ms >= 0 else None,
            "connected": member.connected,
            "subscription": [*member.topics, *([f"/{member.pattern}/"] if member.pattern else [])],
        }
        for member in group.members
    ]


def compact(parts: Iterable[TopicPartition]) -> str | None:
    """Return partitions as `a:0-3,7 b:1`; None for none."""
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(parts):
        by_topic.setdefault(topic, []).append(number)
    return " ".join(f"{topic}:{_ranges(numbers)}" for topic, numbers in by_topic.items()) or None


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def document(group: GroupDescription, lags: Lags) -> dict[str, Any]:
    """Return the whole description of a group, with its lags."""
    return {
        **group._asdict(),
        "member_count": len(group.members),
        "members": [
            {
                **member._asdict(),
                **{field: _listed(getattr(member, field)) for field in ("assigned", "target", "pending_revocation")},
            }
            for member in group.members
        ],
        "partitions": [{**part._asdict(), **lag._asdict()} for part, lag in lags.items()],
    }


def _listed(parts: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    return [part._asdict() for part in parts]


app = typer.Typer(no_args_is_help=True, help="See progress and members of consumer groups, and reset their offsets.")


GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]
GroupsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[GROUP]...", help="Or --all-groups.", show_default=False)
]
AllGroupsOption = Annotated[bool, typer.Option("--all-groups", metavar="", help="All groups.")]
StateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        "-s",
        callback=checked_states(STATES),
        help="Only groups in this state (empty, assigning, reconciling, stable, preparing_rebalance, "
        "completing_rebalance); may be repeated.",
    ),
]


@app.command("list")
def list_groups(
    state: StateOption = None, bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE
) -> None:
    """List the groups. Exit code 1: the list may be incomplete, because a broker did not list its groups.

    Example: raftlog group list --state empty
    """
    missing: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        found = admin.list_groups(state, missing=missing)
    columns = ("group", "state", "members", "coordinator", "type")
    rows = [
        dict(zip(columns, (group.group_id, group.state, group.members, group.coordinator_id, group.type), strict=True))
        for group in found
    ]
    print_rows(rows, columns, output, documents=[listed(group) for group in found])
    check_complete("groups", missing)


@app.command()
def describe(
    groups: GroupsArgument = None,
    all_groups: AllGroupsOption = False,
    state: StateOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the progress of groups in each partition: committed offset, log end, lag in records and seconds, member.

    Lag in seconds is the age of the first unread record. A member without partitions has a row of its own. Exit code 1:
    some values are unknown, and notes on stderr name them. --output json prints an array of groups, even for a single
    one.

    Example: raftlog group describe billing

    Example: raftlog group describe --all-groups --state stable --output json
    """
    missing: list[RaftlogError] = []
    absent: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        found = _described(admin, groups or [], all_groups, state, missing, absent)
        lags = {group.group_id: _lags(admin, group.group_id) for group in found}
    print_rows(
        [row for group in found for row in lag_rows(group, lags[group.group_id])],
        LAG_COLUMNS[len(found) == 1 and on_terminal(output) :],
        output,
        documents=[document(group, lags[group.group_id]) for group in found],
        headlines=map(headline, found),
        ids=("member_id",),
        optional=LAG_OPTIONAL,
    )
    unknown = [_tell_unknown(group.group_id, lags[group.group_id]) for group in found]
    check_complete("groups", missing, absent)
    if any(unknown):
        raise typer.Exit(1)


def _lags(admin: raftlog.Admin, group_id: str) -> Lags:
    try:
        return admin.group_lag(group_id)
    except GroupIdNotFound:  # deleted since
        return {}


def _tell_unknown(group_id: str, lags: Lags) -> bool:
    """Print partitions with an error, and those with unread records deleted; return whether there were errors."""
    reasons: dict[str, list[TopicPartition]] = {}
    for part, lag in lags.items():
        if lag.error:
            reasons.setdefault(lag.error.removeprefix(f"{part}: "), []).append(part)
        elif lag.offset is not None and lag.log_start_offset is not None and lag.offset < lag.log_start_offset:
            print_note(
                f"note: {group_id}, {part}: the committed offset {lag.offset} is below the log start "
                f"{lag.log_start_offset}: the records between them are deleted; the lag counts the remaining ones"
            )
    for reason, parts in reasons.items():
        named = str(parts[0]) if len(parts) == 1 else compact(parts)
        print_note(f"note: {group_id}, {named}: {reason}")
    return bool(reasons)


@app.command()
def members(
    groups: GroupsArgument = None,
    all_groups: AllGroupsOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the members of groups: the partitions that each reads, will get (to_get) and must give up (to_let_go).

    Example: raftlog group members billing
    """
    missing: list[RaftlogError] = []
    absent: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        found = _described(admin, groups or [], all_groups, None, missing, absent)
    print_rows(
        [row for group in found for row in member_rows(group)],
        MEMBER_COLUMNS[len(found) == 1 and on_terminal(output) :],
        output,
        documents=[{key: each for key, each in document(group, {}).items() if key != "partitions"} for group in found],
        headlines=map(headline, found),
        ids=("member_id",),
        optional=MEMBER_OPTIONAL,
    )
    check_complete("groups", missing, absent)


def _described(
    admin: raftlog.Admin,
    named: Sequence[str],
    all_groups: bool,
    states: Sequence[str] | None,
    missing: list[RaftlogError],
    absent: list[RaftlogError],
) -> list[GroupDescription]:
    """Return the groups to show; errors for named groups that do not exist go to `absent`.

    Raises:
        typer.BadParameter: neither names nor --all-groups, or both.
        GroupIdNotFound: none of the named groups exists.
    """
    if bool(named) == all_groups:
        raise typer.BadParameter("name groups, or give --all-groups")
    if named:
        found, unknown = described(named, admin.describe_group)
        absent += unknown
        return [group for group in found if not states or group.state in states]
    found = []
    for listed in admin.list_groups(states, missing=missing):
        try:
            found.append(admin.describe_group(listed.group_id))
        except GroupIdNotFound:  # deleted since
            continue
    return found


app.command("reset-offsets")(reset_offsets.reset_offsets)


@app.command("delete-offsets")
def delete_offsets(
    group: GroupArgument,
    topic: TopicOption,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a group's committed offsets for topics that none of its members subscribes to.

    If the group reads these topics again, it begins at auto.offset.reset. At a terminal the command asks first; in a
    script it does not.

    Example: raftlog group delete-offsets billing --topic orders:0,1
    """
    with connect_admin(bootstrap) as admin:
        committed = admin.group_offsets(group)
        parts = reset_offsets.selected(topic, committed)
        if not parts:
            admin.describe_group(group)  # raises if the group does not exist
            raise GroupIdNotFound(
                f"group {group} has committed nothing for {', '.join(topic)}; raftlog group describe {group} shows "
                "its offsets"
            )
        if not yes:
            confirm_at_terminal(f"delete {counted(len(parts), 'committed offset')} of group {group}?", "not deleted")
        admin.delete_group_offsets(group, parts)
    _print_deleted(group, parts, output)


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", show_default=False)],
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete groups without members, and their offsets. Exit code 1: a group was refused; the others are deleted.

    At a terminal the command asks first; in a script it does not.

    Example: raftlog group delete billing
    """
    if not yes:
        named = f"group {groups[0]}" if len(groups) == 1 else f"{len(groups)} groups"
        confirm_at_terminal(f"delete {named} and the committed offsets?", "not deleted")
    with connect_admin(bootstrap) as admin:
        found = refusals(groups, lambda group_id: _delete(admin, group_id))
    tell(found, "deleted", lambda group_id: f"group {group_id} deleted", "group ", output)


def _delete(admin: raftlog.Admin, group_id: str) -> None:
    try:
        admin.delete_groups([group_id])
    except GroupIdNotFound as error:
        known = (each.group_id for each in admin.list_groups(missing=[]))
        raise GroupIdNotFound(f"{error}{did_you_mean(group_id, known)}") from None


def _print_deleted(group: str, parts: Sequence[TopicPartition], output: Output) -> None:
    print_done(
        f"{counted(len(parts), 'offset')} of group {group} deleted: {', '.join(map(str, parts))}",
        {"group_id": group, "deleted": [part._asdict() for part in parts]},
        output,
    )
