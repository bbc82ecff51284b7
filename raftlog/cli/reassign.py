"""`raftlog partition reassign`: makes plans up, begins moves, looks after them and cancels them (KIP-455, KIP-73)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import raftlog
from raftlog._descriptions import TopicDescription
from raftlog.cli import min_isr, throttles
from raftlog.cli.clients import connect_admin
from raftlog.cli.moving import DONE, GONE, UNDER_WAY, all_topics, carry_out, partition_of, state_of
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
    holding,
    moves_from_arguments,
    moves_from_json,
    plan_of,
    present,
)
from raftlog.errors import UnknownTopicOrPartition
from raftlog.types import TopicPartition

COLUMNS: Final = ("topic", "partition", "replicas", "state", "adding", "removing", "lag")

NOT_MOVING: Final = "not moving"


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
        str | None,
        typer.Option("--brokers", metavar="ID,...", help="For --generate; else all that are up and take replicas."),
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
    rate = None if throttle is None else throttles.rate_of(throttle)
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
                _see_through(admin, wanted, timeout, rate is not None, preserve_throttles, output)
            elif rate is not None:
                print_note(throttles.STAYS)


def _see_through(
    admin: raftlog.Admin,
    moves: Sequence[Move],
    timeout: float | None,
    throttled: bool,
    preserve_throttles: bool,
    output: Output,
) -> None:
    more = f"; {throttles.STAYS}" if throttled else ""
    far = carry_out(admin, moves, timeout_s=timeout, if_interrupted=lambda far: f"{far}{more}")
    if not far.undone:
        _verify(admin, moves, preserve_throttles or not throttled, output)
        return
    _show(admin, moves, output)
    print_error(f"after {timeout:g} s {far}{more}")
    raise typer.Exit(1)


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


def _rows(
    admin: raftlog.Admin,
    topics: Mapping[str, TopicDescription],
    moves: Sequence[Move],
    states: Mapping[TopicPartition, str],
) -> list[dict[str, object]]:
    moving = {move.part.topic for move in moves if states[move.part] == UNDER_WAY}
    known = admin.describe_replicas(moving, silent={}) if moving else {}
    rows: list[dict[str, object]] = []
    for move in moves:
        part = partition_of(move, topics)
        described = known.get(move.part)
        adding = part.adding_replicas if part is not None else []
        lags = [each.lag for each in described.replicas if each.broker_id in adding] if described else []
        rows.append(
            {
                "topic": move.part.topic,
                "partition": move.part.partition,
                "replicas": list(move.replicas or (part.replicas if part is not None else ())),
                "state": states[move.part],
                "adding": adding,
                "removing": part.removing_replicas if part is not None else [],
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
    topics = _topics(admin, moves) if moves else {}
    _print(_rows(admin, topics, moves, {move.part: UNDER_WAY for move in moves}), output)


def _generate(admin: raftlog.Admin, names: Sequence[str], brokers: str | None, output: Output) -> None:
    if not names:
        raise typer.BadParameter("--generate needs --topic")
    up = {each.broker_id: each for each in admin.describe_cluster().brokers if not each.fenced}
    open_ = sorted(each.broker_id for each in up.values() if not each.cordoned and not each.drained)
    try:
        wanted = open_ if brokers is None else [int(each) for each in brokers.split(",")]
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
        pairs = [(new.replicas, old.replicas) for new, old in zip(proposed, current, strict=True)]
        moved = sum(set(new) != set(old) for new, old in pairs)
        turned = sum(set(new) == set(old) and new != old for new, old in pairs)
        what = f"{counted(moved, 'partition')} to move and {turned:,} with another order"
        print_note(f"now:\n{json_text(plan_of(current))}\nwanted, with {what}:")
        print_json(plan_of(proposed))


def _execute(admin: raftlog.Admin, moves: Sequence[Move], rate: int | None, output: Output, *, quiet: bool) -> None:
    for move in moves:
        if not move.replicas:
            raise typer.BadParameter(f"{move.part.topic}-{move.part.partition}: say to which brokers, =1,2,3")
    goals = {move.part: move for move in moves}
    topics = _topics(admin, moves)
    before = [move for move in present(topics.values()) if move.part in goals]
    min_isr.warn(admin, {move.part: len(move.replicas) for move in moves})
    if rate is not None:
        throttles.put_on(admin, [move for move in holding(topics.values()) if move.part in goals], goals, rate)
    admin.alter_reassignments({move.part: move.replicas for move in moves})
    print_note(f"{counted(len(moves), 'move')} begun; the way back, as a plan:\n{json_text(plan_of(before))}")
    if not quiet:
        topics = _topics(admin, moves)
        states = {move.part: state_of(move, topics) for move in moves}
        _print(_rows(admin, topics, moves, states), output, before=plan_of(before))


def _verify(admin: raftlog.Admin, moves: Sequence[Move], preserve_throttles: bool, output: Output) -> None:
    states = _show(admin, moves, output)
    if not preserve_throttles and UNDER_WAY not in states.values():
        throttles.take_off(admin, _there(states))
    if set(states.values()) == {GONE}:
        raise UnknownTopicOrPartition(f"there is no {next(iter(states))}, nor any other of these partitions")
    undone = [part for part, state in states.items() if state not in (DONE, GONE)]
    if undone:
        print_error(_not_done(len(undone), len(moves)))
        raise typer.Exit(1)


def _show(admin: raftlog.Admin, moves: Sequence[Move], output: Output) -> dict[TopicPartition, str]:
    """Print how far moves are, and return it."""
    topics = all_topics(admin)
    states = {move.part: state_of(move, topics) for move in moves}
    _print(_rows(admin, topics, moves, states), output)
    return states


def _there(states: Mapping[TopicPartition, str]) -> set[str]:
    return {part.topic for part, state in states.items() if state != GONE}


def _not_done(undone: int, of: int) -> str:
    return f"{undone} of {counted(of, 'move')} {'is' if undone == 1 else 'are'} not done"


def _cancel(admin: raftlog.Admin, moves: Sequence[Move], preserve_throttles: bool, output: Output) -> None:
    """Cancel what is under way, and clean up after all of it, also where nothing is left to cancel."""
    topics = all_topics(admin)
    now = {move.part: state_of(move, topics) for move in moves}
    if set(now.values()) == {GONE}:
        throttles.take_off(admin, ())
        raise UnknownTopicOrPartition(f"there is no {next(iter(now))}, nor any other of these partitions")
    moving = [part for part, state in now.items() if state == UNDER_WAY]
    if moving:
        admin.alter_reassignments(dict.fromkeys(moving, None))
    if not preserve_throttles:
        throttles.take_off(admin, _there(now))
    words = {UNDER_WAY: "cancelled", GONE: GONE}
    topics = all_topics(admin)
    back = [Move(move.part, ()) for move in moves]
    _print(_rows(admin, topics, back, {part: words.get(state, NOT_MOVING) for part, state in now.items()}), output)
    still = [part for part, state in now.items() if state not in words]
    for part in still:
        print_error(f"{part} is not being moved")
    if still:
        raise typer.Exit(1)
