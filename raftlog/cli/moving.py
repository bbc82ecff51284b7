"""Moves under way: where each is, begun so many at a time, waited for, and told of (KIP-455)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import raftlog
from raftlog._descriptions import PartitionDescription, TopicDescription
from raftlog.cli.output import counted, print_note
from raftlog.cli.plans import Move, goal_of
from raftlog.errors import ElectionNotNeeded, RaftlogError
from raftlog.types import TopicPartition

LOOK_EVERY_S: Final = 0.5
TELL_EVERY_S: Final = 5.0
"""How often a line tells of progress where there is no terminal for a bar."""

DONE: Final = "done"
UNDER_WAY: Final = "under way"
ELSEWHERE: Final = "elsewhere"
"""Neither where it was to be nor moving."""
GONE: Final = "the topic is gone"

Topics = Mapping[str, TopicDescription]


class HowFar(NamedTuple):
    """How many moves are done, go on by themselves, and have not begun."""

    done: int
    under_way: int
    waiting: int

    @property
    def undone(self) -> int:
        """How many are not done."""
        return self.under_way + self.waiting

    def __str__(self) -> str:
        """Say what is not done, and what becomes of that."""
        verb = "is" if self.undone == 1 else "are"
        said = f"{self.undone} of {counted(self.done + self.undone, 'move')} {verb} not done"
        if not self.waiting:
            return f"{said}; {'it goes' if self.under_way == 1 else 'they go'} on"
        goes = f"{self.under_way:,} of them {'goes' if self.under_way == 1 else 'go'} on, " if self.under_way else ""
        return f"{said}; {goes}{self.waiting:,} {'has' if self.waiting == 1 else 'have'} not begun"


# Where they are


def all_topics(admin: raftlog.Admin) -> dict[str, TopicDescription]:
    """Return every topic by name, internal ones as well."""
    return {topic.name: topic for topic in admin.describe_topics(internal=True)}


def partition_of(move: Move, topics: Topics) -> PartitionDescription | None:
    """Return what there is of it; None: the topic is gone."""
    topic = topics.get(move.part.topic)
    return topic.partitions[move.part.partition] if topic and move.part.partition < len(topic.partitions) else None


def state_of(move: Move, topics: Topics) -> str:
    """Return where a move is; where it names no replicas, whether the partition is being moved."""
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
    """Return how many records the new replicas are behind altogether; None while that is not known of all."""
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
    """Tell how many are done, with a word more: by a bar on a terminal, else by a line every few seconds."""
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
    """Begin what has not begun, `batch` partitions at a time, and wait until none is under way, or for `timeout_s`.

    Without `batch` nothing is begun: what is not under way is done. Where nobody answers for a while it goes on later.

    Raises:
        KeyboardInterrupt: after a word about what goes on.
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
                    while batch is not None and waiting and len(left) < batch:  # what is no copy is done at once
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
    """Say which brokers are down that partitions are moving to; "": none."""
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
    """Begin the first `count` that wait, and return them.

    When no answer comes they wait on, and may have begun all the same: those are left alone the next time.
    """
    moves = [waiting[number] for number in range(min(count, len(waiting)))]
    topics = all_topics(admin)
    admin.alter_reassignments({move.part: move.replicas for move in moves if not _has_begun(move, topics)})
    for _ in moves:
        waiting.popleft()
    return moves


def lead_as_wanted(admin: raftlog.Admin, moves: Iterable[Move]) -> None:
    """Have the first replica of each lead, where it could."""
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
            continue  # somebody else did it meanwhile
        except RaftlogError as error:
            if not error.retriable:
                raise
            print_note(f"note: not every partition of {topic} is led by its first replica yet: {error}")
