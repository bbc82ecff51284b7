"""`raftlog cluster ...`

describe, quorum     the cluster's metadata and its quorum
rebalance            a plan that makes the brokers' loads even, shown first, then carried out in batches
features             the levels of the cluster's features, and raising them after an upgrade (KIP-584)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

import raftlog
from raftlog._core import rebalance as core
from raftlog._core.descriptions import BrokerDescription, ClusterDescription, QuorumDescription, TopicDescription
from raftlog._core.rebalance import BrokerPlace, Load, Placement, copied_bytes, loads
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.nodes.draining import seconds
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    is_agreed,
    orderly_end,
    print_done,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.cli.partitions import health, moving, partitions
from raftlog.cli.partitions.moving import (
    DONE,
    GONE,
    HowFar,
    Move,
    all_topics,
    carry_out,
    holding,
    lead_as_wanted,
    moves_from_json,
    plan_of,
    present,
    state_of,
)
from raftlog.config import BYTES_PER_UNIT
from raftlog.errors import RaftlogError, UnknownTopicOrPartition
from raftlog.types import TopicPartition

PATIENCE_S: Final = 5.0
"""The time limit for asking a broker for the sizes of its logs; a plan is useful without them too."""

_MOVE_COLUMNS: Final = ("topic", "partition", "replicas", "wanted", "adding", "size")
_LOAD_COLUMNS: Final = (
    "broker_id",
    "rack",
    "state",
    "replicas",
    "replicas_after",
    "preferred",
    "preferred_after",
    "size",
    "size_after",
)


class Picture(NamedTuple):
    """The cluster. `placed`: replicas after moves in progress; `sizes`: bytes of a replica; `free`: of a broker."""

    brokers: list[BrokerDescription]
    topics: dict[str, TopicDescription]
    placed: dict[TopicPartition, tuple[int, ...]]
    sizes: dict[TopicPartition, int]
    free: dict[int, int]

    def broker(self, broker_id: int) -> BrokerDescription | None:
        """Return a registered broker, or None."""
        return next((each for each in self.brokers if each.broker_id == broker_id), None)

    def places(self, leaving: int | None = None) -> list[BrokerPlace]:
        """Return the brokers; those that are fenced, stopping, drained or cordoned take no replicas."""
        return [
            BrokerPlace(
                each.broker_id,
                each.rack,
                takes=_is_up(each) and not each.cordoned and not each.drained,
                leads=_is_up(each) and not each.drained,
                leaves=each.broker_id == leaving,
            )
            for each in self.brokers
        ]

    def moves_to(self, after: Placement) -> list[Move]:
        """Return the changes: first the ones that copy data, then those that only change the order of replicas."""
        changed = [Move(part, tuple(after[part])) for part in sorted(after) if tuple(after[part]) != self.placed[part]]
        return sorted(changed, key=lambda move: set(move.replicas) == set(self.placed[move.part]))


def _is_up(broker: BrokerDescription) -> bool:
    return not broker.fenced and not broker.in_controlled_shutdown


def look(admin: raftlog.Admin) -> Picture:
    """Ask the cluster; print a note for each broker that does not tell the sizes of its logs."""
    brokers = admin.describe_cluster(linearizable=True).brokers
    topics = all_topics(admin)
    sizes: dict[TopicPartition, int] = {}
    free: dict[int, int] = {}
    for broker in brokers:
        if broker.fenced:
            continue
        try:
            found = admin.describe_log_dirs(broker.broker_id, timeout=PATIENCE_S)
        except RaftlogError as error:
            print_note(f"note: the sizes of the logs on broker {broker.broker_id} are unknown: {error}")
            continue
        free[broker.broker_id] = sum(each.usable_bytes for each in found if each.error is None)
        for log in (log for log_dir in found for log in log_dir.partitions):
            part = TopicPartition(log.topic, log.partition)
            sizes[part] = max(sizes.get(part, 0), log.size_bytes)
    placed = {move.part: move.replicas for move in present(topics.values())}
    return Picture(brokers, topics, placed, {part: sizes.get(part, 0) for part in placed}, free)


# Showing a plan


def show(picture: Picture, moves: Sequence[Move], output: Output) -> None:
    """Print the moves and the brokers' loads before and after them; as JSON only the plan."""
    if output is Output.JSON:
        print_json(plan_of(moves))
        return
    print_rows([_row(picture, move) for move in moves], _MOVE_COLUMNS, output)
    after = {**picture.placed, **{move.part: move.replicas for move in moves}}
    ids = [each.broker_id for each in picture.brokers]
    before, then = loads(picture.placed, ids, picture.sizes), loads(after, ids, picture.sizes)
    print()
    print_rows([_load_row(picture, each, before, then) for each in sorted(before | then)], _LOAD_COLUMNS, output)
    print(f"\n{summary(picture, moves)}")


