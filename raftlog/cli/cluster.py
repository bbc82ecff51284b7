"""`raftlog cluster ...`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from raftlog._descriptions import QuorumDescription, TopicDescription
from raftlog.cli import features, partitions, rebalance
from raftlog.cli import partition_health as health
from raftlog.cli.clients import connect_admin
from raftlog.cli.freshness import is_agreed
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    counted,
    print_done,
    print_json,
    print_rows,
)

app = typer.Typer(no_args_is_help=True, help="What a cluster consists of, and who decides in it.")

_BROKER_COLUMNS = (
    "broker_id",
    "host",
    "port",
    "rack",
    "state",
    "broker_epoch",
    "leaderships",
    "replicas",
)
_PARTITION_COLUMNS = ("topic", "partition", "leader", "replicas", "isr")
_VOTER_COLUMNS = ("node_id", "address", "state", "log_end_index", "lag", "last_contact_ms")
_OBSERVER_COLUMNS = ("broker_id", "applied_offset", "lag", "fenced", "last_heartbeat_ms")


@app.command()
def describe(
    linearizable: Annotated[
        bool,
        typer.Option(
            "--linearizable", metavar="", help="Show nothing at all when the controllers do not say what is newest."
        ),
    ] = False,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", "-t", help="Of the topics only this one; may be repeated.")
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the cluster's id, its controller, its brokers, and every topic's partitions.

    The controllers are asked first. When they do not answer, what a broker knows is shown, with a note on stderr, and
    the exit code is 1.

    Example: raftlog cluster describe --output json
    """
    with connect_admin(bootstrap) as admin:
        agreed = linearizable or is_agreed(admin)
        found = admin.describe_cluster(linearizable=linearizable)
        topics = admin.describe_topics(topic or None)
    brokers = [health.broker_row(broker, output) for broker in found.brokers]
    if output is Output.JSON:
        print_json({**found._asdict(), "brokers": brokers, "topics": [_document(each) for each in topics]})
    else:
        print(f"cluster {found.cluster_id}, controller {found.controller_id} in epoch {found.controller_epoch}")
        features = ", ".join(f"{name}={level}" for name, level in sorted(found.features.items()))
        print(f"metadata offset {found.metadata_offset}{f', features {features}' if features else ''}\n")
        print_rows(brokers, _BROKER_COLUMNS, output)
        rows = [health.row_of(each, part, None) for each in topics for part in each.partitions]
        print(f"\n{counted(len(topics), 'topic')}, {counted(len(rows), 'partition')}")
        if rows:
            print()
            print_rows(rows, _PARTITION_COLUMNS, output)
    if not agreed:
        raise typer.Exit(1)


def _document(topic: TopicDescription) -> dict[str, Any]:
    parts = [health.document_of(topic.name, part, None, {}) for part in topic.partitions]
    return {"topic": topic.name, "topic_id": topic.topic_id.hex(), "partitions": parts}


@app.command()
def quorum(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """Show the metadata quorum: its leader, how far voters and brokers are, and its snapshot. Exit code 1: no leader.

    Example: raftlog cluster quorum
    """
    with connect_admin(bootstrap) as admin:
        print_quorum(admin.describe_quorum(), output)


def print_quorum(found: QuorumDescription, output: Output) -> None:
    """Print a quorum: a few lines and two tables, or one JSON object.

    Raises:
        typer.Exit: with 1, after that, when nobody leads.
    """
    _print_quorum(found, output)
    if found.leader_id < 0:
        raise typer.Exit(1)


def _print_quorum(found: QuorumDescription, output: Output) -> None:
    voters: list[Row] = [
        {**voter._asdict(), "address": f"{voter.host}:{voter.port}" if voter.host else None} for voter in found.voters
    ]
    observers: list[Row] = [observer._asdict() for observer in found.observers]
    if output is Output.JSON:
        print_json({**found._asdict(), "voters": [v._asdict() for v in found.voters], "observers": observers})
        return
    leader = f"leader {found.leader_id}" if found.leader_id >= 0 else "no leader"
    if found.leader_id < 0 and found.answered_by > 0:
        leader += f" (as node {found.answered_by} sees it)"
    print(f"cluster {found.cluster_id}, {leader} in epoch {found.leader_epoch}")
    print(f"log {found.log_start_index} to {found.log_end_index}, committed up to {found.commit_index}")
    if found.snapshot_index > 0:
        print(f"snapshot at {found.snapshot_index}, {counted(found.snapshot_bytes, 'byte')}")
    print()
    print_rows(list(map(_shown, voters)), _VOTER_COLUMNS, output)
    if observers:
        print()
        print_rows(list(map(_shown, observers)), _OBSERVER_COLUMNS, output)


def _shown(row: Row) -> dict[str, Any]:
    """Return a row with nothing where a number is not known."""
    return {key: None if type(value) is int and value < 0 else value for key, value in row.items()}


app.add_typer(features.app, name="features")
app.command("rebalance")(rebalance.rebalance)
app.command("elect-leaders", help="The same as raftlog partition elect.")(partitions.elect)


@app.command("unregister-broker")
def unregister_broker(
    broker_id: Annotated[int, typer.Argument(metavar="BROKER", min=0, show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the cluster forget a broker that is gone for good.

    Example: raftlog cluster unregister-broker 4
    """
    with connect_admin(bootstrap) as admin:
        admin.unregister_broker(broker_id)
    print_done(f"broker {broker_id} unregistered", {"broker_id": broker_id}, output)
