"""`raftlog partition ...`: elects leaders; plans, begins, checks and cancels moves (KIP-455, KIP-73)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import raftlog
from raftlog._core.descriptions import PartitionDescription, PartitionReplicas, TopicDescription
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    YesOption,
    confirm,
    json_text,
    print_done,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.cli.partitions import moving
from raftlog.cli.partitions.health import why_lost_of
from raftlog.cli.partitions.moving import (
    DONE,
    GONE,
    UNDER_WAY,
    Move,
    all_topics,
    balanced,
    carry_out,
    holding,
    moves_from_arguments,
    moves_from_json,
    partition_of,
    plan_of,
    present,
    resized,
    state_of,
)
from raftlog.errors import ElectionNotNeeded, RaftlogError, UnknownTopicOrPartition
from raftlog.types import TopicPartition

ELECTION_PATIENCE_S: Final = 5.0
"""How long a change of leader may take."""
_LOOK_EVERY_S: Final = 0.1
_LAGS_PATIENCE_S: Final = 3.0


def run(admin: raftlog.Admin, topic: str, partitions: Sequence[int], output: Output, *, unclean: bool) -> bool:
    """Elect leaders of partitions that need it, and print them; return whether all partitions are led as requested.

    Raises:
        RaftlogError: nothing was changed; the message says why.
    """
    admin.describe_cluster(linearizable=True)
    before = {part.partition: part for part in admin.describe_topic(topic).partitions}
    chosen = [
        number for number in sorted(set(partitions)) or before if number not in before or _open(before[number], unclean)
    ]
    try:
        if not chosen:
            raise ElectionNotNeeded("every partition is led as requested")
        admin.elect_leaders(topic, chosen, unclean=unclean)
    except ElectionNotNeeded:
        which = f"{', '.join(f'{topic}-{each}' for each in sorted(set(partitions)))}" if partitions else ""
        what = "a leader" if unclean else "its first replica"
        verb = "has" if unclean else "is led by"
        sentence = f"every partition of {topic} {verb} {what}" if not which else f"{which} {verb} {what}"
        print_done(f"nothing to do: {sentence}", {"topic": topic, "unclean": unclean, "partitions": []}, output)
        return True
    document, left = _elected(admin, topic, chosen, output, unclean)
    if output is Output.JSON:
        print_json(document)
    return not left


def run_all(admin: raftlog.Admin, output: Output, *, unclean: bool) -> bool:
    """Elect leaders in all topics, as `run` does; a refusal for one topic does not stop the others."""
    admin.describe_cluster(linearizable=True)
    documents: list[dict[str, Any]] = []
    done = True
    for topic in admin.describe_topics(internal=True):
        chosen = [part.partition for part in topic.partitions if _open(part, unclean)]
        if not chosen:
            continue
        try:
            admin.elect_leaders(topic.name, chosen, unclean=unclean)
        except ElectionNotNeeded:  # another one has done it meanwhile
            pass
        except RaftlogError as error:
            print_error(f"{topic.name}: {error}")
            done = False
            continue
        document, left = _elected(admin, topic.name, chosen, output, unclean)
        documents.append(document)
        done = done and not left
    if output is Output.JSON:
        print_json({"unclean": unclean, "topics": documents})
    elif done and not documents:
        print(f"nothing to do: every partition {'has a leader' if unclean else 'is led by its first replica'}")
    return done


def _elected(
    admin: raftlog.Admin, topic: str, chosen: Sequence[int], output: Output, unclean: bool
) -> tuple[dict[str, Any], list[PartitionDescription]]:
    """Wait for the new leaders and print them, unless as JSON; return the document, and the partitions left."""
    after = _await(admin, topic, chosen)
    ends = _ends(admin, topic) if unclean else {}
    left = [part for part in after if _open(part, unclean)]
    if output is not Output.JSON:
        for part in after:
            if part not in left:
                print(_sentence(topic, part, ends))
    for part in left:
        print_error(f"{topic}-{part.partition} is not led as requested: {_why_open(topic, part)}")
    found = {"topic": topic, "unclean": unclean, "partitions": [_document(topic, each, ends) for each in after]}
    return found, left


def _open(part: PartitionDescription, unclean: bool) -> bool:
    """Return whether a partition needs such an election."""
    return part.leader < 0 if unclean else part.leader != part.replicas[0]


def _why_open(topic: str, part: PartitionDescription) -> str:
    if (why := why_lost_of(topic, part)) is not None:
        return f"it has no leader: {why}"
    leader = f"broker {part.leader} leads it" if part.leader >= 0 else "it has no leader"
    first = part.replicas[0]
    state = "is not up" if first in part.offline_replicas else "is in sync" if first in part.isr else "is not in sync"
    return f"{leader}, its first replica {first} {state}"


def _await(admin: raftlog.Admin, topic: str, chosen: Sequence[int]) -> list[PartitionDescription]:
    """Return the chosen partitions once all have leaders, or after `ELECTION_PATIENCE_S`."""
    deadline = time.monotonic() + ELECTION_PATIENCE_S
    while True:
        found = [part for part in admin.describe_topic(topic).partitions if part.partition in chosen]
        # A leader resigns before the next one is elected; it keeps a partition that no other replica can lead.
        if not any(part.leader < 0 for part in found) or time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_EVERY_S)


def _ends(admin: raftlog.Admin, topic: str) -> dict[TopicPartition, PartitionReplicas]:
    try:
        return admin.describe_replicas([topic], timeout=_LAGS_PATIENCE_S)
    except RaftlogError:
        return {}


def _document(topic: str, part: PartitionDescription, ends: dict[TopicPartition, PartitionReplicas]) -> dict[str, Any]:
    seen = ends.get(TopicPartition(topic, part.partition))
    end = {} if seen is None else {"log_end_offset": seen.log_end_offset}
    return {"partition": part.partition, "leader": part.leader, "leader_epoch": part.leader_epoch, **end}


def _sentence(topic: str, part: PartitionDescription, ends: dict[TopicPartition, PartitionReplicas]) -> str:
    seen = ends.get(TopicPartition(topic, part.partition))
    end = "" if seen is None else f"; its log ends at offset {seen.log_end_offset}"
    return f"{topic}-{part.partition} is led by broker {part.leader} now, in leader epoch {part.leader_epoch}{end}"


COLUMNS: Final = ("topic", "partition", "replicas", "state", "adding", "removing", "lag")

NOT_MOVING: Final = "not moving"


def reassign(
    moves: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC-PARTITION=BROKER,...", help="A partition and its new replicas.", show_default=False
        ),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="A plan in JSON instead of arguments; - is stdin.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", metavar="", help="Make a plan for --topic on --brokers, and print it.")
    ] = False,
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="For --generate; may be repeated.")] = None,
    brokers: Annotated[
        str | None,
        typer.Option(
            "--brokers", metavar="ID,...", help="For --generate; by default all brokers that are up and take replicas."
        ),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="For --generate; by default each partition keeps its number of replicas."
        ),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", metavar="", help="Begin the moves; the default.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", metavar="", help="Show the progress of moves; remove the throttle once all are done."),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", metavar="", help="Cancel the moves: the previous replicas stay.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", metavar="", help="Show the moves that are under way.")] = False,
    throttle: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes per second on each broker for the moves, such as 10MiB.")
    ] = None,
    preserve_throttles: Annotated[
        bool, typer.Option("--preserve-throttles", metavar="", help="Do not remove the throttle.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", metavar="", help="Return when the moves are done.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="With --wait: wait at most this long.")
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move partitions to other brokers: new replicas catch up, then the old ones are removed.

    Example: raftlog partition reassign events-0=2,3,4 events-1=3,4,2 --throttle 20MiB --wait

    Example: raftlog partition reassign --generate --topic events --brokers 2,3,4 > plan.json

    Example: raftlog partition reassign --generate --topic events --replication-factor 3 > plan.json
    """
    if sum((generate, execute, verify, cancel, list_)) > 1:
        raise typer.BadParameter("give only one of --generate, --execute, --verify, --cancel and --list")
    if replication_factor is not None and not generate:
        raise typer.BadParameter("--replication-factor needs --generate, which prints a plan for --plan")
    rate = None if throttle is None else moving.rate_of(throttle)
    with connect_admin(bootstrap) as admin:
        if list_:
            _list(admin, output)
            return
        if generate:
            _generate(admin, topic or [], brokers, replication_factor, output)
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
                print_note(moving.STAYS)


