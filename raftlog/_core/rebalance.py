"""Plans that move replicas: the same input always gives the same plan.

In this order:
1. Brokers that leave are emptied: each of their replicas goes to the taking broker with the smallest load, in another
   rack if possible.
2. Racks are spread: a partition that could be in more racks moves there. No later step reduces its racks.
3. Loads are made even: the brokers that take replicas differ by at most one, as far as racks and the partitions that
   each broker already holds allow. Preferred leaders are made even too, by the order of replicas alone.
So a broker gives away only its surplus, and a moved replica is copied once, however many steps of the plan moved it.
A broker that takes nothing (fenced, drained, cordoned) keeps its replicas.

How `even_out` works: if `best(u, v)` names a thing, it may move from `u` to `v`, directly or along a chain of holders.
Every step lowers the sum of the squares of the loads, so it terminates. At the end no chain leads from a holder to one
that has two less. If only the present holders of a thing decide where it may go, the sum is then minimal (a flow of
convex cost): loads differ by at most one wherever that is possible. Steps start at the fullest holder and go first
to holders below the mean: each removes a surplus and fills a gap, so there are as few direct steps as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, TypeVar

from raftlog._core.words import some
from raftlog.types import TopicPartition


class BrokerPlace(NamedTuple):
    """A broker in a plan. `takes`: it may get replicas; `leads`: it may get leaderships; `leaves`: it keeps no replica.

    A broker that neither takes nor leaves (fenced, drained, cordoned) keeps its replicas.
    """

    broker_id: int
    rack: str = ""
    takes: bool = True
    leads: bool = True
    leaves: bool = False


class Board:
    """The replicas of every partition, the preferred leader first, and the resulting loads.

    `load`: replicas, or their bytes (`by_bytes`), of each broker that takes replicas. `led`: the number of partitions
    that prefer each broker that may lead.
    """

    def __init__(
        self,
        placed: Mapping[TopicPartition, Sequence[int]],
        brokers: Iterable[BrokerPlace],
        sizes: Mapping[TopicPartition, int],
        *,
        by_bytes: bool,
    ) -> None:
        self.places = {each.broker_id: each for each in sorted(brokers)}
        self.home = {part: tuple(placed[part]) for part in sorted(placed)}
        self.replicas = {part: list(replicas) for part, replicas in self.home.items()}
        self.sizes = sizes
        self._by_bytes = by_bytes
        self.takers = [each.broker_id for each in self.places.values() if each.takes and not each.leaves]
        self._one_rack = len({each.rack for each in self.places.values()} | {""}) == 1
        self.load = dict.fromkeys(self.takers, 0)
        self.led = {each.broker_id: 0 for each in self.places.values() if each.leads and not each.leaves}
        self.held: dict[int, set[TopicPartition]] = {}
        self.first: dict[int, set[TopicPartition]] = {}
        self._of_topic: Counter[tuple[int, str]] = Counter()
        self._led_of_topic: Counter[tuple[int, str]] = Counter()
        for part, replicas in self.replicas.items():
            for broker_id in replicas:
                self._hold(part, broker_id)
            self._lead(part, replicas[0])

    def weight(self, part: TopicPartition) -> int:
        """Return the load of one replica of the partition."""
        return self.sizes.get(part, 0) if self._by_bytes else 1

    def rack_of(self, broker_id: int) -> str:
        """Return the rack of a broker; unknown brokers have none."""
        place = self.places.get(broker_id)
        return place.rack if place is not None else ""

    def racks(self, replicas: Iterable[int]) -> set[str]:
        """Return the racks of these brokers."""
        return {self.rack_of(broker_id) for broker_id in replicas}

    def spread_after(self, part: TopicPartition, from_: int, to: int) -> int:
        """Return in how many racks the partition would be after the move."""
        return len(self.racks((*(each for each in self.replicas[part] if each != from_), to)))

    def may_move(self, part: TopicPartition, from_: int, to: int) -> bool:
        """Whether a replica may move: `to` has none yet, and the partition stays in as many racks."""
        replicas = self.replicas[part]
        if to in replicas:
            return False
        return self._one_rack or self.spread_after(part, from_, to) >= len(self.racks(replicas))

    # Changes

    def move(self, part: TopicPartition, from_: int, to: int) -> None:
        """Replace `from_` by `to`, at the same place in the order."""
        replicas = self.replicas[part]
        place = replicas.index(from_)
        if place == 0:
            self._unlead(part, from_)
            self._lead(part, to)
        replicas[place] = to
        self._unhold(part, from_)
        self._hold(part, to)

    def prefer(self, part: TopicPartition, leader: int) -> None:
        """Make one of the replicas the preferred leader."""
        replicas = self.replicas[part]
        self._unlead(part, replicas[0])
        replicas.remove(leader)
        replicas.insert(0, leader)
        self._lead(part, leader)

    def _hold(self, part: TopicPartition, broker_id: int) -> None:
        self.held.setdefault(broker_id, set()).add(part)
        self._of_topic[broker_id, part.topic] += 1
        if broker_id in self.load:
            self.load[broker_id] += self.weight(part)

    def _unhold(self, part: TopicPartition, broker_id: int) -> None:
        self.held[broker_id].remove(part)
        self._of_topic[broker_id, part.topic] -= 1
        if broker_id in self.load:
            self.load[broker_id] -= self.weight(part)

    def _lead(self, part: TopicPartition, broker_id: int) -> None:
        self.first.setdefault(broker_id, set()).add(part)
        self._led_of_topic[broker_id, part.topic] += 1
        if broker_id in self.led:
            self.led[broker_id] += 1

    def _unlead(self, part: TopicPartition, broker_id: int) -> None:
        self.first[broker_id].remove(part)
        self._led_of_topic[broker_id, part.topic] -= 1
        if broker_id in self.led:
            self.led[broker_id] -= 1

    # The best changes; ties go to the first by name, so that plans are reproducible

    def cost(self, part: TopicPartition, from_: int, to: int) -> int:
        """Return how many more copies the move takes: 0 for a replica that has already moved, -1 for a move back."""
        home = self.home[part]
        return (from_ in home) - (to in home)

    def best_replica(self, from_: int, to: int, besides: Collection[TopicPartition] = ()) -> TopicPartition | None:
        """Return the replica to move: cheapest first, then of the topic with the largest difference, then smallest."""
        best: tuple[int, int, int, TopicPartition] | None = None
        less: dict[str, int] = {}
        for part in self.held.get(from_, ()):  # the innermost loop of a plan: the cheapest conditions come first
            cost = self.cost(part, from_, to)
            if best is not None and cost > best[0]:
                continue
            topic = part.topic
            if topic not in less:
                less[topic] = self._of_topic[to, topic] - self._of_topic[from_, topic]
            if best is not None and cost == best[0] and less[topic] > best[1]:
                continue
            found = (cost, less[topic], self.sizes.get(part, 0), part)
            if (best is None or found < best) and part not in besides and self.may_move(part, from_, to):
                best = found
        return None if best is None else best[3]

    def best_moved(self, from_: int, to: int, besides: Collection[TopicPartition] = ()) -> TopicPartition | None:
        """As `best_replica`, among those that the plan has moved to `from_`: no more copies."""
        stays = {part for part in self.held.get(from_, ()) if from_ in self.home[part]}
        return self.best_replica(from_, to, stays.union(besides))

    def best_amount(self, from_: int, to: int, gap: int) -> TopicPartition | None:
        """Return the replica that brings the two loads closest; replicas that the plan has moved to `from_` stay."""
        may = (
            part
            for part in self.held.get(from_, ())
            if from_ in self.home[part] and 0 < self.weight(part) < gap and self.may_move(part, from_, to)
        )
        return min(may, default=None, key=lambda part: (abs(2 * self.weight(part) - gap), part))

    def best_leadership(self, from_: int, to: int, besides: Collection[TopicPartition] = ()) -> TopicPartition | None:
        """Return the partition to prefer `to`: one whose leader changes anyway, or that preferred `to` before."""
        may = (part for part in self.first.get(from_, ()) if part not in besides and to in self.replicas[part])
        return min(may, default=None, key=lambda part: self._leader_preference(part, from_, to))

    def _leader_preference(self, part: TopicPartition, from_: int, to: int) -> tuple[int, int, TopicPartition]:
        first = self.home[part][0]
        more = self._led_of_topic[from_, part.topic] - self._led_of_topic[to, part.topic]
        return (from_ == first) - (to == first), -more, part


Thing = TypeVar("Thing")


class Best(Protocol[Thing]):
    """A function that chooses the best thing to move from `from_` to `to`."""

    def __call__(self, from_: int, to: int, besides: Collection[Thing] = ()) -> Thing | None:
        """Return the best thing that is not in `besides`, or None if none may move."""


def even_out(load: Mapping[int, int], best: Best[Thing], hand_on: Callable[[Thing, int, int], None]) -> None:
    """Move things until loads are even. `load`: by holder; `hand_on(thing, from_, to)` moves a thing and updates it."""
    stuck: set[int] = set()
    while True:
        steps = _next_steps(load, best, stuck)
        if not steps:
            return
        for thing, from_, to in steps:
            hand_on(thing, from_, to)


def _next_steps(load: Mapping[int, int], best: Best[Thing], stuck: set[int]) -> list[tuple[Thing, int, int]]:
    """Return the steps that move one thing from one of the fullest holders to one with less; none if loads are even.

    `stuck`: holders from which no step was possible. All holders that they can reach are as full as they are, so moves
    of others do not help them.
    """
    for from_ in sorted(load.keys() - stuck, key=lambda holder: (-load[holder], holder)):
        if steps := _steps_from(load, best, from_):
            return steps
        stuck.add(from_)
    return []


def _steps_from(load: Mapping[int, int], best: Best[Thing], from_: int) -> list[tuple[Thing, int, int]]:
    less = [holder for holder in load if load[holder] <= load[from_] - 2]
    if not less:
        return []
    mean = sum(load.values()) / len(load)
    for to in sorted(less, key=lambda holder: (load[holder] >= mean, load[holder], holder)):
        thing = best(from_, to)
        if thing is not None:
            return [(thing, from_, to)]
    return _chain_from(load, best, from_)


def _chain_from(load: Mapping[int, int], best: Best[Thing], from_: int) -> list[tuple[Thing, int, int]]:
    """Return a shortest chain of steps that uses each thing once, so that no step prevents another."""
    chains: dict[int, list[tuple[Thing, int, int]]] = {from_: []}
    front = [from_]
    while front:
        following = []
        for holder in front:
            besides = [thing for thing, _, _ in chains[holder]]
            for to in sorted(load.keys() - chains.keys(), key=lambda each: (load[each], each)):
                thing = best(holder, to, besides)
                if thing is None:
                    continue
                chains[to] = [*chains[holder], (thing, holder, to)]
                if load[to] <= load[from_] - 2:
                    return chains[to]
                following.append(to)
        front = following
    return []


def even_out_amounts(
    load: Mapping[int, int],
    slack: int,
    best: Callable[[int, int, int], Thing | None],
    hand_on: Callable[[Thing, int, int], None],
) -> None:
    """As `even_out` for things of different sizes: until loads are within `slack`, or no move brings two closer.

    `best(from_, to, gap)` names a thing smaller than the gap between the two, or None. The loop ends because `best`
    names each thing a limited number of times.
    """
    while True:
        step = _closer(load, slack, best)
        if step is None:
            return
        hand_on(*step)


def _closer(
    load: Mapping[int, int], slack: int, best: Callable[[int, int, int], Thing | None]
) -> tuple[Thing, int, int] | None:
    upwards = sorted(load, key=lambda holder: (load[holder], holder))
    for from_ in reversed(upwards):
        for to in upwards:
            gap = load[from_] - load[to]
            if gap <= slack:
                break
            thing = best(from_, to, gap)
            if thing is not None:
                return thing, from_, to
    return None


Placement = Mapping[TopicPartition, Sequence[int]]
"""Replicas by partition, the preferred leader first."""

SLACK: Final = 0.05
"""How far apart loads in bytes may stay, as a share of the mean load: a smaller difference is not worth a copy."""
_NAMED: Final = 5


class Balance(StrEnum):
    """The load that a plan makes even."""

    REPLICAS = "replicas"
    """The number of replicas of each broker."""
    BYTES = "bytes"
    """The bytes of each broker, whatever the number of its replicas."""
    NOTHING = "nothing"
    """Only replicas of brokers that leave move."""


class CannotPlace(ValueError):
    """Some `partitions` cannot keep all their replicas, because too few brokers take any."""

    def __init__(self, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(f"no broker is left that could hold another replica of {some(partitions, _NAMED)}")
        self.partitions = tuple(partitions)


class Load(NamedTuple):
    """The load of a broker. `leaderships`: how many partitions prefer it as leader."""

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
    """Return the planned replicas of all partitions, including those that stay.

    `sizes`: bytes of one replica of each partition, by default 0. Brokers that are not among `brokers` keep their
    replicas.

    Raises:
        CannotPlace: a broker leaves, and some of its partitions find no other broker.
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
    """Return the loads of these brokers, and of every other broker with replicas."""
    known = sizes or {}
    found = {broker_id: Load() for broker_id in sorted(brokers)}
    for part, replicas in placed.items():
        for place, broker_id in enumerate(replicas):
            had = found.get(broker_id, Load())
            size = had.size_bytes + known.get(part, 0)
            found[broker_id] = Load(had.replicas + 1, had.leaderships + (place == 0), size)
    return dict(sorted(found.items()))


def copied_bytes(before: Placement, after: Placement, sizes: Mapping[TopicPartition, int]) -> int:
    """Return how many bytes new replicas have to fetch."""
    return sum(sizes.get(part, 0) * len(set(after[part]) - set(before[part])) for part in after)


def _empty(board: Board) -> None:
    """Move all replicas off the brokers that leave, the largest first, so that small ones fill the gaps."""
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
    """Let partitions that lost their preferred leader prefer the replica that leads the fewest."""
    for part, replicas in board.replicas.items():
        may_lead = [broker_id for broker_id in replicas if broker_id in board.led]
        if replicas[0] != board.home[part][0] and may_lead:
            board.prefer(part, min(may_lead, key=lambda each: (board.led[each] - (each == replicas[0]), each)))
