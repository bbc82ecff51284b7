"""`raftlog broker decommission`: move everything off a broker, so that it can leave for good."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Annotated, Final

import typer

import raftlog
from raftlog._core import rebalance as core
from raftlog._core.words import some
from raftlog._descriptions import BrokerDescription
from raftlog.cli import throttles
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_done,
    print_note,
)
from raftlog.cli.plans import Move, plan_of
from raftlog.cli.rebalance import BATCH, BatchOption, ThrottleOption, TimeoutOption, see_through
from raftlog.cli.rebalance_view import Picture, look, show, summary, warn_of_space
from raftlog.cli.waiting import until_done
from raftlog.errors import (
    BrokerIdNotRegistered,
    EligibleLeadersNotAvailable,
    InvalidReplicaAssignment,
    NoReassignmentInProgress,
    RaftlogError,
)

_NAMED: Final = 5


def decommission(
    broker_id: Annotated[
        int, typer.Argument(metavar="ID", min=0, help="The broker that is to go.", show_default=False)
    ],
    plan_only: Annotated[
        bool, typer.Option("--plan-only", metavar="", help="Print what would move where, and change nothing.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", metavar="", help="Stop what is under way, and give it replicas again.")
    ] = False,
    throttle: ThrottleOption = None,
    batch: BatchOption = BATCH,
    wait: Annotated[
        bool,
        typer.Option("--wait", "-w", metavar="", help="Also wait until its process has stopped, and unregister it."),
    ] = False,
    timeout: TimeoutOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move every replica off a broker, then have the cluster forget it.

    It is cordoned, its replicas move to the others a batch at a time, it is drained, and once its process has stopped
    it is unregistered. A broker that still runs then is told of: stop it, and give the same command again, or have it
    wait for that with --wait. It may be interrupted at any time; the same command goes on from there. Refused, before
    anything changes, where partitions would not keep their number of replicas.

    Example: raftlog broker decommission 4 --throttle 20MiB

    Example: raftlog broker decommission 4 --plan-only

    Example: raftlog broker decommission 4 --cancel
    """
    if plan_only and cancel:
        raise typer.BadParameter("one of --plan-only and --cancel at a time")
    rate = None if throttle is None else throttles.rate_of(throttle)
    deadline_s = None if timeout is None else time.monotonic() + timeout
    with connect_admin(bootstrap) as admin:
        if cancel:
            _cancel(admin, broker_id, output)
            return
        picture = look(admin)
        broker = _known(picture, broker_id)
        moves = _moves(picture, broker)
        warn_of_space(picture, moves)
        if plan_only:
            show(picture, moves, output)
            return
        if not broker.cordoned:
            admin.alter_broker(broker_id, cordoned=True)
            print_note(f"broker {broker_id} is cordoned: it gets no new replicas")
        _empty(admin, broker_id, rate, batch, deadline_s)
        _leave(admin, broker_id, deadline_s, output, wait=wait)


# What is to be done


def _known(picture: Picture, broker_id: int) -> BrokerDescription:
    broker = picture.broker(broker_id)
    if broker is None:
        there = ", ".join(str(each.broker_id) for each in picture.brokers)
        raise BrokerIdNotRegistered(f"broker {broker_id} is not registered; the cluster has {there}")
    return broker


def _moves(picture: Picture, broker: BrokerDescription) -> list[Move]:
    """Return what has to move.

    Raises:
        InvalidReplicaAssignment: partitions would not keep their replicas.
        EligibleLeadersNotAvailable: the broker is down, and nobody else has all records of a partition.
    """
    _check_others_have_it(picture, broker)
    try:
        after = core.plan(
            picture.placed, picture.places(broker.broker_id), by=core.Balance.NOTHING, sizes=picture.sizes
        )
    except core.CannotPlace as refused:
        raise InvalidReplicaAssignment(
            f"broker {broker.broker_id} cannot leave: {refused}; add a broker, uncordon one, or give those topics "
            "fewer replicas (raftlog partition reassign) first"
        ) from None
    return picture.moves_to(after)