def summary(picture: Picture, moves: Sequence[Move]) -> str:
    """Return how many partitions a plan moves, and how much it copies."""
    copied = [move for move in moves if set(move.replicas) != set(picture.placed[move.part])]
    size = copied_bytes(picture.placed, {move.part: move.replicas for move in moves}, picture.sizes)
    turned = len(moves) - len(copied)
    said = f"{counted(len(copied), 'partition')} to move, {size_text(size)} to copy"
    return f"{said}; {counted(turned, 'partition')} with another order only" if turned else said


def warn_of_space(picture: Picture, moves: Sequence[Move]) -> None:
    """Warn of brokers whose disks have less free space than the plan copies to them."""
    needed: dict[int, int] = {}
    for move in moves:
        for broker_id in set(move.replicas) - set(picture.placed[move.part]):
            needed[broker_id] = needed.get(broker_id, 0) + picture.sizes[move.part]
    for broker_id, size in sorted(needed.items()):
        if broker_id in picture.free and size > picture.free[broker_id]:
            print_note(
                f"warning: broker {broker_id} gets {size_text(size)} and has {size_text(picture.free[broker_id])} "
                "free; give it more space or delete records first"
            )


def size_text(size_bytes: int) -> str:
    """Return a rounded number of bytes in the largest unit that fits, with the units of settings."""
    unit, scale = max(
        (each for each in BYTES_PER_UNIT.items() if each[1] <= max(1, size_bytes)), key=lambda each: each[1]
    )
    return f"{size_bytes} B" if unit == "B" else f"{size_bytes / scale:.1f} {unit}"


def _row(picture: Picture, move: Move) -> dict[str, object]:
    now = picture.placed[move.part]
    adding = [replica for replica in move.replicas if replica not in now]
    return {
        "topic": move.part.topic,
        "partition": move.part.partition,
        "replicas": now,
        "wanted": move.replicas,
        "adding": adding,
        "size": size_text(picture.sizes[move.part] * len(adding)) if adding else None,
    }


def _load_row(
    picture: Picture, broker_id: int, before: Mapping[int, Load], after: Mapping[int, Load]
) -> dict[str, object]:
    broker = picture.broker(broker_id)
    now, then = before.get(broker_id, Load()), after.get(broker_id, Load())
    return {
        "broker_id": broker_id,
        "rack": broker.rack if broker is not None else None,
        "state": health.broker_row(broker, Output.TABLE)["state"] if broker is not None else "not registered",
        "replicas": now.replicas,
        "replicas_after": then.replicas,
        "preferred": now.leaderships,
        "preferred_after": then.leaderships,
        "size": size_text(now.size_bytes),
        "size_after": size_text(then.size_bytes),
    }


BATCH: Final = 20

ThrottleOption = Annotated[
    str | None,
    typer.Option("--throttle", metavar="SIZE", help="Bytes per second on each broker for the moves, such as 10MiB."),
]
BatchOption = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Move at most N partitions at a time.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", parser=seconds, help="Wait no longer than this; then exit code 1."),
]


class By(StrEnum):
    """The values of `--by`."""

    REPLICAS = "replicas"
    BYTES = "bytes"


