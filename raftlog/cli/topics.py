"""`raftlog topic ...`"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import raftlog
from raftlog.cli import partition_health as health
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    key_value_pairs,
    print_done,
    print_json,
    print_rows,
)
from raftlog.errors import TopicAlreadyExists
from raftlog.types import TopicPartition

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, change and delete topics.")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="A topic setting; may be repeated."),
]


@app.command()
def create(
    topic: TopicArgument,
    partitions: Annotated[int, typer.Option("--partitions", "-p", min=1)] = 1,
    replication_factor: Annotated[int, typer.Option("--replication-factor", "-r", min=1)] = 1,
    replica_assignment: Annotated[
        str | None,
        typer.Option(
            metavar="ID:ID,...", help="The brokers of each partition, in place of the two numbers: 1:2,2:3 is two."
        ),
    ] = None,
    config: SetOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", metavar="", help="No error when there is one of that name.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a topic.

    Example: raftlog topic create events --partitions 6 --config retention.ms=7d
    """
    configs = key_value_pairs(config or [])
    assignment = None if replica_assignment is None else _assignment(replica_assignment)
    created = True
    with connect_admin(bootstrap) as admin:
        try:
            admin.create_topic(topic, partitions, replication_factor, configs, replica_assignment=assignment)
        except TopicAlreadyExists:
            if not if_not_exists:
                raise
            created = False
    print_done(
        f"topic {topic} {'created' if created else 'was there already'}",
        {"topic": topic, "created": created},
        output,
    )


def _assignment(text: str) -> list[list[int]]:
    try:
        return [[int(replica) for replica in partition.split(":")] for partition in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--replica-assignment {text}: write BROKER:BROKER,..., for example 1:2,2:3") from None


@app.command("list")
def list_topics(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """List the topics.

    Example: raftlog topic list --output json
    """
    with connect_admin(bootstrap) as admin:
        rows = [{"topic": topic.name, "partitions": len(topic.partitions)} for topic in admin.describe_topics()]
    print_rows(rows, ("topic", "partitions"), output)


@app.command()
def describe(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC]...", help="All, if none is named.", show_default=False)
    ] = None,
    under_replicated: Annotated[
        bool, typer.Option("--under-replicated", metavar="", help="Only where a replica is out of sync.")
    ] = False,
    under_min_isr: Annotated[
        bool,
        typer.Option("--under-min-isr", metavar="", help="Only where fewer are in sync than min.insync.replicas."),
    ] = False,
    unavailable: Annotated[
        bool, typer.Option("--unavailable", metavar="", help="Only where nobody leads, or the leader is down.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the partitions of topics: who leads them, where their replicas are, and how far these are behind.

    Example: raftlog topic describe events

    Example: raftlog topic describe --under-replicated
    """
    with connect_admin(bootstrap) as admin:
        if topics and len(topics) == 1:
            found = [admin.describe_topic(topics[0])]  # waits for one that was created a moment ago
        else:
            found = admin.describe_topics(topics)
        wanted = [(topic, topic.partitions) for topic in found]
        if under_replicated or under_min_isr or unavailable:
            minimum = {topic.name: _min_insync_replicas(admin, topic.name) if under_min_isr else 0 for topic in found}
            wanted = [
                (
                    topic,
                    [
                        part
                        for part in topic.partitions
                        if (under_replicated and health.is_under_replicated(part))
                        or (under_min_isr and health.is_under_min_isr(part, minimum[topic.name]))
                        or (unavailable and health.is_unavailable(part))
                    ],
                )
                for topic in found
            ]
            wanted = [(topic, parts) for topic, parts in wanted if parts]
        seen = health.lags_of(admin, [topic.name for topic, _ in wanted]) if wanted else {}
    if output is Output.JSON:
        documents = [
            {
                "topic": topic.name,
                "topic_id": topic.topic_id.hex(),
                "partitions": [
                    health.document_of(part, seen.get(TopicPartition(topic.name, part.partition))) for part in parts
                ],
            }
            for topic, parts in wanted
        ]
        one = topics is not None and len(topics) == 1 and len(documents) == 1
        print_json(documents[0] if one else documents)
        return
    rows = [
        health.row_of(topic, part, seen.get(TopicPartition(topic.name, part.partition)))
        for topic, parts in wanted
        for part in parts
    ]
    extra = [column for column in health.IF_ANY if not sys.stdout.isatty() or any(row[column] for row in rows)]
    always = health.ALWAYS[1:] if topics and len(topics) == 1 else health.ALWAYS
    print_rows(rows, (*always, *extra), output)


def _min_insync_replicas(admin: raftlog.Admin, topic: str) -> int:
    return int(admin.describe_configs(topic=topic)["min.insync.replicas"].value)


@app.command()
def delete(
    topic: TopicArgument, bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE
) -> None:
    """Delete a topic and its records.

    Example: raftlog topic delete events
    """
    with connect_admin(bootstrap) as admin:
        admin.delete_topic(topic)
    print_done(f"topic {topic} deleted", {"topic": topic, "deleted": True}, output)


@app.command()
def alter(
    topic: TopicArgument,
    config: SetOption = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="KEY", help="Back to the default; may be repeated.")
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change a topic's settings.

    Example: raftlog topic alter events --config retention.ms=1d --unset segment.bytes
    """
    changes = key_value_pairs(config or [])
    if not changes and not unset:
        raise typer.BadParameter("nothing to change; give --config KEY=VALUE or --unset KEY")
    with connect_admin(bootstrap) as admin:
        admin.alter_configs(topic, set=changes, unset=unset or [])
    print_done(f"topic {topic} altered", {"topic": topic, "set": changes, "unset": unset or []}, output)


@app.command("add-partitions")
def add_partitions(
    topic: TopicArgument,
    total: Annotated[int, typer.Argument(metavar="TOTAL", min=1, help="How many there are to be afterwards.")],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a topic more partitions; keys of new records may land elsewhere than before.

    Example: raftlog topic add-partitions events 12
    """
    with connect_admin(bootstrap) as admin:
        admin.create_partitions(topic, total)
    print_done(f"topic {topic} has {counted(total, 'partition')}", {"topic": topic, "partitions": total}, output)
