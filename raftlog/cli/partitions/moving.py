"""Moving partitions: warnings, throttles (KIP-73), plans, and carrying moves out in batches (KIP-455).

A warning names topics whose min.insync.replicas is above the number of replicas, so that writes with acks=all fail.
Such settings are allowed, as in Kafka: they may come before the move that adds replicas. Plans are pure; their JSON is
that of kafka-reassign-partitions:

{"version": 1, "partitions": [{"topic": "events", "partition": 0, "replicas": [1, 2, 3]}]}
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import raftlog
from raftlog._core import rebalance
from raftlog._core.descriptions import PartitionDescription, TopicDescription
from raftlog._core.rebalance import BrokerPlace
from raftlog._core.words import counted, some
from raftlog.cli.output import json_text, print_note
from raftlog.config import parse_size_bytes
from raftlog.errors import ElectionNotNeeded, RaftlogError
from raftlog.types import TopicPartition

KEY: Final = "min.insync.replicas"
_NAMED: Final = 5
MOST_SHOWN: Final = 500
"""Characters of a plan that is shown between other lines."""


def of_topic(admin: raftlog.Admin, topic: str) -> int:
    """Return a topic's effective min.insync.replicas."""
    return int(admin.describe_configs(topic=topic)[KEY].value)


def known(admin: raftlog.Admin) -> Callable[[str], int]:
    """Return `of_topic` for this cluster, which asks about each topic once."""
    return cache(lambda topic: of_topic(admin, topic))


def warn_of_topics(admin: raftlog.Admin, topics: Iterable[str] | None) -> None:
    """Warn of partitions of these topics, or of all, that have fewer replicas than min.insync.replicas."""
    try:
        found = admin.describe_topics(topics)
        counts = {
            TopicPartition(topic.name, part.partition): len(set(part.replicas) - set(part.removing_replicas))
            for topic in found
            for part in topic.partitions
        }
        warn(admin, counts)
    except RaftlogError as error:  # the command itself has succeeded
        print_note(f"note: whether partitions have enough replicas for {KEY} is unknown: {error}")


def warn(admin: raftlog.Admin, replicas: dict[TopicPartition, int]) -> None:
    """Warn of partitions whose number of replicas, now or after a move, is below min.insync.replicas."""
    minimum = {topic: of_topic(admin, topic) for topic in sorted({part.topic for part in replicas})}
    short = [part for part, count in sorted(replicas.items()) if count < minimum[part.topic]]
    for part in short[:_NAMED]:
        print_note(
            f"warning: {part} has {counted(replicas[part], 'replica')} and {KEY}={minimum[part.topic]}: writes with "
            "acks=all are refused; give it more replicas (raftlog partition reassign --generate --replication-factor "
            "N), or lower the setting"
        )
    if len(short) > _NAMED:
        print_note(f"warning: the same holds for {counted(len(short) - _NAMED, 'more partition', 'more partitions')}")


RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
MAX_NAMED: Final = 5
STAYS: Final = (
    "the throttle stays on until raftlog partition reassign --verify with the same moves finds them done and removes it"
)


def rate_of(text: str) -> int:
    """Return the bytes per second of `--throttle`.

    Raises:
        typer.BadParameter: it is no positive size.
    """
    try:
        rate = parse_size_bytes(text)
    except ValueError:
        rate = 0
    if rate < 1:
        raise typer.BadParameter(f"--throttle {text}: write bytes per second, for example 20MiB")
    return rate


def put_on(admin: raftlog.Admin, before: Sequence[Move], goals: Mapping[TopicPartition, Move], rate: int) -> None:
    """Throttle moves, before they begin, to `rate` bytes per second on each broker."""
    involved = {broker for move in (*before, *goals.values()) for broker in move.replicas}
    for broker in sorted(involved & {each.broker_id for each in admin.describe_cluster().brokers}):
        admin.alter_configs(broker=broker, set=dict.fromkeys(RATES, rate))
    for topic, configs in throttled_replicas(before, goals).items():
        admin.alter_configs(topic=topic, set=configs)


