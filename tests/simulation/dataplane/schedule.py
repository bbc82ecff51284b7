"""One run with whole brokers, from a seed; and the checks at its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, cast

from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.image import NO_LEADER, MetadataImage
from tests.simulation.broker import SimBroker
from tests.simulation.dataplane.broker import DataBroker
from tests.simulation.dataplane.clients import Consumer, Deleter, Producer, Values, partitions_of
from tests.simulation.dataplane.disk import LogDisk
from tests.simulation.dataplane.faults import DataFaults
from tests.simulation.dataplane.idempotent import IdempotentProducer
from tests.simulation.dataplane.ledger import Ledger
from tests.simulation.dataplane.messages import Answer, PartitionKey, Produced
from tests.simulation.parts import Parts
from tests.simulation.process import Host, Process
from tests.simulation.requests import Requester
from tests.simulation.schedule import Simulation, Trace
from tests.simulation.voter import Committed

PRODUCERS = 2
CONSUMERS = 2
IDEMPOTENT_PRODUCERS = 2
FIRST_CLIENT = 100


class DataSimulation(Simulation):
    """A quorum, and brokers with logs, on the controllers' hosts or on others."""

    OPTIONS: ClassVar[dict[str, type]] = {
        "late_share": float,
        "segment_bytes": int,
        "brokers": int,
        "apart": bool,
        "topics": int,
        "partitions": int,
        "replication_factor": int,
        "min_insync_replicas": int,
        "segment_bytes_of_topics": int,
        "retention_bytes": int,
        "producers": int,
        "consumers": int,
        "idempotent_producers": int,
        "lag_time_max_ms": int,
        "credit_bytes": int,
        "checkpoint_s": float,
    }
    has_transactions: ClassVar[bool] = False
    """Whether brokers coordinate transactions, and serve their requests."""

    def __init__(
        self,
        seed: int,
        voters: int = 1,
        parts: Parts | None = None,
        trace: Trace | None = None,
        *,
        broker_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(seed, voters, parts, trace, broker_ids=broker_ids or _broker_ids(seed, voters, parts))
        chance = self.random
        self.ledger = Ledger(self)
        self.values = Values()
        self.lag_time_max_ms = self.chosen("lag_time_max_ms", chance.choice((700, 2_000)))
        self.credit_bytes = self.chosen("credit_bytes", chance.choice((2_000, 20_000, 8 << 20)))
        self.segment_bytes_of_topics = self.chosen("segment_bytes_of_topics", chance.choice((1_024, 5_000, 1 << 20)))
        self.checkpoint_s = self.chosen("checkpoint_s", chance.choice((0.3, 2.0, 5.0)))
        self.topics: dict[str, int] = {}
        """min.insync.replicas by topic id."""
        for host in self.hosts:
            if host.node_id in self.broker_ids:
                host.log_disk = LogDisk(host, self.random)
        self._deleted: dict[PartitionKey, int] = {}
        self._probes: set[PartitionKey] = set()
        self._core_probes: set[PartitionKey] = set()
        self._prober: Producer | None = None
        self.idempotent: list[IdempotentProducer] = []
        self.admin: Process | None = None

    # For the parts

    def new_broker(self, process: Process) -> SimBroker:
        """Make a whole broker."""
        return DataBroker(process)

    def new_faults(self) -> DataFaults:
        """Make what goes wrong."""
        return DataFaults(self)

    def data_broker(self, broker_id: int) -> DataBroker | None:
        """Return the broker whose process runs, or is paused, on a host."""
        return cast("DataBroker | None", self.brokers.get(broker_id))

    def metadata_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """The quorum has decided something."""
        self.ledger.metadata_changed(before, after)

    def min_insync_replicas(self, topic_id: bytes) -> int:
        """Return the topic's min.insync.replicas."""
        topic = self.invariants.truth.topics.get(topic_id)
        return 1 if topic is None else self.topics.get(topic.name, 1)

    def id_of(self, topic: str) -> bytes:
        """Return the id of a topic, empty until it is created."""
        return self.invariants.truth.topic_id_by_name.get(topic, b"")

    def is_internal(self, key: PartitionKey) -> bool:
        """Whether a partition belongs to coordinators: clients do not write there, and two batches may be equal."""
        return False

    def deleted_below(self, key: PartitionKey) -> int:
        """Return the highest log start of a partition, on any broker, so far."""
        return self.ledger.log_starts.get(key, 0)

    # Running

    def create_topic(self, partitions: int, replication_factor: int, configs: dict[str, str], *, name: str = "") -> str:
        """Have a topic created; return its name."""
        if self.admin is None:
            self.admin = Process(Host(self, FIRST_CLIENT - 1))
        name = name or f"topic-{len(self.topics) + 1}"
        self.topics[name] = int(configs.get("min.insync.replicas", "1"))
        create = records_pb2.CreateTopicCommand(
            name=name,
            topic_id=self.random.randbytes(16),
            partitions=partitions,
            replication_factor=replication_factor,
            configs=configs,
        )
        requester = Requester(self.admin, self.random)

        def again() -> None:
            requester.propose(MetadataCommand(create_topic=create), created)

        def created(answer: Committed) -> None:
            if isinstance(answer.outcome, Exception) and not self.id_of(name):
                assert self.admin is not None
                self.admin.after(0.1, again)  # too few brokers are up as yet

        again()
        return name

    def propose(self, command: MetadataCommand) -> None:
        """Ask for a change of the metadata from some host; refusals are fine."""
        assert self.admin is not None
        Requester(self.admin, self.random).propose(command, lambda answer: None)

    def topic_configs(self, replication_factor: int) -> dict[str, str]:
        """Draw the configs of a topic."""
        configs = {
            "min.insync.replicas": str(
                self.chosen("min_insync_replicas", self.random.choice((1, min(2, replication_factor))))
            ),
            "segment.bytes": str(self.segment_bytes_of_topics),
            "file.delete.delay.ms": str(self.random.choice((0, 1_000))),
        }
        retention_bytes = self.random.choice((2_000, 20_000)) if self.random.random() < 0.3 else None
        retention_bytes = self.chosen("retention_bytes", retention_bytes)
        if retention_bytes is not None:
            configs["retention.bytes"] = str(retention_bytes)
        return configs

    def start_clients(self) -> None:
        """Create topics, produce and consume."""
        for _ in range(self.chosen("topics", self.random.choice((1, 2)))):
            replication_factor = self.chosen("replication_factor", self.random.choice((2, 3, 3, 3)))
            partitions = self.chosen("partitions", self.random.choice((1, 2)))
            self.create_topic(partitions, replication_factor, self.topic_configs(replication_factor))
        producers = self.chosen("producers", PRODUCERS)
        consumers = self.chosen("consumers", CONSUMERS)
        for number in range(producers):
            Producer(self, FIRST_CLIENT + number)
        for number in range(producers, producers + consumers):
            Consumer(self, FIRST_CLIENT + number)
        self.deleter = Deleter(self, FIRST_CLIENT + producers + consumers)
        for number in range(self.chosen("idempotent_producers", IDEMPOTENT_PRODUCERS)):
            self.idempotent.append(IdempotentProducer(self, FIRST_CLIENT + 10 + number))

    def run(self, seconds: float = 20.0) -> Counter[str]:
        """Run it: faults and clients for so long, then recovery; return what happened.

        Raises:
            Violation: something happened that must never happen.
        """
        return super().run(seconds) + self.ledger.counts

    def what_is_wrong(self) -> str | None:
        """Return why the cluster is not as it should be when nothing is broken."""
        wrong = super().what_is_wrong()
        if not all(map(self.id_of, self.topics)):
            return "topics are not created yet"
        if wrong is None:
            wrong = self._probe(self._probes, [key for key, _ in partitions_of(self.invariants.truth)])
        if wrong is None and any(producer.in_flight for producer in self.idempotent):
            wrong = "an idempotent producer has not heard of all its batches"
        return wrong or self.ledger.what_is_wrong()

    def what_is_wrong_in(self, core: frozenset[int]) -> str | None:
        """Return the work that a core alone has not finished; with enough replicas in it a partition takes records."""
        return super().what_is_wrong_in(core) or self._probe(
            self._core_probes,
            [
                key
                for key, part in partitions_of(self.invariants.truth)
                if not core.isdisjoint(part.isr)
                and len(core.intersection(part.replicas)) >= self.min_insync_replicas(key[0])
            ],
        )

    def _probe(self, probed: set[PartitionKey], keys: list[PartitionKey]) -> str | None:
        """Produce to partitions; return which does not take it yet."""
        if self._prober is None:
            self._prober = Producer(self, FIRST_CLIENT + 50, told=True)
        for key in keys:
            partition = self.invariants.truth.partition(*key)
            if key in probed or self.is_internal(key) or partition is None:
                continue

            def answered(answer: Answer | None, key: PartitionKey = key) -> None:
                if isinstance(answer, Produced):
                    self.counts["partitions probed"] += 1
                    probed.add(key)

            if partition.leader != NO_LEADER:
                self._prober.send(key, partition.leader, partition.leader_epoch, done=answered)
            return f"nothing was produced to {key[0].hex()[:4]}-{key[1]} since the last fault"
        return None

    def check_history(self) -> None:
        """Compare all replicas with the committed records."""
        self.ledger.check_all()
        for broker in self.brokers.values():
            assert isinstance(broker, DataBroker)
            broker.check_loop()


def _broker_ids(seed: int, voters: int, parts: Parts | None) -> list[int]:
    """Draw which hosts are brokers."""
    chance = random.Random(f"brokers {seed}")
    plan = (parts or Parts()).plan
    apart = plan.option("apart", chance.choice((False, True)))
    first = voters + 1 if apart else 1
    return list(range(first, first + plan.option("brokers", chance.choice((3, 3, 4)))))
