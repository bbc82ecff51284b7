"""Producers and consumers: their requests, and their conclusions from the answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from raftlog.errors import OffsetOutOfRange
from raftlog.format import iter_headers, parse_batch
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage
from tests.simulation.dataplane.messages import (
    Answer,
    Answered,
    Asked,
    DeleteRecords,
    Failed,
    Fetch,
    Fetched,
    PartitionKey,
    Produce,
    Produced,
    Request,
)
from tests.simulation.network import Connection
from tests.simulation.parts import Violation
from tests.simulation.process import Host, Process
from tests.support.batches import batch_of

if TYPE_CHECKING:
    from tests.simulation.dataplane.schedule import DataSimulation

EPOCH_MS = 1_700_000_000_000
"""About what clocks show (`Host.wall_ms`): retention by time never comes up."""
PATIENCE_S = 2.5
"""After so long without an answer the connection is given up."""
REFRESH_S = (0.02, 0.4)
SMALL_BYTES = (0, 0, 10, 100, 400)

Done = Callable[[Answer | None], None]
"""None: no answer came, the request may have been carried out."""


class Values:
    """Makes batches that all differ."""

    def __init__(self) -> None:
        self._next = 0

    def batch(self, records: int, padding_bytes: int = 0) -> bytes:
        """Return a batch of so many records."""
        values = []
        for _ in range(records):
            self._next += 1
            values.append(b"%d" % self._next + b"." * padding_bytes)
        return batch_of(*values, timestamp_ms=EPOCH_MS)


class Link:
    """A client's connection to one broker."""

    def __init__(self, client: Client, broker_id: int) -> None:
        self._client = client
        self._waiting: dict[int, Done] = {}
        self._number = 0
        self.connection: Connection | None = None
        simulation = client.simulation
        broker = simulation.data_broker(broker_id)
        connection = None if broker is None else simulation.network.connect(client.process, broker.process)
        if connection is not None and broker is not None:
            self.connection = connection
            connection.opener_hears(self._heard, self._lost)
            broker.accept_client(connection)

    def ask(self, request: Request, done: Done) -> None:
        """Ask; `done` is called once."""
        if self.connection is None:
            self._client.process.after(0.02, done, None)
            return
        self._number += 1
        self._waiting[self._number] = done
        self.connection.send(Asked(self._number, request))
        self._client.process.after(PATIENCE_S, self._give_up, self._number)

    def _heard(self, answered: Answered) -> None:
        done = self._waiting.pop(answered.number, None)
        if done is not None:
            done(answered.answer)

    def _give_up(self, number: int) -> None:
        if number in self._waiting and self.connection is not None:
            self.connection.break_now()
            self._lost()

    def _lost(self) -> None:
        self.connection = None
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(None)


class Client:
    """What producers and consumers have in common: a process, links to brokers, metadata that may be old."""

    def __init__(self, simulation: DataSimulation, number: int) -> None:
        self.simulation = simulation
        self.random = random.Random(simulation.random.random())
        self.process = Process(Host(simulation, number))
        self.image = MetadataImage()
        self._links: dict[int, Link] = {}
        self._refresh()

    def _refresh(self) -> None:
        self.image = self.simulation.invariants.truth
        self.process.after(self.random.uniform(*REFRESH_S), self._refresh)

    def link(self, broker_id: int) -> Link:
        """Return a link to a broker; a new one if there is none that works."""
        link = self._links.get(broker_id)
        if link is None or link.connection is None:
            link = self._links[broker_id] = Link(self, broker_id)
        return link

    def partitions(self) -> list[tuple[PartitionKey, PartitionImage]]:
        """Return the partitions that it knows."""
        return list(partitions_of(self.image))

    def heard(self, answer: Answer | None) -> None:
        """After trouble it asks for newer metadata."""
        if not isinstance(answer, Produced | Fetched) and self.random.random() < 0.7:
            self.image = self.simulation.invariants.truth


def partitions_of(image: MetadataImage) -> Iterator[tuple[PartitionKey, PartitionImage]]:
    """Yield the partitions of an image."""
    for topic_id in sorted(image.topics):
        for partition in image.topics[topic_id].partitions:
            yield (topic_id, partition.partition), partition