def _see_through(
    admin: raftlog.Admin,
    moves: Sequence[Move],
    timeout: float | None,
    throttled: bool,
    preserve_throttles: bool,
    output: Output,
) -> None:
    more = f"; {moving.STAYS}" if throttled else ""
    far = carry_out(admin, moves, timeout_s=timeout, if_interrupted=lambda far: f"{far}{more}")
    if not far.undone:
        _verify(admin, moves, preserve_throttles or not throttled, output)
        return
    _show(admin, moves, output)
    print_error(f"after {timeout:g} s {far}{more}")
    raise typer.Exit(1)


def _moves(arguments: Sequence[str], plan: str | None) -> list[Move]:
    if bool(arguments) == bool(plan):
        raise typer.BadParameter("give either partitions or --plan")
    try:
        if plan is None:
            return moves_from_arguments(arguments)
        return moves_from_json(sys.stdin.read() if plan == "-" else Path(plan).read_text())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# State


def _topics(admin: raftlog.Admin, moves: Sequence[Move]) -> dict[str, TopicDescription]:
    """Return the topics of the moves, after checking that their partitions exist."""
    found = {each.name: each for each in admin.describe_topics({move.part.topic for move in moves})}
    for move in moves:
        partitions = found[move.part.topic].partitions
        if move.part.partition >= len(partitions):
            raise UnknownTopicOrPartition(
                f"topic {move.part.topic} has no partition {move.part.partition}; it has {len(partitions)}, from 0"
            )
    return found


