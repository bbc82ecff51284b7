"""`raftlog partition ...`"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from raftlog.cli import reassign
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, Output, OutputOption, print_done, print_note

app = typer.Typer(no_args_is_help=True, help="Say which brokers hold a partition, and which one leads it.")
app.command("reassign")(reassign.reassign)


@app.command()
def elect(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this one; may be repeated.")
    ] = None,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean", metavar="", help="Let a replica lead that may miss records, where nobody else is left."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask before --unclean.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a topic's partitions led by their first replicas.

    Example: raftlog partition elect events --partition 0
    """
    if unclean:
        print_note(
            f"warning: partitions of {topic} that nobody leads will be led by a replica that may miss records; "
            "what it misses is lost, also when it was acknowledged"
        )
        if not yes and sys.stdin.isatty() and not typer.confirm("go on?", err=True):
            raise typer.Abort
    with connect_admin(bootstrap) as admin:
        admin.elect_leaders(topic, partition or (), unclean=unclean)
    print_done(
        f"leaders of {topic} elected", {"topic": topic, "partitions": partition or "all", "unclean": unclean}, output
    )
