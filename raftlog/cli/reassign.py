"""`raftlog partition reassign`: makes plans up, begins moves, looks after them and cancels them (KIP-455, KIP-73)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import raftlog
from raftlog._descriptions import TopicDescription
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    json_text,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.cli.plans import (
    Move,
    balanced,
    moves_from_arguments,
    moves_from_json,
    plan_of,
    present,
    throttled_replicas,
)
from raftlog.config import parse_size_bytes
from raftlog.errors import UnknownTopicOrPartition
from raftlog.types import TopicPartition

LOOK_EVERY_S: Final = 0.5
RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
COLUMNS: Final = ("topic", "partition", "replicas", "state", "adding", "removing", "lag")

DONE: Final = "done"
UNDER_WAY: Final = "under way"
ELSEWHERE: Final = "elsewhere"
"""Neither where it was to be nor moving."""


def reassign(
    moves: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC-PARTITION=BROKER,...", help="Where a partition is to be.", show_default=False),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="A plan as JSON instead of arguments; - is stdin.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", metavar="", help="Make up a plan for --topic on --brokers, and print it.")
    ] = False,
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="For --generate; may be repeated.")] = None,
    brokers: Annotated[
        str | None, typer.Option("--brokers", metavar="ID,...", help="For --generate; else all that are up.")
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", metavar="", help="Begin the moves; the default.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", metavar="", help="Say how far they are; take the throttle off once all are done."),
    ] = False,
    cancel: Annotated[bool, typer.Option("--cancel", metavar="", help="Go back to where the replicas were.")] = False,
    list_: Annotated[bool, typer.Option("--list", metavar="", help="Show the moves that are under way.")] = False,
    throttle: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes a second that each broker gives to the moves: 10MiB.")
    ] = None,
    preserve_throttles: Annotated[
        bool, typer.Option("--preserve-throttles", metavar="", help="Leave the throttle on in the end.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", metavar="", help="Come back when the moves are done.")] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="Wait no longer than this.")] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move partitions to other brokers: new replicas catch up, then the old ones go.

    Example: raftlog partition reassign events-0=2,3,4 events-1=3,4,2 --throttle 20MiB --wait

    Example: raftlog partition reassign --generate --topic events --brokers 2,3,4 > plan.json
    """
    if sum((generate, execute, verify, cancel, list_)) > 1:
        raise typer.BadParameter("one of --generate, --execute, --verify, --cancel and --list at a time")
    rate = None if throttle is None else _rate(throttle)
    with connect_admin(bootstrap) as admin:
        if list_:
            _list(admin, output)
            return
        if generate:
            _generate(admin, topic or [], brokers, output)
            return
        wanted = _moves(moves or [], plan)
        if verify:
            _verify(admin, wanted, preserve_throttles, output)
        elif cancel:
            _cancel(admin, wanted, preserve_throttles, output)
        else:
            _execute(admin, wanted, rate, output, quiet=wait)
            if wait:
                _wait(admin, wanted, timeout)
                _verify(admin, wanted, preserve_throttles or rate is None, output)


def _rate(text: str) -> int:
    try:
        rate = parse_size_bytes(text)
    except ValueError:
        rate = 0
    if rate < 1:
        raise typer.BadParameter(f"--throttle {text}: write bytes a second, for example 20MiB")
    return rate


def _moves(arguments: Sequence[str], plan: str | None) -> list[Move]:
    if bool(arguments) == bool(plan):
        raise typer.BadParameter("name the partitions, or a --plan, one of the two")
    try:
        if plan is None:
            return moves_from_arguments(arguments)
        return moves_from_json(sys.stdin.read() if plan == "-" else Path(plan).read_text())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# What there is


def _topics(admin: raftlog.Admin, moves: Sequence[Move]) -> dict[str, TopicDescription]:
    """Return the topics of the moves, after checking that their partitions are there."""
    found = {each.name: each for each in admin.describe_topics({move.part.topic for move in moves})}
    for move in moves:
        partitions = found[move.part.topic].partitions
        if move.part.partition >= len(partitions):
            raise UnknownTopicOrPartition(
                f"topic {move.part.topic!r} has {len(partitions)} partitions and none numbered {move.part.partition}"
            )
    return found


def _state(move: Move, topics: Mapping[str, TopicDescription]) -> str:
    part = topics[move.part.topic].partitions[move.part.partition]
    if part.adding_replicas or part.removing_replicas:
        return UNDER_WAY
    return DONE if tuple(part.replicas) == move.replicas or not move.replicas else ELSEWHERE


def _rows(admin: raftlog.Admin, moves: Sequence[Move], states: Mapping[TopicPartition, str]) -> list[dict[str, object]]:
    topics = _topics(admin, moves)
    moving = {move.part.topic for move in moves if states[move.part] == UNDER_WAY}
    known = admin.describe_replicas(moving) if moving else {}
    rows: list[dict[str, object]] = []
    for move in moves:
        part = topics[move.part.topic].partitions[move.part.partition]
        described = known.get(move.part)
        lags = [each.lag for each in described.replicas if each.broker_id in part.adding_replicas] if described else []
        rows.append(
            {
                "topic": move.part.topic,
                "partition": move.part.partition,
                "replicas": list(move.replicas or part.replicas),
                "state": states[move.part],
                "adding": part.adding_replicas,
                "removing": part.removing_replicas,
                "lag": max(lags) if lags and min(lags) >= 0 else None,
            }
        )
    return rows


def _print(rows: Sequence[Mapping[str, object]], output: Output, **more: object) -> None:
    if output is Output.JSON:
        print_json({"moves": [dict(row) for row in rows], **more})
    else:
        print_rows(rows, COLUMNS, output)


# What is asked for