def _rows(
    admin: raftlog.Admin,
    topics: Mapping[str, TopicDescription],
    moves: Sequence[Move],
    states: Mapping[TopicPartition, str],
) -> list[dict[str, object]]:
    under_way = {move.part.topic for move in moves if states[move.part] == UNDER_WAY}
    known = admin.describe_replicas(under_way, silent={}) if under_way else {}
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
    print_rows(rows, COLUMNS, output, documents={"moves": [dict(row) for row in rows], **more})


# Actions


def _list(admin: raftlog.Admin, output: Output) -> None:
    moves = [Move(part, tuple(found.replicas)) for part, found in sorted(admin.list_reassignments().items())]
    topics = _topics(admin, moves) if moves else {}
    _print(_rows(admin, topics, moves, {move.part: UNDER_WAY for move in moves}), output)


def _generate(
    admin: raftlog.Admin, names: Sequence[str], brokers: str | None, replication_factor: int | None, output: Output
) -> None:
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
        raise typer.BadParameter(f"broker {missing[0]} is not up; these are: {', '.join(map(str, sorted(up)))}")
    current = list(present(admin.describe_topics(names)))
    try:
        sized = current if replication_factor is None else resized(current, wanted, replication_factor)
        proposed = balanced(sized, {each: up[each].rack for each in wanted})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if output is Output.JSON:
        print_json({"current": plan_of(current), "proposed": plan_of(proposed)})
    else:
        pairs = [(new.replicas, old.replicas) for new, old in zip(proposed, current, strict=True)]
        moved = sum(set(new) != set(old) for new, old in pairs)
        turned = sum(set(new) == set(old) and new != old for new, old in pairs)
        what = f"{counted(moved, 'partition')} to move and {turned:,} to reorder"
        print_note(f"now:\n{json_text(plan_of(current))}\nwanted, with {what}:")
        print_json(plan_of(proposed))


def _execute(admin: raftlog.Admin, moves: Sequence[Move], rate: int | None, output: Output, *, quiet: bool) -> None:
    for move in moves:
        if not move.replicas:
            raise typer.BadParameter(f"{move.part.topic}-{move.part.partition}: add the brokers, such as =1,2,3")
    goals = {move.part: move for move in moves}
    topics = _topics(admin, moves)
    before = [move for move in present(topics.values()) if move.part in goals]
    moving.warn(admin, {move.part: len(move.replicas) for move in moves})
    if rate is not None:
        moving.put_on(admin, [move for move in holding(topics.values()) if move.part in goals], goals, rate)
    admin.alter_reassignments({move.part: move.replicas for move in moves})
    print_note(f"{counted(len(moves), 'move')} begun; the plan that undoes this:\n{moving.way_back(before)}")
    if not quiet:
        topics = _topics(admin, moves)
        states = {move.part: state_of(move, topics) for move in moves}
        _print(_rows(admin, topics, moves, states), output, before=plan_of(before))


