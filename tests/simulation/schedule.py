"""One run from a seed: a quorum, brokers, clients and faults; and the checks at its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import raftmeta.raft.wal as wal_module
from raftlog.v1.raft_pb2 import VOTER
from raftlog.v1.records_pb2 import CreateTopicCommand, MetadataCommand
from raftmeta.features import supported_ranges
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage
from raftmeta.raft import consensus, wal
from tests.simulation.broker import SimBroker
from tests.simulation.clients import Bursts, Client, TopicModel
from tests.simulation.drains import Drains, misled
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants
from tests.simulation.network import Network
from tests.simulation.parts import Parts, Violation, quick_options
from tests.simulation.process import Host, Process
from tests.simulation.requests import Requester
from tests.simulation.scheduler import Scheduler
from tests.simulation.voter import Committed, Voter
from tests.support.linearizability import NotLinearizable, check_by_key

CLIENTS = 3
LONGEST_RECOVERY_S = 20.0
"""After the last fault everything has to be well within this time."""
CHECK_S = 0.25
PLANNED = ("StorageError", "StorageFull", "OSError", "DiskError")
"""What a process may stop with when its disk is full or broken."""

FIRST_PROBE = 90
"""Hosts from this number on are clients that check whether the cluster answers."""

Trace = Callable[[str], None]
T = TypeVar("T")


class Simulation:
    """A whole cluster in virtual time. Nodes 1..voters are controllers; nodes 1 to 3, or as told, are brokers."""

    cluster_id = "simulated"
    OPTIONS: ClassVar[dict[str, type]] = {
        "late_share": float,
        "think_factor": float,
        "segment_bytes": int,
        "clients": int,
    }
    """What a scenario may choose in place of the seed, and of which type it is."""

    def __init__(
        self,
        seed: int,
        voters: int = 3,
        parts: Parts | None = None,
        trace: Trace | None = None,
        *,
        broker_ids: Sequence[int] | None = None,
    ) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.random: random.Random = self.scheduler.random
        random.seed(seed)  # PySyncObj draws from the module's generator
        self.parts = parts or Parts()
        self.options = quick_options(self.random)
        self.segment_bytes = self.chosen("segment_bytes", self.random.choice((2_000, 10_000, 1 << 20)))
        self.features = supported_ranges()
        self.counts: Counter[str] = Counter()
        self.winding_down = False
        self.think_factor = self.chosen("think_factor", self.random.choice((0.3, 1.0, 1.0)))
        self._trace = trace
        self._clock_of: Host | None = None
        self.voters = list(range(1, voters + 1))
        self.broker_ids = list(broker_ids or (1, 2, 3))
        self.network = Network(self)
        self.invariants = Invariants(self)
        self.hosts = [Host(self, node_id) for node_id in sorted({*self.voters, *self.broker_ids})]
        self._voters: dict[int, Voter] = {}
        self.brokers: dict[int, SimBroker] = {}
        self.clients: list[Client] = []
        self.bursts = Bursts(self)
        self.drains = Drains(self)
        self.wiped: set[int] = set()
        """Voters that got an empty disk, and have perhaps not caught up yet."""
        self.faults: Faults | None = None
        self._core_asked = self._core_answers = False

    # For the parts

    def chosen(self, name: str, drawn: T) -> T:
        """Return the scenario's value, if it has one, or else the drawn one."""
        return self.parts.plan.option(name, drawn)

    def trace(self, host: Host | None, what: str) -> None:
        """Trace an event if a tracer is set."""
        if self._trace is not None:
            self._trace(f"{self.scheduler.now_s:9.4f}  {host or 'network'!s:<8}  {what}")

    def enter(self, host: Host) -> None:
        """The process of this host runs from here on: clocks show its time."""
        self._clock_of = host

    def clock_s(self) -> float:
        """Return the time of the host whose process is running."""
        return self.scheduler.now_s if self._clock_of is None else self._clock_of.local_s()

    def host(self, node_id: int) -> Host:
        """Return a host."""
        return self.hosts[node_id - 1]

    def voter_on(self, node_id: int) -> Voter | None:
        """Return the voter whose process runs, or is paused, on a host."""
        return self._voters.get(node_id)

    def leader(self) -> Voter | None:
        """Return the voter that believes to lead in the highest term."""
        leaders = [each for each in self._voters.values() if each.node.role == "leader"]
        return max(leaders, key=lambda each: each.node.term, default=None)

    def start_process(self, process: Process) -> None:
        """Start the process of a host."""
        node_id = process.host.node_id
        if node_id in self.voters:
            voter = Voter(process)
            self._voters[node_id] = voter
        if node_id in self.broker_ids:
            broker = self.brokers[node_id] = self.new_broker(process)
            if node_id in self.voters:
                voter.watchers.append(broker.sees)
            else:
                broker.watch()

    def new_broker(self, process: Process) -> SimBroker:
        """Make what plays the broker in a process."""
        return SimBroker(process)

    def metadata_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """The quorum has decided something: some replica has applied it, for the first time."""

    def process_ended(self, host: Host) -> None:
        """Forget the process; another one follows."""
        self._voters.pop(host.node_id, None)
        self.brokers.pop(host.node_id, None)
        self.scheduler.after(self.random.choice((0.01, 0.3, 2.0)), host.boot)

    def process_failed(self, host: Host, error: Exception) -> None:
        """A process stopped by itself: right if its disk failed, wrong otherwise."""
        self.counts["fail-stops"] += 1
        if isinstance(error.__cause__, Violation):  # noticed within a cycle, which made an error of its own of it
            raise error.__cause__
        causes = {type(each).__name__ for each in (error, error.__cause__) if each is not None}
        failed = host.disk.failed or (host.log_disk is not None and host.log_disk.failed)
        if failed and causes.intersection(PLANNED):
            return
        raise Violation(f"{host} stopped by itself: {type(error).__name__}: {error}") from error

    # Running

    def run(self, seconds: float = 20.0) -> Counter[str]:
        """Run it: faults and clients for so long, then recovery; return what happened.

        Raises:
            Violation: something happened that must never happen.
        """
        before = consensus.use_clock(self.clock_s)
        sizes = (wal.ALLOCATION_BYTES, wal_module.RESERVE_BYTES)
        wal.ALLOCATION_BYTES, wal_module.RESERVE_BYTES = 16 << 10, 2 << 10  # so that full disks are noticed
        try:
            self._run(seconds)
        except Violation as violation:
            raise Violation(f"at {self.scheduler.now_s:.4f} s: {violation}") from violation
        finally:
            consensus.use_clock(before)
            wal.ALLOCATION_BYTES, wal_module.RESERVE_BYTES = sizes
        return self.counts + self.invariants.counts + (self.faults.counts if self.faults else Counter())

    def _run(self, seconds: float) -> None:
        self.faults = faults = self.new_faults()
        self.start()
        self.start_clients()
        faults.start()
        self.scheduler.run_until(seconds)
        core = self.draw_core()
        self.trace(None, f"faults are over for {sorted(core)}")
        if len(core) < len(self.hosts):
            faults.heal_core(core)
            self.wait_until_well(LONGEST_RECOVERY_S, core)
            self.counts["cores that went on alone"] += 1
        self.trace(None, "faults are over")
        faults.stop()
        self.winding_down = True
        self.wait_until_well(LONGEST_RECOVERY_S)
        self.check_history()

    def new_faults(self) -> Faults:
        """Make what goes wrong."""
        return Faults(self)

    def start_clients(self) -> None:
        """Let the clients begin."""
        self.clients = [Client(self, number) for number in range(self.chosen("clients", CLIENTS))]
        self.bursts.start()
        self.drains.start()

    def start(self) -> None:
        """Start every host."""
        for host in self.hosts:
            self.scheduler.after(self.random.choice((0.0, 0.0, 0.1, 0.5)), host.boot)

    def wait_until_well(self, at_most_s: float, core: frozenset[int] | None = None) -> None:
        """Run until nothing is wrong any more, or until a core alone has finished its work.

        Raises:
            Violation: something still is wrong, or unfinished.
        """
        begin_s = self.scheduler.now_s
        while True:
            self.scheduler.run_until(self.scheduler.now_s + CHECK_S)
            wrong = self.what_is_wrong() if core is None else self.what_is_wrong_in(core)
            if wrong is None:
                break
            if self.scheduler.now_s >= begin_s + at_most_s:
                after = "the last fault" if core is None else f"the core {sorted(core)} was healed"
                raise Violation(f"{at_most_s:.0f} s after {after} the cluster is not as it should be: {wrong}")

    # The core

    def draw_core(self) -> frozenset[int]:
        """Draw the hosts that must work without the others: a majority of voters, and about half of the brokers.

        A voter that got an empty disk counts only once it has caught up. If too few do, all hosts belong to the core.
        """
        chance = random.Random(f"which core of {self.seed}")
        for node_id in sorted(self.wiped):
            voter = self.voter_on(node_id)
            if voter is not None and voter.process.alive and voter.node.voter_state == VOTER:
                self.wiped.discard(node_id)
        voters = [node_id for node_id in self.voters if node_id not in self.wiped]
        majority = len(self.voters) // 2 + 1
        if len(voters) < majority:
            return frozenset(host.node_id for host in self.hosts)
        core = set(chance.sample(voters, majority))
        wanted = chance.choice((len(self.broker_ids) // 2, len(self.broker_ids) // 2 + 1))
        missing = max(0, wanted - len(core.intersection(self.broker_ids)))
        core.update(chance.sample([each for each in self.broker_ids if each not in core], missing))
        return frozenset(core)

    def what_is_wrong_in(self, core: frozenset[int]) -> str | None:
        """Return what a core alone has not achieved: a controller, brokers in service, leaders, answers."""
        for node_id in self.voters:
            if node_id in core and self.voter_on(node_id) is None:
                return f"controller {node_id} does not run"
        serving = [node_id for node_id, voter in self._voters.items() if voter.controller.serving]
        if core.isdisjoint(serving):
            if any(self.host(node_id).disk.broken for node_id in serving):
                self._ask_core()  # whose disk fails leads on, and rightly, until it has something to write
            return "no controller serves"
        for broker_id in self.broker_ids:
            if broker_id in core and (wrong := self._what_is_wrong_with(broker_id)):
                return wrong
        for name, partition in self._partitions():
            if not core.isdisjoint(partition.isr) and self._what_is_wrong_with(partition.leader):
                return f"{name} is not led by a broker in service: {partition}"
        return None if self._core_answers else self._ask_core()

    def _ask_core(self) -> str:
        """Have a topic created, once."""
        if not self._core_asked:
            self._core_asked = True
            create = CreateTopicCommand(
                name="of-the-core", topic_id=self.random.randbytes(16), partitions=1, replication_factor=1
            )

            def answered(answer: Committed) -> None:
                self._core_answers = True

            prober = Process(Host(self, FIRST_PROBE))
            Requester(prober, self.random).propose(MetadataCommand(create_topic=create), answered)
        return "no change of the metadata was acknowledged"

    def _partitions(self) -> Iterator[tuple[str, PartitionImage]]:
        for topic in self.invariants.truth.topics.values():
            for partition in topic.partitions:
                yield f"{topic.name}-{partition.partition}", partition

    def _what_is_wrong_with(self, broker_id: int) -> str | None:
        """Return why a broker is not in service, if it is not."""
        if broker_id == NO_LEADER:
            return "nobody"
        self._clock_of = self.host(broker_id)
        broker, known = self.brokers.get(broker_id), self.invariants.truth.brokers.get(broker_id)
        if broker is None or known is None or known.fenced or known.broker_epoch != broker.broker_epoch:
            return f"broker {broker_id} is not in service: {known}"
        if not broker.has_lease():
            return f"broker {broker_id} has no lease"
        return None

    # The end

    def what_is_wrong(self) -> str | None:
        """Return why the cluster is not as it should be when nothing is broken."""
        nodes = {node_id: voter.node for node_id, voter in self._voters.items()}
        if len(nodes) < len(self.voters):
            return f"controllers {sorted(set(self.voters) - set(nodes))} do not run"
        if len({node.last_applied for node in nodes.values()}) > 1 or len({node.term for node in nodes.values()}) > 1:
            state = {node_id: (node.term, node.role, node.last_applied) for node_id, node in nodes.items()}
            return f"controllers differ (term, role, applied): {state}"
        if not any(voter.controller.serving for voter in self._voters.values()):
            return "no controller serves"
        for broker_id in self.broker_ids:
            if wrong := self._what_is_wrong_with(broker_id):
                return wrong
        for name, partition in self._partitions():
            if partition.leader == NO_LEADER:
                return f"{name} has no leader: {partition}"
            if wrong := misled(self.invariants.truth, partition):
                return f"{name}: {wrong}"
        if self.clients and any(client.open is not None for client in self.clients):
            return f"clients still wait for answers to {[client.open for client in self.clients]}"
        return None

    def check_history(self) -> None:
        """Check that clients saw one topic after the other change at one moment each.

        Raises:
            Violation: they did not.
        """
        operations = [entry for client in self.clients for entry in client.operations()]
        names = {id(operation): name for name, operation in operations}
        try:
            checked = check_by_key(
                [operation for _, operation in operations], TopicModel(), lambda each: names[id(each)]
            )
        except NotLinearizable as error:
            raise Violation(str(error)) from error
        self.counts["operations checked"] += sum(checked.values())