def _list(admin: raftlog.Admin, output: Output) -> None:
    moves = [Move(part, tuple(found.replicas)) for part, found in sorted(admin.list_reassignments().items())]
    _print(_rows(admin, moves, {move.part: UNDER_WAY for move in moves}) if moves else [], output)


def _generate(admin: raftlog.Admin, names: Sequence[str], brokers: str | None, output: Output) -> None:
    if not names:
        raise typer.BadParameter("--generate needs --topic")
    up = {each.broker_id: each for each in admin.describe_cluster().brokers if not each.fenced}
    try:
        wanted = sorted(up) if brokers is None else [int(each) for each in brokers.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--brokers {brokers}: write ids with commas, for example 1,2,3") from None
    missing = [each for each in wanted if each not in up]
    if missing:
        raise typer.BadParameter(f"broker {missing[0]} is not up; the cluster has {', '.join(map(str, sorted(up)))}")
    current = list(present(admin.describe_topics(names)))
    try:
        proposed = balanced(current, {each: up[each].rack for each in wanted})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if output is Output.JSON:
        print_json({"current": plan_of(current), "proposed": plan_of(proposed)})
    else:
        moved = sum(set(new.replicas) != set(old.replicas) for new, old in zip(proposed, current, strict=True))
        print_note(f"now:\n{json_text(plan_of(current))}\nwanted, with {counted(moved, 'partition')} to move:")
        print_json(plan_of(proposed))


def _execute(admin: raftlog.Admin, moves: Sequence[Move], rate: int | None, output: Output, *, quiet: bool) -> None:
    for move in moves:
        if not move.replicas:
            raise typer.BadParameter(f"{move.part.topic}-{move.part.partition}: say to which brokers, =1,2,3")
    goals = {move.part: move for move in moves}
    topics = _topics(admin, moves)
    before = [move for move in present(topics.values()) if move.part in goals]
    if rate is not None:
        _throttle(admin, before, goals, rate)
    admin.alter_reassignments({move.part: move.replicas for move in moves})
    print_note(f"{counted(len(moves), 'move')} begun; the way back, as a plan:\n{json_text(plan_of(before))}")
    if not quiet:
        topics = _topics(admin, moves)
        states = {move.part: _state(move, topics) for move in moves}
        _print(_rows(admin, moves, states), output, before=plan_of(before))


def _throttle(admin: raftlog.Admin, before: Sequence[Move], goals: Mapping[TopicPartition, Move], rate: int) -> None:
    """Hold the moves back before they begin."""
    involved = {broker for move in (*before, *goals.values()) for broker in move.replicas}
    for broker in sorted(involved & {each.broker_id for each in admin.describe_cluster().brokers}):
        admin.alter_configs(broker=broker, set=dict.fromkeys(RATES, rate))
    for topic, configs in throttled_replicas(before, goals).items():
        admin.alter_configs(topic=topic, set=configs)


def _take_throttle_off(admin: raftlog.Admin, moves: Sequence[Move]) -> None:
    for topic in sorted({move.part.topic for move in moves}):
        admin.alter_configs(topic=topic, unset=THROTTLED)
    if admin.list_reassignments():
        return  # others are held back by the same rates
    for broker in admin.describe_cluster().brokers:
        admin.alter_configs(broker=broker.broker_id, unset=RATES)


def _verify(admin: raftlog.Admin, moves: Sequence[Move], preserve_throttles: bool, output: Output) -> None:
    topics = _topics(admin, moves)
    states = {move.part: _state(move, topics) for move in moves}
    _print(_rows(admin, moves, states), output)
    undone = sum(state != DONE for state in states.values())
    if undone:
        print_error(f"{undone} of {counted(len(moves), 'move')} {'is' if undone == 1 else 'are'} not done")
        raise typer.Exit(1)
    if not preserve_throttles:
        _take_throttle_off(admin, moves)


def _cancel(admin: raftlog.Admin, moves: Sequence[Move], preserve_throttles: bool, output: Output) -> None:
    _topics(admin, moves)
    admin.alter_reassignments(dict.fromkeys((move.part for move in moves), None))
    if not preserve_throttles:
        _take_throttle_off(admin, moves)
    back = [Move(move.part, ()) for move in moves]
    _print(_rows(admin, back, {move.part: "cancelled" for move in moves}), output)


def _wait(admin: raftlog.Admin, moves: Sequence[Move], timeout: float | None) -> None:
    """Wait until none of the moves is under way; a bar on a terminal, else a line whenever one is done."""
    deadline = None if timeout is None else time.monotonic() + timeout
    columns = (TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[lag]}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("moving", total=len(moves), lag="")
        told = -1
        while True:
            under_way = admin.list_reassignments()
            left = [move for move in moves if move.part in under_way]
            done = len(moves) - len(left)
            lag = _lag(admin, left, {part: set(each.adding_replicas) for part, each in under_way.items()})
            words = f"{lag:,} records to go" if lag is not None else ""
            bar.update(task, completed=done, lag=words)
            if done != told and not console.is_terminal:
                print_note(f"{done} of {counted(len(moves), 'move')} done{', ' + words if words else ''}")
                told = done
            if not left:
                return
            if deadline is not None and time.monotonic() >= deadline:
                return
            time.sleep(LOOK_EVERY_S)


def _lag(admin: raftlog.Admin, left: Sequence[Move], adding: Mapping[TopicPartition, set[int]]) -> int | None:
    """Return how many records the new replicas are behind altogether; None while that is not known of all."""
    if not left:
        return None
    known = admin.describe_replicas({move.part.topic for move in left})
    lags = [
        replica.lag
        for move in left
        for replica in (known[move.part].replicas if move.part in known else ())
        if replica.broker_id in adding[move.part]
    ]
    return sum(lags) if lags and min(lags) >= 0 else None