def _verify(admin: raftlog.Admin, moves: Sequence[Move], preserve_throttles: bool, output: Output) -> None:
    states = _show(admin, moves, output)
    if not preserve_throttles and UNDER_WAY not in states.values():
        moving.take_off(admin, _there(states))
    if set(states.values()) == {GONE}:
        raise UnknownTopicOrPartition(f"{next(iter(states))} does not exist, nor any other of these partitions")
    undone = [part for part, state in states.items() if state not in (DONE, GONE)]
    if undone:
        verb = "is" if len(undone) == 1 else "are"
        print_error(f"{len(undone)} of {counted(len(moves), 'move')} {verb} not done")
        raise typer.Exit(1)


def _show(admin: raftlog.Admin, moves: Sequence[Move], output: Output) -> dict[TopicPartition, str]:
    """Print the states of moves, and return them."""
    topics = all_topics(admin)
    states = {move.part: state_of(move, topics) for move in moves}
    _print(_rows(admin, topics, moves, states), output)
    return states


def _there(states: Mapping[TopicPartition, str]) -> set[str]:
    return {part.topic for part, state in states.items() if state != GONE}


def _cancel(admin: raftlog.Admin, moves: Sequence[Move], preserve_throttles: bool, output: Output) -> None:
    """Cancel moves under way, and remove the throttle, even if no move is left to cancel."""
    topics = all_topics(admin)
    now = {move.part: state_of(move, topics) for move in moves}
    if set(now.values()) == {GONE}:
        moving.take_off(admin, ())
        raise UnknownTopicOrPartition(f"{next(iter(now))} does not exist, nor any other of these partitions")
    under_way = [part for part, state in now.items() if state == UNDER_WAY]
    if under_way:
        admin.alter_reassignments(dict.fromkeys(under_way, None))
    if not preserve_throttles:
        moving.take_off(admin, _there(now))
    words = {UNDER_WAY: "cancelled", GONE: GONE}
    topics = all_topics(admin)
    back = [Move(move.part, ()) for move in moves]
    _print(_rows(admin, topics, back, {part: words.get(state, NOT_MOVING) for part, state in now.items()}), output)
    still = [part for part, state in now.items() if state not in words]
    for part in still:
        print_error(f"{part} is not being moved")
    if still:
        raise typer.Exit(1)


app = typer.Typer(no_args_is_help=True, help="Choose the brokers that hold a partition, and its leader.")
app.command("reassign")(reassign)


@app.command()
def elect(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Or --all.", show_default=False)] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition; may be repeated.")
    ] = None,
    all_topics: Annotated[bool, typer.Option("--all", metavar="", help="All topics, internal ones included.")] = False,
    unclean: Annotated[
        bool,
        typer.Option("--unclean", metavar="", help="If no other replica can lead, elect one that may lack records."),
    ] = False,
    yes: YesOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Elect the first replica of each partition as its leader, and print the new leaders. With --unclean it asks first.

    Example: raftlog partition elect events --partition 0

    Example: raftlog partition elect --all

    Example: raftlog partition elect events --unclean
    """
    if (topic is None) != all_topics or (all_topics and partition):
        raise typer.BadParameter("give either TOPIC, with or without --partition, or --all")
    if unclean:
        print_note(
            f"warning: partitions of {topic or 'all topics'} without a leader will be led by a replica that may lack "
            "records; these records are lost, even if they were acknowledged"
        )
        if not yes:
            confirm("continue?", "not elected")
    with connect_admin(bootstrap) as admin:
        if topic is None:
            done = run_all(admin, output, unclean=unclean)
        else:
            done = run(admin, topic, partition or (), output, unclean=unclean)
    if not done:
        raise typer.Exit(1)