def rebalance(
    by: Annotated[
        By, typer.Option("--by", help="Balance the number of replicas on each broker, or their bytes.")
    ] = By.REPLICAS,
    execute: Annotated[
        bool, typer.Option("--execute", metavar="", help="Carry out the plan, and wait until it is done.")
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan", metavar="FILE", help="With --execute: use this plan, which -o json has printed; - is stdin."
        ),
    ] = None,
    throttle: ThrottleOption = None,
    batch: BatchOption = BATCH,
    timeout: TimeoutOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Spread replicas and preferred leaders evenly over the brokers, for example after one was added.

    Without --execute nothing changes: the command prints the partitions that would move, the load of each broker before
    and after (preferred: the partitions whose preferred leader it is), and how many bytes would be copied. --output
    json prints the plan, which you can review, change, and give to --plan or to raftlog partition reassign.

    Fenced, drained and cordoned brokers get no replicas, and keep their own. No partition ends up in fewer racks. After
    Ctrl-C the moves that have begun continue; run the same command again for the rest.

    Example: raftlog cluster rebalance

    Example: raftlog cluster rebalance --execute --throttle 20MiB

    Example: raftlog cluster rebalance -o json > plan.json; raftlog cluster rebalance --execute --plan plan.json
    """
    if plan is not None and not execute:
        raise typer.BadParameter("--plan needs --execute; without both options the command makes and prints a plan")
    rate = None if throttle is None else moving.rate_of(throttle)
    given = None if plan is None else _read(plan)
    with connect_admin(bootstrap) as admin:
        picture = look(admin)
        moves = _planned(picture, by) if given is None else _checked(picture, given)
        if not moves and not (execute and admin.list_reassignments()):
            if execute:
                moving.settle(admin, rate)
            print_done("nothing to do: every partition is in its place", plan_of(()), output)
            return
        warn_of_space(picture, moves)
        if not execute:
            show(picture, moves, output)
            print_note("nothing was changed; --execute carries out the plan, -o json prints it for --plan")
            return
        if given is None:  # an interrupted earlier run may have begun moves: they belong to this one
            ours = picture.placed.keys() - {move.part for move in moves}
            under_way = sorted(admin.list_reassignments().items())
            adopted = [Move(part, tuple(each.replicas)) for part, each in under_way if part in ours]
            if adopted:
                print_note(f"{counted(len(adopted), 'partition is', 'partitions are')} moving already")
            moves += adopted
        parts = {move.part for move in moves}
        before = moving.way_back(move for move in holding(picture.topics.values()) if move.part in parts)
        print_note(f"{summary(picture, moves)}; the plan that undoes it:\n{before}")
        if not see_through(admin, moves, rate, batch, timeout, "the same command continues"):
            raise typer.Exit(1)
        if rate is None:
            moving.tell_if_on(admin)
    print_done(f"{counted(len(moves), 'partition')} in place as planned", plan_of(moves), output)


def _read(plan: str) -> list[Move]:
    try:
        return moves_from_json(sys.stdin.read() if plan == "-" else Path(plan).read_text())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _planned(picture: Picture, by: By) -> list[Move]:
    balance = core.Balance.BYTES if by is By.BYTES else core.Balance.REPLICAS
    return picture.moves_to(core.plan(picture.placed, picture.places(), by=balance, sizes=picture.sizes))


def _checked(picture: Picture, given: Sequence[Move]) -> list[Move]:
    """Return all moves of a plan, the finished ones too, because their preferred leaders may not lead yet."""
    for move in given:
        if move.part not in picture.placed:
            raise UnknownTopicOrPartition(f"{move.part} does not exist; make a new plan")
    return list(given)


def see_through(
    admin: raftlog.Admin, moves: Sequence[Move], rate: int | None, batch: int, timeout_s: float | None, then: str
) -> bool:
    """Carry out moves, `batch` at a time and throttled to `rate`; then let first replicas lead, and end the throttle.

    `then`: advice for the message when it ends early. Returns whether all is done, after an error message if not.
    """
    parts = {move.part: move for move in moves}
    topics = all_topics(admin)
    before = [move for move in holding(topics.values()) if move.part in parts]
    begins = [move for move in before if set(move.replicas) != set(parts[move.part].replicas)]
    if rate is not None and begins:
        moving.put_on(admin, begins, {move.part: parts[move.part] for move in begins}, rate)
    left = f"; {then}{', and removes the throttle in the end' if rate is not None else ''}"

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
        moving.take_off_forgotten(admin)
    elsewhere = [part for part, state in states.items() if state not in (DONE, GONE)]
    for part in elsewhere:
        print_error(f"{part} is not where the plan puts it: another client has moved it")
    return not elsewhere


features_app = typer.Typer(
    invoke_without_command=True, help="Show the levels of the cluster's features, or raise them after an upgrade."
)

_COLUMNS = ("feature", "level", "lowest", "highest")


@features_app.callback(invoke_without_command=True)
def show_features(
    context: typer.Context,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show each feature's level, and the lowest and highest level that all brokers support.

    Example: raftlog cluster features
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context.invoked_subcommand, context)
        return
    with connect_admin(bootstrap) as admin:
        print_rows(_rows(admin.describe_cluster(linearizable=True)), _COLUMNS, output)


def _refuse_options_before(command: str, context: typer.Context) -> None:
    """Refuse options before a subcommand's name, which the subcommand would not see. Raises typer.BadParameter."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"put {option.opts[0]} after {command}, which does not see it here")


