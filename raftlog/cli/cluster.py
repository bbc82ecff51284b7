"""`raftlog cluster ...`"""

from __future__ import annotations

import typer

from raftlog.cli.clients import connect_admin
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, Output, OutputOption, print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="What a cluster consists of.")

_BROKER_COLUMNS = ("broker_id", "host", "port", "rack", "fenced")


@app.callback()
def group() -> None:
    """Keep `describe` a command of its own although there is only one."""


@app.command()
def describe(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """Show the cluster's id, its controller and its brokers.

    Example: raftlog cluster describe --output json
    """
    with connect_admin(bootstrap) as admin:
        found = admin.describe_cluster()
    brokers = [{column: getattr(broker, column) for column in _BROKER_COLUMNS} for broker in found.brokers]
    if output is Output.JSON:
        print_json(
            {
                "cluster_id": found.cluster_id,
                "controller_id": found.controller_id,
                "controller_epoch": found.controller_epoch,
                "brokers": brokers,
            }
        )
    else:
        print(f"cluster {found.cluster_id}, controller {found.controller_id} in epoch {found.controller_epoch}\n")
        print_rows(brokers, _BROKER_COLUMNS, output)
