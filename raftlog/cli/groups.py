"""`raftlog group ...`"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

import raftlog
from raftlog._group_descriptions import STATES, GroupDescription
from raftlog.cli import group_view as view
from raftlog.cli import reset_offsets
from raftlog.cli.clients import connect_admin
from raftlog.cli.each import refusals, tell
from raftlog.cli.group_view import Lags
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_done,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.cli.reset_offsets import TopicOption
from raftlog.errors import GroupIdNotFound, RaftlogError
from raftlog.types import TopicPartition

app = typer.Typer(no_args_is_help=True, help="See how far consumer groups are, who is in them, and set them back.")


def _checked_states(states: list[str] | None) -> list[str] | None:
    """Return states in lower case.

    Raises:
        typer.BadParameter: there is no such state.
    """
    for state in states or ():
        if state.lower() not in STATES:
            raise typer.BadParameter(f"there is no state {state!r} of a group; there are {', '.join(STATES)}")
    return [state.lower() for state in states] if states else None


GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]
GroupsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[GROUP]...", help="Or --all-groups.", show_default=False)
]
AllGroupsOption = Annotated[bool, typer.Option("--all-groups", metavar="", help="All that there are.")]
StateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        "-s",
        callback=_checked_states,
        help="Only in this state (empty, assigning, reconciling, stable); may be repeated.",
    ),
]


@app.command("list")
def list_groups(
    state: StateOption = None, bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE
) -> None:
    """List the groups. Exit code 1 when there may be more, because a broker does not say what it coordinates.

    Example: raftlog group list --state empty
    """
    missing: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        found = admin.list_groups(state, missing=missing)
    if output is Output.JSON:
        print_json([view.listed(group) for group in found])
    else:
        rows = [
            {
                "group": group.group_id,
                "state": group.state,
                "members": group.members,
                "coordinator": group.coordinator_id,
            }
            for group in found
        ]
        print_rows(rows, ("group", "state", "members", "coordinator"), output)
    _check_complete(missing)


@app.command()
def describe(
    groups: GroupsArgument = None,
    all_groups: AllGroupsOption = False,
    state: StateOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how far groups have read: committed offset, log end, lag in records and in seconds, and who reads.

    Lag in seconds is the age of the first record that is not read. A member without partitions has a row of its own.
    Exit code 1 when something could not be found out; a note on stderr says what. With --output json it is an array of
    groups, also when one is named.

    Examples:

      raftlog group describe billing

      raftlog group describe --all-groups --state stable --output json
    """
    missing: list[RaftlogError] = []
    absent: list[GroupIdNotFound] = []
    with connect_admin(bootstrap) as admin:
        found = _described(admin, groups or [], all_groups, state, missing, absent)
        lags = {group.group_id: _lags(admin, group.group_id) for group in found}
    if output is Output.JSON:
        print_json([view.document(group, lags[group.group_id]) for group in found])
    else:
        for group in found:
            print_note(view.headline(group))
        rows = [row for group in found for row in view.lag_rows(group, lags[group.group_id])]
        columns = view.LAG_COLUMNS[len(found) == 1 and sys.stdout.isatty() :]
        print_rows(rows, columns, output, ids=("member_id",), optional=view.LAG_OPTIONAL)
    unknown = [_tell_unknown(group.group_id, lags[group.group_id]) for group in found]
    _check_complete(missing, absent)
    if any(unknown):
        raise typer.Exit(1)


def _lags(admin: raftlog.Admin, group_id: str) -> Lags:
    try:
        return admin.group_lag(group_id)
    except GroupIdNotFound:  # deleted since
        return {}


def _tell_unknown(group_id: str, lags: Lags) -> bool:
    """Say which partitions did not tell, and which have lost what was to be read; return whether some did not tell."""
    reasons: dict[str, list[TopicPartition]] = {}
    for part, lag in lags.items():
        if lag.error:
            reasons.setdefault(lag.error.removeprefix(f"{part}: "), []).append(part)
        elif lag.offset is not None and lag.log_start_offset is not None and lag.offset < lag.log_start_offset:
            print_note(
                f"note: {group_id}, {part}: the committed offset {lag.offset} is below the log start "
                f"{lag.log_start_offset}: what was between is deleted; the lag counts what is left"
            )
    for reason, parts in reasons.items():
        named = str(parts[0]) if len(parts) == 1 else view.compact(parts)
        print_note(f"note: {group_id}, {named}: {reason}")
    return bool(reasons)


