"""One run of a whole cluster with the SDK as it ships, from a seed."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from typing import Any

from broker.coordinator.internal_topics import TRANSACTION_STATE
from tests.simulation.broker import SimBroker
from tests.simulation.cluster.admins import Administrator, SendsToWhatComesAndGoes
from tests.simulation.cluster.book import Book
from tests.simulation.cluster.broker import ClusterBroker, client_address
from tests.simulation.cluster.client import Application
from tests.simulation.cluster.deals import Deals
from tests.simulation.cluster.faults import ClusterFaults
from tests.simulation.cluster.hostile import Hostile, tags_collide
from tests.simulation.cluster.ledger import ClusterLedger
from tests.simulation.cluster.members import Member
from tests.simulation.cluster.offsets import GroupOffsets
from tests.simulation.cluster.producers import KINDS, Produces
from tests.simulation.cluster.readers import Reads
from tests.simulation.cluster.server import SimServer
from tests.simulation.cluster.sinks import Driver
from tests.simulation.cluster.surroundings import simulated
from tests.simulation.cluster.transactions import Bank, Transformer
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.dataplane.schedule import FIRST_CLIENT, DataSimulation
from tests.simulation.process import Process

WORK = "work"
MADE = "made"
SINK = "sink"
FLEETING = "fleeting"
TRANSFORMERS = "gamma"
"""Their group."""
GROUPS = {"alpha": True, "beta": False}
"""Whether its members commit by themselves."""


class ClusterSimulation(DataSimulation):
    """Producers, readers, members of groups, transformers, batch writers and administrators on one cluster."""

    has_transactions = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        chance = self.random
        self.ledger: ClusterLedger = ClusterLedger(self)
        self.book = Book(self.ledger)
        self.offsets = GroupOffsets(self.ledger)
        self.deals = Deals(self.book, self.offsets)
        self.listeners: dict[str, SimServer] = {}
        self.offsets_partitions = chance.choice((1, 2))
        self.state_partitions = chance.choice((1, 2))
        self.state_min_isr = chance.choice((1, 2))
        self.frame_bytes = chance.choice((4_096, 1 << 20))
        self.work_topic = WORK
        self.made_topic = MADE
        self.transaction_timeout_ms = chance.choice((1_500, 4_000))
        self.work_partitions = chance.choice((1, 2, 3))
        self.applications: list[Application] = []
        self.loops: list[SimLoop] = []
        """Of all processes that there were."""
        self.over = False

    # For the parts

    def new_broker(self, process: Process) -> SimBroker:
        """Make a whole broker with its listeners."""
        return ClusterBroker(process)

    def new_faults(self) -> ClusterFaults:
        """Make what goes wrong."""
        return ClusterFaults(self)

    @property
    def transaction_ledger(self) -> ClusterLedger:
        """The ledger as what it is."""
        return self.ledger

    def listening(self, address: str) -> SimServer | None:
        """Return the server that accepts connections at an address."""
        server = self.listeners.get(address)
        return server if server is not None and server.is_there else None

    def cluster_brokers(self) -> list[ClusterBroker]:
        """Return the brokers that run now."""
        brokers = (self.data_broker(broker_id) for broker_id in self.broker_ids)
        return [broker for broker in brokers if isinstance(broker, ClusterBroker)]

    def touch(self, process: Process) -> None:
        """A process tells another one something: if it is a broker, the ledger looks at it when it is done."""
        broker = self.data_broker(process.host.node_id)
        if broker is not None and broker.process is process:
            broker.touched = True

    def bootstrap(self, chance: random.Random) -> list[str]:
        """Return the addresses of some brokers."""
        addresses = [client_address(broker_id) for broker_id in self.broker_ids]
        return chance.sample(addresses, chance.choice((2, len(addresses))))

    def wall_ms(self) -> int:
        """Return the time of day of the host whose process is running."""
        assert self._clock_of is not None, "the wall clock is read while no process runs"
        return self._clock_of.wall_ms()

    def is_internal(self, key: PartitionKey) -> bool:
        """Whether a partition is the coordinators'."""
        topic = self.invariants.truth.topics.get(key[0])
        return topic is not None and topic.internal

    def is_state(self, key: PartitionKey) -> bool:
        """Whether a partition is one of __transaction_state."""
        return key[0] == self.id_of(TRANSACTION_STATE)

    def key_of(self, topic: str, partition: int) -> PartitionKey:
        """Return which partition this is, by the names of today."""
        found = self.invariants.truth.topic(topic)
        assert found is not None, f"the topic {topic} does not exist"
        return found.topic_id, partition

    # Running

    def run(self, seconds: float = 20.0) -> Counter[str]:
        """Run it, with clocks, ids and channels for the SDK."""
        with simulated(self), tags_collide():
            try:
                return super().run(seconds) + self.book.counts + self.offsets.counts + self.deals.counts
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """The simulation is over: end the tasks of every process."""
        self.over = True
        for loop in self.loops:
            loop.process.alive = False
        told, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None  # of coroutines that go on waiting
        try:
            for loop in self.loops:
                loop.dispose()
            gc.collect()
        finally:
            sys.unraisablehook = told

    def start_clients(self) -> None:
        """Create the shared topic, and start the applications."""
        replication_factor = self.random.choice((2, 3, 3))
        configs = self.topic_configs(replication_factor)
        configs.pop("retention.bytes", None)
        self.create_topic(self.work_partitions, replication_factor, configs, name=WORK)
        self.create_topic(self.random.choice((1, 2)), replication_factor, configs, name=MADE)
        for kind in KINDS:
            self._add(Produces, kind)
        for isolation_level in ("read_committed", "read_uncommitted"):
            self._add(Reads, isolation_level)

        for group_id, auto_commit in GROUPS.items():
            for _ in range(self.random.choice((1, 2, 3))):
                self._add(Member, group_id, auto_commit=auto_commit)

        for transactional_id in ("bank-0", "bank-1", "bank-1"):  # each other's zombie
            self._add(Bank, transactional_id)
        for transactional_id in ("made-0", "made-1"):
            self._add(Transformer, transactional_id, TRANSFORMERS)
        self._add(Driver, SINK)
        self._add(Administrator, FLEETING)
        self._add(SendsToWhatComesAndGoes, FLEETING)
        self._add(Hostile)

    def _add(self, kind: type[Any], *arguments: object, **options: object) -> None:
        self.applications.append(kind(self, FIRST_CLIENT + 1 + len(self.applications), *arguments, **options))

    def members_of(self, group_id: str) -> list[Member]:
        """Return the members of a group."""
        return [each for each in self.applications if isinstance(each, Member) and each.group_id == group_id]

    def group_behind(self, group_id: str) -> str | None:
        """Return where a group has not read and committed up to the end; None: it has, everywhere."""
        return self.offsets.behind(group_id, self._work())

    def _work(self) -> list[PartitionKey]:
        topic_id = self.id_of(WORK)
        return [(topic_id, number) for number in range(self.work_partitions)]

    # The end

    def sources_are_done(self) -> bool:
        """Whether every application that writes to the shared topic has ended."""
        sources = (Produces, Bank, Driver)
        return self.winding_down and all(each.finished for each in self.applications if isinstance(each, sources))

    def nothing_more_comes(self) -> bool:
        """Whether every writing application has ended, and all its transactions are decided."""
        return self.winding_down and all(
            application.finished for application in self.applications if not isinstance(application, Reads | Member)
        )

    def what_is_wrong(self) -> str | None:
        """Return the work that is unfinished although nothing is broken."""
        for application in self.applications:
            application.stir()
        for application in self.applications:
            if not application.finished and not isinstance(application, Reads | Member):
                return f"{application} has not come to an end"
        wrong = super().what_is_wrong()
        if wrong is not None:
            return wrong
        for application in self.applications:
            if not application.finished:
                behind = application.is_behind() if isinstance(application, Reads) else None
                return behind or f"{application} has not come to an end"
        return None

    def check_history(self) -> None:
        """Check the outcome of all records."""
        super().check_history()
        self.book.check()
        self.deals.check()
        self.deals.check_made(TRANSFORMERS, self._work())