def take_off(admin: raftlog.Admin, topics: Collection[str]) -> None:
    """Remove the throttle of these existing topics, and the brokers' rates once no move is under way."""
    for topic in sorted(topics):
        admin.alter_configs(topic=topic, unset=THROTTLED)
    if admin.list_reassignments():
        return  # the same rates throttle other moves
    for broker in admin.describe_cluster().brokers:
        admin.alter_configs(broker=broker.broker_id, unset=RATES)


def take_off_forgotten(admin: raftlog.Admin, broker_id: int | None = None) -> None:
    """Remove throttles that an interrupted run has left, of all topics or of those whose throttles name a broker.

    It removes only throttles on single replicas, as `put_on` sets them; throttles of moves in progress stay.
    """
    moving = {part.topic for part in admin.list_reassignments()}
    names = {topic.name for topic in admin.describe_topics(internal=True)}
    take_off(admin, {name for name in names - moving if _is_named(admin, name, broker_id)})


def settle(admin: raftlog.Admin, rate: int | None) -> None:
    """Remove forgotten throttles if this run has a `rate`, otherwise print a note about them; for the end of a run."""
    if rate is None:
        tell_if_on(admin)
    else:
        take_off_forgotten(admin)


def tell_if_on(admin: raftlog.Admin) -> None:
    """Print which topics still have a throttle of `put_on`, and how to remove it."""
    held = sorted(topic.name for topic in admin.describe_topics() if _is_named(admin, topic.name, None))
    if held:
        print_note(
            f"note: an earlier throttle is still on ({some(held, MAX_NAMED)}); raftlog cluster rebalance --execute "
            "--throttle SIZE removes it in the end"
        )


def _is_named(admin: raftlog.Admin, topic: str, broker_id: int | None) -> bool:
    configs = admin.describe_configs(topic=topic)
    entries = [entry for key in THROTTLED for entry in configs[key].value.split(",") if ":" in entry]
    return any(broker_id is None or entry.endswith(f":{broker_id}") for entry in entries)


_MOVE = re.compile(r"(?P<topic>[a-zA-Z0-9._-]+)-(?P<partition>[0-9]+)(?:=(?P<replicas>[0-9]+(?:,[0-9]+)*))?", re.ASCII)
_KEYS = {"topic", "partition", "replicas", "log_dirs"}


class Move(NamedTuple):
    """The wanted replicas of a partition, the preferred leader first; empty if none were named."""

    part: TopicPartition
    replicas: tuple[int, ...]


def moves_from_arguments(arguments: Iterable[str]) -> list[Move]:
    """Return the moves of arguments `TOPIC-PARTITION=BROKER,...` or `TOPIC-PARTITION`.

    Raises:
        ValueError: an argument is malformed, or repeats a partition or broker.
    """
    moves = []
    for argument in arguments:
        found = _MOVE.fullmatch(argument)
        if found is None:
            raise ValueError(f"{argument!r}: write TOPIC-PARTITION=BROKER,..., for example events-0=1,2,3")
        replicas = tuple(map(int, found["replicas"].split(","))) if found["replicas"] else ()
        moves.append(Move(TopicPartition(found["topic"], int(found["partition"])), replicas))
    return _checked(moves)