@app.command()
def members(
    groups: GroupsArgument = None,
    all_groups: AllGroupsOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the members of groups: what each reads, is still to get (to_get), and is asked to stop (to_let_go).

    Example: raftlog group members billing
    """
    missing: list[RaftlogError] = []
    absent: list[GroupIdNotFound] = []
    with connect_admin(bootstrap) as admin:
        found = _described(admin, groups or [], all_groups, None, missing, absent)
    if output is Output.JSON:
        print_json(
            [{key: each for key, each in view.document(group, {}).items() if key != "partitions"} for group in found]
        )
    else:
        for group in found:
            print_note(view.headline(group))
        rows = [row for group in found for row in view.member_rows(group)]
        columns = view.MEMBER_COLUMNS[len(found) == 1 and sys.stdout.isatty() :]
        print_rows(rows, columns, output, ids=("member_id",), optional=view.MEMBER_OPTIONAL)
    _check_complete(missing, absent)


def _described(
    admin: raftlog.Admin,
    named: Sequence[str],
    all_groups: bool,
    states: Sequence[str] | None,
    missing: list[RaftlogError],
    absent: list[GroupIdNotFound],
) -> list[GroupDescription]:
    """Return the groups that are meant; of those that are named `absent` gets the ones that are not there.

    Raises:
        typer.BadParameter: neither names nor --all-groups, or both.
        GroupIdNotFound: none of those that are named is there.
    """
    if bool(named) == all_groups:
        raise typer.BadParameter("name groups, or give --all-groups")
    if named:
        found = []
        for group_id in dict.fromkeys(named):
            try:
                found.append(admin.describe_group(group_id))
            except GroupIdNotFound as error:
                absent.append(error)
        if not found:
            raise absent.pop(0)
        return [group for group in found if not states or group.state in states]
    described = []
    for listed in admin.list_groups(states, missing=missing):
        try:
            described.append(admin.describe_group(listed.group_id))
        except GroupIdNotFound:  # deleted since
            continue
    return described


def _check_complete(missing: Iterable[RaftlogError], absent: Iterable[GroupIdNotFound] = ()) -> None:
    reasons = list(dict.fromkeys(map(str, missing)))
    for reason in reasons:
        print_note(f"note: there may be more groups: {reason}")
    for error in absent:
        print_error(str(error))
    if reasons or absent:
        raise typer.Exit(1)


app.command("reset-offsets")(reset_offsets.reset_offsets)


@app.command("delete-offsets")
def delete_offsets(
    group: GroupArgument,
    topic: TopicOption,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a group forget how far it has read of topics that none of its members are subscribed to.

    It begins there at auto.offset.reset when it reads them again.

    Example: raftlog group delete-offsets billing --topic orders:0,1
    """
    with connect_admin(bootstrap) as admin:
        committed = admin.group_offsets(group)
        parts = reset_offsets.selected(topic, committed)
        if not parts:
            admin.describe_group(group)  # which may not be there at all
            raise GroupIdNotFound(
                f"group {group} has committed nothing for {', '.join(topic)}; raftlog group describe {group} shows "
                "what it has"
            )
        admin.delete_group_offsets(group, parts)
    _print_deleted(group, parts, output)


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete groups that have no members, with their offsets. Exit code 1 when one was not; the others are gone.

    Example: raftlog group delete billing
    """
    with connect_admin(bootstrap) as admin:
        found = refusals(groups, lambda group_id: admin.delete_groups([group_id]))
    tell(found, "deleted", lambda group_id: f"group {group_id} deleted", "group ", output)


def _print_deleted(group: str, parts: Sequence[TopicPartition], output: Output) -> None:
    print_done(
        f"group {group} has forgotten {counted(len(parts), 'offset')}: {', '.join(map(str, parts))}",
        {"group_id": group, "deleted": [part._asdict() for part in parts]},
        output,
    )
