"""Plans of where partitions are to be: read, written, made up. Pure; the JSON is that of kafka-reassign-partitions.

{"version": 1, "partitions": [{"topic": "events", "partition": 0, "replicas": [1, 2, 3]}]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raftlog._core import rebalance
from raftlog._core.rebalance_board import BrokerPlace
from raftlog._descriptions import PartitionDescription, TopicDescription
from raftlog.types import TopicPartition

_MOVE = re.compile(r"(?P<topic>[a-zA-Z0-9._-]+)-(?P<partition>[0-9]+)(?:=(?P<replicas>[0-9]+(?:,[0-9]+)*))?", re.ASCII)
_KEYS = {"topic", "partition", "replicas", "log_dirs"}


class Move(NamedTuple):
    """Where one partition is to be, the preferred leader first; no replicas where none were named."""

    part: TopicPartition
    replicas: tuple[int, ...]


def moves_from_arguments(arguments: Iterable[str]) -> list[Move]:
    """Return what `TOPIC-PARTITION=BROKER,...` or `TOPIC-PARTITION` says.

    Raises:
        ValueError: it says nothing that can be understood.
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
        ValueError: no plan; says where it is wrong.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the plan is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("partitions"), list):
        raise ValueError('a plan is {"version": 1, "partitions": [{"topic": …, "partition": …, "replicas": […]}]}')
    if document.get("version", 1) != 1:
        raise ValueError(f"the plan has version {document['version']!r}, this tool reads 1")
    return _checked([_move(number, entry) for number, entry in enumerate(document["partitions"])])


def _move(number: int, entry: Any) -> Move:
    where = f"partitions[{number}] of the plan"
    if not isinstance(entry, dict) or not {"topic", "partition", "replicas"} <= entry.keys() <= _KEYS:
        raise ValueError(f"{where} needs topic, partition and replicas, and nothing else")
    topic, partition, replicas = entry["topic"], entry["partition"], entry["replicas"]
    if not isinstance(topic, str) or not _is_id(partition):
        raise ValueError(f"{where}: topic is a text and partition a number, not {topic!r} and {partition!r}")
    if not isinstance(replicas, list) or not replicas or not all(map(_is_id, replicas)):
        raise ValueError(f"{where}: replicas are the ids of brokers, not {replicas!r}")
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
    """Return the document of a plan."""
    return {
        "version": 1,
        "partitions": [
            {"topic": move.part.topic, "partition": move.part.partition, "replicas": list(move.replicas)}
            for move in moves
        ],
    }


def present(topics: Iterable[TopicDescription]) -> Iterator[Move]:
    """Yield where the partitions are, or are going already."""
    for topic in topics:
        for part in topic.partitions:
            yield Move(TopicPartition(topic.name, part.partition), goal_of(part))


def goal_of(part: PartitionDescription) -> tuple[int, ...]:
    """Return where a partition is, or is going already."""
    return tuple(replica for replica in part.replicas if replica not in part.removing_replicas)


def holding(topics: Iterable[TopicDescription]) -> Iterator[Move]:
    """Yield where the partitions are now, whatever is under way."""
    for topic in topics:
        for part in topic.partitions:
            held = tuple(replica for replica in part.replicas if replica not in part.adding_replicas)
            yield Move(TopicPartition(topic.name, part.partition), held)


def balanced(moves: Sequence[Move], rack_of: Mapping[int, str]) -> list[Move]:
    """Return the same partitions on these brokers alone, evenly, racks apart, with as little moved as that takes.

    Raises:
        ValueError: a partition has more replicas than there are brokers.
    """
    most = max((len(move.replicas) for move in moves), default=0)
    if most > len(rack_of):
        raise ValueError(f"{most} replicas need as many brokers, {len(rack_of)} are named")
    others = {replica for move in moves for replica in move.replicas} - rack_of.keys()
    places = [BrokerPlace(broker_id, rack) for broker_id, rack in rack_of.items()]
    places += [BrokerPlace(broker_id, leaves=True) for broker_id in others]
    placed = rebalance.plan({move.part: move.replicas for move in moves}, places)
    return [Move(move.part, placed[move.part]) for move in moves]


def throttled_replicas(before: Iterable[Move], after: Mapping[TopicPartition, Move]) -> dict[str, dict[str, str]]:
    """Return, by topic, the configs that hold these moves back: who sends, and who receives (KIP-73)."""
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