def moves_from_json(text: str) -> list[Move]:
    """Return the moves of a plan.

    Raises:
        ValueError: the plan is invalid; the message says where.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the plan is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("partitions"), list):
        raise ValueError('a plan is {"version": 1, "partitions": [{"topic": …, "partition": …, "replicas": […]}]}')
    if document.get("version", 1) != 1:
        raise ValueError(f"the plan has version {document['version']!r}; only version 1 is supported")
    return _checked([_move(number, entry) for number, entry in enumerate(document["partitions"])])


def _move(number: int, entry: Any) -> Move:
    where = f"partitions[{number}] of the plan"
    if not isinstance(entry, dict) or not {"topic", "partition", "replicas"} <= entry.keys() <= _KEYS:
        raise ValueError(f"{where} needs topic, partition and replicas, and nothing else")
    topic, partition, replicas = entry["topic"], entry["partition"], entry["replicas"]
    if not isinstance(topic, str) or not _is_id(partition):
        raise ValueError(f"{where}: topic must be a text and partition a number, not {topic!r} and {partition!r}")
    if not isinstance(replicas, list) or not replicas or not all(map(_is_id, replicas)):
        raise ValueError(f"{where}: replicas must be a list of broker ids, not {replicas!r}")
    if any(directory != "any" for directory in entry.get("log_dirs", ())):
        raise ValueError(f"{where}: a log directory cannot be chosen; leave log_dirs out, or write any")
    return Move(TopicPartition(topic, partition), tuple(replicas))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _checked(moves: list[Move]) -> list[Move]:
    seen: set[TopicPartition] = set()
    for move in moves:
        if move.part in seen:
            raise ValueError(f"{move.part.topic}-{move.part.partition} is named twice")
        seen.add(move.part)
        if len(set(move.replicas)) < len(move.replicas):
            raise ValueError(f"{move.part.topic}-{move.part.partition}: {list(move.replicas)} names a broker twice")
    return moves


def plan_of(moves: Iterable[Move]) -> dict[str, Any]:
    """Return a plan as a document."""
    return {
        "version": 1,
        "partitions": [
            {"topic": move.part.topic, "partition": move.part.partition, "replicas": list(move.replicas)}
            for move in moves
        ],
    }


def way_back(before: Iterable[Move]) -> str:
    """Return the plan that undoes moves, or, if it is long, the path of a new file that holds it."""
    text = json_text(plan_of(before))
    if len(text) <= MOST_SHOWN:
        return text
    path = Path(f"raftlog-undo-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json").absolute()
    try:
        with path.open("x") as file:
            file.write(f"{text}\n")
    except OSError:  # the directory is read-only, for example
        return text
    return str(path)


def present(topics: Iterable[TopicDescription]) -> Iterator[Move]:
    """Yield each partition with its replicas after moves under way."""
    for topic in topics:
        for part in topic.partitions:
            yield Move(TopicPartition(topic.name, part.partition), goal_of(part))


def goal_of(part: PartitionDescription) -> tuple[int, ...]:
    """Return a partition's replicas after a move under way."""
    return tuple(replica for replica in part.replicas if replica not in part.removing_replicas)


def holding(topics: Iterable[TopicDescription]) -> Iterator[Move]:
    """Yield each partition with its replicas before moves under way."""
    for topic in topics:
        for part in topic.partitions:
            held = tuple(replica for replica in part.replicas if replica not in part.adding_replicas)
            yield Move(TopicPartition(topic.name, part.partition), held)


def resized(moves: Sequence[Move], brokers: Sequence[int], replication_factor: int) -> list[Move]:
    """Return the partitions with so many replicas: the first ones, and brokers that hold the fewest; not balanced yet.

    Raises:
        ValueError: there are fewer brokers.
    """
    if replication_factor > len(brokers):
        raise ValueError(f"{replication_factor} replicas need {replication_factor} brokers, not {len(brokers)}")
    held = Counter(replica for move in moves for replica in move.replicas)
    after = []
    for move in moves:
        replicas = list(move.replicas[:replication_factor])
        while len(replicas) < replication_factor:
            replicas.append(min(set(brokers) - set(replicas), key=lambda each: (held[each], each)))
            held[replicas[-1]] += 1
        after.append(Move(move.part, tuple(replicas)))
    return after


def balanced(moves: Sequence[Move], rack_of: Mapping[int, str]) -> list[Move]:
    """Return moves that spread these partitions evenly over these brokers and their racks, with few copies.

    Raises:
        ValueError: a partition has more replicas than `rack_of` has brokers.
    """
    most = max((len(move.replicas) for move in moves), default=0)
    if most > len(rack_of):
        raise ValueError(f"{most} replicas need {most} brokers, but only {len(rack_of)} are named")
    others = {replica for move in moves for replica in move.replicas} - rack_of.keys()
    places = [BrokerPlace(broker_id, rack) for broker_id, rack in rack_of.items()]
    places += [BrokerPlace(broker_id, leaves=True) for broker_id in others]
    placed = rebalance.plan({move.part: move.replicas for move in moves}, places)
    return [Move(move.part, placed[move.part]) for move in moves]