@features_app.command()
def upgrade(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Show what would be raised, and whether that is possible.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Raise every feature to the highest level that all brokers support. After that, a downgrade is impossible.

    Do this once every node, controllers included, runs the new version: a node that does not support a level stops.

    Example: raftlog cluster features upgrade --dry-run
    """
    with connect_admin(bootstrap) as admin:
        rows = _rows(admin.describe_cluster(linearizable=True))
        raised = [row for row in rows if row["highest"] is not None and row["level"] < row["highest"]]
        for row in raised:
            admin.update_feature(row["feature"], row["highest"], validate_only=dry_run)
    if output is Output.JSON:
        print_json([{"feature": each["feature"], "from": each["level"], "to": each["highest"]} for each in raised])
        return
    for row in raised:
        verb = "would be raised" if dry_run else "is raised"
        print_done(f"{row['feature']} {verb} from level {row['level']} to {row['highest']}", row, output)
    if any(row["highest"] is None for row in rows):
        print_note(
            "the broker that answered runs an older version and cannot tell the levels of all brokers: upgrade it"
        )
    elif not raised:
        print("nothing to do: every feature is at the highest level that all brokers support")


def _rows(found: ClusterDescription) -> list[dict[str, Any]]:
    rows = []
    for name in sorted({*found.features, *found.supported_features}):
        lowest, highest = found.supported_features.get(name, (None, None))
        rows.append({"feature": name, "level": found.features.get(name, 0), "lowest": lowest, "highest": highest})
    return rows


app = typer.Typer(no_args_is_help=True, help="Describe the cluster and its quorum, balance brokers, raise features.")

_BROKER_COLUMNS = (
    "broker_id",
    "host",
    "port",
    "rack",
    "state",
    "broker_epoch",
    "leaderships",
    "replicas",
)
_PARTITION_COLUMNS = ("topic", "partition", "leader", "replicas", "isr")
_VOTER_COLUMNS = ("node_id", "address", "state", "log_end_index", "lag", "last_contact_ms")
_OBSERVER_COLUMNS = ("broker_id", "applied_offset", "lag", "fenced", "last_heartbeat_ms")


@app.command()
def describe(
    linearizable: Annotated[
        bool,
        typer.Option(
            "--linearizable",
            metavar="",
            help="Fail if the controllers do not answer, instead of showing the metadata of one broker.",
        ),
    ] = False,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", "-t", help="Show only this topic; may be repeated.")
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the cluster's id, its controller, its brokers, and every topic's partitions.

    The command asks the controllers first. If they do not answer, it shows the metadata of one broker, which may be out
    of date, prints a note on stderr, and exits with 1.

    Example: raftlog cluster describe --output json
    """
    with connect_admin(bootstrap) as admin:
        agreed = linearizable or is_agreed(admin)
        found = admin.describe_cluster(linearizable=linearizable)
        topics = admin.describe_topics(topic or None)
    brokers = [health.broker_row(broker, output) for broker in found.brokers]
    if output is Output.JSON:
        print_json({**found._asdict(), "brokers": brokers, "topics": [_document(each) for each in topics]})
    else:
        print(f"cluster {found.cluster_id}, controller {found.controller_id} in epoch {found.controller_epoch}")
        features = ", ".join(f"{name}={level}" for name, level in sorted(found.features.items()))
        print(f"metadata offset {found.metadata_offset}{f', features {features}' if features else ''}\n")
        print_rows(brokers, _BROKER_COLUMNS, output)
        rows = [health.row_of(each, part, None) for each in topics for part in each.partitions]
        print(f"\n{counted(len(topics), 'topic')}, {counted(len(rows), 'partition')}")
        if rows:
            print()
            print_rows(rows, _PARTITION_COLUMNS, output)
    if not agreed:
        raise typer.Exit(1)


def _document(topic: TopicDescription) -> dict[str, Any]:
    parts = [health.document_of(topic.name, part, None, {}) for part in topic.partitions]
    return {"topic": topic.name, "topic_id": topic.topic_id.hex(), "partitions": parts}


@app.command()
def quorum(bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT, output: OutputOption = Output.TABLE) -> None:
    """Show the metadata quorum: its leader, the progress of voters and brokers, its snapshot. Exit code 1: no leader.

    Example: raftlog cluster quorum
    """
    with connect_admin(bootstrap) as admin:
        print_quorum(admin.describe_quorum(), output)


def print_quorum(found: QuorumDescription, output: Output) -> None:
    """Print a quorum: a few lines and two tables, or one JSON object.

    Raises:
        typer.Exit: with 1, after the output, when there is no leader.
    """
    _print_quorum(found, output)
    if found.leader_id < 0:
        raise typer.Exit(1)


def _print_quorum(found: QuorumDescription, output: Output) -> None:
    voters: list[Row] = [
        {**voter._asdict(), "address": f"{voter.host}:{voter.port}" if voter.host else None} for voter in found.voters
    ]
    observers: list[Row] = [observer._asdict() for observer in found.observers]
    if output is Output.JSON:
        print_json({**found._asdict(), "voters": [v._asdict() for v in found.voters], "observers": observers})
        return
    leader = f"leader {found.leader_id}" if found.leader_id >= 0 else "no leader"
    if found.leader_id < 0 and found.answered_by > 0:
        leader += f" (as node {found.answered_by} sees it)"
    print(f"cluster {found.cluster_id}, {leader} in epoch {found.leader_epoch}")
    print(f"log {found.log_start_index} to {found.log_end_index}, committed up to {found.commit_index}")
    if found.snapshot_index > 0:
        print(f"snapshot at {found.snapshot_index}, {counted(found.snapshot_bytes, 'byte')}")
    print()
    print_rows(list(map(_shown, voters)), _VOTER_COLUMNS, output)
    if observers:
        print()
        print_rows(list(map(_shown, observers)), _OBSERVER_COLUMNS, output)


def _shown(row: Row) -> dict[str, Any]:
    """Return a row with None for unknown numbers, which are negative."""
    return {key: None if type(value) is int and value < 0 else value for key, value in row.items()}


app.add_typer(features_app, name="features")
app.command("rebalance")(rebalance)
app.command("elect-leaders", help="The same as raftlog partition elect.")(partitions.elect)


@app.command("unregister-broker")
def unregister_broker(
    broker_id: Annotated[int, typer.Argument(metavar="BROKER", min=0, show_default=False)],
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove the registration of a broker that is gone for good.

    Example: raftlog cluster unregister-broker 4
    """
    with connect_admin(bootstrap) as admin:
        admin.unregister_broker(broker_id)
    print_done(f"broker {broker_id} unregistered", {"broker_id": broker_id}, output)
