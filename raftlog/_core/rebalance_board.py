"""Who holds which partition while a plan is being made, and what each broker has by that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from raftlog.types import TopicPartition


class BrokerPlace(NamedTuple):
    """A broker as plans see it. `takes`: it may be given replicas; `leads`: also leaderships; `leaves`: it keeps none.

    A broker that neither takes nor leaves keeps what it has: it is fenced, drained or cordoned.
    """

    broker_id: int
    rack: str = ""
    takes: bool = True
    leads: bool = True
    leaves: bool = False


class Board:
    """The replicas of every partition, the preferred leader first, and the loads that follow from them.

    `load` counts the replicas of the brokers that take any, or the bytes in them (`by_bytes`); `led` the partitions
    that brokers which may lead stand first in.
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
        """Return what a replica adds to its broker's load."""
        return self.sizes.get(part, 0) if self._by_bytes else 1

    def rack_of(self, broker_id: int) -> str:
        """Return where a broker stands; those of which nothing is known stand nowhere, as those without a rack."""
        place = self.places.get(broker_id)
        return place.rack if place is not None else ""

    def racks(self, replicas: Iterable[int]) -> set[str]:
        """Return the racks that these stand in."""
        return {self.rack_of(broker_id) for broker_id in replicas}

    def spread_after(self, part: TopicPartition, from_: int, to: int) -> int:
        """Return in how many racks the partition would be."""
        return len(self.racks((*(each for each in self.replicas[part] if each != from_), to)))

    def may_move(self, part: TopicPartition, from_: int, to: int) -> bool:
        """Whether a replica may go from one broker to the other: not there yet, and in no fewer racks."""
        replicas = self.replicas[part]
        if to in replicas:
            return False
        return self._one_rack or self.spread_after(part, from_, to) >= len(self.racks(replicas))

    # Changes

    def move(self, part: TopicPartition, from_: int, to: int) -> None:
        """Put `to` in the place of `from_`."""
        replicas = self.replicas[part]
        place = replicas.index(from_)
        if place == 0:
            self._unlead(part, from_)
            self._lead(part, to)
        replicas[place] = to
        self._unhold(part, from_)
        self._hold(part, to)

    def prefer(self, part: TopicPartition, leader: int) -> None:
        """Put one of the replicas first."""
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

    # Which is the best to change; ties go to the first by name, so that a plan is the same every time

    def cost(self, part: TopicPartition, from_: int, to: int) -> int:
        """Return how many more replicas are copied by this: none for one that has been moved already, -1 to go back."""
        home = self.home[part]
        return (from_ in home) - (to in home)

    def best_replica(self, from_: int, to: int, besides: Collection[TopicPartition] = ()) -> TopicPartition | None:
        """Return whose replica had best move: cheapest, of the topic that `from_` has most more of, smallest."""
        best: tuple[int, int, int, TopicPartition] | None = None
        less: dict[str, int] = {}
        for part in self.held.get(from_, ()):  # the innermost loop of a plan: what costs least to ask is asked first
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
        """Return the same of those that the plan has moved to `from_`: nothing more is copied by that."""
        stays = {part for part in self.held.get(from_, ()) if from_ in self.home[part]}
        return self.best_replica(from_, to, stays.union(besides))

    def best_amount(self, from_: int, to: int, gap: int) -> TopicPartition | None:
        """Return whose replica brings two loads closest. One that this plan has copied to `from_` stays there."""
        may = (
            part
            for part in self.held.get(from_, ())
            if from_ in self.home[part] and 0 < self.weight(part) < gap and self.may_move(part, from_, to)
        )
        return min(may, default=None, key=lambda part: (abs(2 * self.weight(part) - gap), part))

    def best_leadership(self, from_: int, to: int, besides: Collection[TopicPartition] = ()) -> TopicPartition | None:
        """Return which partition had best prefer `to`: one whose leader changes anyway, or that it was first in."""
        may = (part for part in self.first.get(from_, ()) if part not in besides and to in self.replicas[part])
        return min(may, default=None, key=lambda part: self._leader_preference(part, from_, to))

    def _leader_preference(self, part: TopicPartition, from_: int, to: int) -> tuple[int, int, TopicPartition]:
        first = self.home[part][0]
        more = self._led_of_topic[from_, part.topic] - self._led_of_topic[to, part.topic]
        return (from_ == first) - (to == first), -more, part