class Producer(Client):
    """Sends batches, some of them before the last one was answered; each is sent once. `told`: only when told to."""

    def __init__(self, simulation: DataSimulation, number: int, *, told: bool = False) -> None:
        super().__init__(simulation, number)
        self._sent = 0
        self._last: dict[tuple[Link, PartitionKey], tuple[int, int]] = {}
        """Number and offset of the last batch that was acknowledged to acks=all on a link."""
        self._all_share = self.random.choice((1.0, 0.8, 0.5))
        self._think_s = self.random.choice((0.02, 0.05, 0.2))
        if not told:
            self.process.after(self.random.uniform(0.5, 1.5), self._next)

    def _next(self) -> None:
        if self.simulation.winding_down:
            return
        self.process.after(self.random.expovariate(1 / self._think_s), self._next)
        known = [entry for entry in self.partitions() if entry[1].leader != NO_LEADER]
        if known:
            key, partition = self.random.choice(known)
            all_replicas = self.random.random() < self._all_share
            for _ in range(self.random.choice((1, 1, 1, 2, 5))):
                self.send(key, partition.leader, partition.leader_epoch, all_replicas=all_replicas)

    def send(
        self,
        key: PartitionKey,
        leader: int,
        leader_epoch: int,
        *,
        all_replicas: bool = True,
        records: int | None = None,
        done: Done = lambda answer: None,
    ) -> None:
        """Send one batch."""
        records = records or self.random.choice((1, 1, 3))
        batch = self.simulation.values.batch(records, self.random.choice(SMALL_BYTES))
        link = self.link(leader)
        self._sent += 1
        number = self._sent
        counts = self.simulation.counts
        counts["produced"] += 1

        def answered(answer: Answer | None) -> None:
            self.heard(answer)
            if isinstance(answer, Produced) and all_replicas:
                self._check_order(link, key, number, answer.base_offset)
            elif isinstance(answer, Failed):
                counts[f"produce {type(answer.error).__name__}"] += 1
            done(answer)

        link.ask(Produce(key, leader_epoch, batch, parse_batch(batch), all_replicas), answered)

    def _check_order(self, link: Link, key: PartitionKey, number: int, offset: int) -> None:
        last = self._last.get((link, key))
        if last is not None and (number > last[0]) != (offset > last[1]):
            raise Violation(
                f"batches of one stream are out of order: batch {number} got offset {offset}, and batch "
                f"{last[0]} offset {last[1]}"
            )
        self._last[link, key] = (number, offset)


class Consumer(Client):
    """Reads every partition from its start, at the leader or at a follower. `told`: only when told to."""

    def __init__(self, simulation: DataSimulation, number: int, *, told: bool = False) -> None:
        super().__init__(simulation, number)
        self.positions: dict[PartitionKey, int] = {}
        self._think_s = self.random.choice((0.01, 0.05, 0.2))
        self._follower_share = self.random.choice((0.0, 0.3))
        if not told:
            self.process.after(self.random.uniform(0.5, 1.5), self._next)

    def _next(self) -> None:
        known = [entry for entry in self.partitions() if entry[1].leader != NO_LEADER]
        if known:
            key, partition = self.random.choice(known)
            source, from_follower = partition.leader, False
            if self.random.random() < self._follower_share:
                source, from_follower = self.random.choice(partition.replicas), True
            self.fetch(key, source, partition.leader_epoch, from_follower=from_follower, done=self._think)
        else:
            self._think(None)

    def _think(self, answer: Answer | None) -> None:
        self.process.after(self.random.expovariate(1 / self._think_s), self._next)

    def fetch(
        self,
        key: PartitionKey,
        source: int,
        leader_epoch: int,
        *,
        from_follower: bool = False,
        done: Done = lambda answer: None,
    ) -> None:
        """Read on."""
        position = self.positions.get(key, 0)

        def answered(answer: Answer | None) -> None:
            self.heard(answer)
            if isinstance(answer, Fetched):
                self.simulation.counts["fetched"] += bool(answer.records)
                for _, header in iter_headers(answer.records):
                    self.positions[key] = max(position, header.next_offset)
            elif isinstance(answer, Failed):
                self.simulation.counts[f"fetch {type(answer.error).__name__}"] += 1
                if isinstance(answer.error, OffsetOutOfRange):
                    self._out_of_range(key, position, source)
            done(answer)

        self.link(source).ask(Fetch(key, leader_epoch, position, from_follower), answered)

    def _out_of_range(self, key: PartitionKey, position: int, source: int) -> None:
        """Right only if the records were deleted: a high watermark that is behind for a moment is no reason."""
        start = self.simulation.deleted_below(key)
        if position >= start:
            raise Violation(
                f"broker {source} answered that offset {position} of partition {key[1]} is out of range, but it "
                f"was read before and only records below {start} were deleted"
            )
        self.positions[key] = start


class Deleter(Client):
    """Deletes records now and then."""

    def delete(self, key: PartitionKey, leader: int, before_offset: int) -> None:
        """Delete what lies below an offset."""
        self.link(leader).ask(DeleteRecords(key, before_offset), self.heard)
