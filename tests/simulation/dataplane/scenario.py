"""Scripted faults for whole brokers: node 1 is the controller, nodes 2, 3 and 4 are brokers, nothing happens by itself.

with DataStory(parts) as story:
    key = story.topic(min_insync_replicas=1)
    first = story.produce(key)
    story.power_cut(2)
    story.leads(key, 3)
    story.holds(key, first)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.log.log_dir import OFFSET_CHECKPOINT
from raftmeta.image import NO_LEADER, PartitionImage
from tests.simulation.dataplane.clients import Consumer, Deleter, Producer
from tests.simulation.dataplane.disk import LOGS, QUICK_S
from tests.simulation.dataplane.messages import Answer, Failed, Fetched, PartitionKey, Produced
from tests.simulation.dataplane.schedule import FIRST_CLIENT, DataSimulation
from tests.simulation.parts import Parts
from tests.simulation.process import Host, Process
from tests.simulation.scenario import Story
from tests.simulation.schedule import Simulation
from tests.support.memory_storage import MemoryStorage

CONTROLLER = 1
BROKERS = (2, 3, 4)
SLOW_S = 60.0
FRAMES, REQUESTS, IMAGE, PROPOSAL, OUTCOME = "list", "ReplicateRequest", "MetadataImage", "Propose", "Committed"
"""What can be held: of replication streams, leader to follower and back; from and to the controller."""


class _Scripted(DataSimulation):
    """Only the story starts processes."""

    def process_ended(self, host: Host) -> None:
        self._voters.pop(host.node_id, None)
        self.brokers.pop(host.node_id, None)

    def start_process(self, process: Process) -> None:
        if process.host.log_disk is not None:
            process.host.log_disk.mend()
        super().start_process(process)


@dataclass
class Sent:
    """A batch that was sent to a leader, and what came back."""

    key: PartitionKey
    answers: list[Answer | None] = field(default_factory=list)

    @property
    def acknowledged(self) -> bool:
        """Whether the producer was told that it is held as asked."""
        return any(isinstance(answer, Produced) for answer in self.answers)

    @property
    def failed(self) -> bool:
        """Whether the producer got an error, or was left without an answer."""
        return any(answer is None or isinstance(answer, Failed) for answer in self.answers)

    @property
    def offset(self) -> int:
        """Where it went, as the producer was told."""
        return next(answer.base_offset for answer in self.answers if isinstance(answer, Produced))


class DataStory(Story):
    """A cluster whose faults are told one by one."""

    simulation: DataSimulation

    def __init__(self, parts: Parts | None = None) -> None:
        super().__init__(1, None, parts)
        self.simulation.lag_time_max_ms = 1_000
        self.simulation.credit_bytes = 1 << 20
        self.simulation.checkpoint_s = 0.5
        self.producer = Producer(self.simulation, FIRST_CLIENT, told=True)
        self.consumer = Consumer(self.simulation, FIRST_CLIENT + 1, told=True)
        self.until(lambda: len(self._up()) == len(BROKERS), "all brokers are up")

    @staticmethod
    def _new_simulation(voters: int, parts: Parts | None) -> Simulation:
        return _Scripted(1, voters, parts, broker_ids=BROKERS)

    def _up(self) -> list[int]:
        image = self.simulation.invariants.truth
        return [
            node_id
            for node_id, broker in image.brokers.items()
            if broker.active and (here := self.simulation.brokers.get(node_id)) is not None and here.has_lease()
        ]

    # Partitions

    def topic(self, *, min_insync_replicas: int = 1, replication_factor: int = 3, **configs: str) -> PartitionKey:
        """Create a topic with one partition; broker 2 is the leader of the first one, then come 3 and 4."""
        first = not self.simulation.invariants.truth.topics
        named = {name.replace("_", "."): value for name, value in configs.items()}
        named["min.insync.replicas"] = str(min_insync_replicas)
        name = self.simulation.create_topic(1, replication_factor, named)
        self.until(lambda: self._is_followed((self.simulation.id_of(name), 0)), "the replicas follow")
        key = (self.simulation.id_of(name), 0)
        assert not first or self.partition(key).replicas == BROKERS[:replication_factor]
        return key

    def partition(self, key: PartitionKey) -> PartitionImage:
        """Return the quorum's state of a partition."""
        found = self.simulation.invariants.truth.partition(*key)
        assert found is not None
        return found

    def _is_followed(self, key: PartitionKey) -> bool:
        part = self.simulation.invariants.truth.partition(*key)
        if part is None or part.leader == NO_LEADER or set(part.isr) != set(part.replicas):
            return False
        leader = self.simulation.data_broker(part.leader)
        here = None if leader is None else leader.find(key)
        return (
            here is not None
            and here.leads
            and all(replica.durable_end_offset >= 0 for replica in here.describe_replicas().replicas)
        )

    def leads(self, key: PartitionKey, *among: int) -> int:
        """Wait until one of these brokers leads, knows it, and has a lease; return which."""

        def leading() -> bool:
            broker = self.simulation.data_broker(self.partition(key).leader)
            here = None if broker is None else broker.find(key)
            return (
                broker is not None
                and broker.broker_id in among
                and here is not None
                and here.leads
                and here.leader_epoch == self.partition(key).leader_epoch
                and broker.has_lease()
            )

        self.until(leading, f"one of {among} leads")
        return self.partition(key).leader

    def in_sync(self, key: PartitionKey, *members: int) -> None:
        """Wait until the committed ISR is this."""
        self.until(lambda: set(self.partition(key).isr) == set(members), f"the ISR is {members}")

    def log_end(self, node_id: int, key: PartitionKey) -> int:
        """Return where a replica's log ends."""
        broker = self.simulation.data_broker(node_id)
        here = None if broker is None else broker.find(key)
        return -1 if here is None else here.log_end_offset

    def reaches(self, node_id: int, key: PartitionKey, offset: int) -> None:
        """Wait until a replica has, and holds, everything below an offset."""

        def has() -> bool:
            broker = self.simulation.data_broker(node_id)
            here = None if broker is None else broker.find(key)
            return here is not None and here.durable_end_offset >= offset

        self.until(has, f"broker {node_id} holds {offset}")

    # Clients

    def send(
        self, key: PartitionKey, leader: int | None = None, *, count: int = 1, records: int = 1, acks: str = "all"
    ) -> list[Sent]:
        """Send batches of so many records to the leader, or to a node that takes itself for the leader."""
        part = self.partition(key)
        target = part.leader if leader is None else leader
        broker = self.simulation.data_broker(target)
        here = None if broker is None else broker.find(key)
        leader_epoch = part.leader_epoch if here is None else here.leader_epoch
        sent = []
        for _ in range(count):
            one = Sent(key)
            self.producer.send(
                key, target, leader_epoch, all_replicas=acks == "all", records=records, done=one.answers.append
            )
            sent.append(one)
        return sent

    def produce(self, key: PartitionKey, count: int = 1, *, records: int = 1) -> list[Sent]:
        """Send batches, and wait until acks=all has answered."""
        sent = self.send(key, count=count, records=records)
        self.until(lambda: all(each.acknowledged for each in sent), f"{count} batches committed")
        return sent

    def fetch(self, key: PartitionKey, source: int | None = None, *, position: int) -> Answer | None:
        """Read from a position; return the answer."""
        part = self.partition(key)
        answers: list[Answer | None] = []
        self.consumer.positions[key] = position
        self.consumer.fetch(key, source or part.leader, part.leader_epoch, done=answers.append)
        self.until(lambda: bool(answers), "an answer to a fetch")
        return answers[0]

    def delete_records(self, key: PartitionKey, before_offset: int) -> None:
        """Delete what lies below an offset."""
        leader = self.partition(key).leader
        Deleter(self.simulation, FIRST_CLIENT + 2).delete(key, leader, before_offset)
        self.until(lambda: self.simulation.deleted_below(key) == before_offset, "records are deleted")

    def holds(self, key: PartitionKey, sent: Iterable[Sent]) -> None:
        """Check that the acknowledged records can be read at their offsets; the ledger knows their content."""
        for one in sent:
            self.until(
                lambda one=one: (
                    isinstance(answer := self.fetch(key, position=one.offset), Fetched)  # type: ignore[misc]
                    and bool(answer.records)
                ),
                f"the record at {one.offset} is read",
            )

    # Faults

    def kill(self, *nodes: int) -> None:
        """Kill processes; their writes stay in the page cache."""
        for node_id in nodes:
            self.simulation.host(node_id).stop("killed")

    def shut_down(self, *nodes: int) -> None:
        """Stop brokers cleanly, all at the same moment."""
        for node_id in nodes:
            self.simulation.brokers[node_id].leave()

    def lose_log(self, node_id: int, key: PartitionKey) -> None:
        """Let the directory of a log vanish from the disk of a broker that is down."""
        disk = self.simulation.host(node_id).log_disk
        assert disk is not None
        topic = self.simulation.invariants.truth.topics[key[0]]
        disk.lose_directory(f"{LOGS}/{topic.name}-{key[1]}")

    def lose_files(self, node_id: int, key: PartitionKey, what: str, copy: MemoryStorage) -> None:
        """Let files of a replica vanish from the disk of a broker that is down, or be those of an older copy."""
        disk = self.simulation.host(node_id).log_disk
        assert disk is not None
        storage = disk.storage
        topic = self.simulation.invariants.truth.topics[key[0]]
        directory = f"{LOGS}/{topic.name}-{key[1]}"
        segments = sorted(name for name in storage.list_sizes(directory) if name.endswith(".log"))
        assert len(segments) >= 3
        match what:
            case "the first segment" | "a middle segment" | "the last segment":
                number = {"the first segment": 0, "a middle segment": len(segments) // 2}.get(what, -1)
                storage.remove(f"{directory}/{segments[number]}")
            case "the checkpoint":
                storage.remove(f"{LOGS}/{OFFSET_CHECKPOINT}")
            case "what an older copy of the log lacks":
                disk.lose_directory(directory)
                storage.make_dir(directory)
                for name in copy.list_sizes(directory):
                    file = storage.open(f"{directory}/{name}", create=True)
                    file.write([bytes(copy.content(f"{directory}/{name}"))], 0)
                    file.datasync()
            case "what an older copy of the disk lacks":
                disk.storage = storage = copy.clone()
            case _:
                raise AssertionError(f"there is no such fault of a disk: {what!r}")
        for path in (directory, LOGS):
            storage.sync_dir(path)

    def copy_disk(self, node_id: int) -> MemoryStorage:
        """Copy the log disk of a broker that is down."""
        disk = self.simulation.host(node_id).log_disk
        assert disk is not None
        return disk.storage.clone()

    def put_back(self, node_id: int, copy: MemoryStorage) -> None:
        """Replace what is on the log disk of a broker that is down by a copy made before."""
        disk = self.simulation.host(node_id).log_disk
        assert disk is not None
        disk.storage = copy.clone()

    def power_cut(self, *nodes: int) -> None:
        """Cut the power; all unsynced bytes are lost."""
        for node_id in nodes:
            host = self.simulation.host(node_id)
            assert host.log_disk is not None
            host.log_disk.loses_all = True
            host.stop("powerless", power=True)

    def boot(self, *nodes: int) -> None:
        """Start machines."""
        for node_id in nodes:
            self.simulation.host(node_id).boot()

    def fill_disk(self, *nodes: int) -> None:
        """Leave no room on these disks."""
        for node_id in nodes:
            disk = self.simulation.host(node_id).log_disk
            assert disk is not None
            disk.fill()

    def full_disks(self) -> list[int]:
        """Return the brokers that have told the controller that their disks are full."""
        brokers = self.simulation.invariants.truth.brokers
        return [broker_id for broker_id, broker in sorted(brokers.items()) if broker.storage_full]

    def mend_disk(self, *nodes: int) -> None:
        """Let these disks have room again."""
        for node_id in nodes:
            disk = self.simulation.host(node_id).log_disk
            assert disk is not None
            disk.mend()

    def slow_disk(self, *nodes: int, seconds: float = SLOW_S) -> None:
        """Let everything that is asked of these disks from now on take so long, until they are quick again."""
        for node_id in nodes:
            disk = self.simulation.host(node_id).log_disk
            assert disk is not None
            disk.sync_s = (seconds,)

    def quick_disk(self, *nodes: int) -> None:
        """Let what is asked of these disks from now on be done quickly."""
        for node_id in nodes:
            disk = self.simulation.host(node_id).log_disk
            assert disk is not None
            disk.sync_s = QUICK_S

    def cut_off(self, *nodes: int) -> None:
        """Let no packets through between these nodes and all others; their connections break."""
        others = [host.node_id for host in self.simulation.hosts if host.node_id not in nodes]
        self.separate(nodes, others)
        self.break_connections(nodes, others)

    def part(self, one: int, other: int) -> None:
        """Let no packets through between two nodes; their connections break."""
        self.separate({one}, {other})
        self.break_connections({one}, {other})

    def all_equal(self) -> None:
        """Mend everything, and wait until all replicas are in sync and equal."""
        self.heal()
        self.release()
        self.boot(*(node_id for node_id in BROKERS if not self.simulation.host(node_id).alive))
        self.quick_disk(*BROKERS)
        self.until(lambda: self.simulation.ledger.what_is_wrong() is None, "all replicas in sync and equal")
        self.simulation.check_history()
