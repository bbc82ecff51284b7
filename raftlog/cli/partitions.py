"""`raftlog partition ...`"""

from __future__ import annotations

from typing import Annotated

import typer

from raftlog.cli import elections, reassign
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, Output, OutputOption, confirmed, print_note

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
    yes: Annotated[
        bool, typer.Option("--yes", "-y", metavar="", help="Do not ask before --unclean; a script has to say so.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a topic's partitions led by their first replicas, and name the new leaders.

    Example: raftlog partition elect events --partition 0

    Example: raftlog partition elect events --unclean
    """
    if unclean:
        print_note(
            f"warning: partitions of {topic} that nobody leads will be led by a replica that may miss records; "
            "what it misses is lost, also when it was acknowledged"
        )
        if not yes:
            _ask()
    with connect_admin(bootstrap) as admin:
        if not elections.run(admin, topic, partition or (), output, unclean=unclean):
            raise typer.Exit(1)


def _ask() -> None:
    try:
        agreed = confirmed("go on?")
    except KeyboardInterrupt:
        print_note("not elected")
        raise
    if not agreed:
        print_note("not elected")
        raise typer.Exit(1)
