"""Where replicas had better be: a plan from what there is, the same one every time from the same.

In this order:
1. What leaves goes: every replica of a broker that `leaves` to the broker with the smallest load, in a rack of its own
   where there is one.
2. Racks come apart: a partition that could be in more racks is put there. From here on no step has one in fewer.
3. Loads become even: within one between the brokers that take replicas, as far as racks, and the partitions that each
   holds already, allow; the same for preferred leaders, by the order of replicas alone.
By that every broker gives away only what it has too much of, and a replica that moves is copied once, however many
steps it took here: what brokers that leave have, what racks ask for, and where that was nothing, no more than loads
within one take. A broker that takes nothing (fenced, drained, cordoned) keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from raftlog._core.rebalance_board import Board, BrokerPlace
from raftlog._core.rebalance_evening import even_out, even_out_amounts
from raftlog._core.words import some
from raftlog.types import TopicPartition

Placement = Mapping[TopicPartition, Sequence[int]]
"""Replicas by partition, the preferred leader first."""

SLACK: Final = 0.05
"""How far apart loads in bytes may stay, of what a broker has on average: less is not worth copying for."""
_NAMED: Final = 5


class Balance(StrEnum):
    """What is made even."""

    REPLICAS = "replicas"
    """How many replicas brokers have."""
    BYTES = "bytes"
    """How much is in them; how many there are does not count."""
    NOTHING = "nothing"
    """What leaves a broker is spread, all else stays."""


class CannotPlace(ValueError):
    """Partitions would not keep all their replicas: too few brokers take any. `partitions` names them all."""

    def __init__(self, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(f"no broker is left that could hold another replica of {some(partitions, _NAMED)}")
        self.partitions = tuple(partitions)


class Load(NamedTuple):
    """What a broker has. `leaderships`: of how many partitions it is the preferred leader."""

    replicas: int = 0
    leaderships: int = 0
    size_bytes: int = 0


def plan(
    placed: Placement,
    brokers: Iterable[BrokerPlace],
    *,
    by: Balance = Balance.REPLICAS,
    sizes: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return where every one of the partitions had better be; those that stay included.

    `sizes`: bytes of one replica of each partition; 0 where nothing is said. Brokers that are not among `brokers`
    keep what they have.

    Raises:
        CannotPlace: a broker leaves, and not every partition finds another one in its place.
    """
    board = Board(placed, brokers, sizes or {}, by_bytes=by is Balance.BYTES)
    _empty(board)
    match by:
        case Balance.NOTHING:
            even_out(board.load, board.best_moved, board.move)
            _lead_what_moved(board)
        case Balance.REPLICAS:
            _spread_racks(board)
            even_out(board.load, board.best_replica, board.move)
            even_out(board.led, board.best_leadership, lambda part, _, to: board.prefer(part, to))
        case Balance.BYTES:
            _spread_racks(board)
            slack = int(SLACK * sum(board.load.values()) / max(1, len(board.load)))
            even_out_amounts(board.load, slack, board.best_amount, board.move)
            even_out(board.led, board.best_leadership, lambda part, _, to: board.prefer(part, to))
    return {part: tuple(replicas) for part, replicas in board.replicas.items()}


def loads(
    placed: Placement, brokers: Iterable[int], sizes: Mapping[TopicPartition, int] | None = None
) -> dict[int, Load]:
    """Return what each of these brokers has, and every other one that has something."""
    known = sizes or {}
    found = {broker_id: Load() for broker_id in sorted(brokers)}
    for part, replicas in placed.items():
        for place, broker_id in enumerate(replicas):
            had = found.get(broker_id, Load())
            size = had.size_bytes + known.get(part, 0)
            found[broker_id] = Load(had.replicas + 1, had.leaderships + (place == 0), size)
    return dict(sorted(found.items()))


def copied_bytes(before: Placement, after: Placement, sizes: Mapping[TopicPartition, int]) -> int:
    """Return how much new replicas have to fetch."""
    return sum(sizes.get(part, 0) * len(set(after[part]) - set(before[part])) for part in after)


def _empty(board: Board) -> None:
    """Take everything off the brokers that leave; the largest first, so that the small ones fill the gaps."""
    leaving = [each.broker_id for each in board.places.values() if each.leaves]
    going = [(part, from_) for from_ in leaving for part in board.held.get(from_, ())]
    homeless = []
    for part, from_ in sorted(going, key=lambda each: (-board.weight(each[0]), each)):
        free = [broker_id for broker_id in board.takers if broker_id not in board.replicas[part]]
        if not free:
            homeless.append(part)
            continue
        board.move(part, from_, min(free, key=lambda to: _rank(board, part, from_, to)))
    if homeless:
        raise CannotPlace(sorted(homeless))


def _rank(board: Board, part: TopicPartition, from_: int, to: int) -> tuple[int, int, int, int]:
    return -board.spread_after(part, from_, to), board.load[to], len(board.held.get(to, ())), to


def _spread_racks(board: Board) -> None:
    for part, replicas in board.replicas.items():
        while True:
            racks = board.racks(replicas)
            there = [to for to in board.takers if board.rack_of(to) not in racks]
            crowded = [
                each
                for each in replicas
                if each in board.load and len(board.racks(set(replicas) - {each})) == len(racks)
            ]
            if not there or not crowded:
                break
            from_ = max(crowded, key=lambda broker_id: (board.load[broker_id], -broker_id))
            board.move(part, from_, min(there, key=lambda broker_id: (board.load[broker_id], broker_id)))


def _lead_what_moved(board: Board) -> None:
    """Have partitions that lost their preferred leader prefer the replica that leads fewest."""
    for part, replicas in board.replicas.items():
        may_lead = [broker_id for broker_id in replicas if broker_id in board.led]
        if replicas[0] != board.home[part][0] and may_lead:
            board.prefer(part, min(may_lead, key=lambda each: (board.led[each] - (each == replicas[0]), each)))
