"""`raftlog cluster rebalance`: a plan that makes loads even, shown first, then carried out in batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import raftlog
from raftlog._core import rebalance as core
from raftlog.cli import throttles
from raftlog.cli.clients import connect_admin
from raftlog.cli.moving import DONE, GONE, HowFar, all_topics, carry_out, lead_as_wanted, state_of
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    json_text,
    print_done,
    print_error,
    print_note,
)
from raftlog.cli.plans import Move, holding, moves_from_json, plan_of
from raftlog.cli.rebalance_view import Picture, look, show, summary, warn_of_space
from raftlog.cli.signals import orderly_end
from raftlog.cli.waiting import seconds
from raftlog.errors import RaftlogError, UnknownTopicOrPartition

BATCH: Final = 20

ThrottleOption = Annotated[
    str | None, typer.Option("--throttle", metavar="SIZE", help="Bytes a second that each broker gives to it: 10MiB.")
]
BatchOption = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Move so many partitions at a time.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", parser=seconds, help="Wait no longer than this; then exit code 1."),
]


class By(StrEnum):
    """What `--by` takes."""

    REPLICAS = "replicas"
    BYTES = "bytes"


def rebalance(
    by: Annotated[
        By, typer.Option("--by", help="Make even how many replicas brokers have, or how many bytes are in them.")
    ] = By.REPLICAS,
    execute: Annotated[
        bool, typer.Option("--execute", metavar="", help="Carry the plan out, and wait until it is done.")
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="FILE", help="With --execute: this plan, as printed with -o json; - is stdin."),
    ] = None,
    throttle: ThrottleOption = None,
    batch: BatchOption = BATCH,
    timeout: TimeoutOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Spread replicas and preferred leaders evenly over the brokers, for example after one was added.

    Without --execute nothing is changed: it prints which partitions would move, what each broker has before and after
    (preferred: of how many partitions it is the preferred leader), and how much would be copied. With --output json
    it prints a plan that can be looked at, changed, and given to --plan or to raftlog partition reassign.

    Brokers that are fenced, drained or cordoned get nothing and keep what they have. No partition ends up in fewer
    racks than it is in. After Ctrl-C what has begun goes on; the same command goes on with the rest.

    Example: raftlog cluster rebalance

    Example: raftlog cluster rebalance --execute --throttle 20MiB

    Example: raftlog cluster rebalance -o json > plan.json; raftlog cluster rebalance --execute --plan plan.json
    """
    if plan is not None and not execute:
        raise typer.BadParameter("--plan needs --execute; without both a plan is made and printed")
    rate = None if throttle is None else throttles.rate_of(throttle)
    given = None if plan is None else _read(plan)
    with connect_admin(bootstrap) as admin:
        picture = look(admin)
        moves = _planned(picture, by) if given is None else _checked(picture, given)
        if not moves and not (execute and admin.list_reassignments()):
            if execute:
                throttles.settle(admin, rate)
            print_done("nothing to do: everything is where it should be", plan_of(()), output)
            return
        warn_of_space(picture, moves)
        if not execute:
            show(picture, moves, output)
            print_note("nothing was changed; --execute carries it out, -o json prints a plan for --plan")
            return
        if given is None:  # an earlier run may have been interrupted: what it began is a part of this
            ours = picture.placed.keys() - {move.part for move in moves}
            under_way = sorted(admin.list_reassignments().items())
            adopted = [Move(part, tuple(each.replicas)) for part, each in under_way if part in ours]
            if adopted:
                print_note(f"{counted(len(adopted), 'partition moves', 'partitions move')} already")
            moves += adopted
        print_note(f"{summary(picture, moves)}; the way back, as a plan:\n{json_text(_way_back(picture, moves))}")
        if not see_through(admin, moves, rate, batch, timeout, "the same command goes on with it"):
            raise typer.Exit(1)
        if rate is None:
            throttles.tell_if_on(admin)
    print_done(f"{counted(len(moves), 'partition')} where the plan has them", plan_of(moves), output)


def _read(plan: str) -> list[Move]:
    try:
        return moves_from_json(sys.stdin.read() if plan == "-" else Path(plan).read_text())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _planned(picture: Picture, by: By) -> list[Move]:
    balance = core.Balance.BYTES if by is By.BYTES else core.Balance.REPLICAS
    return picture.moves_to(core.plan(picture.placed, picture.places(), by=balance, sizes=picture.sizes))


def _checked(picture: Picture, given: Sequence[Move]) -> list[Move]:
    """Return the moves of a plan, those that are done as well: their leaders may not lead yet."""
    for move in given:
        if move.part not in picture.placed:
            raise UnknownTopicOrPartition(f"there is no {move.part}; make the plan anew")
    return list(given)


def _way_back(picture: Picture, moves: Sequence[Move]) -> dict[str, Any]:
    parts = {move.part for move in moves}
    return plan_of(move for move in holding(picture.topics.values()) if move.part in parts)


def see_through(
    admin: raftlog.Admin, moves: Sequence[Move], rate: int | None, batch: int, timeout_s: float | None, then: str
) -> bool:
    """Carry moves out, `batch` at a time and held back to `rate`, have the first replicas lead, take the throttle off.

    `then`: what to do when it ends before that. Returns whether all is done; says what is not.
    """
    parts = {move.part: move for move in moves}
    topics = all_topics(admin)
    before = [move for move in holding(topics.values()) if move.part in parts]
    begins = [move for move in before if set(move.replicas) != set(parts[move.part].replicas)]
    if rate is not None and begins:
        throttles.put_on(admin, begins, {move.part: parts[move.part] for move in begins}, rate)
    left = f"; {then}{', and takes the throttle off in the end' if rate is not None else ''}"

    def words(far: HowFar) -> str:
        return f"{far}{left}"

    try:
        with orderly_end():
            far = carry_out(admin, moves, batch=batch, timeout_s=timeout_s, if_interrupted=words)
    except RaftlogError:
        if rate is not None and begins:
            print_note(f"the throttle is still on{left}")
        raise
    if far.undone:
        print_error(f"after {timeout_s:g} s {words(far)}")
        return False
    lead_as_wanted(admin, moves)
    topics = all_topics(admin)
    states = {move.part: state_of(move, topics) for move in moves}
    if rate is not None:
        throttles.take_off_forgotten(admin)
    elsewhere = [part for part, state in states.items() if state not in (DONE, GONE)]
    for part in elsewhere:
        print_error(f"{part} is not where it was to be: somebody else has moved it")
    return not elsewhere
