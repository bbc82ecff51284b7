"""`raftlog broker ...`"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from rich.filesize import decimal

import raftlog
from raftlog._core.descriptions import LogDirDescription, LogDirPartition
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.nodes import decommission, draining
from raftlog.cli.nodes.draining import named, needed, seconds, until_done
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    check_complete,
    print_done,
    print_rows,
)
from raftlog.cli.partitions import health, moving
from raftlog.errors import BrokerUnavailable, RaftlogError, RetriableError
from raftlog.types import TopicPartition

app = typer.Typer(no_args_is_help=True, help="List brokers, keep replicas off them, and stop them safely.")
app.command("decommission")(decommission.decommission)

_COLUMNS = ("broker_id", "host", "port", "rack", "state", "broker_epoch", "leaderships", "replicas")

BrokerArgument = Annotated[int, typer.Argument(metavar="ID", min=0, show_default=False, help="The broker's node.id.")]


@app.command("list")
def list_brokers(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """List the brokers with their addresses, states, leaderships and replicas.

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

    A broker that stops hands its leaderships over by itself. This command waits for partitions whose other replicas are
    not in sync. It does not wait for partitions that would fall below min.insync.replicas even if all replicas were in
    sync.

    Example: raftlog broker await-safe-stop 2 --timeout 90 && systemctl restart raftlog
    """
    with connect_admin(bootstrap) as admin:
        until_done(waits_for(admin, broker_id), timeout_s, f"broker {broker_id} is still needed after")
    print(f"broker {broker_id} may stop: no partition falls below {moving.KEY}")


def waits_for(admin: raftlog.Admin, broker_id: int) -> Callable[[], str]:
    """Return a function that names the partitions that need a broker, or returns "" when it may stop."""
    least = moving.known(admin)

    def look() -> str:
        waits = needed(admin.describe_topics(None, internal=True), broker_id, least)
        return f"{counted(len(waits), 'partition needs', 'partitions need')} it: {named(waits)}" if waits else ""

    return look


# Log directories

_DIRECTORY_COLUMNS = ("broker_id", "log_dir", "topic", "partition", "size_bytes", "lag", "segments")


@app.command("log-dirs")
def log_dirs(
    brokers: Annotated[
        list[int] | None, typer.Argument(metavar="[ID]...", help="By default all.", min=0, show_default=False)
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", "-t", help="Only partitions of this topic; may be repeated.")
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the log directories of brokers: their space, and the size and lag of each partition in them.

    The lag is the number of records that the replica is behind its leader, or - if the leader has not answered. A line
    on stderr describes each directory. Exit code 1: a broker has not answered, or a directory is offline.

    Example: raftlog broker log-dirs 2 --topic events
    """
    missing: list[RaftlogError] = []
    found: list[LogDirDescription] = []
    with connect_admin(bootstrap) as admin:
        if topic:
            admin.describe_topics(topic)  # raises for an unknown one
        known = {each.broker_id: each for each in admin.describe_cluster().brokers}
        for broker_id in sorted(set(brokers or known)):
            try:
                if broker_id in known and known[broker_id].fenced:
                    raise BrokerUnavailable(f"broker {broker_id} is {health.state_of(known[broker_id])}")
                found += admin.describe_log_dirs(broker_id, timeout=health.PATIENCE_S)
            except RetriableError as error:
                missing.append(error)
        names = {part.topic for each in found for part in _of_topics(each, topic)}
        seen = health.ask_leaders(admin, sorted(names)) if names else health.Seen({}, {})
    rows = [row for each in found for row in _directory_rows(each, topic, seen)]
    documents = [
        {
            **each._asdict(),
            "error": None if each.error is None else str(each.error),
            "partitions": [
                {**part._asdict(), "lag": _lag(each.broker_id, part, seen)} for part in _of_topics(each, topic)
            ],
        }
        for each in found
    ]
    print_rows(rows, _DIRECTORY_COLUMNS, output, documents=documents, headlines=map(_directory_line, found))
    check_complete("log directories", missing)
    if any(each.error is not None for each in found):
        raise typer.Exit(1)


def _of_topics(directory: LogDirDescription, topics: Collection[str] | None) -> list[LogDirPartition]:
    return [part for part in directory.partitions if not topics or part.topic in topics]


def _lag(broker_id: int, part: LogDirPartition, seen: health.Seen) -> int | None:
    described = seen.replicas.get(TopicPartition(part.topic, part.partition))
    lags = {each.broker_id: each.lag for each in described.replicas} if described is not None else {}
    return lags[broker_id] if lags.get(broker_id, -1) >= 0 else None


def _directory_rows(
    directory: LogDirDescription, topics: Collection[str] | None, seen: health.Seen
) -> list[dict[str, Any]]:
    return [
        {
            "broker_id": directory.broker_id,
            "log_dir": directory.path,
            **part._asdict(),
            "lag": _lag(directory.broker_id, part, seen),
        }
        for part in sorted(_of_topics(directory, topics))
    ]


def _directory_line(directory: LogDirDescription) -> str:
    """Return a line about a whole directory."""
    start = f"broker {directory.broker_id}: {directory.path}: "
    if directory.error is not None:
        return f"{start}offline: {directory.error}"
    size = sum(part.size_bytes for part in directory.partitions)
    return (
        f"{start}{counted(len(directory.partitions), 'partition')}, {decimal(size)}; "
        f"{decimal(directory.usable_bytes)} of {decimal(directory.total_bytes)} free"
    )


# Cordoned


@app.command()
def cordon(
    broker_id: BrokerArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a broker no new replicas until it is uncordoned; it keeps its replicas, and may lead.

    New topics, new partitions and new plans leave the broker out, even after it has restarted.

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
    """Let a broker get new replicas again.

    Example: raftlog broker uncordon 4
    """
    with connect_admin(bootstrap) as admin:
        admin.alter_broker(broker_id, cordoned=False)
    print_done(f"broker {broker_id} is no longer cordoned", {"broker_id": broker_id, "cordoned": False}, output)


app.command()(draining.drain)
app.command()(draining.undrain)
