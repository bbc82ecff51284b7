"""`raftlog txn ...`: transactions, sinks and producers as rows for tables and documents for programs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from raftlog._admin import Admin
from raftlog._core.descriptions import (
    ONGOING,
    OPEN_STATES,
    STATE_NUMBERS,
    HangingTransaction,
    PartitionProducers,
    ProducerState,
    SinkDescription,
    SinkListing,
    StageDescription,
    TransactionDescription,
    TransactionListing,
)
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.groups.groups import compact
from raftlog.cli.groups.reset_offsets import parse_span_ms
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    check_complete,
    checked_states,
    described,
    on_terminal,
    print_done,
    print_note,
    print_rows,
    refusals,
    tell,
)
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition

LIST_COLUMNS: Final = ("transactional_id", "sink", "producer_id", "state", "open_seconds", "coordinator")
LIST_OPTIONAL: Final = ("open_seconds", "sink", "coordinator")
DESCRIBE_COLUMNS: Final = ("transactional_id", "topic", "partition", "group", "marker")
DESCRIBE_OPTIONAL: Final = ("group", "marker")
SINK_COLUMNS: Final = ("sink", "last_batch", "target", "committed_seconds_ago", "open_stages", "coordinator")
SINK_OPTIONAL: Final = ("target", "committed_seconds_ago", "open_stages", "coordinator")
STAGE_COLUMNS: Final = (
    "sink",
    "producer_id",
    "batch",
    "state",
    "open_seconds",
    "timeout_seconds",
    "attempt",
    "partitions",
)
STAGE_OPTIONAL: Final = ("open_seconds", "attempt", "partitions", "timeout_seconds")
PRODUCER_COLUMNS: Final = (
    "topic",
    "partition",
    "producer_id",
    "epoch",
    "last_sequence",
    "idle_seconds",
    "transaction_start_offset",
    "open_seconds",
    "transactional_id",
    "sink",
)
PRODUCER_OPTIONAL: Final = (
    "transaction_start_offset",
    "open_seconds",
    "transactional_id",
    "sink",
    "idle_seconds",
    "last_sequence",
)
HANGING_COLUMNS: Final = (
    "topic",
    "partition",
    "producer_id",
    "producer_epoch",
    "start_offset",
    "open_seconds",
    "idle_seconds",
)
"""The `..._OPTIONAL` are the columns that a narrow terminal leaves out, the last one first."""

Producers = Mapping[TopicPartition, PartitionProducers]
Owners = Mapping[int, TransactionListing]
"""The transactional id or stage of each producer id that a coordinator knows."""


def since_s(at_ms: int | None, now_ms: float) -> float | None:
    """Return the seconds since a time; None if there is no time."""
    return round(max(0.0, now_ms - at_ms) / 1000, 1) if at_ms else None


def listed(found: TransactionListing) -> dict[str, Any]:
    """Return a listed entry as a document; empty names become None."""
    return {**found._asdict(), "transactional_id": found.transactional_id or None, "sink_id": found.sink_id or None}


def open_first(found: Iterable[TransactionListing]) -> list[TransactionListing]:
    """Return open transactions, the oldest first, then the rest in its order."""
    return sorted(
        found, key=lambda each: (False, each.started_ms) if each.state in OPEN_STATES and each.started_ms else (True, 0)
    )


def list_row(found: TransactionListing, now_ms: float) -> dict[str, Any]:
    """Return the row of a transactional id, or of a stage."""
    return {
        "transactional_id": found.transactional_id or None,
        "sink": found.sink_id or None,
        "producer_id": found.producer_id,
        "state": found.state,
        "open_seconds": since_s(found.started_ms, now_ms),
        "coordinator": found.coordinator_id,
    }


def headline(found: TransactionDescription, now_ms: float) -> str:
    """Return a line about a whole transaction."""
    parts = [found.state]
    open_s = since_s(found.started_ms, now_ms)
    if open_s is not None:
        parts[0] += f" for {open_s:g} s"
    parts.append(f"timeout {found.timeout_ms / 1000:g} s")
    parts.append(f"producer {found.producer_id} epoch {found.producer_epoch}")
    parts.append(f"coordinator {found.coordinator_id} (__transaction_state-{found.state_partition})")
    if found.pending:
        parts.append(f"markers still missing: {compact(found.pending)}")
    return f"{found.transactional_id}: {', '.join(parts)}"


def describe_rows(found: TransactionDescription) -> list[dict[str, Any]]:
    """Return a row for each partition and group of a transaction."""
    decided = found.state.startswith("prepare")
    rows: list[dict[str, Any]] = [
        {
            "transactional_id": found.transactional_id,
            "topic": part.topic,
            "partition": part.partition,
            "marker": ("missing" if part in found.pending else "written") if decided else None,
        }
        for part in found.partitions
    ]
    return rows + [{"transactional_id": found.transactional_id, "group": group_id} for group_id in found.group_ids]


def document(found: TransactionDescription) -> dict[str, Any]:
    """Return the whole description of a transaction."""
    return {**found._asdict(), "partitions": parts(found.partitions), "pending": parts(found.pending)}


def sink_row(found: SinkListing, now_ms: float) -> dict[str, Any]:
    """Return the row of a sink."""
    return {
        "sink": found.sink_id,
        "last_batch": found.last_batch_id if found.last_batch_id >= 0 else None,
        "target": found.target or None,
        "committed_seconds_ago": since_s(found.updated_ms, now_ms),
        "open_stages": found.open_stages,
        "coordinator": found.coordinator_id,
    }


def sink_headline(found: SinkDescription, now_ms: float) -> str:
    """Return a line about a whole sink."""
    ago_s = since_s(found.updated_ms, now_ms)
    last = "no batch is committed"
    if found.last_batch_id >= 0:
        last = f"batch {found.last_batch_id} is committed" + (f", {ago_s:g} s ago" if ago_s is not None else "")
    open_stages = sum(stage.state == ONGOING for stage in found.stages)
    return f"{found.sink_id}: {last}, target {found.target or '-'}, {counted(open_stages, 'stage')} open"


def stage_rows(found: SinkDescription, now_ms: float) -> list[dict[str, Any]]:
    """Return a row for each stage of a sink."""
    return [
        {
            "sink": found.sink_id,
            "producer_id": stage.producer_id,
            "batch": stage.batch_id,
            "state": stage.state,
            "open_seconds": since_s(stage.started_ms, now_ms),
            "timeout_seconds": round(stage.timeout_ms / 1000),
            "attempt": stage.attempt or None,
            "partitions": compact(stage.partitions),
        }
        for stage in found.stages
    ]


def sink_document(found: SinkDescription) -> dict[str, Any]:
    """Return the whole description of a sink."""
    return {**found._asdict(), "stages": [stage_document(stage) for stage in found.stages]}


def stage_document(found: StageDescription) -> dict[str, Any]:
    """Return the whole description of a stage."""
    return {**found._asdict(), "partitions": parts(found.partitions)}


def only_open(found: Producers) -> dict[TopicPartition, PartitionProducers]:
    """Return for each partition the producers with an open transaction there."""
    return {
        part: described._replace(
            producers=[each for each in described.producers if each.transaction_start_offset is not None]
        )
        for part, described in found.items()
    }


def producer_rows(found: Producers, owners: Owners, now_ms: float) -> list[dict[str, Any]]:
    """Return a row for each producer of each partition."""
    return [
        {
            "topic": part.topic,
            "partition": part.partition,
            "producer_id": each.producer_id,
            "epoch": each.producer_epoch,
            "last_sequence": each.last_sequence if each.last_sequence >= 0 else None,
            "idle_seconds": since_s(each.last_append_ms, now_ms),
            "transaction_start_offset": each.transaction_start_offset,
            "open_seconds": since_s(each.transaction_started_ms, now_ms),
            "transactional_id": _names(each, owners)["transactional_id"],
            "sink": _names(each, owners)["sink_id"],
        }
        for part, described in found.items()
        for each in described.producers
    ]


def _names(producer: ProducerState, owners: Owners) -> dict[str, str | None]:
    owner = owners.get(producer.producer_id)
    return {
        "transactional_id": owner.transactional_id or None if owner is not None else None,
        "sink_id": owner.sink_id or None if owner is not None else None,
    }


def producer_documents(found: Producers, owners: Owners) -> list[dict[str, Any]]:
    """Return the whole descriptions of partitions' producers."""
    return [
        {
            **part._asdict(),
            **described._asdict(),
            "producers": [{**each._asdict(), **_names(each, owners)} for each in described.producers],
        }
        for part, described in found.items()
    ]