def throttled_replicas(before: Iterable[Move], after: Mapping[TopicPartition, Move]) -> dict[str, dict[str, str]]:
    """Return, by topic, the configs that throttle these moves: sending and receiving replicas (KIP-73)."""
    sending: dict[str, list[str]] = {}
    receiving: dict[str, list[str]] = {}
    for move in before:
        topic, partition = move.part
        if move.part not in after:
            continue
        new = [replica for replica in after[move.part].replicas if replica not in move.replicas]
        if new:
            sending.setdefault(topic, []).extend(f"{partition}:{replica}" for replica in move.replicas)
            receiving.setdefault(topic, []).extend(f"{partition}:{replica}" for replica in new)
    return {
        topic: {
            "leader.replication.throttled.replicas": ",".join(sending[topic]),
            "follower.replication.throttled.replicas": ",".join(receiving[topic]),
        }
        for topic in sorted(sending)
    }


LOOK_EVERY_S: Final = 0.5
TELL_EVERY_S: Final = 5.0
"""How often a line reports progress if stderr is no terminal."""

DONE: Final = "done"
UNDER_WAY: Final = "under way"
ELSEWHERE: Final = "elsewhere"
"""The partition is neither in its wanted place nor moving."""
GONE: Final = "the topic is gone"

Topics = Mapping[str, TopicDescription]


class HowFar(NamedTuple):
    """How many moves are done, are under way and continue by themselves, and have not begun."""

    done: int
    under_way: int
    waiting: int

    @property
    def undone(self) -> int:
        """Return how many moves are not done."""
        return self.under_way + self.waiting

    def __str__(self) -> str:
        """Return how many moves are not done, and whether they continue."""
        verb = "is" if self.undone == 1 else "are"
        said = f"{self.undone} of {counted(self.done + self.undone, 'move')} {verb} not done"
        if not self.waiting:
            return f"{said}; {'it continues' if self.under_way == 1 else 'they continue'}"
        goes_on = "continues" if self.under_way == 1 else "continue"
        going = f"{self.under_way:,} of them {goes_on}, " if self.under_way else ""
        return f"{said}; {going}{self.waiting:,} {'has' if self.waiting == 1 else 'have'} not begun"


# Where they are


def all_topics(admin: raftlog.Admin) -> dict[str, TopicDescription]:
    """Return every topic by name, internal ones included."""
    return {topic.name: topic for topic in admin.describe_topics(internal=True)}


def partition_of(move: Move, topics: Topics) -> PartitionDescription | None:
    """Return a move's partition; None: the topic is gone."""
    topic = topics.get(move.part.topic)
    return topic.partitions[move.part.partition] if topic and move.part.partition < len(topic.partitions) else None


def state_of(move: Move, topics: Topics) -> str:
    """Return a move's state; a move without replicas is done when the partition is not moving."""
    part = partition_of(move, topics)
    if part is None:
        return GONE
    if part.adding_replicas or part.removing_replicas:
        return UNDER_WAY
    return DONE if tuple(part.replicas) == move.replicas or not move.replicas else ELSEWHERE


def _has_begun(move: Move, topics: Topics) -> bool:
    part = partition_of(move, topics)
    return part is None or goal_of(part) == move.replicas


def _lag(admin: raftlog.Admin, left: Sequence[Move], adding: Mapping[TopicPartition, set[int]]) -> int | None:
    """Return the total lag of new replicas in records; None while one of them is unknown."""
    if not left:
        return None
    known = admin.describe_replicas({move.part.topic for move in left}, silent={})
    lags = [
        replica.lag
        for move in left
        for replica in (known[move.part].replicas if move.part in known else ())
        if replica.broker_id in adding[move.part]
    ]
    return sum(lags) if lags and min(lags) >= 0 else None


# Seeing them through


