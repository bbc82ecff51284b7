"""`raftlog topic ...`"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

import raftlog
from raftlog._core.descriptions import PartitionDescription, TopicDescription
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.groups.reset_offsets import parse_time_ms
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    YesOption,
    check_complete,
    confirm_at_terminal,
    is_agreed,
    key_value_pairs,
    on_terminal,
    print_done,
    print_error,
    print_note,
    print_rows,
)
from raftlog.cli.partitions import health, moving
from raftlog.errors import AuthorizationError, InvalidPartitions, RaftlogError, TopicAlreadyExists
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
        typer.Option("--partitions", "-p", min=1, help="Number of partitions; by default the server's num.partitions."),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            "--replication-factor",
            "-r",
            min=1,
            help="Replicas of each partition; by default the server's default.replication.factor.",
        ),
    ] = None,
    replica_assignment: Annotated[
        str | None,
        typer.Option(
            metavar="ID:ID,...",
            help="The brokers of each partition, in place of both numbers: 1:2,2:3 makes two partitions.",
        ),
    ] = None,
    config: SetOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", metavar="", help="Succeed when the topic exists already.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a topic. A number that is not given is the server's num.partitions or default.replication.factor.

    Example: raftlog topic create events --partitions 6 --config retention.ms=7d
    """
    configs = key_value_pairs(config or [])
    assignment = None if replica_assignment is None else _assignment(replica_assignment, partitions, replication_factor)
    created = True
    with connect_admin(bootstrap) as admin:
        try:
            admin.create_topic(topic, partitions, replication_factor, configs, replica_assignment=assignment)
            moving.warn_of_topics(admin, [topic])
        except TopicAlreadyExists:
            if not if_not_exists:
                raise
            created = False
    print_done(
        f"topic {topic} {'created' if created else 'exists already'}",
        {"topic": topic, "created": created},
        output,
    )


def _assignment(text: str, partitions: int | None, replication_factor: int | None) -> list[list[int]]:
    """Return the brokers of each partition.

    Raises:
        typer.BadParameter: the text is malformed, or contradicts itself or one of the numbers.
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


InternalOption = Annotated[
    bool,
    typer.Option("--internal", metavar="", help="Include internal topics, whose names begin with two underscores."),
]


def _visible(topics: Sequence[TopicDescription], *, internal: bool) -> list[TopicDescription]:
    """Return the topics without internal ones, unless these are asked for; a note at a terminal counts the hidden."""
    shown = [topic for topic in topics if internal or not topic.internal]
    if (hidden := len(topics) - len(shown)) and sys.stderr.isatty():
        print_note(f"{counted(hidden, 'internal topic')} hidden; --internal shows them")
    return shown


@app.command("list")
def list_topics(
    internal: InternalOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the topics.

    Example: raftlog topic list --output json
    """
    with connect_admin(bootstrap) as admin:
        topics = _visible(admin.describe_topics(internal=True), internal=internal)
    rows = [{"topic": topic.name, "partitions": len(topic.partitions)} for topic in topics]
    print_rows(rows, ("topic", "partitions"), output)


@app.command()
def describe(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC]...", help="By default all.", show_default=False)
    ] = None,
    under_replicated: Annotated[
        bool, typer.Option("--under-replicated", metavar="", help="Only partitions with a replica out of sync.")
    ] = False,
    under_min_isr: Annotated[
        bool,
        typer.Option(
            "--under-min-isr", metavar="", help="Only partitions with fewer in-sync replicas than min.insync.replicas."
        ),
    ] = False,
    at_min_isr: Annotated[
        bool,
        typer.Option("--at-min-isr", metavar="", help="Only partitions with exactly min.insync.replicas in sync."),
    ] = False,
    unavailable: Annotated[
        bool,
        typer.Option(
            "--unavailable",
            metavar="",
            help="Only partitions without a leader, or whose leader is down or does not answer.",
        ),
    ] = False,
    internal: InternalOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the partitions of topics: their leaders, their replicas, and the lag of each replica.

    The command asks the controllers first. If they do not answer, it shows the metadata of one broker, prints a note on
    stderr, and exits with 1. --output json prints an array of topics, even for a single one. An option such as
    --under-replicated includes internal topics.

    Example: raftlog topic describe events

    Example: raftlog topic describe --under-replicated
    """
    only = _Only(under_replicated, under_min_isr, at_min_isr, unavailable)
    one = topics is not None and len(topics) == 1
    with connect_admin(bootstrap) as admin:
        agreed = is_agreed(admin)
        if topics and one:
            found = [admin.describe_topic(topics[0])]  # waits for a topic that was created a moment ago
        else:
            found = admin.describe_topics(topics, internal=True)
            if topics is None:
                found = _visible(found, internal=internal or any(only))
        seen = health.ask_leaders(admin, [topic.name for topic in found]) if found else health.Seen({}, {})
        wanted = [(topic, only.of(admin, topic, seen)) for topic in found]
        wanted = [(topic, parts) for topic, parts in wanted if parts or not any(only)]
        if one and output is not Output.JSON:
            print_note(_settings(admin, found[0].name))
    for topic, parts in wanted:
        for part in parts:
            if (why := health.why_lost_of(topic.name, part)) is not None:
                print_note(f"{topic.name}-{part.partition} has no leader: {why}")
    rows = [
        health.row_of(topic, part, seen.replicas.get(TopicPartition(topic.name, part.partition)))
        for topic, parts in wanted
        for part in parts
    ]
    extra = [column for column in health.IF_ANY if not on_terminal(output) or any(row[column] for row in rows)]
    documents = [_document(topic, parts, seen) for topic, parts in wanted]
    print_rows(rows, (*(health.ALWAYS[1:] if one else health.ALWAYS), *extra), output, documents=documents)
    if not agreed:
        raise typer.Exit(1)


class _Only(NamedTuple):
    """Which partitions are shown: those with any of the chosen problems, or all if none is chosen."""

    under_replicated: bool
    under_min_isr: bool
    at_min_isr: bool
    unavailable: bool

    def of(self, admin: raftlog.Admin, topic: TopicDescription, seen: health.Seen) -> list[PartitionDescription]:
        """Return the partitions of a topic to show."""
        minimum = moving.of_topic(admin, topic.name) if self.under_min_isr or self.at_min_isr else 0
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
    """Return a line with a topic's own settings, and always min.insync.replicas, which the ISR is compared with."""
    try:
        entries = admin.describe_configs(topic=topic)
    except AuthorizationError as error:  # a user without this permission still sees the rest
        return f"{topic}: configs: not allowed ({error})"
    own = sorted(key for key, entry in entries.items() if entry.source == "dynamic_topic" and key != moving.KEY)
    return f"{topic}: " + ", ".join(f"{key}={entries[key].value}" for key in (moving.KEY, *own))