def held_up(found: Producers) -> list[str]:
    """Return a line for each partition where an open transaction holds up read_committed consumers."""
    return [
        f"{part}: the last stable offset is {each.last_stable_offset}, {each.high_watermark - each.last_stable_offset} "
        f"below the high watermark {each.high_watermark}"
        for part, each in found.items()
        if each.last_stable_offset < each.high_watermark
    ]


def hanging_row(found: HangingTransaction, now_ms: float) -> dict[str, Any]:
    """Return the row of a hanging transaction."""
    row = found._asdict()
    row["open_seconds"] = since_s(row.pop("started_ms"), now_ms)
    row["idle_seconds"] = since_s(row.pop("last_append_ms"), now_ms)
    return row


def abort_command(found: HangingTransaction) -> str:
    """Return the command that ends a hanging transaction."""
    return (
        f"raftlog txn abort-hanging {shlex.quote(found.topic)} --partition {found.partition} "
        f"--start-offset {found.start_offset}"
    )


def parts(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    """Return partitions as documents."""
    return [part._asdict() for part in partitions]


app = typer.Typer(
    no_args_is_help=True, help="See open transactions and staged batches, and abort the ones that are left behind."
)


def _span_ms(text: str) -> int:
    """Return a duration in milliseconds.

    Raises:
        typer.BadParameter: it is malformed.
    """
    try:
        return parse_span_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


StateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        "-s",
        callback=checked_states(STATE_NUMBERS),
        help="Only in this state (empty, ongoing, prepare_commit, prepare_abort, complete_commit, complete_abort); "
        "may be repeated.",
    ),
]
IdsArgument = Annotated[list[str], typer.Argument(metavar="TRANSACTIONAL-ID...", show_default=False)]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]


