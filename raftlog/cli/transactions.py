"""`raftlog txn ...`"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import typer

from raftlog._admin import Admin
from raftlog._transaction_descriptions import STATE_NUMBERS, TransactionListing
from raftlog.cli import transaction_view as view
from raftlog.cli.clients import connect_admin
from raftlog.cli.each import refusals, tell
from raftlog.cli.offset_plans import parse_span_ms
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_done,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.errors import RaftlogError, TransactionalIdNotFound

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True, help="See transactions and staged batches that are open, and end what nobody ends."
)


def _checked_states(states: list[str] | None) -> list[str] | None:
    """Return states in lower case.

    Raises:
        typer.BadParameter: there is no such state.
    """
    for state in states or ():
        if state.lower() not in STATE_NUMBERS:
            raise typer.BadParameter(f"there is no state {state!r}; there are {', '.join(STATE_NUMBERS)}")
    return [state.lower() for state in states] if states else None


def _span_ms(text: str) -> int:
    """Return a duration in milliseconds.

    Raises:
        typer.BadParameter: it is none.
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
        callback=_checked_states,
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
        list[int] | None, typer.Option("--producer-id", min=0, help="Only of this producer; may be repeated.")
    ] = None,
    longer_than: Annotated[
        str, typer.Option("--longer-than", metavar="DURATION", help="Only what is open for longer, such as 30s or 5m.")
    ] = "0s",
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List transactional ids with their last transactions, and stages of batches. What is open comes first.

    Exit code 1 when there may be more, because a broker does not say what it coordinates.

    Example: raftlog txn list --state ongoing --longer-than 1m
    """
    missing: list[RaftlogError] = []
    longer_than_ms = _span_ms(longer_than)
    with connect_admin(bootstrap) as admin:
        found = view.open_first(
            admin.list_transactions(
                state, producer_ids=producer_id, running_longer_than_ms=longer_than_ms, missing=missing
            )
        )
    now_ms = time.time() * 1000
    if output is Output.JSON:
        print_json([view.listed(each) for each in found])
    else:
        rows = [view.list_row(each, now_ms) for each in found]
        print_rows(rows, view.LIST_COLUMNS, output, optional=view.LIST_OPTIONAL)
    _check_complete("transactions", missing)


@app.command()
def describe(
    transactional_ids: IdsArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show transactions: since when they are open, what they have written to, and whose markers are missing.

    The marker of a partition is what commits or aborts its records; it is missing while the partition has no leader.
    With --output json it is an array, also when one id is named. Exit code 1 when one of them is not known.

    Example: raftlog txn describe billing-7
    """
    with connect_admin(bootstrap) as admin:
        found, absent = _each(transactional_ids, admin.describe_transaction)
    now_ms = time.time() * 1000
    if output is Output.JSON:
        print_json([view.document(each) for each in found])
    else:
        for each in found:
            print_note(view.headline(each, now_ms))
        rows = [row for each in found for row in view.describe_rows(each)]
        columns = view.DESCRIBE_COLUMNS[len(found) == 1 and sys.stdout.isatty() :]
        print_rows(rows, columns, output, optional=view.DESCRIBE_OPTIONAL)
    _tell_absent(absent)