def _check_others_have_it(picture: Picture, broker: BrokerDescription) -> None:
    if not broker.fenced:
        return
    alone = [
        f"{topic.name}-{part.partition}"
        for topic in picture.topics.values()
        for part in topic.partitions
        if part.leader in (-1, broker.broker_id) and set(part.isr) == {broker.broker_id}
    ]
    if alone:
        raise EligibleLeadersNotAvailable(
            f"broker {broker.broker_id} is down and alone has all records of {some(alone, _NAMED)}; start "
            "it again, or delete those topics, or accept losses with raftlog partition elect --unclean, first"
        )


def _empty(admin: raftlog.Admin, broker_id: int, rate: int | None, batch: int, deadline_s: float | None) -> None:
    """Move everything off; what was created before it was cordoned as well.

    Raises:
        typer.Exit: with 1, when not everything was done in time.
    """
    again = f"raftlog broker decommission {broker_id} --cancel has the broker stay; the same command goes on with it"
    while True:
        picture = look(admin)
        moves = _moves(picture, _known(picture, broker_id))
        # A move that somebody has begun already counts as where it goes, so it is not in the plan.
        going = [
            Move(part, tuple(each.replicas))
            for part, each in sorted(admin.list_reassignments().items())
            if broker_id in each.removing_replicas
        ]
        if not moves and not going:
            throttles.settle(admin, rate)
            return
        print_note(summary(picture, moves) if moves else f"{counted(len(going), 'partition')} still moving")
        left_s = None if deadline_s is None else round(max(0.0, deadline_s - time.monotonic()), 1)
        if not see_through(admin, [*going, *moves], rate, batch, left_s, again):
            raise typer.Exit(1)


def _leave(admin: raftlog.Admin, broker_id: int, deadline_s: float | None, output: Output, *, wait: bool) -> None:
    """Drain a broker that holds nothing, and unregister it if its process has stopped, or once it has.

    Raises:
        RequestTimedOut: it has not stopped in time.
    """
    admin.alter_broker(broker_id, drained=True)
    if wait:
        left_s = math.inf if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        running = f"broker {broker_id} holds nothing any more; its process is to be stopped"
        until_done(lambda: "" if _look_at(admin, broker_id).fenced else running, left_s, "not unregistered after")
    broker = _look_at(admin, broker_id)
    result = {"broker_id": broker_id, "replicas": 0, "unregistered": broker.fenced}
    if not broker.fenced:
        print_done(
            f"broker {broker_id} holds nothing any more; stop its process, then raftlog broker decommission "
            f"{broker_id} again unregisters it",
            result,
            output,
        )
    else:
        admin.unregister_broker(broker_id)
        print_done(f"broker {broker_id} holds nothing, has stopped, and is unregistered", result, output)
    _tell_of_vote(admin, broker_id)


def _look_at(admin: raftlog.Admin, broker_id: int) -> BrokerDescription:
    for broker in admin.describe_cluster(linearizable=True).brokers:
        if broker.broker_id == broker_id:
            return broker
    raise BrokerIdNotRegistered(f"broker {broker_id} is not registered any more: somebody else has unregistered it")


def _tell_of_vote(admin: raftlog.Admin, broker_id: int) -> None:
    """Say that a broker which is a controller as well has a vote, which this leaves alone."""
    try:
        voters = [voter.node_id for voter in admin.describe_quorum().voters]
    except RaftlogError:
        return  # all that is asked for has been done
    if broker_id in voters:
        print_note(
            f"note: node {broker_id} is also a controller and keeps its vote; docs/quorum.md says how voters are "
            "replaced"
        )


# Taking it back


def _cancel(admin: raftlog.Admin, broker_id: int, output: Output) -> None:
    """Have the broker stay: cancel the moves off it, give it replicas and leaderships again."""
    moving = [
        Move(part, ())
        for part, each in sorted(admin.list_reassignments().items())
        if broker_id in each.removing_replicas
    ]
    admin.alter_broker(broker_id, cordoned=False, drained=False)
    with contextlib.suppress(NoReassignmentInProgress):  # one came to its end meanwhile; the others are cancelled
        admin.alter_reassignments({move.part: None for move in moving})
    throttles.take_off_forgotten(admin, broker_id)
    print_done(
        f"broker {broker_id} stays, and gets replicas again; {counted(len(moving), 'move')} cancelled. What had been "
        "moved stays where it is; raftlog cluster rebalance gives the broker its share again",
        {"broker_id": broker_id, "cancelled": plan_of(moving)["partitions"]},
        output,
    )