@app.command("list")
def list_transactions(
    state: StateOption = None,
    producer_id: Annotated[
        list[int] | None, typer.Option("--producer-id", min=0, help="Only of this producer id; may be repeated.")
    ] = None,
    longer_than: Annotated[
        str,
        typer.Option(
            "--longer-than", metavar="DURATION", help="Only transactions open for longer than this, such as 30s or 5m."
        ),
    ] = "0s",
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List transactional ids with their last transactions, and stages of batches; open ones come first.

    Exit code 1: the list may be incomplete, because a broker did not list its transactions.

    Example: raftlog txn list --state ongoing --longer-than 1m
    """
    missing: list[RaftlogError] = []
    longer_than_ms = _span_ms(longer_than)
    with connect_admin(bootstrap) as admin:
        found = open_first(
            admin.list_transactions(
                state, producer_ids=producer_id, running_longer_than_ms=longer_than_ms, missing=missing
            )
        )
    now_ms = time.time() * 1000
    rows = [list_row(each, now_ms) for each in found]
    print_rows(rows, LIST_COLUMNS, output, documents=list(map(listed, found)), optional=LIST_OPTIONAL)
    check_complete("transactions", missing)


@app.command()
def describe(
    transactional_ids: IdsArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show transactions: how long they are open, the partitions that they have written to, and missing markers.

    A marker commits or aborts the transaction's records in a partition; it is missing while the partition has no
    leader.
    --output json prints an array, even for a single id. Exit code 1: an id is unknown.

    Example: raftlog txn describe billing-7
    """
    with connect_admin(bootstrap) as admin:
        found, absent = described(transactional_ids, admin.describe_transaction)
    now_ms = time.time() * 1000
    print_rows(
        [row for each in found for row in describe_rows(each)],
        DESCRIBE_COLUMNS[len(found) == 1 and on_terminal(output) :],
        output,
        documents=list(map(document, found)),
        headlines=[headline(each, now_ms) for each in found],
        optional=DESCRIBE_OPTIONAL,
    )
    check_complete("", (), absent)


@app.command()
def abort(
    transactional_ids: IdsArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort the open transactions of these ids. Their producers are fenced and have to start again.

    The command refuses a transaction whose commit or abort is already decided. Exit code 1: one was refused; the others
    are aborted. For the stages of a sink, see raftlog txn abort-stages.

    Example: raftlog txn abort billing-7
    """
    with connect_admin(bootstrap) as admin:
        found = refusals(transactional_ids, admin.abort_transaction)
    tell(found, "aborted", lambda each: f"the open transaction of {each} is aborted", "", output)


@app.command("abort-stages")
def abort_stages(
    sink_id: Annotated[str, typer.Argument(metavar="SINK", show_default=False)],
    batch: Annotated[int | None, typer.Option("--batch", min=0, help="Only the stages of this batch.")] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort the open stages that a dead writer of a sink has left: read_committed consumers wait behind them.

    If the writer is still alive, its commit fails, and it writes the batch again. See raftlog txn sinks SINK.

    Example: raftlog txn abort-stages nightly-export --batch 42
    """
    with connect_admin(bootstrap) as admin:
        ended = admin.abort_stages(sink_id, batch)
    whose = sink_id if batch is None else f"batch {batch} of {sink_id}"
    stages = counted(len(ended), "open stage")
    print_done(
        f"{stages} of {whose} {'is' if len(ended) == 1 else 'are'} aborted" if ended else f"{whose} has no open stages",
        {"sink_id": sink_id, "aborted": [stage_document(each) for each in ended]},
        output,
    )


@app.command()
def producers(
    topic: TopicArgument,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")] = None,
    open_only: Annotated[
        bool, typer.Option("--open", metavar="", help="Only producers with an open transaction.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the producers of a topic's partitions, their names, and the start of each open transaction.

    read_committed consumers get no records from the first of those offsets on; a note shows how many records these are.
    With many writing tasks, as in Spark, use --open: every attempt of a task is a producer. The names come from the
    coordinators: transactional ids, and the sinks of open stages.

    Example: raftlog txn producers orders --partition 3 --open
    """
    missing: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        found = admin.describe_producers(topic, partition)
        if open_only:
            found = only_open(found)
        owners = _owners(admin, found, missing)
    print_rows(
        producer_rows(found, owners, time.time() * 1000),
        PRODUCER_COLUMNS,
        output,
        documents=producer_documents(found, owners),
        headlines=[f"note: {line}" for line in held_up(found)],
        optional=PRODUCER_OPTIONAL,
    )
    for reason in dict.fromkeys(map(str, missing)):
        print_note(f"note: some names may be missing: {reason}")


def _owners(admin: Admin, found: Producers, missing: list[RaftlogError]) -> dict[int, TransactionListing]:
    """Return the owners of the producer ids; reasons why some may be missing go to `missing`."""
    ids = {each.producer_id for described in found.values() for each in described.producers}
    if not ids:
        return {}
    try:
        listed = admin.list_transactions(producer_ids=ids, missing=missing)
    except RaftlogError as error:  # no coordinator answers: the rows are useful without names too
        missing.append(error)
        return {}
    return {each.producer_id: each for each in listed}


@app.command("find-hanging")
def find_hanging(
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="Only this topic; may be repeated.")] = None,
    max_transaction_timeout: Annotated[
        str,
        typer.Option(
            "--max-transaction-timeout",
            metavar="DURATION",
            help="Only transactions open for longer are checked: the brokers' longest timeout.",
        ),
    ] = "15m",
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find transactions that are open on a partition but unknown to every coordinator, and print how to abort them.

    Such a transaction does not end by itself, and read_committed consumers wait behind it. Its cause is a client that
    breaks the protocol, or a record that arrived after its partition had forgotten the producer. Exit code 1: the list
    may be incomplete, because a partition's leader did not answer.

    Example: raftlog txn find-hanging --topic orders
    """
    missing: list[RaftlogError] = []
    timeout_ms = _span_ms(max_transaction_timeout)
    with connect_admin(bootstrap) as admin:
        found = admin.find_hanging_transactions(topic or None, max_transaction_timeout_ms=timeout_ms, missing=missing)
    now_ms = time.time() * 1000
    documents = [{**each._asdict(), "abort_command": abort_command(each)} for each in found]
    print_rows([hanging_row(each, now_ms) for each in found], HANGING_COLUMNS, output, documents=documents)
    if found and output is not Output.JSON:
        print_note("these commands abort them, and their readers continue:")
        for each in found:
            print_note(f"  {abort_command(each)}")
    check_complete("hanging transactions", missing)


@app.command("abort-hanging")
def abort_hanging(
    topic: TopicArgument,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, show_default=False)],
    start_offset: Annotated[
        int,
        typer.Option("--start-offset", min=0, show_default=False, help="Its first offset, which find-hanging prints."),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            metavar="",
            help="Do not ask the coordinators whether they know it; use it if they do not answer.",
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort a hanging transaction in one partition. If a coordinator knows it, use raftlog txn abort instead.

    Example: raftlog txn abort-hanging orders --partition 3 --start-offset 1205
    """
    with connect_admin(bootstrap) as admin:
        ended = admin.abort_hanging(topic, partition, start_offset, force=force)
    print_done(
        f"the transaction of producer {ended.producer_id} that began at offset {start_offset} of {topic}-{partition} "
        "is aborted",
        ended._asdict(),
        output,
    )


@app.command()
def sinks(
    sink_ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SINK]...", help="Show these with their stages; by default all are listed.", show_default=False
        ),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the sinks of staged batches and their last committed batches, or show named sinks with their stages.

    Exit code 1: the list may be incomplete, or a named sink is unknown.

    Example: raftlog txn sinks
    """
    missing: list[RaftlogError] = []
    if sink_ids:
        _describe_sinks(sink_ids, bootstrap, output)
        return
    with connect_admin(bootstrap) as admin:
        found = admin.list_sinks(missing=missing)
    now_ms = time.time() * 1000
    rows = [sink_row(each, now_ms) for each in found]
    print_rows(rows, SINK_COLUMNS, output, documents=[each._asdict() for each in found], optional=SINK_OPTIONAL)
    check_complete("sinks", missing)


def _describe_sinks(sink_ids: Sequence[str], bootstrap: str, output: Output) -> None:
    with connect_admin(bootstrap) as admin:
        found, absent = described(sink_ids, admin.describe_sink)
    now_ms = time.time() * 1000
    print_rows(
        [row for each in found for row in stage_rows(each, now_ms)],
        STAGE_COLUMNS,
        output,
        documents=list(map(sink_document, found)),
        headlines=[sink_headline(each, now_ms) for each in found],
        optional=STAGE_OPTIONAL,
    )
    check_complete("", (), absent)
