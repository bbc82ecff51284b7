"""`raftlog broker ...`"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import raftlog
from raftlog.cli import decommission, draining, min_isr
from raftlog.cli import partition_health as health
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_done,
    print_rows,
)
from raftlog.cli.safe_stop import named, needed
from raftlog.cli.waiting import seconds, until_done

app = typer.Typer(no_args_is_help=True, help="Brokers: which there are, what they take, and when one may be stopped.")
app.command("decommission")(decommission.decommission)

_COLUMNS = ("broker_id", "host", "port", "rack", "state", "broker_epoch", "leaderships", "replicas")

BrokerArgument = Annotated[int, typer.Argument(metavar="ID", min=0, show_default=False, help="The broker's node.id.")]


@app.command("list")
def list_brokers(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """List the brokers: where they are, what they are doing, and how much they have.

    Example: raftlog broker list
    """
    with connect_admin(bootstrap) as admin:
        found = admin.describe_cluster()
    print_rows([health.broker_row(broker, output) for broker in found.brokers], _COLUMNS, output)


@app.command()
def await_safe_stop(
    broker_id: Annotated[int, typer.Argument(metavar="ID", help="The broker that is about to be stopped.")],
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", parser=seconds, help="How long to wait; then exit code 1."),
    ] = 60.0,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
) -> None:
    """Wait until no partition falls below min.insync.replicas when this broker stops; for scripts that stop brokers.

    A broker that is stopped hands its leaderships over by itself. What it cannot do is keep partitions writable whose
    other replicas are not in sync: this waits for those. Partitions without a replica to spare are not waited for.

    Example: raftlog broker await-safe-stop 2 --timeout 90 && systemctl restart raftlog
    """
    with connect_admin(bootstrap) as admin:
        until_done(waits_for(admin, broker_id), timeout_s, f"broker {broker_id} is still needed after")
    print(f"broker {broker_id} may stop: no partition falls below {min_isr.KEY} by that")


def waits_for(admin: raftlog.Admin, broker_id: int) -> Callable[[], str]:
    """Return a function that says which partitions need a broker; "" when it may stop."""
    least = min_isr.known(admin)

    def look() -> str:
        waits = needed(admin.describe_topics(None, internal=True), broker_id, least)
        return f"{counted(len(waits), 'partition needs', 'partitions need')} it: {named(waits)}" if waits else ""

    return look


# Cordoned


@app.command()
def cordon(
    broker_id: BrokerArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a broker no new replicas, until it is uncordoned; it keeps what it has, and may lead.

    New topics and partitions, and plans that are made up, pass it over, also after it has been started again.

    Example: raftlog broker cordon 4
    """
    with connect_admin(bootstrap) as admin:
        admin.alter_broker(broker_id, cordoned=True)
    print_done(f"broker {broker_id} is cordoned", {"broker_id": broker_id, "cordoned": True}, output)


@app.command()
def uncordon(
    broker_id: BrokerArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a broker have new replicas again.

    Example: raftlog broker uncordon 4
    """
    with connect_admin(bootstrap) as admin:
        admin.alter_broker(broker_id, cordoned=False)
    print_done(f"broker {broker_id} is not cordoned any more", {"broker_id": broker_id, "cordoned": False}, output)


app.command()(draining.drain)
app.command()(draining.undrain)
