"""`raftlog broker decommission`: move everything off a broker, so that it can leave for good."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Annotated, Final

import typer

import raftlog
from raftlog._core import rebalance as core
from raftlog._core.descriptions import BrokerDescription
from raftlog._core.words import counted, some
from raftlog.cli.client_config import connect_admin
from raftlog.cli.nodes.cluster import (
    BATCH,
    BatchOption,
    Picture,
    ThrottleOption,
    TimeoutOption,
    look,
    see_through,
    show,
    summary,
    warn_of_space,
)
from raftlog.cli.nodes.draining import until_done
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, Output, OutputOption, print_done, print_note
from raftlog.cli.partitions import moving
from raftlog.cli.partitions.moving import Move, plan_of
from raftlog.errors import (
    BrokerIdNotRegistered,
    EligibleLeadersNotAvailable,
    InvalidReplicaAssignment,
    NoReassignmentInProgress,
    RaftlogError,
)

_NAMED: Final = 5


def decommission(
    broker_id: Annotated[int, typer.Argument(metavar="ID", min=0, help="The broker to remove.", show_default=False)],
    plan_only: Annotated[
        bool, typer.Option("--plan-only", metavar="", help="Print the moves; change nothing.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", metavar="", help="Cancel a decommission: stop its moves, uncordon the broker.")
    ] = False,
    throttle: ThrottleOption = None,
    batch: BatchOption = BATCH,
    wait: Annotated[
        bool,
        typer.Option("--wait", "-w", metavar="", help="Also wait until its process has stopped, then unregister it."),
    ] = False,
    timeout: TimeoutOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move every replica off a broker, then unregister it.

    The command cordons the broker, moves its replicas to other brokers in batches, and drains it. It unregisters the
    broker once its process has stopped: stop the process and run the same command again, or let this run wait with
    --wait. You may interrupt the command at any time; run it again to continue. If partitions could not keep their
    number of replicas, it refuses before any change.

    Example: raftlog broker decommission 4 --throttle 20MiB

    Example: raftlog broker decommission 4 --plan-only

    Example: raftlog broker decommission 4 --cancel
    """
    if plan_only and cancel:
        raise typer.BadParameter("give either --plan-only or --cancel")
    rate = None if throttle is None else moving.rate_of(throttle)
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


# Planning


def _known(picture: Picture, broker_id: int) -> BrokerDescription:
    broker = picture.broker(broker_id)
    if broker is None:
        there = ", ".join(str(each.broker_id) for each in picture.brokers)
        raise BrokerIdNotRegistered(f"broker {broker_id} is not registered; the cluster has brokers {there}")
    return broker


def _moves(picture: Picture, broker: BrokerDescription) -> list[Move]:
    """Return the moves off a broker.

    Raises:
        InvalidReplicaAssignment: partitions could not keep their number of replicas.
        EligibleLeadersNotAvailable: the broker is down, and no other one has all records of a partition.
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
            f"broker {broker.broker_id} is down and only it has all records of {some(alone, _NAMED)}; start "
            "it again, delete those topics, or accept losses with raftlog partition elect --unclean, first"
        )


def _empty(admin: raftlog.Admin, broker_id: int, rate: int | None, batch: int, deadline_s: float | None) -> None:
    """Move all replicas off a broker, including those that it received before it was cordoned.

    Raises:
        typer.Exit: with 1, when the moves were not done in time.
    """
    again = f"raftlog broker decommission {broker_id} --cancel keeps the broker; the same command continues"
    while True:
        picture = look(admin)
        moves = _moves(picture, _known(picture, broker_id))
        # The plan takes the goals of moves in progress for the current places, so it leaves these moves out.
        going = [
            Move(part, tuple(each.replicas))
            for part, each in sorted(admin.list_reassignments().items())
            if broker_id in each.removing_replicas
        ]
        if not moves and not going:
            moving.settle(admin, rate)
            return
        print_note(summary(picture, moves) if moves else f"{counted(len(going), 'partition')} still moving")
        left_s = None if deadline_s is None else round(max(0.0, deadline_s - time.monotonic()), 1)
        if not see_through(admin, [*going, *moves], rate, batch, left_s, again):
            raise typer.Exit(1)


def _leave(admin: raftlog.Admin, broker_id: int, deadline_s: float | None, output: Output, *, wait: bool) -> None:
    """Drain a broker without replicas, and unregister it if its process has stopped; `wait`: once it has.

    Raises:
        RequestTimedOut: it has not stopped in time.
    """
    admin.alter_broker(broker_id, drained=True)
    if wait:
        left_s = math.inf if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        running = f"broker {broker_id} no longer has replicas; stop its process"
        until_done(lambda: "" if _look_at(admin, broker_id).fenced else running, left_s, "not unregistered after")
    broker = _look_at(admin, broker_id)
    result = {"broker_id": broker_id, "replicas": 0, "unregistered": broker.fenced}
    if not broker.fenced:
        print_done(
            f"broker {broker_id} no longer has replicas; stop its process, then run raftlog broker decommission "
            f"{broker_id} again to unregister it",
            result,
            output,
        )
    else:
        admin.unregister_broker(broker_id)
        print_done(f"broker {broker_id} has no replicas, has stopped, and is unregistered", result, output)
    _note_vote(admin, broker_id)


def _look_at(admin: raftlog.Admin, broker_id: int) -> BrokerDescription:
    for broker in admin.describe_cluster(linearizable=True).brokers:
        if broker.broker_id == broker_id:
            return broker
    raise BrokerIdNotRegistered(f"broker {broker_id} is no longer registered: another client has unregistered it")


def _note_vote(admin: raftlog.Admin, broker_id: int) -> None:
    """Note that the node is also a controller and keeps its vote."""
    try:
        voters = [voter.node_id for voter in admin.describe_quorum().voters]
    except RaftlogError:
        return  # the command itself has succeeded
    if broker_id in voters:
        print_note(
            f"note: node {broker_id} is also a controller and keeps its vote; docs/quorum.md says how to replace voters"
        )


# Cancelling


def _cancel(admin: raftlog.Admin, broker_id: int, output: Output) -> None:
    """Keep the broker: cancel the moves off it, and let it have replicas and leaderships again."""
    dropped = [
        Move(part, ())
        for part, each in sorted(admin.list_reassignments().items())
        if broker_id in each.removing_replicas
    ]
    admin.alter_broker(broker_id, cordoned=False, drained=False)
    with contextlib.suppress(NoReassignmentInProgress):  # a move ended meanwhile; the others are cancelled
        admin.alter_reassignments({move.part: None for move in dropped})
    moving.take_off_forgotten(admin, broker_id)
    print_done(
        f"broker {broker_id} stays, and gets replicas again; {counted(len(dropped), 'move')} cancelled. Replicas that "
        "have moved do not move back; raftlog cluster rebalance gives the broker its share again",
        {"broker_id": broker_id, "cancelled": plan_of(dropped)["partitions"]},
        output,
    )
