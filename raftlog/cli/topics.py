"""`raftlog topic ...`"""

from __future__ import annotations

from typing import Annotated

import typer

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

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, change and delete topics.")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="A topic setting; may be repeated."),
]
_PARTITION_COLUMNS = ("partition", "leader", "leader_epoch", "replicas", "isr")


@app.command()
def create(
    topic: TopicArgument,
    partitions: Annotated[int, typer.Option("--partitions", "-p", min=1)] = 1,
    replication_factor: Annotated[int, typer.Option("--replication-factor", "-r", min=1)] = 1,
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
    created = True
    with connect_admin(bootstrap) as admin:
        try:
            admin.create_topic(topic, partitions, replication_factor, configs)
        except TopicAlreadyExists:
            if not if_not_exists:
                raise
            created = False
    print_done(
        f"topic {topic} {'created' if created else 'was there already'}",
        {"topic": topic, "created": created},
        output,
    )


@app.command("list")
def list_topics(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """List the topics.

    Example: raftlog topic list --output json
    """
    with connect_admin(bootstrap) as admin:
        names = admin.list_topics()
        rows = [{"topic": name, "partitions": len(admin.describe_topic(name).partitions)} for name in sorted(names)]
    print_rows(rows, ("topic", "partitions"), output)


@app.command()
def describe(
    topic: TopicArgument, bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE
) -> None:
    """Show a topic's partitions and who leads them.

    Example: raftlog topic describe events
    """
    with connect_admin(bootstrap) as admin:
        described = admin.describe_topic(topic)
    rows = [{column: getattr(found, column) for column in _PARTITION_COLUMNS} for found in described.partitions]
    if output is Output.JSON:
        print_json({"topic": described.name, "topic_id": described.topic_id.hex(), "partitions": rows})
    else:
        print_rows(rows, _PARTITION_COLUMNS, output)


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
