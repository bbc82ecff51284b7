"""One run with whole brokers that coordinate transactions, from a seed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import broker.coordinator.transactions.coordinator as decisions_module
import broker.coordinator.transactions.records as records_module
import broker.coordinator.transactions.transaction as transaction_module
import raftlog._core.transaction_state as client_module
from broker.coordinator.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from tests.simulation.dataplane.clients import Consumer, Producer
from tests.simulation.dataplane.faults import DataFaults
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.dataplane.schedule import FIRST_CLIENT, DataSimulation
from tests.simulation.dataplane.transaction_book import Book
from tests.simulation.dataplane.transaction_ledger import TransactionLedger
from tests.simulation.dataplane.transaction_producers import TransactionalProducer, Transformer
from tests.simulation.dataplane.transaction_readers import CommittedReader, Observer, Reader, SessionReader
from tests.simulation.dataplane.transaction_sinks import Driver

FIRST_TRANSACTIONAL = FIRST_CLIENT + 200
SINK = "sink"


@contextlib.contextmanager
def _last_epoch(epoch: int) -> Iterator[None]:
    """Let producer ids be used up by so many transactions."""
    before = transaction_module.MAX_EPOCH
    modules: tuple[Any, ...] = (transaction_module, decisions_module, records_module)
    try:
        for module in modules:
            module.MAX_EPOCH = epoch
        vars(client_module)["LAST_EPOCH"] = epoch + 1
        yield
    finally:
        for module in modules:
            module.MAX_EPOCH = before
        vars(client_module)["LAST_EPOCH"] = before + 1


class _Faults(DataFaults):
    """Records are not deleted, nor do they expire: a partition knows its producers by its records (KIP-98)."""

    def _delete_records(self) -> bool:
        return self._elect_preferred()


class TransactionSimulation(DataSimulation):
    """Producers, transformers, batch writers and readers of committed records share one topic."""

    OPTIONS: ClassVar[dict[str, type]] = {
        "late_share": float,
        "segment_bytes": int,
        "brokers": int,
        "apart": bool,
        "replication_factor": int,
        "min_insync_replicas": int,
        "segment_bytes_of_topics": int,
        "lag_time_max_ms": int,
        "credit_bytes": int,
        "checkpoint_s": float,
        "timeout_ms": int,
        "death_factor": float,
        "last_epoch": int,
        "banks": int,
        "transformers": int,
        "drivers": int,
        "zombies": bool,
    }
    has_transactions = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ledger: TransactionLedger = TransactionLedger(self)
        self.book = Book(self.ledger)
        max_epoch = transaction_module.MAX_EPOCH
        self.timeout_ms: int = self.chosen("timeout_ms", self.random.choice((1_000, 2_500)))
        self.death_factor: float = self.chosen("death_factor", self.random.choice((0.0, 1.0, 2.0)))
        self.last_epoch: int = self.chosen("last_epoch", self.random.choice((3, max_epoch, max_epoch)))
        self.transactional_ids: list[str] = []
        self.writers: dict[int, TransactionalProducer | Driver] = {}
        self.readers: list[Reader] = []
        self.observer: Observer | None = None
        self.work_topic = ""
        self._next_number = FIRST_TRANSACTIONAL

    @property
    def transaction_ledger(self) -> TransactionLedger:
        """The ledger as what it is."""
        return self.ledger

    def new_faults(self) -> DataFaults:
        """Make what goes wrong."""
        return _Faults(self)

    def is_internal(self, key: PartitionKey) -> bool:
        """Whether a partition is the coordinators'."""
        return key[0] in (self.id_of(CONSUMER_OFFSETS), self.id_of(TRANSACTION_STATE))

    def is_state(self, key: PartitionKey) -> bool:
        """Whether a partition is one of __transaction_state."""
        return key[0] == self.id_of(TRANSACTION_STATE)

    def work(self) -> list[PartitionKey]:
        """Return the partitions of the shared topic, once they exist."""
        topic = self.invariants.truth.topic(self.work_topic)
        return [] if topic is None else [(topic.topic_id, part.partition) for part in topic.partitions]

    def groups(self) -> list[tuple[str, int]]:
        """Return the groups, and which partition each reads."""
        return [("group-copy-0", 0), ("group-copy-1", 1)]

    def run(self, seconds: float = 20.0) -> Counter[str]:
        """Run it, with an end of epochs that may be near."""
        with _last_epoch(self.last_epoch):
            return super().run(seconds)

    # Clients

    def start_clients(self) -> None:
        """Create the topics, and begin the clients' lives."""
        min_insync_replicas = self.chosen("min_insync_replicas", self.random.choice((1, 2)))
        configs = {"min.insync.replicas": str(min_insync_replicas), "segment.bytes": "5000"}
        self.create_topic(1, 3, configs, name=CONSUMER_OFFSETS)
        self.create_topic(self.random.choice((1, 2)), 3, configs, name=TRANSACTION_STATE)
        replication_factor = self.chosen("replication_factor", self.random.choice((2, 3, 3)))
        configs = self.topic_configs(replication_factor)
        configs.pop("retention.bytes", None)
        self.work_topic = self.create_topic(3, replication_factor, configs)
        self.scheduler.after(self.random.uniform(0.5, 1.0), self._begin_writers)
        Producer(self, FIRST_CLIENT)
        Consumer(self, FIRST_CLIENT + 1)

    def _begin_writers(self) -> None:
        if not self.work():
            self.scheduler.after(0.1, self._begin_writers)
            return
        banks = [f"bank-{number}" for number in range(self.chosen("banks", 2))]
        copies = [f"copy-{number}" for number in range(self.chosen("transformers", 2))]
        self.transactional_ids = [*banks, *copies]
        for transactional_id in banks:
            self._add(TransactionalProducer(self, self._number(), "producer", transactional_id))
        for partition, transactional_id in enumerate(copies):
            self._add(Transformer(self, self._number(), "transformer", transactional_id, partition))
        for _ in range(self.chosen("drivers", self.random.choice((1, 2)))):
            self._add(Driver(self, self._number(), "driver", SINK))
        self.scheduler.after(self.random.uniform(1.0, 6.0), self._begin_zombies)
        self.readers = [
            CommittedReader(self, self._number(), "reader"),
            SessionReader(self, self._number(), "reader with a session"),
        ]
        self.observer = Observer(self, self._number(), "observer")

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _add(self, writer: TransactionalProducer | Driver) -> None:
        self.writers[writer.process.host.node_id] = writer

    def _begin_zombies(self) -> None:
        """Others begin with ids that are in use: from here on each is the other's zombie."""
        if not self.chosen("zombies", self.random.random() >= 0.3) or self.winding_down:
            return
        if "bank-0" in self.transactional_ids:
            self._add(TransactionalProducer(self, self._number(), "another producer", "bank-0"))
        if "copy-0" in self.transactional_ids:
            self._add(Transformer(self, self._number(), "another transformer", "copy-0", 0))

    def begin_again(self, dead: TransactionalProducer) -> None:
        """A producer has died: another process begins with its id."""
        del self.writers[dead.process.host.node_id]

        def begin() -> None:
            if isinstance(dead, Transformer):
                self._add(Transformer(self, self._number(), dead.name, dead.transactional_id, dead.partition))
            else:
                self._add(TransactionalProducer(self, self._number(), dead.name, dead.transactional_id))

        self.scheduler.after(self.random.choice((0.01, 0.5, 2.0)), begin)

    def begin_driver(self, dead: Driver) -> None:
        """A driver has died: another one goes on."""
        del self.writers[dead.process.host.node_id]
        self.scheduler.after(
            self.random.choice((0.01, 0.5)), lambda: self._add(Driver(self, self._number(), dead.name, dead.sink_id))
        )

    # The end

    def what_is_wrong(self) -> str | None:
        """Return the work that is unfinished although nothing is broken."""
        for writer in self.writers.values():
            if not writer.finished:
                return f"{writer.name} {writer.process.host.node_id} has not come to an end"
        if self.observer is not None and not self.observer.finished:
            return "the observer has not come to an end"
        return super().what_is_wrong() or next(filter(None, (reader.is_behind() for reader in self.readers)), None)

    def check_history(self) -> None:
        """Check the outcome of all transactions."""
        super().check_history()
        self.counts += self.book.check()