@app.command()
def abort(
    transactional_ids: IdsArgument,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort the open transactions of these ids. Their producers are fenced: they have to begin again.

    What is decided already is not aborted. Exit code 1 when one was not; the others are. The stages of a sink are
    ended by raftlog txn abort-stages.

    Example: raftlog txn abort billing-7
    """
    with connect_admin(bootstrap) as admin:
        found = refusals(transactional_ids, admin.abort_transaction)
    tell(found, "aborted", lambda each: f"the open transaction of {each} is aborted", "", output)


@app.command("abort-stages")
def abort_stages(
    sink_id: Annotated[str, typer.Argument(metavar="SINK", show_default=False)],
    batch: Annotated[int | None, typer.Option("--batch", min=0, help="Only those of this batch.")] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort the open stages of a sink, which a writer has left that is gone: readers wait behind them.

    A writer that still lives fails when it commits, and writes its batch again. See raftlog txn sinks SINK.

    Example: raftlog txn abort-stages nightly-export --batch 42
    """
    with connect_admin(bootstrap) as admin:
        ended = admin.abort_stages(sink_id, batch)
    whose = sink_id if batch is None else f"batch {batch} of {sink_id}"
    stages = counted(len(ended), "open stage")
    print_done(
        f"{stages} of {whose} {'is' if len(ended) == 1 else 'are'} aborted" if ended else f"{whose} has no open stages",
        {"sink_id": sink_id, "aborted": [view.stage_document(each) for each in ended]},
        output,
    )


@app.command()
def producers(
    topic: TopicArgument,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this one.")] = None,
    open_only: Annotated[
        bool, typer.Option("--open", metavar="", help="Only those that have a transaction open.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the producers that a topic's partitions know, whose they are, and where each has a transaction open.

    Readers of what is committed get nothing from the first of those offsets on. A note says how far that is. Where
    many tasks write, as those of Spark, ask for --open: there is a producer for each attempt of a task. Names are
    those that coordinators know: transactional ids, and sinks of stages that are not over.

    Example: raftlog txn producers orders --partition 3 --open
    """
    missing: list[RaftlogError] = []
    with connect_admin(bootstrap) as admin:
        found = admin.describe_producers(topic, partition)
        if open_only:
            found = view.only_open(found)
        owners = _owners(admin, found, missing)
    if output is Output.JSON:
        print_json(view.producer_documents(found, owners))
    else:
        for line in view.held_up(found):
            print_note(f"note: {line}")
        rows = view.producer_rows(found, owners, time.time() * 1000)
        print_rows(rows, view.PRODUCER_COLUMNS, output, optional=view.PRODUCER_OPTIONAL)
    for reason in _reasons(missing):
        print_note(f"note: some names may be missing: {reason}")


def _owners(admin: Admin, found: view.Producers, missing: list[RaftlogError]) -> dict[int, TransactionListing]:
    """Return whose the producer ids are; why some may be missing goes to `missing`."""
    ids = {each.producer_id for described in found.values() for each in described.producers}
    if not ids:
        return {}
    try:
        listed = admin.list_transactions(producer_ids=ids, missing=missing)
    except RaftlogError as error:  # no coordinator answers: what partitions know is worth having without
        missing.append(error)
        return {}
    return {each.producer_id: each for each in listed}


@app.command("find-hanging")
def find_hanging(
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="Only this one; may be repeated.")] = None,
    max_transaction_timeout: Annotated[
        str,
        typer.Option(
            "--max-transaction-timeout",
            metavar="DURATION",
            help="transaction.max.timeout.ms of the brokers: what is open for less is not looked at.",
        ),
    ] = "15m",
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find transactions that are open on a partition though no coordinator knows of them, and say how to end them.

    Nothing ends such a transaction by itself, and readers of what is committed wait behind it. There are none unless
    a client breaks the rules, or a record came after its partition forgot the producer. Exit code 1 when there may be
    more, because a partition does not tell.

    Example: raftlog txn find-hanging --topic orders
    """
    missing: list[RaftlogError] = []
    timeout_ms = _span_ms(max_transaction_timeout)
    with connect_admin(bootstrap) as admin:
        found = admin.find_hanging_transactions(topic or None, max_transaction_timeout_ms=timeout_ms, missing=missing)
    if output is Output.JSON:
        print_json([{**each._asdict(), "abort_command": view.abort_command(each)} for each in found])
    else:
        now_ms = time.time() * 1000
        print_rows([view.hanging_row(each, now_ms) for each in found], view.HANGING_COLUMNS, output)
        if found:
            print_note("what they have written is aborted, and readers go on, by:")
        for each in found:
            print_note(f"  {view.abort_command(each)}")
    _check_complete("hanging transactions", missing)


@app.command("abort-hanging")
def abort_hanging(
    topic: TopicArgument,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, show_default=False)],
    start_offset: Annotated[
        int, typer.Option("--start-offset", min=0, show_default=False, help="Where it begins, as find-hanging says.")
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", metavar="", help="Do not ask the coordinators whether they know it, where they do not answer."
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort a hanging transaction in one partition. One that a coordinator knows is refused: see raftlog txn abort.

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
        list[str] | None, typer.Argument(metavar="[SINK]...", help="With their stages.", show_default=False)
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the sinks of staged batches, which batch each has committed last; those that are named with open stages.

    Exit code 1 when there may be more, or one of those named is not known.

    Example: raftlog txn sinks
    """
    missing: list[RaftlogError] = []
    if sink_ids:
        _describe_sinks(sink_ids, bootstrap, output)
        return
    with connect_admin(bootstrap) as admin:
        found = admin.list_sinks(missing=missing)
    if output is Output.JSON:
        print_json([each._asdict() for each in found])
    else:
        now_ms = time.time() * 1000
        rows = [view.sink_row(each, now_ms) for each in found]
        print_rows(rows, view.SINK_COLUMNS, output, optional=view.SINK_OPTIONAL)
    _check_complete("sinks", missing)


def _describe_sinks(sink_ids: Sequence[str], bootstrap: str, output: Output) -> None:
    with connect_admin(bootstrap) as admin:
        found, absent = _each(sink_ids, admin.describe_sink)
    if output is Output.JSON:
        print_json([view.sink_document(each) for each in found])
    else:
        now_ms = time.time() * 1000
        for each in found:
            print_note(view.sink_headline(each, now_ms))
        rows = [row for each in found for row in view.stage_rows(each, now_ms)]
        print_rows(rows, view.STAGE_COLUMNS, output, optional=view.STAGE_OPTIONAL)
    _tell_absent(absent)


def _each(ids: Iterable[str], describe: Callable[[str], T]) -> tuple[list[T], list[TransactionalIdNotFound]]:
    """Return what is known, and why the rest is not.

    Raises:
        TransactionalIdNotFound: nothing is.
    """
    found: list[T] = []
    absent: list[TransactionalIdNotFound] = []
    for each in dict.fromkeys(ids):
        try:
            found.append(describe(each))
        except TransactionalIdNotFound as error:
            absent.append(error)
    if not found:
        raise absent.pop(0)
    return found, absent


def _tell_absent(absent: Sequence[TransactionalIdNotFound]) -> None:
    for error in absent:
        print_error(str(error))
    if absent:
        raise typer.Exit(1)


def _check_complete(what: str, missing: Iterable[RaftlogError]) -> None:
    reasons = _reasons(missing)
    for reason in reasons:
        print_note(f"note: there may be more {what}: {reason}")
    if reasons:
        raise typer.Exit(1)


def _reasons(missing: Iterable[RaftlogError]) -> list[str]:
    """Return each reason once."""
    return list(dict.fromkeys(map(str, missing)))