@app.command()
def delete(
    topic: TopicArgument,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a topic and its records. At a terminal the command asks first; in a script it does not.

    Example: raftlog topic delete events
    """
    if not yes:
        confirm_at_terminal(f"delete topic {topic} and all of its records?", "not deleted")
    with connect_admin(bootstrap) as admin:
        admin.delete_topic(topic)
    print_done(f"topic {topic} deleted", {"topic": topic, "deleted": True}, output)


@app.command()
def alter(
    topic: TopicArgument,
    config: SetOption = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="KEY", help="Return this setting to its default; may be repeated."),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", metavar="TOTAL", min=1, help="The number of partitions afterwards; it cannot shrink."
        ),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change a topic's settings, or its number of partitions as `topic add-partitions` does.

    Example: raftlog topic alter events --config retention.ms=1d --unset segment.bytes

    Example: raftlog topic alter events --partitions 12
    """
    changes = key_value_pairs(config or [])
    if not changes and not unset and partitions is None:
        raise typer.BadParameter("nothing to change; give --config KEY=VALUE, --unset KEY or --partitions TOTAL")
    document: dict[str, Any] = {"topic": topic, "set": changes, "unset": unset or []}
    with connect_admin(bootstrap) as admin:
        if partitions is not None:
            admin.create_partitions(topic, partitions)
            document["partitions"] = partitions
        if changes or unset:
            admin.alter_configs(topic, set=changes, unset=unset or [])
        if moving.KEY in (*changes, *(unset or [])):
            moving.warn_of_topics(admin, [topic])
    print_done(f"topic {topic} altered", document, output)


@app.command("add-partitions")
def add_partitions(
    topic: TopicArgument,
    total: Annotated[int, typer.Argument(metavar="TOTAL", min=1, help="The number of partitions afterwards.")],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give a topic more partitions; records with the same key may go to another partition than before.

    Example: raftlog topic add-partitions events 12
    """
    with connect_admin(bootstrap) as admin:
        admin.create_partitions(topic, total)
    print_done(f"topic {topic} has {counted(total, 'partition')}", {"topic": topic, "partitions": total}, output)


# Offsets


_NAMED_TIMES: Final = {
    "-1": "latest",
    "latest": "latest",
    "-2": "earliest",
    "earliest": "earliest",
    "-3": "max_timestamp",
    "max-timestamp": "max_timestamp",
}
"""With Kafka's numbers."""
PartitionsOption = Annotated[
    list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition; may be repeated.")
]


@app.command()
def offsets(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC]...", help="By default all.", show_default=False)
    ] = None,
    time: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="latest (-1), earliest (-2), max-timestamp (-3: the record with the newest timestamp), or a time: "
            "2026-11-01T12:30:00Z, or milliseconds since 1970.",
        ),
    ] = "latest",
    partition: PartitionsOption = None,
    internal: InternalOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the offsets of partitions: their ends, their starts, or the first record at or after a time.

    A partition without such a record has no offset. Exit code 1: a leader has not answered; its partitions are missing.

    Example: raftlog topic offsets events --time earliest

    Example: raftlog topic offsets events --time 2026-11-01T12:30:00Z
    """
    which = _which(time)
    missing: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        if topics:
            found = admin.describe_topics(topics)
        else:
            found = _visible(admin.describe_topics(internal=True), internal=internal)
        parts = [part for topic in found for part in _chosen(topic, partition)]
        answers = admin.list_offsets(dict.fromkeys(parts, which), missing=missing) if parts else {}
    rows = [
        {
            "topic": part.topic,
            "partition": part.partition,
            "offset": None if answer is None else answer.offset,
            "timestamp": None if answer is None or answer.timestamp_ms < 0 else answer.timestamp_ms,
        }
        for part, answer in answers.items()
    ]
    print_rows(rows, ("topic", "partition", "offset", "timestamp"), output, optional=("timestamp",))
    check_complete("offsets", missing)


def _which(time: str) -> int | str:
    """Return what `--time` asks for, as `Admin.list_offsets` takes it.

    Raises:
        typer.BadParameter: it is neither a name nor a time.
    """
    if time in _NAMED_TIMES:
        return _NAMED_TIMES[time]
    try:
        return parse_time_ms(time)
    except ValueError:
        names = ", ".join(name for name in _NAMED_TIMES if name[0] != "-")
        raise typer.BadParameter(
            f"--time {time}: write {names}, or a time such as 2026-11-01T12:30:00Z or milliseconds since 1970"
        ) from None


def _chosen(topic: TopicDescription, numbers: Sequence[int] | None) -> list[TopicPartition]:
    """Return the named partitions of a topic, by default all.

    Raises:
        InvalidPartitions: the topic does not have one of them.
    """
    for number in numbers or ():
        if number >= len(topic.partitions):
            raise InvalidPartitions(
                f"topic {topic.name} has no partition {number}; it has {len(topic.partitions)}, from 0"
            )
    return [
        TopicPartition(topic.name, part.partition)
        for part in topic.partitions
        if not numbers or part.partition in numbers
    ]


@app.command("delete-records")
def delete_records(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", show_default=False)] = None,
    partition: PartitionsOption = None,
    before_offset: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Delete the records below this offset.")
    ] = None,
    all_records: Annotated[
        bool, typer.Option("--all", metavar="", help="Delete every record that is committed when the command runs.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--offset-json-file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help='Kafka\'s form: {"partitions": [{"topic": "events", "partition": 0, "offset": 100}]}; -1 is the end.',
        ),
    ] = None,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete the oldest records of partitions, and print where their logs begin now.

    At a terminal the command asks first; in a script it does not. Exit code 1: a partition was refused; the records of
    the others are deleted.

    Example: raftlog topic delete-records events --partition 0 --before-offset 100

    Example: raftlog topic delete-records events --all --yes
    """
    if (topic is None) == (file is None):
        raise typer.BadParameter("give either TOPIC or --offset-json-file")
    if file is not None:
        if partition or before_offset is not None or all_records:
            raise typer.BadParameter("--offset-json-file already names partitions and offsets")
        before = _from_kafkas_json(file)
    elif (before_offset is None) == (not all_records):
        raise typer.BadParameter("give either --before-offset or --all")
    with connect_admin(bootstrap) as admin:
        if topic is not None:
            parts = _chosen(admin.describe_topic(topic), partition)
            if before_offset is not None and len(parts) > 1 and not partition:
                raise typer.BadParameter(
                    f"--before-offset needs --partition: topic {topic} has {len(parts)} partitions, and each has its "
                    "own offsets"
                )
            before = dict.fromkeys(parts, -1 if before_offset is None else before_offset)
        if not yes:
            named = ", ".join(f"{part} below {'its end' if at < 0 else f'offset {at}'}" for part, at in before.items())
            confirm_at_terminal(f"delete the records of {named}?", "not deleted")
        starts: dict[TopicPartition, int] = {}
        refused: dict[TopicPartition, str] = {}
        for part, at in before.items():
            try:
                starts |= admin.delete_records({part: at})
            except RaftlogError as error:
                refused[part] = str(error)
    rows = [{"topic": part.topic, "partition": part.partition, "log_start_offset": at} for part, at in starts.items()]
    documents = {"partitions": rows, "refused": {str(part): why for part, why in refused.items()}}
    print_rows(rows, ("topic", "partition", "log_start_offset"), output, documents=documents)
    for part, why in refused.items():
        print_error(f"no record was deleted: {why}" if str(part) in why else f"no record of {part} was deleted: {why}")
    if refused:
        raise typer.Exit(1)


def _from_kafkas_json(file: Path) -> Mapping[TopicPartition, int]:
    """Return the offsets of a file for kafka-delete-records.

    Raises:
        typer.BadParameter: the file has another form.
    """
    try:
        entries = json.loads(file.read_text())["partitions"]
        found = {TopicPartition(str(each["topic"]), int(each["partition"])): int(each["offset"]) for each in entries}
    except (ValueError, KeyError, TypeError):
        found = {}
    if not found or len(found) < len(entries):
        raise typer.BadParameter(
            f'{file}: write {{"partitions": [{{"topic": "events", "partition": 0, "offset": 100}}]}}, with each '
            "partition once"
        )
    return found
