"""`raftlog topic ...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

import raftlog
from raftlog._descriptions import PartitionDescription, TopicDescription
from raftlog.cli import min_isr
from raftlog.cli import partition_health as health
from raftlog.cli.clients import connect_admin
from raftlog.cli.freshness import is_agreed
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    key_value_pairs,
    print_done,
    print_json,
    print_note,
    print_rows,
)
from raftlog.errors import AuthorizationError, TopicAlreadyExists
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
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", min=1, help="How many; else the server's default."),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option("--replication-factor", "-r", min=1, help="Replicas of each; else the server's default."),
    ] = None,
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
    """Create a topic. What is not said is as the server has it: num.partitions, default.replication.factor.

    Example: raftlog topic create events --partitions 6 --config retention.ms=7d
    """
    configs = key_value_pairs(config or [])
    assignment = None if replica_assignment is None else _assignment(replica_assignment, partitions, replication_factor)
    created = True
    with connect_admin(bootstrap) as admin:
        try:
            admin.create_topic(topic, partitions or 0, replication_factor or 0, configs, replica_assignment=assignment)
            min_isr.warn_of_topics(admin, [topic])
        except TopicAlreadyExists:
            if not if_not_exists:
                raise
            created = False
    print_done(
        f"topic {topic} {'created' if created else 'was there already'}",
        {"topic": topic, "created": created},
        output,
    )


def _assignment(text: str, partitions: int | None, replication_factor: int | None) -> list[list[int]]:
    """Return the brokers of each partition.

    Raises:
        typer.BadParameter: it cannot be understood, or contradicts itself or one of the numbers.
    """
    try:
        found = [[int(replica) for replica in partition.split(":")] for partition in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--replica-assignment {text}: write BROKER:BROKER,..., for example 1:2,2:3") from None
    wrong = f"--replica-assignment {text}: "
    for number, brokers in enumerate(found):
        twice = [each for each in brokers if brokers.count(each) > 1]
        if twice:
            raise typer.BadParameter(f"{wrong}partition {number} names broker {twice[0]} twice")
        if len(brokers) != len(found[0]):
            raise typer.BadParameter(
                f"{wrong}partition 0 has {counted(len(found[0]), 'replica')} and partition {number} has "
                f"{counted(len(brokers), 'replica')}; a comma begins the next partition, a colon the next replica"
            )
    if partitions not in (None, len(found)):
        raise typer.BadParameter(
            f"--replica-assignment names {counted(len(found), 'partition')} and --partitions {partitions}"
        )
    if replication_factor not in (None, len(found[0])):
        raise typer.BadParameter(
            f"--replica-assignment names {counted(len(found[0]), 'replica')} and --replication-factor "
            f"{replication_factor}"
        )
    return found


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
    at_min_isr: Annotated[
        bool,
        typer.Option("--at-min-isr", metavar="", help="Only where just as many are in sync as min.insync.replicas."),
    ] = False,
    unavailable: Annotated[
        bool,
        typer.Option(
            "--unavailable", metavar="", help="Only where nobody leads, or the leader is down or does not answer."
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the partitions of topics: who leads them, where their replicas are, and how far these are behind.

    The controllers are asked first. When they do not answer, what a broker knows is shown, with a note on stderr, and
    the exit code is 1. With --output json it is an array of topics, also when one is named.

    Example: raftlog topic describe events

    Example: raftlog topic describe --under-replicated
    """
    only = _Only(under_replicated, under_min_isr, at_min_isr, unavailable)
    one = topics is not None and len(topics) == 1
    with connect_admin(bootstrap) as admin:
        agreed = is_agreed(admin)
        if topics and one:
            found = [admin.describe_topic(topics[0])]  # waits for one that was created a moment ago
        else:
            found = admin.describe_topics(topics)
        seen = health.ask_leaders(admin, [topic.name for topic in found]) if found else health.Seen({}, {})
        wanted = [(topic, only.of(admin, topic, seen)) for topic in found]
        wanted = [(topic, parts) for topic, parts in wanted if parts or not any(only)]
        if one and output is Output.TABLE:
            print_note(_settings(admin, found[0].name))
    for topic, parts in wanted:
        for part in parts:
            if (why := health.why_lost_of(topic.name, part)) is not None:
                print_note(f"{topic.name}-{part.partition}: nobody leads it: {why}")
    if output is Output.JSON:
        print_json([_document(topic, parts, seen) for topic, parts in wanted])
    else:
        rows = [
            health.row_of(topic, part, seen.replicas.get(TopicPartition(topic.name, part.partition)))
            for topic, parts in wanted
            for part in parts
        ]
        extra = [column for column in health.IF_ANY if not sys.stdout.isatty() or any(row[column] for row in rows)]
        print_rows(rows, (*(health.ALWAYS[1:] if one else health.ALWAYS), *extra), output)
    if not agreed:
        raise typer.Exit(1)


class _Only(NamedTuple):
    """Which partitions are shown: those with any of these troubles, or all where none is named."""

    under_replicated: bool
    under_min_isr: bool
    at_min_isr: bool
    unavailable: bool

    def of(self, admin: raftlog.Admin, topic: TopicDescription, seen: health.Seen) -> list[PartitionDescription]:
        """Return those of a topic."""
        minimum = min_isr.of_topic(admin, topic.name) if self.under_min_isr or self.at_min_isr else 0
        return [
            part
            for part in topic.partitions
            if not any(self)
            or (self.under_replicated and health.is_under_replicated(part))
            or (self.under_min_isr and health.is_under_min_isr(part, minimum))
            or (self.at_min_isr and health.is_at_min_isr(part, minimum))
            or (self.unavailable and health.why_unavailable(topic.name, part, seen.silent) is not None)
        ]


def _document(topic: TopicDescription, parts: Sequence[PartitionDescription], seen: health.Seen) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "topic_id": topic.topic_id.hex(),
        "partitions": [
            health.document_of(
                topic.name, part, seen.replicas.get(TopicPartition(topic.name, part.partition)), seen.silent
            )
            for part in parts
        ],
    }


def _settings(admin: raftlog.Admin, topic: str) -> str:
    """Return a line with what is set for a topic; min.insync.replicas always, as it says what the ISR means."""
    try:
        entries = admin.describe_configs(topic=topic)
    except AuthorizationError as error:  # who may describe it sees the rest
        return f"{topic}: configs: not allowed ({error})"
    own = sorted(key for key, entry in entries.items() if entry.source == "dynamic_topic" and key != min_isr.KEY)
    return f"{topic}: " + ", ".join(f"{key}={entries[key].value}" for key in (min_isr.KEY, *own))


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
        if min_isr.KEY in (*changes, *(unset or [])):
            min_isr.warn_of_topics(admin, [topic])
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