@contextmanager
def _telling(of: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that reports progress: with a bar on a terminal, otherwise with a line every few seconds."""
    columns = (TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    console = Console(stderr=True)
    told, told_at_s = -1, 0.0
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("moving", total=of, words="")

        def tell(done: int, words: str) -> None:
            nonlocal told, told_at_s
            bar.update(task, completed=done, words=words)
            if not console.is_terminal and (done != told or time.monotonic() - told_at_s >= TELL_EVERY_S):
                print_note(f"{done} of {counted(of, 'move')} done{', ' + words if words else ''}")
                told, told_at_s = done, time.monotonic()

        yield tell


def carry_out(
    admin: raftlog.Admin,
    moves: Sequence[Move],
    *,
    batch: int | None = None,
    timeout_s: float | None = None,
    if_interrupted: Callable[[HowFar], str],
) -> HowFar:
    """Begin moves, `batch` partitions at a time, and wait until none is under way, at most `timeout_s`.

    Without `batch` it begins no move, and a move that is not under way counts as done. Retriable errors are waited out.

    Raises:
        KeyboardInterrupt: after printing `if_interrupted`.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    topics = {} if batch is None else all_topics(admin)
    waiting = deque(move for move in moves if batch is not None and not _has_begun(move, topics))
    begun = [move for move in moves if batch is None or _has_begun(move, topics)]
    far = HowFar(0, len(begun), len(waiting))
    said = ""
    try:
        with _telling(len(moves)) as tell:
            while True:
                try:
                    moving = _under_way(admin)
                    left = [move for move in begun if move.part in moving]
                    while batch is not None and waiting and len(left) < batch:  # a move without a copy is done at once
                        begun += _begin(admin, waiting, batch - len(left))
                        moving = _under_way(admin)
                        left = [move for move in begun if move.part in moving]
                    far = HowFar(len(begun) - len(left), len(left), len(waiting))
                    lag = _lag(admin, left, {part: set(each.adding_replicas) for part, each in moving.items()})
                    tell(far.done, f"{counted(lag, 'record')} to go" if lag is not None else "")
                    waits = _down({move.part: moving[move.part] for move in left})
                except RaftlogError as error:
                    if not error.retriable:
                        raise
                    waits = str(error)
                if waits != said:
                    said = waits
                    if said:
                        print_note(f"waiting: {said}")
                if not far.undone or (deadline_s is not None and time.monotonic() >= deadline_s):
                    return far
                time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        print_note(if_interrupted(far))
        raise


def _under_way(admin: raftlog.Admin) -> dict[TopicPartition, PartitionDescription]:
    return {
        TopicPartition(topic.name, part.partition): part
        for topic in all_topics(admin).values()
        for part in topic.partitions
        if part.adding_replicas or part.removing_replicas
    }


def _down(moving: Mapping[TopicPartition, PartitionDescription]) -> str:
    """Return a text on brokers that are down while partitions move to them; "" if there are none."""
    parts = [part for part, each in sorted(moving.items()) if set(each.adding_replicas) & set(each.offline_replicas)]
    if not parts:
        return ""
    brokers = {broker for part in parts for broker in moving[part].adding_replicas}
    down = sorted(brokers & {broker for part in parts for broker in moving[part].offline_replicas})
    more = f" and {len(parts) - 1:,} more" if len(parts) > 1 else ""
    return (
        f"broker {', '.join(map(str, down))} is down or has no working log for {parts[0]}{more}, which should move "
        "there; start it again, or cancel those moves (raftlog partition reassign --cancel)"
    )


def _begin(admin: raftlog.Admin, waiting: deque[Move], count: int) -> list[Move]:
    """Begin the first `count` waiting moves, and return them.

    Without an answer they stay in `waiting`; the next attempt leaves out those that have begun nevertheless.
    """
    moves = [waiting[number] for number in range(min(count, len(waiting)))]
    topics = all_topics(admin)
    admin.alter_reassignments({move.part: move.replicas for move in moves if not _has_begun(move, topics)})
    for _ in moves:
        waiting.popleft()
    return moves


def lead_as_wanted(admin: raftlog.Admin, moves: Iterable[Move]) -> None:
    """Elect the first replica of each partition, if it is in sync and does not lead yet."""
    topics = all_topics(admin)
    wanted: dict[str, list[int]] = {}
    for move in moves:
        part = partition_of(move, topics)
        if (
            part is not None
            and 0 <= part.leader != move.replicas[0] == part.replicas[0]
            and part.replicas[0] in part.isr
        ):
            wanted.setdefault(move.part.topic, []).append(move.part.partition)
    for topic, partitions in sorted(wanted.items()):
        try:
            admin.elect_leaders(topic, partitions)
        except ElectionNotNeeded:
            continue  # it has happened meanwhile
        except RaftlogError as error:
            if not error.retriable:
                raise
            print_note(f"note: not every partition of {topic} is led by its first replica yet: {error}")
