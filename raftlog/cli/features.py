"""`raftlog cluster features`: the levels that the cluster works at, and raising them after an upgrade (KIP-584)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from raftlog._descriptions import ClusterDescription
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    print_done,
    print_json,
    print_note,
    print_rows,
)

app = typer.Typer(
    invoke_without_command=True, help="Show the levels of the cluster's features, or raise them after an upgrade."
)

_COLUMNS = ("feature", "level", "lowest", "highest")


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show each feature's level, and the lowest and highest that all brokers know; or raise them after an upgrade.

    Example: raftlog cluster features
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context.invoked_subcommand, context)
        return
    with connect_admin(bootstrap) as admin:
        print_rows(_rows(admin.describe_cluster(linearizable=True)), _COLUMNS, output)


def _refuse_options_before(command: str, context: typer.Context) -> None:
    """Refuse what a command would not see, since it stands before its name. Raises BadParameter."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"put {option.opts[0]} after {command}, which would not see it there")


@app.command()
def upgrade(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Say what would be raised, and whether it can be.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Raise every feature to the highest level that all brokers know; there is no way back to an older version then.

    Do it after every node, the controllers among them, runs the new version: one that does not know a level stops.

    Example: raftlog cluster features upgrade --dry-run
    """
    with connect_admin(bootstrap) as admin:
        rows = _rows(admin.describe_cluster(linearizable=True))
        raised = [row for row in rows if row["highest"] is not None and row["level"] < row["highest"]]
        for row in raised:
            admin.update_feature(row["feature"], row["highest"], validate_only=dry_run)
    if output is Output.JSON:
        print_json([{"feature": each["feature"], "from": each["level"], "to": each["highest"]} for each in raised])
        return
    for row in raised:
        verb = "would be raised" if dry_run else "is raised"
        print_done(f"{row['feature']} {verb} from level {row['level']} to {row['highest']}", row, output)
    if any(row["highest"] is None for row in rows):
        print_note("the broker that was asked runs an older version and does not tell what all know: upgrade it first")
    elif not raised:
        print("nothing to do: every feature is at the highest level that all brokers know")


def _rows(found: ClusterDescription) -> list[dict[str, Any]]:
    rows = []
    for name in sorted({*found.features, *found.supported_features}):
        lowest, highest = found.supported_features.get(name, (None, None))
        rows.append({"feature": name, "level": found.features.get(name, 0), "lowest": lowest, "highest": highest})
    return rows
